"""Snapshots of a whole host buffer on their way to the device, in reused pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm_ascend.strata import pinned_ring, switches

if TYPE_CHECKING:
    from vllm.v1.utils import CpuGpuBuffer

ENABLED: bool = switches.bind("snapshot_staging_ring", __name__)


def handles(buffer: CpuGpuBuffer) -> bool:
    """Whether :func:`copy` takes the place of upstream's clone for this buffer, here and now."""
    return ENABLED and pinned_ring.can_stage(buffer.cpu)


def copy(buffer: CpuGpuBuffer) -> torch.Tensor:
    """Enqueue the copy of ``buffer.cpu``, as it is now, to ``buffer.gpu``; returns ``buffer.gpu``.

    Any shape and dtype with at least one dimension; ``buffer.cpu`` may be overwritten at once. Waits only if
    :data:`pinned_ring.MAX_SLOTS` copies of this buffer are pending.
    """
    return pinned_ring.ring_of(buffer, buffer.cpu).copy(buffer.cpu, buffer.gpu)
