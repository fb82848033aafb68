"""q, k and v as views of one row, against vLLM's own method, alone and through the layer's core."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gdn_device import Batch, Layer, assert_same, bits
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm_ascend.strata import mixed_qkv_views, transposed_conv_weights, weight_caches

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def fresh(enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    enable(mixed_qkv_views)
    enable(transposed_conv_weights, False)
    monkeypatch.setattr(weight_caches, "_arenas", [])
    return enable


def layer_of(key_heads: int, heads: int, key_size: int, size: int, ranks: int = 1) -> Any:
    return SimpleNamespace(
        key_dim=key_heads * key_size * ranks,
        value_dim=heads * size * ranks,
        tp_size=ranks,
        head_k_dim=key_size,
        head_v_dim=size,
    )


def grafted(layer: Any, mixed_qkv: torch.Tensor | None) -> Any:
    """The method as vLLM's class has it now."""
    return QwenGatedDeltaNetAttention.rearrange_mixed_qkv(layer, mixed_qkv)


def upstream() -> Callable[..., Any]:
    """vLLM's own, which the graft keeps."""
    method = QwenGatedDeltaNetAttention.rearrange_mixed_qkv
    cells = dict(zip(method.__code__.co_freevars, method.__closure__, strict=True))
    return cells["upstream"].cell_contents


def test_grafted_onto_vllms_class_over_its_own_method() -> None:
    assert QwenGatedDeltaNetAttention.rearrange_mixed_qkv.__code__.co_filename == mixed_qkv_views.__file__
    assert upstream().__code__.co_filename.endswith("qwen_gdn_linear_attn.py")


@given(
    rows=st.integers(1, 4),
    key_heads=st.integers(1, 3),
    heads=st.integers(1, 4),
    key_size=st.integers(1, 33),
    size=st.integers(1, 33),
    ranks=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
)
def test_equal_to_vllms(
    rows: int,
    key_heads: int,
    heads: int,
    key_size: int,
    size: int,
    ranks: int,
    dtype: torch.dtype,
    strided: bool,
) -> None:
    layer = layer_of(key_heads, heads, key_size, size, ranks)
    width = 2 * key_heads * key_size + heads * size
    mixed = torch.randn((rows, 2 * width if strided else width)).to(dtype)
    mixed = mixed[:, ::2] if strided else mixed
    ours, theirs = grafted(layer, mixed), upstream()(layer, mixed)
    viewed = rows == 1 and mixed.is_contiguous()
    for one, two in zip(ours, theirs, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype and one.stride() == two.stride()
        assert one.is_contiguous() and bits(one) == bits(two)
        shared = one.untyped_storage().data_ptr() == mixed.untyped_storage().data_ptr()
        assert shared is viewed


def test_nothing_gives_nothing() -> None:
    assert grafted(layer_of(1, 1, 4, 4), None) == (None, None, None)


@pytest.mark.parametrize("width", [11, 13])
def test_a_row_of_another_width_fails_as_in_vllm(width: int) -> None:
    layer, row = layer_of(1, 1, 4, 4), torch.zeros((1, width))
    with pytest.raises(RuntimeError) as theirs:
        upstream()(layer, row)
    with pytest.raises(RuntimeError) as ours:
        grafted(layer, row)
    assert str(ours.value) == str(theirs.value)


def test_no_rows() -> None:
    layer, nothing = layer_of(1, 2, 4, 4), torch.zeros((0, 16))
    assert not mixed_qkv_views.fits(layer, nothing)


def test_switch_off_is_vllms(fresh: Callable[..., None]) -> None:
    fresh(mixed_qkv_views, False)
    layer, row = layer_of(1, 2, 4, 4), torch.randn((1, 16))
    for part in grafted(layer, row):
        assert part.untyped_storage().data_ptr() != row.untyped_storage().data_ptr()


BATCHES = {
    "one decode": (Batch(decodes=1), True),
    "two decodes": (Batch(decodes=2), False),
    "one prompt of one row": (Batch(prefills=(1,)), True),
    "decode and a prompt": (Batch(decodes=1, prefills=(3,)), True),  # its decode rows are split off: one
    "prompt": (Batch(prefills=(5,)), False),
    "drafts": (Batch(spec=1, drafts=4), False),
    "drafts and one decode": (Batch(spec=1, drafts=4, decodes=1), True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conv", [True, False], ids=["kept weights on", "kept weights off"])
@pytest.mark.parametrize(("batch", "hits"), BATCHES.values(), ids=BATCHES.keys())
def test_the_layers_core_is_the_same(
    batch: Batch,
    hits: bool,
    conv: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    fresh: Callable[..., None],
) -> None:
    layer = Layer(monkeypatch, batch, dtype, 2, 4, 8)
    fresh(transposed_conv_weights, conv)
    weight_caches.build(SimpleNamespace(get_model=lambda: layer.module))
    split, taken = mixed_qkv_views.split, []
    monkeypatch.setattr(mixed_qkv_views, "split", lambda *given: taken.append(1) or split(*given))
    ours = layer.run()
    assert bool(taken) is hits
    fresh(mixed_qkv_views, False)
    fresh(transposed_conv_weights, False)
    assert_same(ours, layer.run())


def test_one_decoding_request_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(monkeypatch, Batch(decodes=1), torch.bfloat16, 2, 4, 8)
    device, _, _ = layer.run()
    (value,), (row,) = device.values, device.conv_outputs
    assert value.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
