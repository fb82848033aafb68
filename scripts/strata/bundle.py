"""``make export``: the tuned image and the compose files, as a directory to carry to another host."""

from __future__ import annotations

import shutil
from pathlib import Path

from strata import host
from strata.bases import load_bases
from strata.choice import choose
from strata.engine import Engine
from strata.errors import Finding, StrataError
from strata.image import write_environment
from strata.wheels import Say

COMPOSE = ("compose.yaml", "compose.cpu.yaml")


def export(version: str, request: str | None, root: Path, say: Say) -> str:
    """Write ``dist/<name>/`` with image.tar, the compose files, .env and a README. Returns the directory.

    E-IMAGE where the image has not been built. Nothing is left behind where it fails.
    """
    known = choose(load_bases(root), version, request, host.npu_devices(), host.npu_generation()).known
    engine = Engine()
    image = engine.image(known.tuned_tag)
    if image is None:
        raise StrataError(
            Finding("E-IMAGE", f"{known.tuned_tag} has not been built", hint=f"make image BASE={known.name}")
        )
    destination = root / "dist" / f"strata-{known.full_name}"
    host.require_space(root, int(image.attrs["Size"] * 1.1), "the exported image")
    part = destination.with_suffix(".part")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    try:
        say(f"saving {known.tuned_tag} ({image.attrs['Size'] / 1e9:.1f} GB)")
        with (part / "image.tar").open("wb") as file:
            for chunk in image.save(named=known.tuned_tag, chunk_size=1 << 22):
                file.write(chunk)
        for name in COMPOSE:
            shutil.copy(root / name, part / name)
        write_environment(part / ".env", known)
        (part / "README").write_text(
            f"Strata {known.full_name}\n\n  docker load -i image.tar\n  docker compose --profile c1 up\n\n"
            "The profiles and what can be set are in compose.yaml.\n"
        )
        if destination.exists():
            shutil.rmtree(destination)
        part.rename(destination)
    finally:
        if part.exists():
            shutil.rmtree(part)
    return str(destination)
