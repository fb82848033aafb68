"""``strata preset``: list, show, render and lint presets and start lines; check compose files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from strata import compose
from strata.errors import EXIT_GOOD, EXIT_NEEDS_PERSON, StrataError
from strata.serving import command

_VERSION = click.option(
    "--version", "version", default=command.DEFAULT_VERSION, show_default=True, help="Release to render for."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="The same as JSON.")


def _patches() -> tuple[str, ...]:
    """The ids of the checkout's series: what an image built from it has."""
    from strata.paths import repository
    from strata.series import load_series

    return tuple(load_series(repository()).ids)


@click.group()
def preset() -> None:
    """List, check and render serving presets."""


@preset.command("list")
def list_() -> int:
    """One line for each preset, the environment's overrides applied."""
    click.echo(command.listing(os.environ))
    return EXIT_GOOD


@preset.command()
@click.argument("name")
def show(name: str) -> int:
    """A preset with defaults and environment applied."""
    click.echo(command.shown(name, os.environ), nl=False)
    return EXIT_GOOD


@preset.command()
@click.argument("name")
@_VERSION
@_JSON
def render(name: str, version: str, as_json: bool) -> int:
    """The argument list of a preset for one release."""
    click.echo(command.rendered_text(name, version, os.environ, _patches(), "json" if as_json else "shell"))
    return EXIT_GOOD


@preset.command(context_settings={"ignore_unknown_options": True})
@_VERSION
@_JSON
@click.option("--no-environment", is_flag=True, help="Leave the environment's variables out.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lint(version: str, as_json: bool, no_environment: bool, arguments: tuple[str, ...]) -> int:
    """Everything wrong with a vllm serve line: strata preset lint -- MODEL --option … Exit 1 on errors."""
    patches = _patches()
    result = command.linted(arguments, version, {} if no_environment else os.environ, patches)
    if as_json:
        body = {
            "findings": [f.as_dict() for f in result.findings],
            "corrected": result.corrected,
            "exit": EXIT_NEEDS_PERSON if result.errors else EXIT_GOOD,
        }
        click.echo(json.dumps(body, indent=1))
    else:
        click.echo(command.lint_text(result, version, patches))
    return EXIT_NEEDS_PERSON if result.errors else EXIT_GOOD


@preset.command("compose-check")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@_JSON
def compose_check(files: tuple[Path, ...], as_json: bool) -> int:
    """Check compose files: devices, drivers, ids, quotes, parallelism. Exit 1 on findings."""
    findings = compose.check_files(files)
    if findings:
        raise StrataError(findings, EXIT_NEEDS_PERSON)
    click.echo(json.dumps({"findings": [], "exit": 0}) if as_json else f"good: {', '.join(map(str, files))}")
    return EXIT_GOOD
