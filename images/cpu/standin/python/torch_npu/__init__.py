"""Stand-in for torch_npu on a host without CANN and NPU. See README.md beside this package.

Real: versions, formats, streams and events (no-ops on a synchronous device), layout casts (identity).
Not real: every operator raises :class:`StandInError` when it is called.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from torch_npu import _torch_setup, npu
from torch_npu._standin import Namespace, Operator, StandInError

__strata_stand_in__ = True
__version__ = "2.10.0.post4+strata.standin"
"""The release that vllm-ascend 0.23.0 pins, with a local part that says that this is not it."""

_torch_setup.install(npu)

from torch_npu import _C, _inductor, multiprocessing, op_plugin, profiler  # noqa: E402  they use torch.npu

__all__ = ["_C", "Format", "StandInError", "_inductor", "multiprocessing", "npu", "op_plugin", "profiler"]


class Format(IntEnum):
    """Numbers of the device's memory layouts, as CANN's aclFormat has them."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    FRACTAL_NZ = 29


def npu_format_cast(tensor: torch.Tensor, acl_format: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The tensor itself: a format names a memory layout of the device, values and shape stay."""
    return tensor


def npu_format_cast_(tensor: torch.Tensor, acl_format: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In-place form of :func:`npu_format_cast`."""
    return tensor


def get_npu_format(tensor: torch.Tensor) -> int:
    """ND for every tensor: there are no device layouts on the CPU."""
    return int(Format.ND)


def empty_with_format(size: Any, dtype: torch.dtype | None = None, acl_format: int = 2) -> torch.Tensor:
    """An uninitialised CPU tensor."""
    return torch.empty(size, dtype=dtype)


atb = Namespace("torch_npu.atb")


def __getattr__(name: str) -> Operator:
    """``npu_*`` and ``_npu_*`` are operators; each keeps its identity, so that a test can replace it."""
    if name.startswith(("npu_", "_npu_")):
        operator = globals()[name] = Operator(f"torch_npu.{name}")
        return operator
    raise AttributeError(f"the stand-in for torch_npu has no {name!r}")
