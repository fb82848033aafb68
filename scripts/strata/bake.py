"""The environment of CANN, ATB and jemalloc as ``ENV`` lines of the tuned image.

What ``env.sh`` sets depends on the base alone, so it is asked of the base once; then commands that
``docker exec`` starts without a shell see what the entrypoint and every bash see.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import docker.errors
from docker.models.images import Image

from strata.engine import Engine
from strata.errors import Finding, StrataError
from strata.serving.environment import as_docker, difference, tidy

SCRIPT = Path("layers") / "serving" / "rootfs" / "etc" / "strata" / "env.sh"
_SPLIT = "STRATA_SPLIT=1"
_RUN = f'env -0; printf "{_SPLIT}\\0"; eval "$1" >&2 && exec env -0'


def dockerfile_with_environment(
    dockerfile: Path, engine: Engine, image: Image, root: Path, directory: Path
) -> Path:
    """``dockerfile`` with the base's environment at its end, written to ``directory``.

    E-ENV-SCRIPT where the script fails on the base.
    """
    lines = environment_lines(engine, image, (root / SCRIPT).read_text(encoding="utf-8"), directory)
    written = directory / "Dockerfile"
    text = dockerfile.read_text(encoding="utf-8").rstrip("\n")
    head = "# written by strata: what /etc/strata/env.sh sets on this base"
    written.write_text(f"{text}\n\n{head}\n{lines}", encoding="utf-8")
    return written


def environment_lines(engine: Engine, image: Image, script: str, cache: Path) -> str:
    """``ENV`` lines for what ``script`` sets in a container of ``image``.

    Kept in ``cache`` by image and script. E-ENV-SCRIPT where the script fails.
    """
    key = hashlib.sha256(f"{image.id}\n{script}".encode()).hexdigest()[:16]
    kept = cache / f"environment-{key}"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    try:
        output: Any = engine.client.containers.run(
            image,
            ["--noprofile", "--norc", "-c", _RUN, "strata", script],
            entrypoint="/bin/bash",
            network_mode="none",
            remove=True,
            stdout=True,
            stderr=False,
        )
    except docker.errors.ContainerError as error:
        told = error.stderr or b""
        text = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        raise StrataError(
            Finding(
                "E-ENV-SCRIPT",
                "the environment script fails on this base",
                where=str(SCRIPT),
                found=text.strip()[-500:],
            )
        ) from error
    lines = as_docker(parse(output.decode("utf-8", errors="replace")))
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_text(lines, encoding="utf-8")
    return lines


def parse(output: str) -> dict[str, str]:
    """What changed between the two listings of a run (entries end in NUL); path lists without repetitions."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    into = before
    for entry in output.split("\0"):
        if entry == _SPLIT:
            into = after
        elif "=" in entry:
            name, _, value = entry.partition("=")
            into[name] = value
    return difference(before, tidy(after))
