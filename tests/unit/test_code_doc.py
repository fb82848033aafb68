"""docs/code.md lists each module of scripts/strata once, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_module_has_its_line() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "code.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = sorted(name for row in rows for name in re.findall(r"`([\w/]+)`", row))
    package = ROOT / "scripts" / "strata"
    modules = (p.relative_to(package).with_suffix("").as_posix() for p in package.rglob("*.py"))
    assert listed == sorted(m for m in modules if not m.endswith("__init__"))
