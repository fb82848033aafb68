"""Pinned staging tensors that are used in turn and reused only after their last copy has finished.

``Ring.copy`` takes the content of a host tensor at the time of the call to the device without waiting:
later writes to the host tensor are never seen by the copy. Each slot carries an event that is recorded on the
stream of its copy, directly behind it; a slot is written again only when that event has completed. A ring has
no slots at first and grows while the oldest copy is still pending, up to :data:`MAX_SLOTS`; only a full ring
waits, for its oldest copy. After warm-up it therefore allocates nothing.

For the thread that runs the model: a ring has no lock.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch

MAX_SLOTS: Final = 8
"""Copies of one buffer that may be pending at once before the host waits. A step makes at most three of one
buffer, and two steps overlap under asynchronous scheduling.
"""

_ATTRIBUTE: Final = "_strata_ring"


class _Slot:
    """memory: pinned, like the ring's host tensor; done: completes when the slot's last copy has finished."""

    __slots__ = ("done", "memory")

    def __init__(self, like: torch.Tensor) -> None:
        with torch.inference_mode(False):
            self.memory: torch.Tensor = torch.empty_like(
                like, device="cpu", memory_format=torch.contiguous_format
            ).pin_memory()
        self.done: Any = torch.npu.Event()


class Ring:
    """Staging memory for copies of (leading rows of) host tensors of one shape and dtype."""

    def __init__(self, like: torch.Tensor) -> None:
        """like: a host tensor of the largest shape that will be staged, with its dtype."""
        self._like = like
        self._slots: deque[_Slot] = deque()

    @property
    def slots(self) -> int:
        """Pinned tensors allocated so far, at most :data:`MAX_SLOTS`."""
        return len(self._slots)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Enqueue ``target.copy_(source)`` on the current stream; returns what ``copy_`` returns.

        source: a host tensor, the first rows (any number) of the ring's shape; target: same shape as source.
        ``source`` may be overwritten as soon as the call returns. Raises what the copies raise; a slot whose
        copy failed half-way counts as pending.
        """
        slot = self._take()
        staged = slot.memory[: source.shape[0]]
        staged.copy_(source)
        try:
            return target.copy_(staged, non_blocking=True)
        finally:
            slot.done.record()

    def _take(self) -> _Slot:
        """The slot to write next, as the newest of the ring."""
        slots = self._slots
        if slots and slots[0].done.query():
            slot = slots.popleft()
        elif len(slots) < MAX_SLOTS:
            slot = _Slot(self._like)
        else:
            slot = slots.popleft()
            slot.done.synchronize()
        slots.append(slot)
        return slot


def ring_of(owner: Any, like: torch.Tensor) -> Ring:
    """The ring that belongs to ``owner`` and lives as long as it does, made at the first call.

    owner: an object with a ``__dict__``, whose host tensor never changes shape; like: see :class:`Ring`.
    """
    attributes = vars(owner)
    ring: Ring | None = attributes.get(_ATTRIBUTE)
    if ring is None or ring._like is not like:
        ring = attributes[_ATTRIBUTE] = Ring(like)
    return ring


def can_stage(source: Any) -> bool:
    """Whether a ring may take the place of a fresh pinned clone of ``source``: a host tensor of at least one
    dimension, and no graph being captured on the current stream (a captured copy would read the slot again at
    every replay, and events cannot be asked during capture).
    """
    return (
        type(source) is torch.Tensor
        and source.dim() > 0
        and source.device.type == "cpu"
        and torch.npu.is_current_stream_capturing() is not True
    )
