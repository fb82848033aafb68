"""Positions of a step, from the host's buffer instead of a computation on the device.

Equal where the host's counts are final (:mod:`exact_host_counts`): the device then holds a copy of the
host's counts, gathers it by the same request indices and adds the same offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend.strata import exact_host_counts, pinned_ring, switches

if TYPE_CHECKING:
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

ENABLED: bool = switches.bind("cpu_positions", __name__)


def fill(runner: NPUModelRunner, num_tokens: int) -> bool:
    """Enqueue the copy of the step's first ``num_tokens`` positions, int64, to ``runner.positions``.

    To be called while ``runner._positions_cpu_buf`` holds them. False: nothing was done, the device has to
    compute them.
    """
    host = runner._positions_cpu_buf
    if not ENABLED or not exact_host_counts.hold(runner) or not pinned_ring.can_stage(host):
        return False
    pinned_ring.ring_of(host, host).copy(host[:num_tokens], runner.positions[:num_tokens])
    return True
