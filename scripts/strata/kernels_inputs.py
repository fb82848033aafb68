"""Which build inputs changed, and what has to be built because of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from strata.kernels_tree import GROUPS

# Sources of the Python extension (vllm_ascend_C and libvllm_ascend_kernels), as the root CMakeLists.txt globs
# them
_EXTENSION = re.compile(
    r"CMakeLists\.txt|setup\.py|cmake/.*"
    r"|csrc/[^/]+\.(cpp|h|hpp)"
    r"|csrc/(kernels|mla_preprocess|batch_matmul_transpose|aclnn_torch_adapter|utils)/.*"
    r"|csrc/.*_torch_adpt\.(h|hpp|cpp)"
)
_OPERATORS = re.compile(
    rf"csrc/({'|'.join(GROUPS)}|common|cmake|scripts|third_party)/.*"
    r"|csrc/(CMakeLists\.txt|version\.info|[^/]+\.sh)"
)
_ADAPTER = re.compile(r"csrc/.*_torch_adpt\.(h|hpp|cpp)")


@dataclass(frozen=True)
class Needed:
    """What the changed inputs call for."""

    operators: bool
    extension: bool


def needed(paths: Iterable[str]) -> Needed:
    """What must be rebuilt for these changed files (relative to the tree, with ``/``).

    A file of ``csrc/`` that fits no rule calls for both: building too much is slow, building too little is
    wrong.
    """
    operators = extension = False
    for path in paths:
        is_extension = _EXTENSION.fullmatch(path) is not None
        is_operator = _OPERATORS.fullmatch(path) is not None and not _ADAPTER.fullmatch(path)
        unknown = not is_extension and not is_operator and path.startswith("csrc/")
        extension |= is_extension or unknown
        operators |= is_operator or unknown
    return Needed(operators, extension)


def changed_files(changed: Path | None) -> list[str]:
    """The files below ``changed``, relative, sorted; none where the directory is missing."""
    if changed is None or not changed.is_dir():
        return []
    return sorted(p.relative_to(changed).as_posix() for p in changed.rglob("*") if p.is_file())


def overlay(changed: Path, tree: Path) -> None:
    """Copy the changed inputs over the tree; contents and modes, not times."""
    for name in changed_files(changed):
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(changed / name, target)


def kernel_sources(paths: Iterable[str]) -> dict[str, str]:
    """Changed device sources: path in the tree -> path below the package's ``ascendc/``, as the release
    installs them.
    """
    found: dict[str, str] = {}
    for path in paths:
        operator = re.fullmatch(rf"csrc/(?:{'|'.join(GROUPS)})/([^/]+)/op_kernel/(.+)", path)
        common = re.fullmatch(r"csrc/common/include/kernel/(.+)", path)
        if operator:
            found[path] = f"{operator[1]}/{operator[2]}"
        elif common:
            found[path] = f"common/{common[1]}"
    return found
