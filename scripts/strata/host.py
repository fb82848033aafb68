"""Facts about the machine that Strata runs on."""

from __future__ import annotations

import glob
import platform
import shutil
from pathlib import Path

from strata.errors import Finding, StrataError

_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
DOCKER_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64", "x86_64": "x86_64", "aarch64": "aarch64"}


def architecture() -> str:
    """``x86_64`` or ``aarch64``; E-ARCH on any other machine."""
    machine = _MACHINES.get(platform.machine().lower())
    if machine is None:
        raise StrataError(Finding("E-ARCH", "Strata builds on x86_64 and aarch64", found=platform.machine()))
    return machine


def npu_devices(pattern: str = "/dev/davinci[0-9]*") -> list[str]:
    """The NPU device nodes of this host; empty on a host without one."""
    return sorted(glob.glob(pattern))


def npu_generation(directories: str = "/sys/bus/pci/devices/*") -> str | None:
    """``a2`` or ``a3`` by the PCI ids of Huawei's NPUs (vendor 0x19e5: 0xd802 is a 910B, 0xd803 a 910C), else None."""
    kinds = {"0xd802": "a2", "0xd803": "a3"}
    for directory in glob.glob(directories):
        device = Path(directory)
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
            Finding("E-SPACE", f"not enough disk space for {purpose}", where=str(path),
                    expected=f"{needed / 1e9:.0f} GB free", found=f"{free / 1e9:.1f} GB free",
                    hint="free some space (docker system df shows what images take), then run the same command again")
        )  # fmt: skip
