"""Run vllm-ascend's own CPU unit tests on a base and on what was built from it, and compare test by test.

    run_uts.py --version 0.23.0 --base-image REF --tuned-image REF
    run_uts.py --version 0.23.0 --python PYTHON --base-tree DIR --tuned-tree DIR     (development, no engine)

The tuned one runs three times: with all switches off, with the image's own defaults, with all on. A tree is a
directory with ``vllm_ascend`` and ``tests/ut``. Prints one line a run, then the differences.
Exit 0: the same outcomes but for the changes that expected.yaml lists; 1: not; 2: could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uts

HERE = Path(__file__).resolve().parent
IMAGE_TREE = "/vllm-workspace/vllm-ascend"
IMAGE_PYTHON = "/opt/base/venv/bin/python"
NPU_DIRECTORIES = ("a2", "a2_2", "a3_2", "a3_4")
NEEDS_RAY = "tests/ut/distributed/weight_transfer"
# as upstream's CI sets it for its CPU runner
ENVIRONMENT = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
TIMEOUT_S = 1800
MODES = ("all=off", "", "all=on")
"""Switches of the tuned runs, as in STRATA_SWITCHES."""


def pytest_arguments(junit: str) -> list[str]:
    """Arguments of one run: upstream's CPU selection."""
    ignored = [f"--ignore-glob=*/{name}/*" for name in NPU_DIRECTORIES]
    options = [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "strata_uts_switches",
        f"--junitxml={junit}",
    ]
    return ["-m", "pytest", *options, "tests/ut", f"--ignore={NEEDS_RAY}", *ignored]


def in_image(image: str, out: Path, switches: str) -> list[str]:
    """The command that runs the tests in ``image``, without network, results in ``out``."""
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": "/uts/plugin",
        "STRATA_UTS_REPORT": "/uts/out/switches.json",
        "STRATA_SWITCHES": switches,
    }
    variables = [item for name, value in environment.items() for item in ("--env", f"{name}={value}")]
    mounts = ["--volume", f"{HERE / 'plugin'}:/uts/plugin:ro", "--volume", f"{out}:/uts/out"]
    run = ["docker", "run", "--rm", "--network", "none", "--workdir", IMAGE_TREE, *mounts, *variables]
    return [*run, "--entrypoint", IMAGE_PYTHON, image, *pytest_arguments("/uts/out/junit.xml")]


def run_image(name: str, image: str, switches: str) -> uts.Run:
    """Run the tests in an image. Raises ResultError if there are no results."""
    with tempfile.TemporaryDirectory(prefix="strata-uts-") as directory:
        out = Path(directory)
        return _results(name, in_image(image, out, switches), out, None, dict(os.environ))


def run_tree(name: str, tree: Path, python: Path, switches: str) -> uts.Run:
    """Run the tests of a tree on this host. Raises ResultError if there are no results, or of another
    tree."""
    with tempfile.TemporaryDirectory(prefix="strata-uts-") as directory:
        out = Path(directory)
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": f"{tree}{os.pathsep}{HERE / 'plugin'}",
            "STRATA_UTS_REPORT": str(out / "switches.json"),
            "STRATA_SWITCHES": switches,
        }
        _check_tree(tree, python, environment)
        command = [str(python), *pytest_arguments(str(out / "junit.xml"))]
        return _results(name, command, out, tree, environment)


def _check_tree(tree: Path, python: Path, environment: dict[str, str]) -> None:
    if not (tree / "tests" / "ut").is_dir():
        raise uts.ResultError(f"{tree}: no tests/ut; expected the source tree of a vllm-ascend release")
    where = "import importlib.util as u; print(u.find_spec('vllm_ascend').origin)"
    found = subprocess.run(
        [str(python), "-c", where], capture_output=True, text=True, env=environment, check=False
    )
    if not found.stdout.startswith(str(tree)):
        raise uts.ResultError(
            f"{python} imports vllm_ascend from {found.stdout.strip() or found.stderr}, not {tree}"
        )


def _results(
    name: str, command: list[str], out: Path, cwd: Path | None, environment: dict[str, str]
) -> uts.Run:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise uts.ResultError(f"{name}: {error}") from error
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
    if done.returncode not in (
        0,
        1,
    ):  # pytest: 1 says that tests failed, all else that they did not run to the end
        raise uts.ResultError(f"{name}: the run ended with exit code {done.returncode}\n{tail}")
    try:
        switches = json.loads((out / "switches.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise uts.ResultError(f"{name}: the switches were not reported ({error})\n{tail}") from error
    return uts.Run(name, uts.read_junit(out / "junit.xml"), switches)


def mode_name(switches: str) -> str:
    """``tuned (all=on)``: what a tuned run is called."""
    return f"tuned ({switches or 'defaults'})"


def compare(base: uts.Run, tuned: uts.Run, expected: uts.Expected) -> list[str]:
    """Print the tuned run's line and the differences; return the differences."""
    on = ", ".join(sorted(name for name, value in (tuned.switches or {}).items() if value)) or "none"
    print(f"{tuned.line()} (switches on: {on})")
    faults = uts.differences(base, tuned, expected)
    for fault in faults[:50]:
        print(f"  {fault}")
    if len(faults) > 50:
        print(f"  and {len(faults) - 50} more")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True, help="the base release, a key of the expected counts")
    parser.add_argument("--expected", type=Path, default=HERE / "expected.yaml")
    parser.add_argument(
        "--switches",
        action="append",
        help="of a tuned run, as in STRATA_SWITCHES; once for each. Default: all off, the image's, all on",
    )
    parser.add_argument("--base-image")
    parser.add_argument("--tuned-image")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--base-tree", type=Path)
    parser.add_argument("--tuned-tree", type=Path)
    given = parser.parse_args(arguments)
    images = (given.base_image, given.tuned_image)
    trees = (given.python, given.base_tree, given.tuned_tree)
    if all(images) == all(trees) or any(images) == any(trees):
        parser.error("give --base-image and --tuned-image, or --python, --base-tree and --tuned-tree")
    try:
        expected = uts.read_expected(given.expected, given.version)
        if all(images):
            base = run_image("base", given.base_image, "")
        else:
            base = run_tree("base", given.base_tree.resolve(), given.python, "")
        print(base.line(), flush=True)
        faults = []
        for switches in given.switches or MODES:
            name = mode_name(switches)
            if all(images):
                tuned = run_image(name, given.tuned_image, switches)
            else:
                tuned = run_tree(name, given.tuned_tree.resolve(), given.python, switches)
            faults += compare(base, tuned, expected)
        return 1 if faults else 0
    except uts.ResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
