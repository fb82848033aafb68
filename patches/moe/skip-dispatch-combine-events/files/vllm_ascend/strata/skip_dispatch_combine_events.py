"""Which of a MoE layer's events somebody waits for, and recording only those.

A layer's routed experts record an event before dispatch, before the second grouped matmul and before combine.
Their one reader is the layer's shared-expert forward, which waits for them before parts of its own work. That
orders something only where the shared experts run on another stream (``multistream_overlap_shared_expert``):
a stream that waits for an event of its own is already past it. The reader takes None as "nothing to wait
for".

The layer says so for the duration of its experts' computation through one attribute of the extra forward
context, which the recording sites read. Only ``True`` there means skip: absent, None, or a test double
records as upstream does, and so does every other caller of the experts (310P layers, callers outside a
layer).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("skip_dispatch_combine_events", __name__)


class ExtraContext(Protocol):
    """The part of vllm-ascend's extra forward context that this module uses."""

    skip_dispatch_combine_events: bool | None


def awaited(layer: torch.nn.Module, return_with_event: bool) -> bool:
    """Whether anything waits, on another stream, for the events of this layer's routed experts.

    layer: the MoE layer; its ``multistream_overlap_shared_expert`` says whether the shared experts get a
    stream of their own (a layer without that attribute counts as one that does). return_with_event: whether
    the caller gets the events.
    """
    return bool(return_with_event and getattr(layer, "multistream_overlap_shared_expert", True))


class Needed:
    """Context of one layer's experts: with ``needed`` False, :func:`record` records nothing inside.

    The value that the forward context had before comes back on leaving, by exception too. With the switch off
    the forward context is not touched.
    """

    __slots__ = ("_before", "_context", "_needed")

    def __init__(self, context: ExtraContext, needed: bool) -> None:
        self._context = context
        self._needed = needed

    def __enter__(self) -> None:
        if ENABLED:
            self._before = getattr(self._context, "skip_dispatch_combine_events", None)
            self._context.skip_dispatch_combine_events = not self._needed

    def __exit__(self, *error: Any) -> None:
        if ENABLED:
            self._context.skip_dispatch_combine_events = self._before


def record(context: ExtraContext) -> torch.npu.Event | None:
    """An event on the current stream; None where the layer said that nobody waits for it."""
    if getattr(context, "skip_dispatch_combine_events", None) is True:
        return None
    return torch.npu.current_stream().record_event()
