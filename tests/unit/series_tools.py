"""Small series and trees for tests of the engine."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml
from strata.languages import language_of
from strata.model import Edit
from strata.plan import Plan, plan_series
from strata.series import Series, load_series
from strata.spans import PlaceFault, Placement
from strata.trees import Trees

VERSION = "0.23.0"


def edit(at: str = "f.py", **parts: Any) -> Edit:
    """An edit from the words of patch.yaml; ``at`` may be ``f.py::symbol`` or just the symbol."""
    where = at if at.startswith(("f.", "vllm")) else f"f.py::{at}"
    return Edit.model_validate({"at": where, **{k.rstrip("_"): v for k, v in parts.items()}})


def place(source: str, at: str = "f.py", **parts: Any) -> Placement:
    return language_of("f.py").place(source, edit(at, **parts))


def fault(source: str, at: str = "f.py", **parts: Any) -> PlaceFault:
    """The fault of an edit that must not land."""
    try:
        placement = place(source, at, **parts)
    except PlaceFault as found:
        return found
    raise AssertionError(f"landed: {placement}")


def changed(source: str, *edits: Edit) -> str:
    """The file after these edits, composed as the planner does it; checked to be Python."""
    from strata.composition import Keyed, Piece, compose, text_of

    spans = [
        Keyed(span, (0, "p", n))
        for n, e in enumerate(edits)
        for span in language_of("f.py").place(source, e).spans
    ]
    pieces, overlaps = compose([Piece(source, ("base",))], spans)
    assert not overlaps, overlaps
    text = text_of(pieces)
    plain = sorted((k.span for k in spans), key=lambda s: s.start)
    if all(s.op in ("insert", "replace") for s in plain) and len({s.start for s in plain}) == len(plain):
        # nothing but the spans changes: cutting and pasting gives the same
        at, parts = 0, []
        for span in plain:
            parts += [source[at : span.start], span.text]
            at = span.end
        assert "".join([*parts, source[at:]]) == text
    compile(text, "f.py", "exec")
    return text


def code(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def make_trees(directory: Path, files: dict[str, str]) -> Trees:
    """Trees with these files; ``vllm::path`` goes to the vllm tree. Both packages' ``__init__.py`` are
    added."""
    todo = {"vllm_ascend/__init__.py": "", "vllm::vllm/__init__.py": "", **files}
    for name, text in todo.items():
        tree, _, file = name.rpartition("::")
        path = directory / (tree or "vllm-ascend") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return Trees.at(directory)


def make_series(root: Path, patches: dict[str, dict[str, Any]]) -> Series:
    """A series on disk: id -> parts of patch.yaml, ``files`` (path -> text) taken out of it."""
    for patch_id, parts in patches.items():
        spec = {"title": patch_id, "why": "a test", "kind": "build", **parts}
        files = spec.pop("files", {})
        diffs = spec.pop("diffs", {})
        directory = root / "patches" / "group" / patch_id
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "patch.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
        for file, text in files.items():
            path = directory / "files" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        for file, text in diffs.items():
            (directory / file).write_text(text, encoding="utf-8")
    listed = {"groups": [{"name": "group", "patches": list(patches)}]}
    path = root / "layers" / "source" / "series.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(listed), encoding="utf-8")
    return load_series(root)


def make_plan(
    tmp_path: Path, files: dict[str, str], patches: dict[str, dict[str, Any]], **options: Any
) -> Plan:
    trees = make_trees(tmp_path / "trees", files)
    return plan_series(
        make_series(tmp_path / "root", patches), trees, options.pop("version", VERSION), **options
    )


def codes(plan: Plan) -> list[str]:
    return [f.finding.code for f in plan.faults]
