"""The README keeps up with the repository: every patch with its switch, every target it names."""

from __future__ import annotations

import re
from pathlib import Path

from strata.series import load_series

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_patch_is_listed_with_its_switch() -> None:
    for patch in load_series(ROOT).patches:
        row = next((line for line in README.splitlines() if f"[{patch.id}](" in line), "")
        assert f"patches/{patch.group}/{patch.id}/patch.yaml" in row, patch.id
        if patch.spec.switch:
            default = "on" if patch.spec.switch.default else "off"
            assert f"`{patch.spec.switch.name}` ({default})" in row, patch.id


def test_every_target_and_file_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z][a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
