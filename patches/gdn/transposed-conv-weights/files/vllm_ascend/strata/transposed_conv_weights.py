"""The convolution weight of a gated delta net as [kernel width, channels], contiguous, beside the weight.

Holds the values of upstream's transposed view, bit for bit, refreshed after every change of the weight
(:mod:`vllm_ascend.strata.weight_caches`); only the strides differ, so that the operator has nothing to copy.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm_ascend.strata import switches, weight_caches

ENABLED: bool = switches.bind("transposed_conv_weights", __name__)

ATTRIBUTE = "strata_conv_weights_transposed"


def of(layer: nn.Module, conv_weights: torch.Tensor) -> torch.Tensor:
    """``conv_weights.transpose(0, 1)``: the kept tensor, or the view where none is kept.

    layer: the attention layer; conv_weights: its weight as [channels, kernel width].
    Returns [kernel width, channels]; the result must not be written to.
    """
    if ENABLED:
        kept: torch.Tensor | None = getattr(layer, ATTRIBUTE, None)
        if kept is not None:
            return kept
    return conv_weights.transpose(0, 1)


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """The convolution weight, [channels, 1, kernel width], if the module is a gated delta net with one."""
    if not isinstance(module, GatedDeltaNetAttention):
        return None
    weight = getattr(getattr(module, "conv1d", None), "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.dim() == 3 and weight.size(1) == 1 else None


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.squeeze(1).transpose(0, 1)


weight_caches.register(
    weight_caches.Derived(attribute=ATTRIBUTE, enabled=lambda: ENABLED, weight=weight_of, view=_transposed)
)
