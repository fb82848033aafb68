"""What a release's tree says of its operators: names for each SoC, kinds, and where things lie in an operator
package.

Standard library only: this runs in the kernels stage with the base's Python.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.errors import Finding, StrataError

BUILD_SCRIPT = "csrc/build_aclnn.sh"
PACKAGE = "vllm_ascend/_cann_ops_custom"
CATLASS = "csrc/third_party/catlass/include"
GROUPS = ("attention", "ffn", "gmm", "mc2", "moe", "posembedding")

_BRANCH = re.compile(r"=~\s*\^(?P<family>ascend\w+)\s*\]\]")
_ARRAY = re.compile(r"CUSTOM_OPS_ARRAY=\((?P<body>[^)]*)\)")
_ARGUMENT = re.compile(r'SOC_ARG="(?P<unit>\w+)"')


@dataclass(frozen=True)
class Unit:
    """One chip family of the release's build script: the prefix of SOC_VERSION, the compute unit, its
    operators.
    """

    family: str
    compute_unit: str
    operators: tuple[str, ...]


def units(script: str) -> list[Unit]:
    """The chip families in the text of ``build_aclnn.sh``, in order.

    A family is a ``[[ ... =~ ^ascendNNN ]]`` branch with a ``CUSTOM_OPS_ARRAY`` and a ``SOC_ARG``. Comments
    don't count.
    """
    text = re.sub(r"(?m)^\s*#.*$", "", script)
    starts = list(_BRANCH.finditer(text))
    found: list[Unit] = []
    for start, end in zip(starts, [*[m.start() for m in starts[1:]], len(text)], strict=True):
        body = text[start.end() : end]
        array, argument = _ARRAY.search(body), _ARGUMENT.search(body)
        if array and argument:
            names = tuple(re.findall(r"[\w]+", array["body"]))
            found.append(Unit(start["family"], argument["unit"], names))
    return found


def unit_for(tree: Path, soc_version: str) -> Unit:
    """The family that ``soc_version`` (``ascend910b1``, ``ascend910_9391``) belongs to in this release.

    Raises E-SOC where the build script has no operators for it, E-TREE where there is no build script.
    """
    script = tree / BUILD_SCRIPT
    if not script.is_file():
        raise StrataError(
            Finding(
                "E-TREE",
                "the tree has no operator build",
                where=str(tree),
                expected=BUILD_SCRIPT,
                found="no such file",
                hint="give the vllm-ascend tree with its csrc/",
            )
        )
    known = units(script.read_text(encoding="utf-8"))
    for unit in known:
        if soc_version.startswith(unit.family):
            return unit
    raise StrataError(
        Finding(
            "E-SOC",
            f"the release builds no operators for {soc_version!r}",
            where=str(script),
            expected="a SOC_VERSION starting with one of " + ", ".join(u.family for u in known),
            found=soc_version,
            hint="correct soc_version of the base in images/bases.yaml",
        )
    )


def directory_of(tree: Path, operator: str) -> Path | None:
    """The operator's source directory below ``csrc/``; None where the release names it but has no sources."""
    for group in GROUPS:
        candidate = tree / "csrc" / group / operator
        if candidate.is_dir():
            return candidate
    return None


def kind_of(tree: Path, operator: str) -> str:
    """``aicore`` (a kernel for the AI cores), ``aicpu`` (runs on the device's CPU), ``host``, or
    ``missing``.
    """
    directory = directory_of(tree, operator)
    if directory is None:
        return "missing"
    if (directory / "op_kernel_aicpu").is_dir():
        return "aicpu"
    return "aicore" if (directory / "op_kernel").is_dir() else "host"


def needs_catlass(tree: Path, operator: str) -> bool:
    """Whether the operator's device code includes catlass headers, itself or through ``csrc/moe/common``."""
    directory = directory_of(tree, operator)
    if directory is None or not (directory / "op_kernel").is_dir():
        return False
    for path in sorted((directory / "op_kernel").rglob("*")):
        if path.suffix in (".h", ".hpp", ".cpp") and b'"catlass/' in path.read_bytes():
            return True
    return False


@dataclass(frozen=True)
class Package:
    """An installed operator package (``_cann_ops_custom``): the places in it that Strata reads and writes."""

    root: Path
    vendor: Path

    @classmethod
    def at(cls, root: Path) -> Package:
        """The package below ``root``; E-PACKAGE where it doesn't hold exactly one vendor with AI-core
        wrappers.
        """
        vendors = sorted(p.parents[3] for p in root.glob("vendors/*/op_impl/ai_core/tbe/*_impl"))
        if len(vendors) != 1:
            raise StrataError(
                Finding(
                    "E-PACKAGE",
                    "not an operator package",
                    where=str(root),
                    expected="one directory vendors/<name>/op_impl/ai_core/tbe/<name>_impl",
                    found=f"{len(vendors)} of them",
                    hint="take vllm_ascend/_cann_ops_custom from the release's wheel or image",
                )
            )
        return cls(root, vendors[0])

    @property
    def tbe(self) -> Path:
        return self.vendor / "op_impl" / "ai_core" / "tbe"

    @property
    def impl(self) -> Path:
        return next(iter(sorted(self.tbe.glob("*_impl"))))

    @property
    def wrappers(self) -> Path:
        """Generated Python wrappers, one a file."""
        return self.impl / "dynamic"

    @property
    def sources(self) -> Path:
        """Kernel sources and the headers that travel with them (``common/``)."""
        return self.impl / "ascendc"

    def descriptions(self, compute_unit: str) -> dict[str, dict[str, Any]]:
        """Operator type -> its description (``aic-<unit>-ops-info.json``); E-PACKAGE where there is none."""
        path = self.tbe / "config" / compute_unit / f"aic-{compute_unit}-ops-info.json"
        try:
            data: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            units_here = sorted(p.name for p in (self.tbe / "config").glob("*"))
            raise StrataError(
                Finding(
                    "E-PACKAGE",
                    f"no operator descriptions for {compute_unit}",
                    where=str(path),
                    found=str(error),
                    expected="one of the package's own: " + ", ".join(units_here),
                ),
            ) from error
        return data

    def binaries(self, compute_unit: str, op_file: str) -> list[Path]:
        """The JSON files beside an operator's compiled kernels, in order of name."""
        return sorted((self.tbe / "kernel" / compute_unit / op_file).glob("*.json"))
