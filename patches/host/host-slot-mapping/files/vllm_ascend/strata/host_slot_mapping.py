"""Cache slots of a small batch, computed on the host for every KV cache group.

slot = block number * block size + offset in the block, the block number looked up in the host's block table,
of which the device holds a copy. Equal to the kernel where the host's positions are the device's
(:mod:`exact_host_counts`) and where every position lies within the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm_ascend.strata import exact_host_counts, pinned_ring, switches
from vllm_ascend.worker.block_table import BlockTable, MultiGroupBlockTable

if TYPE_CHECKING:
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

ENABLED: bool = switches.bind("host_slot_mapping", __name__)

MAX_TOKENS: Final = 80
"""Largest batch that is computed here: 16 requests of 5 tokens."""


def compute(runner: NPUModelRunner, req_indices: np.ndarray, positions: np.ndarray) -> bool:
    """Enqueue the slots of a step for every attention group, and the padding behind them.

    req_indices: [tokens], the batch index of each token's request; positions: [tokens], int64. Writes to each
    group's ``slot_mapping.gpu`` what the kernel writes: [tokens] slots, PAD_SLOT_ID from there to
    ``max_num_batched_tokens``, nothing behind. Mamba groups have no slots. False: nothing was done, the
    kernel has to.
    """
    if not ENABLED or positions.shape[0] > MAX_TOKENS or not exact_host_counts.hold(runner):
        return False
    tables = runner.input_batch.block_table
    if type(tables) is not MultiGroupBlockTable:
        return False
    found = []
    for table in tables.block_tables:
        if table.is_mamba_group:
            continue
        slots = slots_of(table, req_indices, positions) if _serves(table) else None
        if slots is None:
            return False
        found.append((table, slots))
    for table, slots in found:
        _to_device(table, slots)
    return True


def slots_of(table: BlockTable, req_indices: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
    """[tokens] int64 slots; None if a position lies outside the table, where the kernel reads on in
    memory.
    """
    numbers = table.block_table.np
    blocks = positions // table.block_size
    if blocks.size and (int(blocks.max()) >= numbers.shape[1] or int(blocks.min()) < 0):
        return None
    offsets = positions - blocks * table.block_size
    return numbers[req_indices, blocks].astype(np.int64) * table.block_size + offsets


def _serves(table: BlockTable) -> bool:
    return (
        type(table) is BlockTable
        and table.pcp_world_size * table.dcp_world_size == 1
        and pinned_ring.can_stage(table.slot_mapping.cpu)
    )


def _to_device(table: BlockTable, slots: np.ndarray) -> None:
    host, device = table.slot_mapping.cpu, table.slot_mapping.gpu
    tokens = slots.shape[0]
    pinned_ring.ring_of(table.slot_mapping, host).copy(torch.from_numpy(slots), device[:tokens])
    device[tokens : table.max_num_batched_tokens].fill_(PAD_SLOT_ID)
