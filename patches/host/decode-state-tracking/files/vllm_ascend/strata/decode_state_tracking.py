"""What the device holds of the host's state, so that a step copies only what is not there yet.

Tracking happens inside a step only, from :func:`begin` (start of ``_prepare_inputs``) to :func:`finish`
(start of ``_build_attention_metadata``). A step that begins and does not finish, a dummy run and waking up
leave knowledge untrusted: the next step forgets all of it and copies everything. Outside a step every copy is
upstream's.

Block tables carry a version that each writer raises. The other buffers are short vectors, of which the last
content copied is kept on the host and compared in full. Tracked copies go through the pinned ring, so that
what is remembered is what arrives, whatever the host writes next.

For the thread that runs the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm_ascend.strata import pinned_ring, switches

if TYPE_CHECKING:
    from vllm.v1.utils import CpuGpuBuffer
    from vllm_ascend.worker.block_table import BlockTable
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

ENABLED: bool = switches.bind("decode_state_tracking", __name__)

MAX_COMPARED: Final = 1024
"""Longest vector that is compared rather than copied, in entries."""

_UNUSED: Final = -1
"""What upstream writes into query_start_loc behind the last request."""

_ATTRIBUTE: Final = "_strata_on_device"

_in_step: bool = False
_trusted: bool = False
_epoch: int = 0


class _Vector:
    """What the device holds of one buffer.

    content: host copy of the device's vector, of which the first ``length`` entries are known; epoch:
    knowledge of another epoch counts as none; due: index from which the device has yet to be filled with
    _UNUSED, or None.
    """

    __slots__ = ("content", "due", "epoch", "length")

    def __init__(self, like: np.ndarray) -> None:
        self.content = np.empty_like(like)
        self.length = 0
        self.epoch = -1
        self.due: int | None = None


class _Table:
    """version: raised by every writer of the table; the other three: what the device holds, that is the first
    ``rows`` rows as of version ``copied``, if ``epoch`` is the present one.
    """

    __slots__ = ("copied", "epoch", "rows", "version")

    def __init__(self) -> None:
        self.version = 0
        self.copied = -1
        self.rows = 0
        self.epoch = -1


def begin(runner: NPUModelRunner) -> None:
    """A step starts to prepare its inputs. Not tracked with the switch off or under context parallelism."""
    global _in_step, _trusted, _epoch
    if not _trusted:
        _epoch += 1
    _trusted = False
    _in_step = ENABLED and runner.use_cp is False


def finish(runner: NPUModelRunner) -> None:
    """The step's inputs are on their way; writes the tail of query_start_loc if nobody has. Nothing outside a
    step.
    """
    global _in_step, _trusted
    if not _in_step:
        return
    starts = _vector_of(runner.query_start_loc)
    if starts.due is not None:
        tail = starts.content[starts.due :]
        if (tail != _UNUSED).any():
            runner.query_start_loc.gpu[starts.due :].fill_(_UNUSED)
            tail.fill(_UNUSED)
        starts.due = None
    _in_step = False
    _trusted = True


def invalidate() -> None:
    """Something else than a step writes to the device, or may have: nothing is known until the next step has
    copied everything.
    """
    global _in_step, _trusted
    _in_step = False
    _trusted = False


def copy(buffer: CpuGpuBuffer, count: int | None = None) -> bool:
    """Bring the first ``count`` entries (all without a number) of a one-dimensional buffer to the device.

    False: not tracked, the caller has to copy. What the device holds behind ``count`` stays.
    """
    if not _in_step:
        return False
    wanted = buffer.np if count is None else buffer.np[:count]
    size = wanted.shape[0]
    known = _vector_of(buffer)
    if size > MAX_COMPARED or not pinned_ring.can_stage(buffer.cpu):
        known.epoch = -1
        return False
    if known.length < size or not np.array_equal(known.content[:size], wanted):
        _to_device(buffer, known, size)
    return True


def copy_starts(runner: NPUModelRunner, num_reqs: int) -> bool:
    """Bring query_start_loc to the device: its first ``num_reqs + 1`` entries now, the tail when it is
    known what belongs there (:func:`copy_padded_starts`, else :func:`finish`).

    Between the two nobody reads the tail. False: not tracked, the caller has to copy the whole buffer.
    """
    buffer = runner.query_start_loc
    size = buffer.np.shape[0]
    if not _in_step:
        return False
    known = _vector_of(buffer)
    if size > MAX_COMPARED or not pinned_ring.can_stage(buffer.cpu):
        known.epoch = -1
        return False
    used = num_reqs + 1
    if known.length < size or not np.array_equal(known.content[:used], buffer.np[:used]):
        _to_device(buffer, known, size)
    known.due = used
    return True


def tail_is_due(runner: NPUModelRunner) -> bool:
    """Whether the fill of query_start_loc's tail is left to :func:`copy_padded_starts` or :func:`finish`."""
    return _in_step and _vector_of(runner.query_start_loc).due is not None


def copy_padded_starts(runner: NPUModelRunner, buffer: CpuGpuBuffer) -> bool:
    """Bring the whole padded query_start_loc to the device. False: not tracked (a drafter's own buffer, whose
    device side others write), the caller has to copy.
    """
    if buffer is not runner.query_start_loc or not copy(buffer):
        return False
    _vector_of(buffer).due = None
    return True


def changed(table: BlockTable) -> None:
    """The host's block table is about to be written."""
    _table_of(table).version += 1


def committed(table: BlockTable, num_reqs: int) -> bool:
    """Whether the device holds the first ``num_reqs`` rows as they are; if not, the caller copies them now.

    Rows behind ``num_reqs`` count as unknown afterwards: building the attention metadata clears them.
    """
    if not _in_step or table.pcp_world_size * table.dcp_world_size != 1:
        return False
    state = _table_of(table)
    there = state.epoch == _epoch and state.copied == state.version and num_reqs <= state.rows
    state.epoch, state.copied, state.rows = _epoch, state.version, num_reqs
    return there


def _to_device(buffer: CpuGpuBuffer, known: _Vector, size: int) -> None:
    pinned_ring.ring_of(buffer, buffer.cpu).copy(buffer.cpu[:size], buffer.gpu[:size])
    known.content[:size] = buffer.np[:size]
    known.length = max(known.length, size)


def _vector_of(buffer: Any) -> _Vector:
    """The buffer's record, emptied if it is of another epoch."""
    attributes = vars(buffer)
    known: _Vector | None = attributes.get(_ATTRIBUTE)
    if known is None:
        known = attributes[_ATTRIBUTE] = _Vector(buffer.np)
    if known.epoch != _epoch:
        known.epoch, known.length, known.due = _epoch, 0, None
    return known


def _table_of(table: Any) -> _Table:
    attributes = vars(table)
    state: _Table | None = attributes.get(_ATTRIBUTE)
    if state is None:
        state = attributes[_ATTRIBUTE] = _Table()
    return state
