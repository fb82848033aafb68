"""q, k and v of one row as views of it.

vLLM's ``rearrange_mixed_qkv`` copies [rows, q | k | v] into three contiguous [1, rows, heads, head size]
tensors. For one row the three parts are contiguous in the row itself, so views of it have the same values,
shapes and strides. With more rows they would not be contiguous, which what reads them requires.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("mixed_qkv_views", __name__)

Parts = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


def graft(target: type) -> None:
    """Replace ``target.rearrange_mixed_qkv``; the present one stays in use for everything but one row."""
    upstream = target.rearrange_mixed_qkv  # type: ignore[attr-defined]

    def rearrange_mixed_qkv(self: Any, mixed_qkv: torch.Tensor | None) -> Parts:
        if ENABLED and fits(self, mixed_qkv):
            return split(self, mixed_qkv)
        parts: Parts = upstream(self, mixed_qkv)
        return parts

    target.rearrange_mixed_qkv = rearrange_mixed_qkv  # type: ignore[attr-defined]


def sizes(layer: Any) -> tuple[int, int, int]:
    """Elements of q, k and v per row on this rank."""
    key = layer.key_dim // layer.tp_size
    return key, key, layer.value_dim // layer.tp_size


def fits(layer: Any, mixed_qkv: torch.Tensor | None) -> bool:
    """Whether it is one contiguous row [1, q + k + v]."""
    return (
        mixed_qkv is not None
        and mixed_qkv.dim() == 2
        and mixed_qkv.shape[0] == 1
        and mixed_qkv.is_contiguous()
        and mixed_qkv.shape[1] == sum(sizes(layer))
    )


def split(layer: Any, mixed_qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one row: q and k as [1, 1, heads, key head size], v as [1, 1, heads, value head size]."""
    query, key, value = mixed_qkv.view(-1).split(sizes(layer))
    return (
        query.view(1, 1, -1, layer.head_k_dim),
        key.view(1, 1, -1, layer.head_k_dim),
        value.view(1, 1, -1, layer.head_v_dim),
    )
