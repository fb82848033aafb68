"""``1 + weight`` of Gemma's RMSNorm, kept beside the weight.

Equal to upstream in every bit: the kept tensor is the same addition of the same weight, done after every
change of the weight instead of in every call (:mod:`vllm_ascend.strata.weight_caches`).
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm_ascend.strata import switches, weight_caches

ENABLED: bool = switches.bind("gemma_weight_plus_one", __name__)

ATTRIBUTE = "strata_weight_plus_one"


def of(norm: nn.Module) -> torch.Tensor:
    """``1.0 + norm.weight``: the kept tensor, or a new one where none is kept.

    norm: a GemmaRMSNorm; shape [hidden size] and type of its weight. The result must not be written to.
    Traced: reads one module attribute.
    """
    if ENABLED:
        kept: torch.Tensor | None = getattr(norm, ATTRIBUTE, None)
        if kept is not None:
            return kept
    weight: torch.Tensor = norm.weight
    return 1.0 + weight


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """The weight, [hidden size], of a floating type, if the module is a Gemma RMSNorm."""
    if not isinstance(module, GemmaRMSNorm):
        return None
    weight = module.weight
    return weight if weight.dim() == 1 and weight.is_floating_point() else None


def _same(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _add_one(values: torch.Tensor) -> torch.Tensor:
    return values.add_(1.0)


weight_caches.register(
    weight_caches.Derived(
        attribute=ATTRIBUTE,
        enabled=lambda: ENABLED,
        weight=weight_of,
        view=_same,
        finish=_add_one,
    )
)
