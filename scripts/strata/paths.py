"""Where things lie: the repository, and Strata's own work directory inside it."""

from __future__ import annotations

from pathlib import Path

from strata.errors import Finding, StrataError


def repository() -> Path:
    """The checkout that this package was installed from; E-ROOT where the package lies outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "images" / "bases.yaml").is_file():
        raise StrataError(
            Finding("E-ROOT", "strata runs from a checkout", expected="images/bases.yaml", where=str(root),
                    hint="clone the repository and run ./scripts/bootstrap.sh there")
        )  # fmt: skip
    return root


def work_directory(root: Path) -> Path:
    """``.strata``: downloads, trees and build contexts; everything in it can be made again."""
    path = root / ".strata"
    path.mkdir(exist_ok=True)
    return path
