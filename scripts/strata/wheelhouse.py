"""``make wheelhouse``: everything that a build without a network needs, below ``.strata/wheelhouse``."""

from __future__ import annotations

import sys
from pathlib import Path

from strata import host, rootfs
from strata.base import fetch_base_wheels, wheels_wanted
from strata.bases import find_base, load_bases
from strata.choice import choose
from strata.engine import Engine
from strata.image import tool_wheels
from strata.sources import fetch_archives, fetch_operators, wheelhouse
from strata.wheels import Say, Target, fetch_wheels


def fill(version: str, request: str | None, root: Path, say: Say) -> str:
    """Fetch what ``make image OFFLINE=1`` with the same arguments will read. Returns one line that says what
    is there.

    A device base's image is not among it: it comes as an image on the engine, or as an archive
    (``BASE=<archive>``).
    """
    bases = load_bases(root)
    architecture = host.architecture()
    choice = choose(bases, version, request, host.npu_devices(), host.npu_generation())
    known = choice.known
    place = wheelhouse(root)
    here = Target(f"3.{sys.version_info.minor}", architecture)
    fetch_wheels([root / "requirements.lock"], [], here, place / f"strata-{here.tag}", say)
    tool_wheels(Target(known.base.toolchain.python, architecture), root, say, offline=False)
    fetch_archives(find_base(bases, version, "cpu"), root, say)
    if known.base.kind == "embedded":
        fetch_base_wheels(wheels_wanted(known, root, architecture), say, offline=False)
        fetch_operators(known, root, architecture, say)
        _keep_rootfs(version, root, architecture, say)
    size = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    return f"{place}: {size / 1e9:.1f} GB; carry it with the checkout, then: make image OFFLINE=1" + (
        f" BASE={request}" if request else ""
    )


def _keep_rootfs(version: str, root: Path, architecture: host.Architecture, say: Say) -> None:
    """The root filesystem as an archive: made here, or saved from the image that an earlier build left."""
    known = find_base(load_bases(root), version, "cpu")
    archive = rootfs.archive_of(known, root, architecture)
    if archive.is_file():
        return
    if rootfs.can_bootstrap():
        rootfs.bootstrap(known, root, archive, say)
    else:
        engine = Engine()
        rootfs.save(
            engine, rootfs.ensure(known, root, architecture, engine, say, offline=False), archive, say
        )
