"""The source trees of a release on the host: for checks, tests and diffs without an image."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path

from strata.bases import KnownBase
from strata.errors import Finding, StrataError
from strata.fingerprint import tree_hash
from strata.paths import work_directory
from strata.wheels import Say, Target, fetch_source, fetch_wheels

OPERATORS = "vllm_ascend/_cann_ops_custom/"
# tests, docs and sources of other devices: half of vLLM's package, and nothing that a patch or a test reads
_VLLM_PARTS = ("vllm/", "requirements/", "pyproject.toml", "setup.py", "PKG-INFO", "LICENSE")


def wheelhouse(root: Path) -> Path:
    """Everything that was downloaded. Complete (``make wheelhouse``), it is what an offline build needs."""
    return work_directory(root) / "wheelhouse"


def fetch_archives(known: KnownBase, root: Path, say: Say) -> dict[str, Path]:
    """The release's source archives by tree name, fetched once and checked by sha256."""
    return {
        tree: fetch_source(source.requirement, source.sha256, wheelhouse(root), say)
        for tree, source in known.release.sources.items()
    }


def fetch_operators(known: KnownBase, root: Path, architecture: str, say: Say) -> Path:
    """The release's vllm-ascend wheel for the base's Python: it carries the compiled operators of one SoC."""
    target = Target(known.base.toolchain.python, architecture)
    directory = wheelhouse(root) / f"operators-{known.version}-{target.tag}"
    fetch_wheels([], [known.release.sources["vllm-ascend"].requirement], target, directory, say)
    return next(directory.glob("*.whl"))


def unpack_tree(tree: str, archive: Path, destination: Path) -> None:
    """Unpack a source archive with ``destination`` as the tree's root (its top directory is dropped)."""
    with tarfile.open(archive) as tar:
        members = []
        for member in tar.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name and (tree != "vllm" or member.name.startswith(_VLLM_PARTS)):
                members.append(member)
        tar.extractall(destination, members, filter="data")


def unpack_operators(wheel: Path, destination: Path) -> None:
    """Put the wheel's operator package where the wheel has it: ``vllm_ascend/_cann_ops_custom``."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(destination, [n for n in archive.namelist() if n.startswith(OPERATORS)])


def make_trees(known: KnownBase, root: Path, architecture: str, say: Say) -> Path:
    """``.strata/trees/<version>`` with ``vllm-ascend/`` and ``vllm/``, verified; made aside, moved in whole.
    """
    destination = work_directory(root) / "trees" / known.version
    expected: dict[str, str] = {tree: source.tree for tree, source in known.release.sources.items()}
    if destination.is_dir():
        if {tree: tree_hash(destination / tree) for tree in expected} == expected:
            return destination
        say(f"{destination} differs from the release: making it again")
        shutil.rmtree(destination)
    archives = fetch_archives(known, root, say)
    wheel = fetch_operators(known, root, architecture, say)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        made = Path(scratch, known.version)
        for tree, archive in archives.items():
            say(f"unpacking {archive.name}")
            unpack_tree(tree, archive, made / tree)
            found = tree_hash(made / tree)
            if found != expected[tree]:
                raise StrataError(
                    Finding(
                        "E-SOURCE",
                        f"the {tree} tree is not the one that images/bases.yaml records",
                        where=archive.name,
                        expected=expected[tree],
                        found=found,
                        hint="if strata.fingerprint.tree_hash changed, record the new hash",
                    )
                )
        unpack_operators(wheel, made / "vllm-ascend")
        made.rename(destination)
    return destination
