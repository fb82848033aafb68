"""Packages from the caller's package index, through pip, also for another Python than the one that runs this.

Everything goes through ``pip`` with the caller's own configuration (index, find-links, certificates,
constraints); no address is written here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement

from strata.errors import Finding, StrataError

Say = Callable[[str], None]
# Debian 12 has glibc 2.36, Ubuntu 22.04 (the device bases) 2.35: a wheel for any older glibc runs on both
_GLIBC_MINOR = 35
_BACKEND = '''"""Stands in for a package's build backend: PKG-INFO holds the metadata that pip asks for."""
import email, pathlib, shutil

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    facts = email.message_from_string(pathlib.Path("PKG-INFO").read_text(encoding="utf-8"))
    name = f"{facts['Name'].replace('-', '_')}-{facts['Version']}.dist-info"
    target = pathlib.Path(metadata_directory, name)
    target.mkdir()
    shutil.copy("PKG-INFO", target / "METADATA")
    (target / "WHEEL").write_text("Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    return name
'''


@dataclass(frozen=True)
class Target:
    """The interpreter that wheels are for: ``python`` as ``3.11``, ``architecture`` ``x86_64`` or
    ``aarch64``.
    """

    python: str
    architecture: str

    @property
    def tag(self) -> str:
        return f"cp{self.python.replace('.', '')}-{self.architecture}"

    def arguments(self) -> list[str]:
        """pip's options that ask for wheels of this target only."""
        platforms = [f"manylinux_2_{n}" for n in range(_GLIBC_MINOR, 4, -1)]
        platforms += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        tagged = [f"{p}_{self.architecture}" for p in platforms]
        return [
            "--only-binary=:all:",
            "--implementation",
            "cp",
            "--python-version",
            self.python,
            *(a for p in tagged for a in ("--platform", p)),
        ]


def _pip(
    arguments: Sequence[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, **(environment or {})},
        check=False,
    )


def _failed(what: str, done: subprocess.CompletedProcess[str]) -> StrataError:
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING:")]
    hint = "check the network and pip's configuration (pip config list), then run the same command again"
    if any("No matching distribution" in line for line in lines):
        hint = "offer it by find-links or an extra index (pip config list shows what pip uses now)"
    found = "\n".join(line if len(line) < 300 else line[:297] + "..." for line in lines[-6:])
    return StrataError(
        Finding(
            "E-PIP", f"pip could not fetch {what}", found=found or f"exit code {done.returncode}", hint=hint
        )
    )


def fetch_source(requirement: str, sha256: str, directory: Path, say: Say) -> Path:
    """The source archive of ``requirement`` in ``directory``, checked against ``sha256``; no upstream code
    runs.

    pip insists on a package's metadata before it saves an archive, and would run the package's build for it
    (vLLM's imports torch). A backend that hands over the archive's own PKG-INFO answers instead.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.tar.gz"):
        if _sha256(path) == sha256:
            return path
    say(f"fetching the source package {requirement}")
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        backend = Path(scratch, "backend", "setuptools")
        backend.mkdir(parents=True)
        (backend / "__init__.py").write_text("")
        (backend / "build_meta.py").write_text(_BACKEND)
        done = _pip(
            [
                "download",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                ":all:",
                "--no-cache-dir",
                "--dest",
                str(Path(scratch, "out")),
                requirement,
            ],
            {"PYTHONPATH": str(backend.parent)},
        )
        archives = list(Path(scratch, "out").glob("*.tar.gz"))
        if done.returncode or len(archives) != 1:
            raise _failed(requirement, done)
        found = _sha256(archives[0])
        if found != sha256:
            raise StrataError(
                Finding(
                    "E-SOURCE",
                    f"the source package of {requirement} is not the one that Strata knows",
                    where=archives[0].name,
                    expected=f"sha256 {sha256}",
                    found=f"sha256 {found}",
                    hint="check which index pip uses; nothing was kept",
                )
            )
        return Path(shutil.move(archives[0], directory / archives[0].name))


@dataclass(frozen=True)
class Resolved:
    """What pip would install: name, version, file name, and the requirements that hold on the target."""

    name: str
    version: str
    file: str
    requires: tuple[str, ...]


def resolve(requirement: str, target: Target) -> Resolved:
    """Ask the index what ``requirement`` means on ``target``.

    An index that serves metadata beside its wheels answers without a download.
    """
    with tempfile.TemporaryDirectory() as scratch:
        done = _pip(
            [
                "install",
                "--quiet",
                "--dry-run",
                "--ignore-installed",
                "--no-deps",
                "--report",
                "-",
                "--target",
                scratch,
                *target.arguments(),
                requirement,
            ]
        )
    if done.returncode:
        raise _failed(requirement, done)
    return read_report(json.loads(done.stdout), target)


def read_report(report: dict[str, Any], target: Target) -> Resolved:
    """The one package of a pip installation report (format version 1), markers evaluated for ``target``."""
    (entry,) = report["install"]
    metadata = entry["metadata"]
    environment: dict[str, str] = {
        **{k: str(v) for k, v in default_environment().items()},
        "python_version": target.python,
        "python_full_version": f"{target.python}.0",
        "extra": "",
        "platform_machine": target.architecture,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
    }
    requires = [Requirement(r) for r in metadata.get("requires_dist", [])]
    return Resolved(
        metadata["name"],
        metadata["version"],
        entry["download_info"]["url"].rpartition("/")[2],
        tuple(str(r) for r in requires if r.marker is None or r.marker.evaluate(environment)),
    )


def require_cpu_build(torch: Resolved) -> None:
    """E-TORCH-CUDA where the resolved torch asks for CUDA libraries: said before a download of several GB."""
    wanted = [r.split(";")[0] for r in torch.requires if r.lower().startswith(("nvidia-", "cuda-", "triton"))]
    if wanted:
        raise StrataError(
            Finding(
                "E-TORCH-CUDA",
                f"pip offers only a CUDA build of torch {torch.version}",
                where=torch.file,
                expected="a CPU build (version suffix +cpu, no nvidia requirements)",
                found=f"requires {', '.join(wanted[:3])}{' …' if len(wanted) > 3 else ''}",
                hint="offer a CPU wheel to pip and run the same command again:\n"
                "PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheel index>, or\n"
                "PIP_FIND_LINKS=<directory with the wheel>\n"
                "(docs/cpu-base.md). Nothing was downloaded.",
            )
        )


def fetch_wheels(
    requirements: Sequence[Path], extra: Sequence[str], target: Target, directory: Path, say: Say
) -> str:
    """Wheels for every line of ``requirements`` and for ``extra``, without their dependencies, into
    ``directory``.

    Returns the digest of what was asked for. The second run sees the stamp and asks nobody; a change of one
    line fetches only what is missing.
    """
    asked = asked_for(requirements, extra, target)
    stamp = directory / ".complete"
    if stamp.is_file() and stamp.read_text() == asked:
        return asked
    directory.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    say(f"fetching wheels for {target.tag} into {directory.name}")
    listed = [a for p in requirements for a in ("-r", str(p))]
    done = _pip(
        [
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(directory),
            "--find-links",
            str(directory),
            *target.arguments(),
            *listed,
            *extra,
        ]
    )
    if done.returncode:
        raise _failed("the wheels of the base", done)
    stamp.write_text(asked)
    return asked


def asked_for(requirements: Sequence[Path], extra: Sequence[str], target: Target) -> str:
    """The digest that :func:`fetch_wheels` stamps a complete directory with."""
    text = "\n".join([target.tag, *extra, *(p.read_text() for p in requirements)])
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
