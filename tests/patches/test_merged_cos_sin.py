"""One gather for cosines and sines through the real update_cos_sin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_ascend.ops import rotary_embedding
from vllm_ascend.strata import merged_cos_sin

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STATE = ("_cos", "_sin", "_cos_slice", "_sin_slice", "_cos_sin_cache")


@pytest.fixture(autouse=True)
def fresh(enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    enable(merged_cos_sin)
    for name in STATE:
        monkeypatch.setattr(rotary_embedding, name, None)
    return enable


def prepare(tokens: int, table: torch.Tensor, dtype: torch.dtype) -> None:
    """What set_cos_and_sin and the rotary modules leave behind."""
    dimension = table.shape[1]
    rotary_embedding._cos = torch.full((1, tokens, 1, dimension), 7.0, dtype=dtype)
    rotary_embedding._sin = torch.full((1, tokens, 1, dimension), 8.0, dtype=dtype)
    rotary_embedding._cos_sin_cache = table


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def run(on: bool, tokens: int, table: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(merged_cos_sin, "ENABLED", on)
        prepare(tokens, table, dtype)
        rotary_embedding.update_cos_sin(positions)
        cos, sin = rotary_embedding.get_cos_and_sin_slice()
        assert cos.data_ptr() == rotary_embedding._cos.data_ptr()
        assert sin.data_ptr() == rotary_embedding._sin.data_ptr()
        return [bits(it) for it in (rotary_embedding._cos, rotary_embedding._sin, cos, sin)]


@given(
    data=st.data(),
    half=st.integers(1, 40),
    length=st.integers(1, 50),
    tokens=st.integers(1, 12),
    table_dtype=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int64, torch.int32]),
)
def test_equal_to_upstream(
    data: st.DataObject,
    half: int,
    length: int,
    tokens: int,
    table_dtype: torch.dtype,
    dtype: torch.dtype,
    index: torch.dtype,
) -> None:
    """Any positions, repeated ones among them; the rest of the kept tensors is left alone."""
    used = data.draw(st.integers(0 if dtype is table_dtype else 1, tokens))
    chosen = data.draw(st.lists(st.integers(0, length - 1), min_size=max(used, 1), max_size=max(used, 1)))
    table = torch.randn((length, 2 * half), generator=torch.Generator().manual_seed(half)).to(table_dtype)
    table[0, 0], table[-1, -1] = float("nan"), float("-inf")
    positions = torch.tensor(chosen, dtype=index)
    ours = run(True, tokens, table, dtype, positions)
    assert ours == run(False, tokens, table, dtype, positions)


@pytest.mark.parametrize("positions", [[5], [-1], [0, 9]])
def test_positions_outside_fail_as_upstream(positions: list[int]) -> None:
    table = torch.zeros((4, 8))
    for on in (True, False):
        with pytest.raises((IndexError, RuntimeError)):
            run(on, 4, table, torch.float32, torch.tensor(positions))


@pytest.mark.parametrize("on", [True, False])
def test_without_tensors_nothing_happens(on: bool, fresh: Callable[..., None]) -> None:
    """Qwen3.5, other multimodal models and MLA."""
    fresh(merged_cos_sin, on)
    rotary_embedding.update_cos_sin(torch.arange(3))
    assert rotary_embedding.get_cos_and_sin_slice() == (None, None)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_half_the_gathers_and_repetitions() -> None:
    table, positions = torch.randn((8, 6)), torch.arange(4)
    counts = {}
    for on in (True, False):
        with Count() as count:
            run(on, 4, table, torch.float32, positions)
        counts[on] = (count.names.count("index_select"), count.names.count("repeat"))
    assert counts == {True: (1, 1), False: (2, 2)}
