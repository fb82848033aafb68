"""The kernels stage: ``python -m strata.kernels_build``. Its interface is in docs/kernels.md.

Runs with the base's Python and the standard library; of Strata it needs this, ``errors`` and the other
``kernels_*``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata import kernels_cpu, kernels_device
from strata.errors import Finding, StrataError
from strata.kernels_inputs import changed_files, needed, overlay
from strata.kernels_tree import PACKAGE, Package, unit_for


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
    tree: Path = arguments.tree.resolve()
    out: Path = arguments.out
    if out.exists() and any(out.iterdir()):
        raise StrataError(
            Finding("E-OUT", "the output directory is not empty", where=str(out), hint="give a new one")
        )
    paths = changed_files(arguments.changed)
    need = needed(paths)
    result: dict[str, Any] = {
        "compiler": None,
        "package": "as shipped",
        "relocatable": False,
        "extension": "as shipped",
        "removed": [],
        "operators": [],
    }
    out.mkdir(parents=True, exist_ok=True)
    target = out / "tree"
    target.mkdir()
    if not need.operators and not need.extension:
        say(f"no build input changed ({len(paths)} files): the base's operators stay as they are")
        unit = unit_for(tree, base["soc_version"])
        package = Package.at(tree / PACKAGE)
        described = {d["opFile"]["value"] for d in package.descriptions(unit.compute_unit).values()}
        result["relocatable"] = not kernels_cpu.absolute_includes(package, described)
        result["operators"] = [{"name": op, "compiler": None, "state": "as shipped"} for op in unit.operators]
        return result
    say(
        f"{len(paths)} changed build inputs: operators {'yes' if need.operators else 'no'}, "
        f"extension {'yes' if need.extension else 'no'}"
    )
    overlay(arguments.changed, tree)
    if base["variant"] == "cpu":
        if need.extension:
            result["extension"] = "as shipped: changed, but building it needs CANN and torch_npu"
        built = kernels_cpu.build(
            tree,
            base["soc_version"],
            paths,
            target,
            arguments.ascend.resolve(),
            every=arguments.all_descriptors,
            jobs=arguments.jobs,
            say=say,
        )
        compiler: str | None = "stand-in"
        result["package"] = "regenerated"
    else:
        built, compiler, removed = kernels_device.build(
            tree, base["soc_version"], need, target, arguments.ascend.resolve(), base["version"], say
        )
        result |= {
            "package": "built",
            "removed": removed,
            "extension": "built" if need.extension else "as shipped",
        }
    result |= {"compiler": compiler, "relocatable": built.relocatable}
    result["operators"] = [
        {
            "name": name,
            "compiler": None if state == "as shipped" or state.startswith("not proved") else compiler,
            "state": state,
        }
        for name, state in sorted(built.operators.items())
    ]
    return result


def say(text: str) -> None:
    print(f"[kernels] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 good, 1 an operator or a build failed, 2 could not run."""
    arguments = parser().parse_args(argv)
    start = time.monotonic()
    try:
        result = run(arguments)
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
