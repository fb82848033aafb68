"""The kept convolution weights through the real core of the gated delta net, every branch of it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gdn_device import WIDTH, Batch, Layer, assert_same, bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vllm_ascend.strata import mixed_qkv_views, transposed_conv_weights, weight_caches, weight_changes

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BRANCHES = {
    "decode": Batch(decodes=3),
    "one decode": Batch(decodes=1),
    "prefill": Batch(prefills=(5, 2)),
    "prefill, context parallel": Batch(prefills=(5, 4), ranks=2),
    "prefill and decode": Batch(decodes=2, prefills=(3,)),
    "drafts": Batch(spec=2, drafts=4),
    "drafts and decode": Batch(spec=1, drafts=2, decodes=2),
    "drafts and prefill": Batch(spec=2, drafts=1, prefills=(1, 6)),
}


@pytest.fixture(autouse=True)
def fresh(enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    enable(transposed_conv_weights)
    enable(mixed_qkv_views, False)
    monkeypatch.setattr(weight_caches, "_arenas", [])
    monkeypatch.setattr(weight_changes, "pending", False)
    return enable


def build(module: nn.Module) -> torch.Tensor:
    weight_caches.build(types.SimpleNamespace(get_model=lambda: module))
    kept: torch.Tensor = getattr(module, transposed_conv_weights.ATTRIBUTE)
    return kept


@pytest.mark.parametrize("views", [True, False], ids=["views on", "views off"])
@pytest.mark.parametrize("batch", BRANCHES.values(), ids=BRANCHES.keys())
def test_every_branch_gets_the_kept_weight(
    batch: Batch, views: bool, monkeypatch: pytest.MonkeyPatch, fresh: Callable[..., None]
) -> None:
    layer = Layer(monkeypatch, batch, torch.bfloat16, 2, 4, 8)
    kept = build(layer.module)
    fresh(mixed_qkv_views, views)
    ours = layer.run()
    fresh(mixed_qkv_views, False)
    fresh(transposed_conv_weights, False)
    theirs = layer.run()
    assert ours[0].weights and all(weight is kept for weight in ours[0].weights)
    assert not any(weight.is_contiguous() for weight in theirs[0].weights)
    assert_same(ours, theirs)


def test_branches_cover_every_call_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    from vllm_ascend.ops import gdn

    source = inspect.getsource(gdn.AscendGatedDeltaNetAttention._forward_core)
    assert source.count("npu_causal_conv1d_custom") == source.count("transposed_conv_weights.of") == 4
    assert ".transpose(0, 1)" not in source.replace("mixed_qkv_non_spec.transpose(0, 1)", "")


@settings(max_examples=60)
@given(
    channels=st.integers(1, 300),
    width=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_kept_tensor_is_the_transposed_view(channels: int, width: int, dtype: torch.dtype, seed: int) -> None:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    size = torch.finfo(dtype).bits // 8
    raw = torch.randint(
        0, 256, (channels * width * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    layer: Any = object.__new__(QwenGatedDeltaNetAttention)
    nn.Module.__init__(layer)
    layer.conv1d = nn.Module()
    layer.conv1d.weight = nn.Parameter(raw.view(dtype).view(channels, 1, width))
    kept = build(layer)
    weights = layer.conv1d.weight.view(channels, width)
    ours, theirs = transposed_conv_weights.of(layer, weights), weights.transpose(0, 1)
    assert ours is kept and ours.is_contiguous() and ours.shape == theirs.shape == (width, channels)
    assert bits(ours) == bits(theirs)


def test_follows_a_change_in_place(monkeypatch: pytest.MonkeyPatch, fresh: Callable[..., None]) -> None:
    layer = Layer(monkeypatch, Batch(decodes=2), torch.float32, 2, 2, 8)
    kept = build(layer.module)
    address = kept.data_ptr()
    layer.module.conv1d.weight.data.copy_(torch.randn(layer.channels, 1, WIDTH))
    weight_changes.mark()
    weight_caches.settle()
    ours = layer.run()
    assert ours[0].weights == [kept] or ours[0].weights[0] is kept
    assert kept.data_ptr() == address
    fresh(transposed_conv_weights, False)
    assert_same(ours, layer.run())


def test_without_a_kept_tensor_the_view_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(monkeypatch, Batch(decodes=2), torch.float32, 2, 2, 8)
    (weight,) = layer.run()[0].weights
    assert weight.data_ptr() == layer.module.conv1d.weight.data_ptr()


def test_switch_off_builds_nothing(fresh: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(monkeypatch, Batch(decodes=2), torch.float32, 2, 2, 8)
    fresh(transposed_conv_weights, False)
    weight_caches.build(types.SimpleNamespace(get_model=lambda: layer.module))
    assert transposed_conv_weights.ATTRIBUTE not in vars(layer.module)


def test_layers_without_such_a_weight_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(monkeypatch, Batch(decodes=2), torch.float32, 2, 2, 8)
    assert transposed_conv_weights.weight_of(nn.Linear(2, 2)) is None
    layer.module.conv1d.weight = nn.Parameter(torch.ones(layer.channels, 2, WIDTH))
    assert transposed_conv_weights.weight_of(layer.module) is None
    del layer.module.conv1d
    assert transposed_conv_weights.weight_of(layer.module) is None
