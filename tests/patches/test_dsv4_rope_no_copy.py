"""DeepSeek V4's rotary module with and without the copy back, through its real forward."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm_ascend.ops.rope_dsv4 import ComplexExpRotaryEmbedding
from vllm_ascend.strata import dsv4_rope_no_copy, series

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str) -> torch.Tensor:
    assert rotary_mode == "interleave" and x.dim() == 4
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cos + turned * sin


@pytest.fixture(autouse=True)
def fresh(enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    enable(dsv4_rope_no_copy)
    monkeypatch.setattr(torch_npu, "npu_rotary_mul", rotary_mul)
    return enable


def module() -> Any:
    it = object.__new__(ComplexExpRotaryEmbedding)
    nn.Module.__init__(it)
    return it


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


@given(
    shape=st.sampled_from([(3, 8), (3, 2, 8), (3, 1, 2, 8), (1, 4), (5, 1, 1, 2)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    strided=st.booleans(),
)
def test_result_is_upstreams(shape: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = shape[-1]
    cos, sin = (torch.randn((shape[0], 1, 1, size), generator=generator).to(dtype) for _ in range(2))
    wide = torch.randn((*shape[:-1], 2 * size), generator=generator).to(dtype)
    given_tensor = wide[..., :size] if strided else wide[..., :size].contiguous()
    results = {}
    for on in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(dsv4_rope_no_copy, "ENABLED", on)
            x = given_tensor.clone() if not strided else wide.clone()[..., :size]
            before = bits(x)
            out = module()(x, cos, sin)
            results[on] = out
            if on:  # the contract that the switch changes
                assert bits(x) == before and out.data_ptr() != x.data_ptr()
            else:
                assert out is x and (bits(x) != before or bits(out) == before)
    assert results[True].shape == results[False].shape and results[True].dtype == results[False].dtype
    assert bits(results[True]) == bits(results[False])


def test_a_result_of_another_type_is_still_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_npu, "npu_rotary_mul", lambda x, *_, **__: x.float() * 1.5)
    x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    out = module()(x, x, x)
    assert out is x and out.dtype == torch.bfloat16 and out.tolist() == [[1.5, 3.0]]


def test_an_operator_in_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_npu, "npu_rotary_mul", lambda x, *_, **__: x.mul_(2))
    x = torch.ones((2, 4))
    assert module()(x, x, x) is x


def test_off_is_the_default_and_mutates_the_input(fresh: Callable[..., None]) -> None:
    assert series.load().defaults["dsv4_rope_no_copy"] is False
    fresh(dsv4_rope_no_copy, False)
    x = torch.ones((2, 4))
    assert module()(x, torch.full((2, 1, 1, 4), 2.0), torch.zeros((2, 1, 1, 4))) is x
    assert x.tolist() == [[2.0] * 4] * 2


def test_nothing_in_this_release_calls_the_module() -> None:
    """The evidence of the patch: the class is constructed in one place, its attribute never called."""
    import vllm_ascend

    package = Path(vllm_ascend.__file__).parent
    makers, callers = [], []
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "ComplexExpRotaryEmbedding" in text and path.name != "rope_dsv4.py":
            makers.append(path)
    for path in makers:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("rotary_emb"):
                callers.append((path.name, node.lineno))
    assert [path.name for path in makers] == ["deepseek_v4.py"]
    assert callers == []
