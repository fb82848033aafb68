"""The kernels stage: ``python -m strata.kernels_build``. Its interface is in docs/kernels.md.

Runs with the base's Python and the standard library; of Strata it needs this, ``errors`` and the other
``kernels_*``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata import kernels_cpu, kernels_device
from strata.errors import EXIT_COULD_NOT_RUN, Finding, StrataError
from strata.kernels_inputs import changed_files, needed, overlay
from strata.kernels_tree import PACKAGE, Package, unit_for

COMPILED = (kernels_cpu.RESOLVED, "built")
NEEDS_CANN = "as shipped: changed, but building it needs CANN and torch_npu"


def parser() -> argparse.ArgumentParser:
    """The command line, as docs/kernels.md describes it."""
    p = argparse.ArgumentParser(
        prog="python -m strata.kernels_build", description="Build and prove a base's operators."
    )
    p.add_argument(
        "--base-json", type=Path, required=True, help="the base: name, version, variant, soc_version"
    )
    p.add_argument(
        "--tree", type=Path, required=True, help="the vllm-ascend tree of the base (changed in place)"
    )
    p.add_argument("--changed", type=Path, help="new and changed build inputs, laid out as in the tree")
    p.add_argument("--out", type=Path, required=True, help="an empty or new directory for the results")
    p.add_argument(
        "--ascend",
        type=Path,
        default=Path("/usr/local/Ascend"),
        help="where CANN and ATB (or the stand-in) are",
    )
    p.add_argument(
        "--all-descriptors", action="store_true", help="every recorded descriptor, not one for each operator"
    )
    p.add_argument("--jobs", type=int, help="processes at a time (default: one for each core)")
    return p


def read_base(path: Path) -> dict[str, Any]:
    """The base's description; E-BASE-JSON where it can't be read or lacks a key."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StrataError(
            Finding("E-BASE-JSON", "the base's description can't be read", where=str(path), found=str(error))
        ) from error
    keys = ("name", "version", "variant", "soc_version")
    missing = [
        k for k in keys if not isinstance(data, dict) or not isinstance(data.get(k), str) or not data[k]
    ]
    if missing:
        raise StrataError(
            Finding(
                "E-BASE-JSON",
                "the base's description is incomplete",
                where=str(path),
                expected=", ".join(keys),
                found="missing: " + ", ".join(missing),
            )
        )
    return data


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the work; the content of ``operators.json``. Nothing is left in ``--out`` where it fails."""
    base = read_base(arguments.base_json)
    out: Path = arguments.out
    if out.exists() and any(out.iterdir()):
        raise StrataError(
            Finding("E-OUT", "the output directory is not empty", where=str(out), hint="give a new one")
        )
    target = out / "tree"
    target.mkdir(parents=True)
    try:
        return build(base, arguments, target)
    except BaseException:
        shutil.rmtree(target)
        raise


def build(base: dict[str, Any], arguments: argparse.Namespace, target: Path) -> dict[str, Any]:
    """Build what the changed inputs call for, below ``target``; the content of ``operators.json``."""
    tree: Path = arguments.tree.resolve()
    ascend: Path = arguments.ascend.resolve()
    soc: str = base["soc_version"]
    paths = changed_files(arguments.changed)
    need = needed(paths)
    if not need.operators and not need.extension:
        say(f"no build input changed ({len(paths)} files): the base's operators stay as they are")
        return as_shipped(tree, soc)
    what = f"operators {_yes(need.operators)}, extension {_yes(need.extension)}"
    say(f"{len(paths)} changed build inputs: {what}")
    overlay(arguments.changed, tree)
    if base["variant"] == "cpu":
        if not need.operators:
            return as_shipped(tree, soc) | {"extension": NEEDS_CANN}
        built = kernels_cpu.build(
            tree, soc, paths, target, ascend, every=arguments.all_descriptors, jobs=arguments.jobs, say=say
        )
        compiler: str | None = "stand-in"
        how = {
            "package": "regenerated",
            "extension": NEEDS_CANN if need.extension else "as shipped",
            "removed": [],
        }
    else:
        built, compiler, removed = kernels_device.build(tree, soc, need, target, ascend, base["version"], say)
        how = {
            "package": "built",
            "extension": "built" if need.extension else "as shipped",
            "removed": removed,
        }
    operators = [
        {"name": name, "compiler": compiler if state in COMPILED else None, "state": state}
        for name, state in sorted(built.operators.items())
    ]
    return {"compiler": compiler, "relocatable": built.relocatable, **how, "operators": operators}


def as_shipped(tree: Path, soc_version: str) -> dict[str, Any]:
    """``operators.json`` for a base whose operators stay as they are."""
    unit = unit_for(tree, soc_version)
    package = Package.at(tree / PACKAGE)
    described = {d["opFile"]["value"] for d in package.descriptions(unit.compute_unit).values()}
    return {
        "compiler": None,
        "relocatable": not kernels_cpu.absolute_includes(package, described),
        "package": "as shipped",
        "extension": "as shipped",
        "removed": [],
        "operators": [{"name": op, "compiler": None, "state": "as shipped"} for op in sorted(unit.operators)],
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def say(text: str) -> None:
    print(f"[kernels] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 good, 1 an operator or a build failed, 2 could not run."""
    arguments = parser().parse_args(argv)
    start = time.monotonic()
    try:
        result = run(arguments)
    except OSError as error:
        print(
            Finding(
                "E-IO", "reading or writing failed", where=str(error.filename or ""), found=str(error)
            ).render(),
            file=sys.stderr,
        )
        return EXIT_COULD_NOT_RUN
    except StrataError as error:
        print("\n\n".join(f.render() for f in error.findings), file=sys.stderr)
        return error.exit_code
    (arguments.out / "operators.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(
        f"{len(result['operators'])} operators, package {result['package']}, {time.monotonic() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
