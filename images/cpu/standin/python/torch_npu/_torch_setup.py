"""What importing the stand-in changes in PyTorch, in this process only.

The backend named ``npu`` has no C++ hooks here, and PyTorch raises where it would ask them: looking for
the current accelerator, and pinning memory. Both are answered on the Python side: ``torch.accelerator``
knows none (which also keeps Dynamo from asking for its streams), internal callers get the CPU, and a
request to pin is dropped (an unpinned tensor has the same content and only copies more slowly).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed

PINNING_FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "from_file", "full", "full_like",
    "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip
PINNING_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_MARK = "_strata_unpinned"


def without_pinning(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its ``pin_memory`` argument dropped; wrapping twice changes nothing."""
    if getattr(function, _MARK, False):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    setattr(call, _MARK, True)
    return call


def _no_accelerator(check_available: bool = False) -> None:
    """In place of ``torch.accelerator.current_accelerator``: none, as in a CPU build."""


def install(npu: ModuleType) -> None:
    """Name the private-use backend ``npu`` with the module ``npu`` behind it; keep all else on the CPU."""
    try:
        torch.utils.rename_privateuse1_backend("npu")
    except RuntimeError as error:
        # PyTorch allows one name per process; a test harness may have given the same one before
        if torch._C._get_privateuse1_backend_name() != "npu":
            raise RuntimeError("the private-use backend of this process has another name than npu") from error
    torch.npu = npu
    sys.modules["torch.npu"] = npu
    torch.version.cann = None
    torch.distributed.is_hccl_available = lambda: True
    torch._C._get_accelerator = lambda *args, **kwargs: torch.device("cpu")
    torch.accelerator.current_accelerator = _no_accelerator
    for name in PINNING_FACTORIES:
        setattr(torch, name, without_pinning(getattr(torch, name)))
    for name in PINNING_METHODS:
        setattr(torch.Tensor, name, without_pinning(getattr(torch.Tensor, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.is_pinned = lambda self, *args, **kwargs: False
