"""Cosines and sines of a step's positions from one gather.

A row of the rotary table is [cosines | sines], each of half the rotary dimension; the operators want both
repeated to the whole of it. The same gather and the same repetition serve both.
"""

from __future__ import annotations

import torch
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("merged_cos_sin", __name__)


def update(cos: torch.Tensor, sin: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> bool:
    """Write the positions' cosines and sines into the first places of the kept tensors.

    cos, sin: [1, tokens at most, 1, rotary dimension]; table: [positions, rotary dimension], a row being
    cosines and sines of half the dimension; positions: [tokens], integers. Returns False, with nothing done,
    if the switch is off.
    """
    if not ENABLED:
        return False
    tokens = positions.size(0)
    rows = table.index_select(0, positions).view(tokens, 2, -1).repeat(1, 1, 2)
    cos[:, :tokens] = rows[:, 0:1]
    sin[:, :tokens] = rows[:, 1:2]
    return True
