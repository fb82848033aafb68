"""Operators on a device base: the release's own builds, with its environment, its arguments and nothing
downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from strata.errors import Finding, StrataError
from strata.kernels_cpu import Built, absolute_includes
from strata.kernels_inputs import Needed
from strata.kernels_prove import environment
from strata.kernels_tree import (
    BUILD_SCRIPT,
    CATLASS,
    PACKAGE,
    Package,
    Unit,
    kind_of,
    needs_catlass,
    unit_for,
)
from strata.kernels_wrappers import is_relocatable

GIB = 1 << 30
JOB_BYTES = 3 * GIB
"""Memory that one compile job may take. An assumption with room to spare, not a measurement; ``MAX_JOBS``
overrides it.
"""


def job_limit(available: int, cores: int) -> int:
    """Parallel compile jobs for ``available`` bytes of memory and ``cores`` cores: at least one, at most the
    cores.
    """
    return max(1, min(cores, available // JOB_BYTES))


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> int:
    """Bytes that a build may take: MemAvailable, or the container's limit where that is lower."""
    fields = dict(
        line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    if limit.is_file():
        text = limit.read_text(encoding="ascii").strip()
        if text.isdigit():
            available = min(available, int(text))
    return available


def preflight(tree: Path, unit: Unit) -> None:
    """What the release's build would otherwise fetch must be there: there is no network in the kernels stage.

    Raises E-CATLASS naming the commit and the operators that need it, E-THIRD-PARTY for the packer of the
    build.
    """
    findings = []
    if not (tree / CATLASS / "catlass" / "catlass.hpp").is_file():
        users = [op for op in unit.operators if needs_catlass(tree, op)]
        findings.append(
            Finding(
                "E-CATLASS",
                f"catlass is missing; {unit.compute_unit} needs it for {', '.join(users)}",
                where=str(tree / CATLASS),
                expected="catlass/catlass.hpp" + _commit(tree),
                found="no such file",
                hint="put the release's catlass there; the source package and the published images hold it",
            )
        )
    makeself = tree / "csrc" / "third_party" / "makeself"
    fetcher = tree / "csrc" / "cmake" / "third_party" / "makeself-fetch.cmake"
    if fetcher.is_file() and not all((makeself / n).is_file() for n in ("makeself.sh", "makeself-header.sh")):
        findings.append(
            Finding(
                "E-THIRD-PARTY",
                "the operator build would download makeself, and there is no network here",
                where=str(makeself),
                expected="makeself.sh and makeself-header.sh",
                found="no such files",
                hint=f"unpack the archive that {fetcher.relative_to(tree)} names into that directory",
            )
        )
    if findings:
        raise StrataError(findings)


def _commit(tree: Path) -> str:
    modules = tree / ".gitmodules"
    if modules.is_file():
        for line in modules.read_text(encoding="utf-8").splitlines():
            key, _, value = line.strip().partition("=")
            if key.strip() == "commit":
                return f" at commit {value.strip()}"
    return ""


def build_environment(
    ascend: Path, soc_version: str, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of both builds: CANN and ATB sourced, SOC_VERSION, a job limit by memory, ccache where
    it is there.
    """
    env = environment(
        [ascend / "ascend-toolkit" / "set_env.sh", ascend / "nnal" / "atb" / "set_env.sh"], base
    )
    env["SOC_VERSION"] = soc_version
    env["COMPILE_CUSTOM_KERNELS"] = "1"
    env.setdefault("MAX_JOBS", str(job_limit(available_memory(), os.cpu_count() or 1)))
    # this one downloads and installs a second operator package; the base has it already
    env.pop("VLLM_BATCH_INVARIANT", None)
    ccache = shutil.which("ccache", path=env["PATH"])
    if ccache:
        # the operator build finds ccache by itself; the extension's takes CMake's variables
        env.setdefault("CMAKE_C_COMPILER_LAUNCHER", ccache)
        env.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", ccache)
    return env


def compiler_of(env: Mapping[str, str]) -> str | None:
    """``bisheng``, ``stand-in``, or None where the environment has no device compiler."""
    if (Path(env.get("ASCEND_HOME_PATH", "/nonexistent")) / "STAND-IN").is_file():
        return "stand-in"
    return "bisheng" if shutil.which("bisheng", path=env.get("PATH", "")) else None


def build(
    tree: Path,
    soc_version: str,
    need: Needed,
    out: Path,
    ascend: Path,
    version: str,
    say: Callable[[str], None] = print,
) -> tuple[Built, str | None, list[str]]:
    """Run the builds that ``need`` calls for; copy what they made below ``out``.

    version: the release, for a source tree without git history. Returns (operators, compiler, files of the
    old package that the new one doesn't have). Raises E-CATLASS and E-THIRD-PARTY before, E-BUILD after.
    """
    unit = unit_for(tree, soc_version)
    preflight(tree, unit)
    env = build_environment(ascend, soc_version)
    compiler = compiler_of(env)
    if compiler == "stand-in":
        raise StrataError(
            Finding(
                "E-TOOLKIT",
                "a device base can't be built with the stand-in toolkit",
                where=str(ascend),
                expected="CANN",
                found="Strata's stand-in",
                hint="use BASE=cpu, or a real device base",
            )
        )
    ccache = "on" if "CMAKE_CXX_COMPILER_LAUNCHER" in env else "not there"
    say(f"SOC_VERSION={soc_version} ({unit.compute_unit}, {len(unit.operators)} operators)")
    say(f"MAX_JOBS={env['MAX_JOBS']}, ccache {ccache}")
    before = _files(tree / PACKAGE)
    extensions = {p.name: p.stat().st_mtime_ns for p in (tree / "vllm_ascend").glob("*.so")}
    if need.extension:
        # as the release installs itself; its extension build starts with the operator build
        env["SETUPTOOLS_SCM_PRETEND_VERSION"] = version
        _run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--no-build-isolation",
                "--no-deps",
                "--no-index",
                "-e",
                str(tree),
            ],
            tree,
            env,
            say,
            "the release's extension build failed",
        )
        made = [
            p
            for p in sorted((tree / "vllm_ascend").glob("*.so"))
            if extensions.get(p.name) != p.stat().st_mtime_ns
        ]
        if not made:
            raise StrataError(
                Finding(
                    "E-BUILD",
                    "the extension build left no library",
                    where=str(tree / "vllm_ascend"),
                    expected="a new vllm_ascend/*.so",
                ),
                exit_code=1,
            )
        for path in made:
            _copy(path, out / "vllm_ascend" / path.name)
    else:
        _run(
            ["bash", BUILD_SCRIPT, str(tree), soc_version],
            tree,
            env,
            say,
            "the release's operator build failed",
        )
    package = Package.at(tree / PACKAGE)
    relocatable = is_relocatable(tree)
    _check(package, unit, tree, relocatable)
    shutil.copytree(package.root, out / PACKAGE, symlinks=True)
    removed = sorted(before - _files(tree / PACKAGE))
    return Built(dict.fromkeys(unit.operators, "built"), relocatable), compiler, removed


def _check(package: Package, unit: Unit, tree: Path, relocatable: bool) -> None:
    known = {d["opFile"]["value"] for d in package.descriptions(unit.compute_unit).values()}
    lost = [op for op in unit.operators if kind_of(tree, op) == "aicore" and op not in known]
    if lost:
        raise StrataError(
            Finding(
                "E-BUILD",
                f"{len(lost)} operators are not in the built package",
                where=str(package.root),
                expected=f"the AI-core operators that {BUILD_SCRIPT} lists",
                found="missing: " + ", ".join(lost),
            ),
            exit_code=1,
        )
    fixed = absolute_includes(package) if relocatable else []
    if fixed:
        raise StrataError(
            Finding(
                "E-RELOCATABLE",
                "built wrappers name absolute include paths",
                where=str(package.root),
                found=fixed[0],
                details=tuple(fixed[1:]),
            ),
            exit_code=1,
        )


def _run(
    command: list[str], tree: Path, env: Mapping[str, str], say: Callable[[str], None], message: str
) -> None:
    say("running " + " ".join(command))
    code = subprocess.run(command, cwd=tree, env=dict(env), check=False).returncode
    if code != 0:
        raise StrataError(
            Finding(
                "E-BUILD",
                message,
                where=" ".join(command),
                found=f"exit code {code}",
                hint="the build's own output is above",
            ),
            exit_code=1,
        )


def _files(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() or p.is_symlink()}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
