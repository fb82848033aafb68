"""The used rows of a block table on their way to the device, in reused pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend.strata import pinned_ring, switches

if TYPE_CHECKING:
    from vllm.v1.utils import CpuGpuBuffer

ENABLED: bool = switches.bind("block_table_commit_ring", __name__)


def commit(buffer: CpuGpuBuffer, num_reqs: int) -> bool:
    """Enqueue the copy of the first ``num_reqs`` rows, as they are now, to the device.

    buffer: [max_num_reqs, blocks per request], int32, of one KV cache group. Its host rows may be changed as
    soon as the call returns. False: nothing was done, upstream's copy has to.
    """
    if not ENABLED or not pinned_ring.can_stage(buffer.cpu):
        return False
    pinned_ring.ring_of(buffer, buffer.cpu).copy(buffer.cpu[:num_reqs], buffer.gpu[:num_reqs])
    return True
