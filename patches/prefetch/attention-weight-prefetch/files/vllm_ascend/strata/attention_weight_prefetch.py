"""The next layer's attention weights, read into the L2 cache while this layer's MLP runs.

Which layer is the next one is settled by layer index, once, after loading: within the target's decoder only,
never by order of construction, which would chain the MTP layer (index 0 of its own list) to the target's
last one.

The decoder is traced. An operator without result or mutation is removed as dead code by FX and AOTAutograd
unless it is marked as having an effect; both operators here are. They take the name of the layer as a
constant of the graph and look the weights up when they run, so that weights become no inputs of a layer that
does not use them.

The prefetch is joined before the next layer's attention begins: in the same piece where the graph is
captured in pieces split at attention, and by the end of the forward everywhere, as the last layer forks
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.utils.torch_utils import direct_register_custom_op
from vllm_ascend.strata import switches, weight_prefetch_stream
from vllm_ascend.utils import _mark_op_side_effectful

ENABLED: bool = switches.bind("attention_weight_prefetch", __name__)

_NEXT = "strata_next_attention"
_JOINS = "strata_joins_prefetch"
_FULL = ("qkv_proj", "o_proj")
_LINEAR = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "out_proj")
_projections: dict[str, tuple[torch.nn.Module, ...]] = {}
"""Name of a decoder layer -> the linear layers of its attention, in the order of use."""


class LinkError(RuntimeError):
    """The decoder's layers do not say which one follows which."""


def link(model: torch.nn.Module) -> None:
    """Settle, for each layer of each Qwen3.5 decoder in ``model`` but the last, which attention comes next.

    model: the loaded target. Only a list of layers that run one behind the other counts: a Qwen3_5Model's
    layers of this pipeline stage. Raises LinkError where two of them have the same index.
    """
    if not ENABLED:
        return
    _projections.clear()
    for layers in _decoders(model):
        for index, (_, layer) in layers.items():
            following = layers.get(index + 1)
            setattr(layer, _NEXT, following[0] if following else None)
            setattr(layer, _JOINS, index - 1 in layers)
        _projections.update({name: _projections_of(layer) for name, layer in layers.values()})


def before_mlp(layer: torch.nn.Module, hidden_states: torch.Tensor) -> None:
    """Fork: prefetch the following layer's attention weights. Traced; hidden_states: [tokens, hidden]."""
    if ENABLED:
        following = getattr(layer, _NEXT, None)
        if following is not None:
            torch.ops.vllm.strata_prefetch_attention(hidden_states, following)


def before_attention(layer: torch.nn.Module, hidden_states: torch.Tensor) -> None:
    """Join what the layer before has forked. Traced."""
    if ENABLED and getattr(layer, _JOINS, False):
        torch.ops.vllm.strata_join_prefetch(hidden_states)


def _decoders(model: torch.nn.Module) -> Iterator[dict[int, tuple[str, torch.nn.Module]]]:
    """Of each decoder: layer index -> (name in ``model``, layer)."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5Model

    for name, module in model.named_modules():
        if not isinstance(module, Qwen3_5Model):
            continue
        layers: dict[int, tuple[str, torch.nn.Module]] = {}
        for place, layer in module.layers.named_children():
            if not isinstance(layer, Qwen3_5DecoderLayer):  # another pipeline stage's
                continue
            full_name = f"{name}.layers.{place}" if name else f"layers.{place}"
            if layer.layer_idx in layers:
                raise LinkError(
                    f"{layers[layer.layer_idx][0]} and {full_name} both have layer index {layer.layer_idx}: "
                    "attention weights cannot be prefetched (STRATA_SWITCHES=attention_weight_prefetch=off)"
                )
            layers[layer.layer_idx] = (full_name, layer)
        yield layers


def _projections_of(layer: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    full = layer.layer_type == "full_attention"
    attention = layer.self_attn if full else layer.linear_attn
    found = (getattr(attention, name, None) for name in (_FULL if full else _LINEAR))
    return tuple(module for module in found if module is not None)


def _prefetch(start: torch.Tensor, layer: str) -> None:
    weight_prefetch_stream.fork(start, weight_prefetch_stream.weights_of(_projections.get(layer, ())))


def _prefetch_fake(start: torch.Tensor, layer: str) -> None:
    return


def _join(x: torch.Tensor) -> None:
    weight_prefetch_stream.join()


def _join_fake(x: torch.Tensor) -> None:
    return


direct_register_custom_op(
    op_name="strata_prefetch_attention",
    op_func=_prefetch,
    fake_impl=_prefetch_fake,
    mutates_args=[],
    dispatch_key="PrivateUse1",
)
direct_register_custom_op(
    op_name="strata_join_prefetch",
    op_func=_join,
    fake_impl=_join_fake,
    mutates_args=[],
    dispatch_key="PrivateUse1",
)
_mark_op_side_effectful(torch.ops.vllm.strata_prefetch_attention)
_mark_op_side_effectful(torch.ops.vllm.strata_join_prefetch)
