"""Every operator wrapper of a package through the toolkit's compiler: which pass, and where their headers
came from.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from strata.errors import Finding, StrataError
from strata.kernels_descriptors import Descriptor
from strata.kernels_tree import Package

WORKER = Path(__file__).with_name("kernels_worker.py")


@dataclass(frozen=True)
class Outcome:
    """What became of one descriptor. ``outside``: headers from neither package, toolkit nor system."""

    op_type: str
    op_file: str
    name: str
    error: str
    outside: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.error and not self.outside

    @property
    def reason(self) -> str:
        """The first line that says what is wrong, empty where nothing is."""
        if self.error:
            lines = self.error.splitlines()
            return next((line.strip() for line in lines if "error:" in line), lines[0])
        return f"header from outside the package: {self.outside[0]}" if self.outside else ""


def environment(scripts: Iterable[Path], base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment after sourcing the ``set_env.sh`` scripts in order; E-ENV where one is missing or
    fails.
    """
    paths = list(scripts)
    for path in paths:
        if not path.is_file():
            raise StrataError(
                Finding(
                    "E-ENV",
                    "a toolkit environment script is missing",
                    expected=str(path),
                    found="no such file",
                    hint="use a base with the CANN toolkit and ATB",
                )
            )
    # the real scripts use unset variables and return codes of their own, so neither -u nor -e
    text = "".join(f"source '{p}' || exit 91\n" for p in paths) + "env -0"
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, env=dict(base or os.environ), check=False
    )
    if done.returncode != 0:
        raise StrataError(
            Finding(
                "E-ENV",
                "a toolkit environment script failed",
                where=", ".join(map(str, paths)),
                found=done.stderr.decode(errors="replace").strip()[-500:],
            )
        )
    pairs = (item.partition("=") for item in done.stdout.decode(errors="surrogateescape").split("\0") if item)
    return {key: value for key, _, value in pairs}


def prove(
    package: Package,
    descriptors: Sequence[Descriptor],
    env: Mapping[str, str],
    *,
    jobs: int | None = None,
    progress: Callable[[Outcome], None] | None = None,
    in_place: Path | None = None,
    cpath: Path | None = None,
) -> list[Outcome]:
    """Run every descriptor's wrapper; one process for each operator, ``jobs`` (default: all cores) at a time.

    env: the toolkit's environment. ``CPATH`` and the like are taken out: they would hide a header that the
    package lacks. in_place, cpath: for a package that isn't meant to move: a further directory that headers
    may come from, and the ``CPATH`` that the release's build sets. Outcomes come in the order of
    ``descriptors``; ``progress`` sees them as they come.
    """
    if importlib.util.find_spec("regex") is None:
        raise StrataError(
            Finding(
                "E-TOOL",
                "this Python lacks the module regex, which every operator wrapper imports",
                where=sys.executable,
                hint=f"{sys.executable} -m pip install regex",
            )
        )
    clean = {
        k: v
        for k, v in env.items()
        if k not in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "BUILD_KERNEL_SRC")
    }
    clean["PYTHONDONTWRITEBYTECODE"] = "1"
    clean["LC_ALL"] = "C"
    if cpath is not None:
        clean["CPATH"] = str(cpath)
    allowed = _allowed(package, clean, in_place)
    groups: dict[str, list[Descriptor]] = {}
    for descriptor in descriptors:
        groups.setdefault(descriptor.op_file, []).append(descriptor)
    found: dict[str, Outcome] = {}
    with (
        tempfile.TemporaryDirectory(prefix="strata-kernels-") as scratch,
        ThreadPoolExecutor(jobs or os.cpu_count()) as pool,
    ):
        futures = [
            pool.submit(_operator, package, group, clean, allowed, Path(scratch)) for group in groups.values()
        ]
        for future in as_completed(futures):
            for outcome in future.result():
                found[outcome.name] = outcome
                if progress:
                    progress(outcome)
    return [found[d.name] for d in descriptors]


def _allowed(package: Package, env: Mapping[str, str], in_place: Path | None) -> tuple[str, ...]:
    """Directories that headers may come from: the package, the toolkit, the host compiler's own."""
    roots = [
        package.root,
        Path(env["ASCEND_HOME_PATH"]),
        Path("/usr/include"),
        Path("/usr/lib"),
        Path("/usr/local/include"),
    ]
    return tuple(str(r.resolve()) + "/" for r in [*roots, *([in_place] if in_place else [])])


def _operator(
    package: Package, group: list[Descriptor], env: Mapping[str, str], allowed: tuple[str, ...], scratch: Path
) -> list[Outcome]:
    op_file = group[0].op_file
    output = scratch / op_file
    output.mkdir()
    wrapper = package.wrappers.resolve() / f"{op_file}.py"
    job = {"wrapper": str(wrapper), "output": str(output), "descriptors": [d.as_json() for d in group]}
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=dict(env),
        cwd=output,
        check=False,
    )
    lines = {r["name"]: r for r in map(json.loads, done.stdout.splitlines())} if done.returncode == 0 else {}
    outcomes = []
    for d in group:
        result = lines.get(
            d.name, {"error": f"the wrapper could not be imported: {_last(done.stderr)}", "headers": []}
        )
        outside = tuple(h for h in result["headers"] if not h.startswith(allowed))
        outcomes.append(Outcome(d.op_type, op_file, d.name, result["error"], outside))
    return outcomes


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def passed(outcomes: Sequence[Outcome]) -> tuple[list[str], list[str]]:
    """(operators of which every descriptor passed, operators of which one failed), by file name, sorted."""
    bad = {o.op_file for o in outcomes if not o.ok}
    return sorted({o.op_file for o in outcomes} - bad), sorted(bad)
