"""Operators on a base without CANN: wrappers regenerated and proved; binaries stay as shipped."""

from __future__ import annotations

import filecmp
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.errors import Finding, StrataError
from strata.kernels_descriptors import from_package
from strata.kernels_inputs import kernel_sources
from strata.kernels_prove import Outcome, environment, passed, prove
from strata.kernels_tree import CATLASS, PACKAGE, Package, kind_of, unit_for
from strata.kernels_wrappers import compile_options, described, generate, is_relocatable

_ABSOLUTE = re.compile(r"'(-I|-isystem|-include|-imacros)(/[^']*)'")

RESOLVED = "headers resolve"
"""What a pass with the stand-in means: no more than this."""


@dataclass(frozen=True)
class Built:
    """What a build left: operators by name with their state, and whether wrappers hold after a move."""

    operators: dict[str, str]
    relocatable: bool


def absolute_includes(package: Package, only: Collection[str] | None = None) -> list[str]:
    """``wrapper: option`` for every include option of a wrapper that names an absolute path.

    only: names of the wrappers to look at (without ``.py``); all of them where None.
    """
    return [
        f"{path.name}: {flag}{name}"
        for path in sorted(package.wrappers.glob("*.py"))
        if only is None or path.stem in only
        for flag, name in _ABSOLUTE.findall(path.read_text(encoding="utf-8"))
    ]


def assemble(tree: Path, soc_version: str, changed: Sequence[str], work: Path, toolkit: str) -> Package:
    """An operator package below ``work`` with regenerated wrappers, the headers that travel, and changed
    kernel sources.

    Compiled binaries and libraries are left out: nothing here looks at them.
    """
    unit = unit_for(tree, soc_version)
    shipped_package = Package.at(tree / PACKAGE)
    autogen, headers = compile_options(tree, unit.operators, work, toolkit)
    descriptions = described(shipped_package, unit.compute_unit)
    wrappers = generate(tree, descriptions, unit.compute_unit, autogen, work)
    root = work / "assembled"
    shutil.copytree(shipped_package.root, root, ignore=shutil.ignore_patterns("*.o", "*.so", "__pycache__"))
    package = Package.at(root)
    for path in sorted(wrappers.glob("*.py")):
        shutil.copyfile(path, package.wrappers / path.name)
        (package.wrappers / path.name).chmod(0o644)
    if headers is not None:
        shutil.copytree(headers, package.sources / "common", dirs_exist_ok=True)
    for name, target in kernel_sources(changed).items():
        (package.sources / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / name, package.sources / target)
    return package


def build(
    tree: Path,
    soc_version: str,
    changed: Sequence[str],
    out: Path,
    ascend: Path,
    *,
    every: bool = False,
    jobs: int | None = None,
    say: Callable[[str], None] = print,
) -> Built:
    """Regenerate, move, prove; write the files that differ from the shipped package below
    ``out/vllm_ascend``.

    Every AI-core wrapper must pass, with all inputs and with the optional ones absent. Raises E-OPERATOR
    (exit 1) naming those that don't; nothing is written then. ``every``: all recorded descriptors instead of
    one for each operator.
    """
    env = environment([ascend / "ascend-toolkit" / "set_env.sh", ascend / "nnal" / "atb" / "set_env.sh"])
    unit = unit_for(tree, soc_version)
    relocatable = is_relocatable(tree)
    with tempfile.TemporaryDirectory(prefix="strata-operators-") as scratch:
        say(f"regenerating the wrappers of {unit.compute_unit} with the release's generator")
        package = assemble(tree, soc_version, changed, Path(scratch) / "build", env["ASCEND_HOME_PATH"])
        if relocatable:
            # a wrapper that passes only where it was made isn't worth shipping
            moved = Path(scratch) / "elsewhere" / "operators"
            moved.parent.mkdir()
            package.root.rename(moved)
            shutil.rmtree(Path(scratch) / "build")
            package = Package.at(moved)
            # a wrapper without a description (two, for a chip that this package isn't for) stays as shipped
            described_here = {d["opFile"]["value"] for d in package.descriptions(unit.compute_unit).values()}
            fixed = absolute_includes(package, described_here)
            if fixed:
                raise StrataError(
                    Finding(
                        "E-RELOCATABLE",
                        "wrappers still name absolute include paths",
                        where=str(moved),
                        found=fixed[0],
                        details=tuple(fixed[1:]),
                    ),
                    exit_code=1,
                )
        where = " from a package moved elsewhere" if relocatable else ", where they were made"
        for absent in (False, True):
            descriptors = from_package(package, unit.compute_unit, every=every, absent=absent)
            what = "optional inputs absent" if absent else "all inputs"
            say(f"running {len(descriptors)} descriptors through the stand-in compiler ({what})")
            outcomes = prove(
                package,
                descriptors,
                env,
                jobs=jobs,
                progress=_reporter(len(descriptors), say),
                in_place=None if relocatable else tree / "csrc",
                cpath=None if relocatable else tree / CATLASS,
            )
            good, bad = passed(outcomes)
            say(f"{len(good)} of {len(good) + len(bad)} operators pass{where} ({what})")
            if bad:
                raise failure(outcomes, bad)
        wanted = {op for op in unit.operators if kind_of(tree, op) == "aicore"}
        for path in sorted(p for p in package.root.rglob("*") if p.is_file()):
            name = path.relative_to(package.root)
            shipped = tree / PACKAGE / name
            if not shipped.is_file() or not filecmp.cmp(path, shipped, shallow=False):
                target = out / PACKAGE / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    states = dict.fromkeys(good, RESOLVED)
    states |= dict.fromkeys(
        sorted(wanted - set(good)), "not proved: needs CANN (no description in the package)"
    )
    states |= {op: "as shipped" for op in unit.operators if op not in states}
    return Built(states, relocatable)


def failure(outcomes: Sequence[Outcome], bad: Sequence[str]) -> StrataError:
    """E-OPERATOR: which operators failed, each with its first reason."""
    reasons: dict[str, str] = {}
    for outcome in outcomes:
        if not outcome.ok:
            reasons.setdefault(outcome.op_file, outcome.reason)
    total = len({o.op_file for o in outcomes})
    return StrataError(
        Finding(
            "E-OPERATOR",
            f"{len(bad)} of {total} operator wrappers do not pass",
            found=reasons[bad[0]],
            expected="every header that a wrapper includes comes with the package or the toolkit",
            hint="ship the header: add it to _STRATA_SHIPS in csrc/cmake/strata_relocatable.cmake",
            details=tuple(f"{op}: {reasons[op]}" for op in bad),
        ),
        exit_code=1,
    )


def _reporter(total: int, say: Callable[[str], None]) -> Callable[[Outcome], None]:
    seen = 0

    def report(outcome: Outcome) -> None:
        nonlocal seen
        seen += 1
        say(
            f"  [{seen:>{len(str(total))}}/{total}] {'ok  ' if outcome.ok else 'FAIL'} {outcome.op_type}"
            + (f": {outcome.reason}" if not outcome.ok else "")
        )

    return report
