"""``preset`` commands, shared by the image and the host: list, show, render, lint, catalogue."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from strata.errors import EXIT_GOOD, EXIT_NEEDS_PERSON, StrataError
from strata.serving import facts, image, presets, render
from strata.serving.lint import Linted, lint

DEFAULT_VERSION = "0.23.0"


def listing(environment: Mapping[str, str]) -> str:
    """One line a preset: name, title, model, sequences, speculation, devices."""
    rows = []
    for name in presets.names():
        p = presets.load(name, environment)
        drafts = f", {p.speculation.method} N={p.speculation.tokens}" if p.speculation else ""
        rows.append(
            f"{name:<12}{p.title}\n{'':<12}{p.model}, {p.max_num_seqs} sequences{drafts}, {p.devices} devices"
        )
    return "\n".join(rows)


def shown(name: str, environment: Mapping[str, str]) -> str:
    """The preset with defaults and environment applied, as YAML."""
    data: dict[str, Any] = presets.load(name, environment).model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, width=110)


def linted(
    arguments: Sequence[str], version: str, environment: Mapping[str, str], patches: Collection[str]
) -> Linted:
    """A start line held against the catalogue of ``version``."""
    return lint(arguments, facts.catalogue(version), environment=environment, patches=patches)


def lint_text(result: Linted, version: str, patches: Collection[str]) -> str:
    """Findings, then the corrected line (and what it cannot correct)."""
    if not result.findings:
        return f"good: vllm-ascend {version} takes every option and key as written"
    text = "\n\n".join(f.render() for f in result.findings)
    if result.corrected is None:
        return text + "\n\nno corrected line: a value could not be read"
    left = [f.code for f in linted(result.corrected, version, {}, patches).errors]
    still = f"\n(still open, a person has to choose: {', '.join(left)})" if left else ""
    return f"{text}\n\ncorrected line:\n  vllm serve {shlex.join(result.corrected)}{still}"


def rendered_text(
    name: str, version: str, environment: Mapping[str, str], patches: Collection[str], style: str
) -> str:
    """The preset's argument list as a ``shell`` line or as ``json``; notes as comment lines in the former."""
    known = facts.catalogue(version)
    result = render.render(presets.load(name, environment), known, patches=patches)
    if style == "json":
        return json.dumps({"arguments": result.arguments, "notes": result.notes}, indent=1)
    return "\n".join([*(f"# {n}" for n in result.notes), f"vllm serve {shlex.join(result.arguments)}"])


def main(arguments: Sequence[str]) -> int:
    """The in-image command line. Version and patches come from image.json."""
    parser = argparse.ArgumentParser(prog="strata preset")
    sub = parser.add_subparsers(dest="action", required=True)
    sub.add_parser("list")
    sub.add_parser("show").add_argument("name")
    rendering = sub.add_parser("render")
    rendering.add_argument("name")
    rendering.add_argument("--json", action="store_true")
    sub.add_parser("lint").add_argument("arguments", nargs=argparse.REMAINDER)
    sub.add_parser("catalogue")
    options = parser.parse_args(list(arguments))
    environment = dict(os.environ)
    if options.action == "list":
        print(listing(environment))
    elif options.action == "show":
        print(shown(options.name, environment), end="")
    elif options.action == "catalogue":
        from strata.serving import catalogue

        print(catalogue.as_yaml(catalogue.build()), end="")
    else:
        try:
            this = image.load()
            version, patches = this.version, this.patches
        except StrataError:
            version, patches = DEFAULT_VERSION, ()
        if options.action == "render":
            style = "json" if options.json else "shell"
            print(rendered_text(options.name, version, environment, patches, style))
        else:
            words = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
            result = linted(words, version, environment, patches)
            print(lint_text(result, version, patches))
            return EXIT_NEEDS_PERSON if result.errors else EXIT_GOOD
    return EXIT_GOOD
