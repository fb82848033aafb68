"""Facts about the machine that Strata runs on."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Literal

from strata.errors import Finding, StrataError

Architecture = Literal["x86_64", "aarch64"]
_MACHINES: dict[str, Architecture] = {
    "x86_64": "x86_64",
    "amd64": "x86_64",
    "aarch64": "aarch64",
    "arm64": "aarch64",
}
DOCKER_ARCHITECTURES: dict[str, str] = {
    "amd64": "x86_64",
    "arm64": "aarch64",
    "x86_64": "x86_64",
    "aarch64": "aarch64",
}


def architecture() -> Architecture:
    """``x86_64`` or ``aarch64``; E-ARCH on any other machine."""
    machine = _MACHINES.get(platform.machine().lower())
    if machine is None:
        raise StrataError(Finding("E-ARCH", "Strata builds on x86_64 and aarch64", found=platform.machine()))
    return machine


def npu_devices(directory: Path = Path("/dev")) -> list[str]:
    """The NPU device nodes of this host; empty on a host without one."""
    return sorted(str(p) for p in directory.glob("davinci[0-9]*"))


def npu_generation(directory: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """``a2`` or ``a3`` by the PCI ids of Huawei's NPUs (vendor 0x19e5; 0xd802: 910B, 0xd803: 910C), else
    None.
    """
    kinds = {"0xd802": "a2", "0xd803": "a3"}
    for device in sorted(directory.glob("*")):
        try:
            if (device / "vendor").read_text().strip() == "0x19e5":
                kind = kinds.get((device / "device").read_text().strip())
                if kind:
                    return kind
        except OSError:
            continue  # a device that went away while we looked is not one to build for
    return None


def require_space(path: Path, needed: int, purpose: str) -> None:
    """E-SPACE where the file system of ``path`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise StrataError(
            Finding(
                "E-SPACE",
                f"not enough disk space for {purpose}",
                where=str(path),
                expected=f"{needed / 1e9:.0f} GB free",
                found=f"{free / 1e9:.1f} GB free",
                hint="free some space (docker system df shows what images take), then run it again",
            )
        )
