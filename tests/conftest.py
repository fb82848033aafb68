"""Fixtures shared by all tests: the real source trees, and writable copies of parts of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from strata.trees import PACKAGES, Trees

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.23.0"


@pytest.fixture(scope="session")
def real_trees() -> Trees:
    """The sources of the release, read only: from STRATA_TREES, else where ``make sources`` puts them."""
    given = os.environ.get("STRATA_TREES")
    directory = Path(given) if given else ROOT / ".strata" / "trees" / VERSION
    if not directory.is_dir():
        pytest.fail(
            f"no sources of {VERSION} in {directory}; run: make sources VERSION={VERSION}", pytrace=False
        )
    return Trees.at(directory)


@pytest.fixture
def tree_copy(real_trees: Trees, tmp_path: Path) -> Callable[..., Trees]:
    """Call with ``(tree, file)`` pairs: writable trees that hold just these files and the packages' own
    mark."""

    def copy(*paths: tuple[str, str]) -> Trees:
        directory = tmp_path / "trees"
        marks = [(tree, f"{package}/__init__.py") for tree, package in PACKAGES.items()]
        for tree, file in [*marks, *paths]:
            target = directory / tree / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(real_trees.path(tree, file), target)
        return Trees.at(directory)

    return copy
