"""The patches that the benchmark of host effects names: each once, and none that the series does not have."""

from __future__ import annotations

import ast
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = ("TIMED", "COUNTED", "LEFT_OUT")


def listed() -> dict[str, list[str]]:
    """Patch ids by list, read without importing the script, which needs the image."""
    module = ast.parse((ROOT / "tests/bench/host_effects.py").read_text(encoding="utf-8"))
    found = {}
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in LISTS:
            assert isinstance(node.value, ast.Dict)
            found[node.target.id] = [ast.literal_eval(key) for key in node.value.keys if key is not None]
    assert set(found) == set(LISTS)
    return found


def test_every_patch_is_named_once() -> None:
    names = [name for names in listed().values() for name in names]
    assert sorted(names) == sorted(set(names))


def test_they_are_perf_patches_of_the_series() -> None:
    for names in listed().values():
        for name in names:
            (path,) = ROOT.glob(f"patches/*/{name}/patch.yaml")
            assert yaml.safe_load(path.read_text(encoding="utf-8"))["kind"] == "perf", name
