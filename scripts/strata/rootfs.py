"""The cpu base's Debian root filesystem: by mmdebstrap from the machine's own mirror, or on a pulled Debian
image.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from strata.bases import KnownBase, Packages
from strata.engine import Build, Engine, container_of
from strata.errors import Finding, StrataError
from strata.sources import wheelhouse
from strata.wheels import Say

# documentation and translations: a third of a minimal Debian, and of no use in an image
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


def packages_of(packages: Packages, root: Path) -> list[str]:
    """The Debian packages asked for, in order, comments dropped."""
    lines = (root / packages.root).read_text().splitlines()
    return [line for raw in lines if (line := raw.partition("#")[0].strip())]


def recipe(packages: Packages, root: Path, architecture: str) -> str:
    """12 hex digits over everything that decides what the root filesystem holds, except Debian's own updates.
    """
    text = "\n".join([packages.debian, architecture, *packages_of(packages, root), *_LEFT_OUT])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def tag_of(known: KnownBase, root: Path, architecture: str) -> str:
    assert known.base.packages is not None
    return f"strata-rootfs:{known.base.packages.debian}-{recipe(known.base.packages, root, architecture)}"


def archive_of(known: KnownBase, root: Path, architecture: str) -> Path:
    """Where ``make wheelhouse`` keeps the root filesystem."""
    return wheelhouse(root) / (tag_of(known, root, architecture).replace(":", "-") + ".tar")


def ensure(
    known: KnownBase, root: Path, architecture: str, engine: Engine, say: Say, *, offline: bool
) -> str:
    """The tag of an image with the root filesystem; made where it is missing."""
    tag = tag_of(known, root, architecture)
    if engine.image(tag):
        return tag
    archive = archive_of(known, root, architecture)
    if archive.is_file():
        _import(archive, tag, say)
        return tag
    if offline:
        raise StrataError(
            Finding(
                "E-OFFLINE",
                "the root filesystem is neither an image here nor in the wheelhouse",
                where=str(archive),
                hint="make wheelhouse (with a network), then carry .strata/wheelhouse here",
            )
        )
    if can_bootstrap():
        with tempfile.TemporaryDirectory(prefix="strata-rootfs-") as scratch:
            made = Path(scratch, "rootfs.tar")
            bootstrap(known, root, made, say)
            _import(made, tag, say)
    else:
        _on_debian_image(known, root, tag, engine, say)
    return tag


def can_bootstrap() -> bool:
    """Whether mmdebstrap is here, or can be installed here (root on Debian)."""
    release = Path("/etc/os-release")
    debian = release.is_file() and "\nID=debian\n" in "\n" + release.read_text()
    return debian and (shutil.which("mmdebstrap") is not None or os.geteuid() == 0)


def bootstrap(known: KnownBase, root: Path, destination: Path, say: Say) -> None:
    """Write the root filesystem as a tar archive to ``destination`` (under another name until it is
    complete).
    """
    packages = known.base.packages
    assert packages is not None
    script = root / "scripts" / "bootstrap.sh"
    _run([str(script), "mmdebstrap"], "mmdebstrap cannot be set up")
    sources = source_lines(_run([str(script), "mirror", packages.debian], "no Debian mirror"))
    say(f"making a {packages.debian} root filesystem with mmdebstrap")
    part = destination.with_suffix(".part.tar")
    _run(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            "--include=" + ",".join(packages_of(packages, root)),
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
            "--dpkgopt=path-include=/usr/share/locale/locale.alias",
            packages.debian,
            str(part),
            *sources,
        ],
        "mmdebstrap failed",
    )
    part.rename(destination)


def source_lines(mirrors: str) -> list[str]:
    """One-line apt sources from the output of ``bootstrap.sh mirror SUITE``."""
    lines = []
    for line in mirrors.splitlines():
        suite, uri, key = line.split("\t")
        signed = f" [signed-by={key}]" if key else ""
        lines.append(f"deb{signed} {uri} {suite} main")
    return lines


def _on_debian_image(known: KnownBase, root: Path, tag: str, engine: Engine, say: Say) -> None:
    """The same packages on ``debian:<suite>-slim``, for hosts where mmdebstrap cannot run; needs the network.
    """
    packages = known.base.packages
    assert packages is not None
    reference = f"debian:{packages.debian}-slim"
    if engine.image(reference) is None:
        engine.pull(reference, say)
    directory = root / "images" / "cpu"
    Build(
        context=directory,
        dockerfile=directory / "rootfs.Dockerfile",
        tag=tag,
        network=None,
        contexts={"debian": f"docker-image://{reference}"},
        arguments={"PACKAGES": " ".join(packages_of(packages, root))},
    ).run(say)


def _import(archive: Path, tag: str, say: Say) -> None:
    say(f"importing {archive.name} as {tag}")
    _run(["docker", "import", "--change", 'CMD ["/bin/bash"]', str(archive), tag], "docker import failed")


def _run(command: list[str], failure: str) -> str:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise StrataError(
            Finding(
                "E-ROOTFS",
                failure,
                where=command[0],
                found="\n".join(lines[-5:]) or f"exit {done.returncode}",
                hint="mend that, then run the same command again",
            )
        )
    return done.stdout


def save(engine: Engine, tag: str, archive: Path, say: Say) -> None:
    """Write an image's files as a plain tar archive, as mmdebstrap would have made it."""
    say(f"saving {tag}")
    part = archive.with_suffix(".part.tar")
    with container_of(engine, tag) as container, part.open("wb") as file:
        for chunk in cast(Iterator[bytes], container.export(chunk_size=1 << 20)):
            file.write(chunk)
    part.rename(archive)
