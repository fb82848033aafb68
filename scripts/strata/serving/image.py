"""What this image says of itself: ``/etc/strata/image.json``, and whether it may serve here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.config import near
from strata.errors import Finding, StrataError

IMAGE_JSON = Path("/etc/strata/image.json")
WORKSPACE = Path("/vllm-workspace")


@dataclass(frozen=True)
class Image:
    """The parts of image.json that serving needs. python, serve_python: interpreters of the base and of the
    CPU engine (None where the base serves itself); stubs: stand-in Python modules, None on a device base;
    live: state of the live proof (``passed``, ``deferred``).
    """

    base: str
    version: str
    variant: str
    python: str
    serve_python: str | None
    stubs: str | None
    live: str
    patches: tuple[str, ...] = ()
    standin_operators: tuple[str, ...] = ()
    architecture: str | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def standin(self) -> bool:
        """Built without the device's compiler: serves on CPU only."""
        return self.variant == "cpu" or bool(self.standin_operators)


def load(path: Path | None = None) -> Image:
    """Read image.json; E-IMAGE where it is missing, unreadable or lacks a part."""
    path = path or Path(os.environ.get("STRATA_IMAGE_JSON") or IMAGE_JSON)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        base = raw["base"]
        return Image(
            base=base["name"],
            version=base["version"],
            variant=base["variant"],
            python=base["python"],
            serve_python=base.get("serve_python"),
            stubs=base.get("stubs"),
            live=raw.get("proof", {}).get("live", "deferred"),
            patches=tuple(
                p["id"]
                for p in raw.get("series", {}).get("patches", ())
                if p.get("state", "applied") == "applied"
            ),
            standin_operators=tuple(
                o["name"] for o in raw.get("operators", ()) if o.get("compiler") == "stand-in"
            ),
            architecture=base.get("architecture"),
            raw=raw,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise StrataError(
            Finding(
                "E-IMAGE",
                "this image does not say what it is",
                where=str(path),
                expected="the file that the build wrote",
                found=what,
                hint="serve from an image that make image built",
            )
        ) from error


def record_live(state: str, path: Path | None = None) -> None:
    """Write the state of the live proof into image.json (the image build does, after the proof ran)."""
    path = path or Path(os.environ.get("STRATA_IMAGE_JSON") or IMAGE_JSON)
    content = json.loads(path.read_text(encoding="utf-8"))
    content.setdefault("proof", {})["live"] = state
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def may_serve(image: Image, environment: Mapping[str, str], devices: list[str]) -> list[Finding]:
    """Findings that forbid serving this image in this place.

    environment: ``STRATA_PROFILE_KIND`` says what the compose files set the container up for (``npu``,
    ``cpu``); devices: NPU device nodes in the container.
    """
    kind = environment.get("STRATA_PROFILE_KIND", "").strip()
    if kind and kind not in ("npu", "cpu"):
        guess = near(kind, ("npu", "cpu"))
        return [
            Finding(
                "E-ENV",
                "STRATA_PROFILE_KIND is not known",
                where="environment: STRATA_PROFILE_KIND",
                expected="npu or cpu",
                found=kind,
                hint=f"did you mean {guess}?" if guess else "unset it",
            )
        ]
    if image.standin and (kind == "npu" or devices):
        why = "STRATA_PROFILE_KIND=npu" if kind == "npu" else f"{devices[0]} is here"
        operators = (
            f", {len(image.standin_operators)} operators from the stand-in compiler"
            if image.standin_operators
            else ""
        )
        return [
            Finding(
                "E-STANDIN",
                f"{image.base} is a stand-in image and cannot serve on an NPU",
                where="NPU profile",
                expected="an image on a device base (a2, a3)",
                found=f"variant {image.variant}{operators}; {why}",
                hint="build one on this host: make image BASE=a3; or use compose.cpu.yaml: "
                "COMPOSE_FILE=compose.yaml:compose.cpu.yaml",
            )
        ]
    if not image.standin and kind == "cpu":
        return [
            Finding(
                "E-STANDIN",
                f"{image.base} needs an NPU and is started in a CPU profile",
                where="CPU profile",
                expected="the cpu base's image",
                found=f"variant {image.variant}",
                hint="take compose.cpu.yaml out of COMPOSE_FILE, or set STRATA_IMAGE to the cpu image",
            )
        ]
    if not image.standin and not devices:
        return [
            Finding(
                "E-DEVICE",
                "no NPU in this container",
                where="/dev",
                expected="/dev/davinci0 and so on",
                found="no davinci device node",
                hint="start it with docker compose, which hands the devices in",
            )
        ]
    return []


def devices(root: Path = Path("/dev")) -> list[str]:
    """The NPU device nodes (``/dev/davinci<n>``), by number."""
    found = [p for p in root.glob("davinci*") if p.name.removeprefix("davinci").isdigit()]
    return [str(p) for p in sorted(found, key=lambda p: int(p.name.removeprefix("davinci")))]
