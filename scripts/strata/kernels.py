"""A release's operators as ``layers/kernels/ops.yaml`` records them, and whether a tree agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from strata.config import Strict, load, near
from strata.errors import Finding, StrataError
from strata.kernels_tree import BUILD_SCRIPT, kind_of, needs_catlass, units

OPS_FILE = Path("layers") / "kernels" / "ops.yaml"


class Operator(Strict):
    """One operator of a release.

    kind: ``aicore`` (compiled for the AI cores, has a wrapper) or ``aicpu`` (runs on the device's CPU, has
    none); chips: the families that the release builds it for; catlass: whether its device code includes
    catlass headers.
    """

    name: str
    kind: Literal["aicore", "aicpu"]
    chips: tuple[str, ...]
    catlass: bool = False


class Planned(Strict):
    """An operator that Strata is going to add; not in any count until it is in a patch."""

    name: str
    chips: tuple[str, ...]
    why: str


class Release(Strict):
    """The operators of one release."""

    operators: tuple[Operator, ...]
    planned: tuple[Planned, ...] = ()

    @property
    def chips(self) -> list[str]:
        """The chip families that the operators are built for, sorted."""
        return sorted({c for o in self.operators for c in o.chips})

    def on(self, chip: str) -> tuple[Operator, ...]:
        """The operators that the release builds for a chip family, by name; E-CHIP for an unknown one."""
        if chip not in self.chips:
            raise StrataError(
                Finding(
                    "E-CHIP",
                    f"no operators recorded for {chip!r}",
                    expected="one of " + ", ".join(self.chips),
                    found=chip,
                    where=str(OPS_FILE),
                )
            )
        return tuple(sorted((o for o in self.operators if chip in o.chips), key=lambda o: o.name))


class OpsFile(Strict):
    """The content of ``ops.yaml``."""

    releases: dict[str, Release]


def release(root: Path, version: str) -> Release:
    """The operators of a release; E-VERSION where the file doesn't know it."""
    path = root / OPS_FILE
    known = load(path, OpsFile).releases
    if version not in known:
        guess = near(version, known)
        raise StrataError(
            Finding(
                "E-VERSION",
                f"no operators recorded for {version!r}",
                where=str(path),
                expected="one of " + ", ".join(known),
                found=version,
                hint=f"did you mean {guess}?" if guess else "",
            )
        )
    return known[version]


def compare(recorded: Release, tree: Path) -> list[Finding]:
    """Where ``ops.yaml`` and the tree's own operator build differ, for every chip family that the file
    names.
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
            )
        )
    by_chip = {u.compute_unit: u for u in units(script.read_text(encoding="utf-8"))}
    findings: list[Finding] = []
    for chip in recorded.chips:
        built = set(by_chip[chip].operators) if chip in by_chip else set()
        named = {o.name for o in recorded.on(chip)}
        for name in sorted(built ^ named):
            found, expected = ("built", "not named") if name in built else ("not built", "named")
            findings.append(
                Finding(
                    "E-OPS",
                    f"{name} on {chip}: the release's build and the file differ",
                    where=str(OPS_FILE),
                    expected=f"{expected} in the file",
                    found=f"{found} by {BUILD_SCRIPT}",
                )
            )
    for operator in recorded.operators:
        kind, catlass = kind_of(tree, operator.name), needs_catlass(tree, operator.name)
        if (kind, catlass) != (operator.kind, operator.catlass):
            findings.append(
                Finding(
                    "E-OPS",
                    f"{operator.name}: the tree says otherwise",
                    where=str(OPS_FILE),
                    expected=f"kind {kind}, catlass {str(catlass).lower()}",
                    found=f"kind {operator.kind}, catlass {str(operator.catlass).lower()}",
                )
            )
    return findings
