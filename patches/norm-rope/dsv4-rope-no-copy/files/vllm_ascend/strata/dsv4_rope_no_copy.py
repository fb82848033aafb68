"""When the rotated tensor can be returned in the input's place."""

from __future__ import annotations

import torch
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("dsv4_rope_no_copy", __name__)


def fits(rotated: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether the rotated tensor may be returned instead of being copied into the given one.

    Both hold the same number of elements. Copying would convert to the input's type, so a result of another
    type is not returned as it is; nor is one that shares the input's storage.
    """
    return ENABLED and rotated.dtype == given.dtype and rotated.data_ptr() != given.data_ptr()
