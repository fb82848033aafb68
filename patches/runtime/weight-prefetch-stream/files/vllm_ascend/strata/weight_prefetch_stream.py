"""Reading weights into the L2 cache ahead of their use, on vllm-ascend's prefetch stream.

A prefetch is a hint: it changes no value, and who is late finds a cold cache. What has to be right is the
order of streams. :func:`fork` puts prefetches on the side stream behind what the current stream has issued;
:func:`join` makes the current stream wait for them. Each fork is joined before the forward ends, inside the
same captured graph: a side stream that is still open at the end of a capture is an error, and so is, during a
capture, waiting for a stream that the capture has not forked. Hence :func:`join` waits exactly if something
was forked since the last one.

For one model-executing thread per process.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch_npu
from vllm_ascend.utils import npu_stream_switch, prefetch_stream

BUDGET = 18 * 1024 * 1024
"""Bytes per fork. vllm-ascend's own cut for MLP weights; more would push out of the cache what is in use."""
MAX_TOKENS = 500
"""Above so many tokens matmuls are bound by computing, not by reading weights; vllm-ascend's number too."""

_open = False


def fork(start: torch.Tensor, weights: Iterable[torch.Tensor], budget: int = BUDGET) -> int:
    """Issue prefetches of ``weights``, in this order, until ``budget`` bytes are used up. Returns the bytes
    issued; 0 leaves the streams alone.

    start: a tensor of the current stream that the prefetches may begin after, its first dimension the
    tokens; too many of them issue nothing. Weights on another device than ``start`` (offloaded ones) are
    passed over.
    """
    global _open
    if start.shape[0] > MAX_TOKENS:
        return 0
    sizes: list[tuple[torch.Tensor, int]] = []
    left = budget
    for weight in weights:
        size = min(weight.numel() * weight.element_size(), left)
        if size > 0 and weight.device == start.device:
            sizes.append((weight, size))
            left -= size
    if not sizes:
        return 0
    side = prefetch_stream()
    side.wait_stream(torch.npu.current_stream())
    with npu_stream_switch(side):
        for weight, size in sizes:
            torch_npu.npu_prefetch(weight, start, size, 0)
    _open = True
    return budget - left


def join() -> None:
    """Make the current stream wait for what :func:`fork` has issued since the last join, if anything."""
    global _open
    if _open:
        torch.npu.current_stream().wait_stream(prefetch_stream())
        _open = False


def weights_of(modules: Iterable[torch.nn.Module | None]) -> list[torch.Tensor]:
    """The ``weight`` tensors that these linear layers hold now, in order; layers without one are passed over.

    Read at each use: loading, quantisation and weight updates may replace a parameter.
    """
    weights = (getattr(module, "weight", None) for module in modules)
    return [weight for weight in weights if isinstance(weight, torch.Tensor)]
