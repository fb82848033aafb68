"""The shared experts' weights, read into the L2 cache while the routed experts run.

The shared experts of a layer are issued behind its routed ones, whose dispatch and combine leave the memory
time. The prefetch is forked when the layer starts and joined when it returns, on the default stream, so that
a captured graph holds both. The layer's forward is one opaque operator: there is no dead code to fear.
"""

from __future__ import annotations

import torch
from vllm_ascend.strata import switches, weight_prefetch_stream

ENABLED: bool = switches.bind("shared_expert_weight_prefetch", __name__)


def fork(layer: torch.nn.Module, hidden_states: torch.Tensor) -> None:
    """Prefetch what the layer's shared experts will read, if it has any. hidden_states: [tokens, hidden]."""
    experts = layer._shared_experts
    if not ENABLED or experts is None:
        return
    modules = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    weight_prefetch_stream.fork(hidden_states, weight_prefetch_stream.weights_of(modules))


def join() -> None:
    """Close the side stream before the layer returns; prefetches of other patches with it."""
    if ENABLED:
        weight_prefetch_stream.join()
