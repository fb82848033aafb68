"""Gemma's RMSNorm with and without the kept tensor, through vllm-ascend's own forwards.

The operators are stand-ins that compute in float32 and note their arguments; equality is of every argument
and every result, bit for bit.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm_ascend.ops import layernorm
from vllm_ascend.ops.layernorm import AscendGemmaRMSNorm
from vllm_ascend.strata import gemma_weight_plus_one, weight_caches, weight_changes

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return (total * scale * weight.float()).to(x.dtype), scale, total.to(x.dtype)


class Device:
    """Stand-ins of the three operators; ``weights``: those that they got; ``custom`` chooses the branch."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.custom = True

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: Any) -> Any:
        assert not self.custom
        self.weights.append(weight)
        return add_rms_norm(x, residual, weight, eps)

    def add_rms_norm_bias(self, x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> Any:
        assert self.custom and bias is None
        self.weights.append(weight)
        return add_rms_norm(x, residual, weight, eps)

    def gemma_rms_norm(self, x: Any, weight: Any, eps: Any) -> Any:
        self.weights.append(weight)
        return add_rms_norm(x, torch.zeros_like(x), 1.0 + weight, eps)[:2]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch_npu, "npu_add_rms_norm", device.add_rms_norm)
    monkeypatch.setattr(torch.ops._C_ascend, "npu_add_rms_norm_bias", device.add_rms_norm_bias, raising=False)
    monkeypatch.setattr(torch.ops._C_ascend, "npu_gemma_rms_norm", device.gemma_rms_norm, raising=False)
    monkeypatch.setattr(torch.ops.vllm, "maybe_chunk_residual", lambda x, residual: residual, raising=False)
    monkeypatch.setattr(layernorm, "enable_custom_op", lambda: device.custom)
    return device


@pytest.fixture(autouse=True)
def fresh(enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    enable(gemma_weight_plus_one)
    monkeypatch.setattr(weight_caches, "_arenas", [])
    monkeypatch.setattr(weight_changes, "pending", False)
    return enable


@pytest.fixture(autouse=True, scope="module")
def vllm_config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def norm_of(weight: torch.Tensor) -> AscendGemmaRMSNorm:
    norm = AscendGemmaRMSNorm(weight.numel(), 1e-6)
    norm.weight = nn.Parameter(weight)
    return norm


def build(*modules: nn.Module) -> None:
    model = nn.ModuleList(modules)
    weight_caches.build(types.SimpleNamespace(get_model=lambda: model))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern: subnormals, infinities and NaN among them."""
    width = torch.finfo(dtype).bits // 8
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size * width,), dtype=torch.uint8, generator=generator).view(dtype)


@given(
    size=st.integers(1, 700), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 10**6), plain=st.booleans()
)
def test_kept_tensor_is_the_addition(size: int, dtype: torch.dtype, seed: int, plain: bool) -> None:
    weight = random_bits(size, dtype, seed)
    if plain:
        weight = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    norm = norm_of(weight)
    build(norm, norm_of(weight.flip(0)))
    kept = gemma_weight_plus_one.of(norm)
    assert kept is gemma_weight_plus_one.of(norm)
    theirs = 1.0 + norm.weight.detach()
    assert kept.dtype == theirs.dtype and kept.shape == theirs.shape and kept.is_contiguous()
    nan = theirs.isnan()
    assert torch.equal(kept.isnan(), nan)
    assert bits(kept[~nan]) == bits(theirs[~nan])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("custom", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_forward_is_upstreams(
    dtype: torch.dtype, custom: bool, residual: bool, device: Device, fresh: Callable[..., None]
) -> None:
    device.custom = custom
    generator = torch.Generator().manual_seed(1)
    norm = norm_of(torch.randn(256, generator=generator).to(dtype))
    x, other = (torch.randn((5, 256), generator=generator).to(dtype) for _ in range(2))
    arguments = (x, other) if residual else (x,)
    build(norm)
    ours = norm.forward_oot(*arguments)
    fresh(gemma_weight_plus_one, False)
    theirs = norm.forward_oot(*arguments)
    assert bits(device.weights[0]) == bits(device.weights[1])
    for one, two in zip(ours, theirs, strict=True):
        assert bits(one) == bits(two)
    kept = getattr(norm, gemma_weight_plus_one.ATTRIBUTE)
    assert (device.weights[0] is kept) is residual
    assert device.weights[1] is not kept


def test_without_a_kept_tensor_the_addition_stays(device: Device) -> None:
    norm = norm_of(torch.arange(4.0))
    x = torch.ones((1, 4))
    norm.forward_oot(x, x)
    norm.weight.data.mul_(2)
    norm.forward_oot(x, x)
    assert [weight.tolist() for weight in device.weights] == [[1, 2, 3, 4], [1, 3, 5, 7]]


def test_two_norms_have_two_tensors(device: Device) -> None:
    """Also when the second takes the first one's place in memory."""
    x = torch.ones((1, 4))
    for value in (1.0, 2.0, 3.0):
        norm = norm_of(torch.full((4,), value))
        build(norm)
        norm.forward_oot(x, x)
        del norm
    assert [weight[0].item() for weight in device.weights] == [2, 3, 4]


class Stop(Exception):
    pass


def attention(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """Qwen3.5's full attention up to its fused operator, whose arguments are noted."""
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    layer = object.__new__(Qwen3NextAttention)
    nn.Module.__init__(layer)
    generator = torch.Generator().manual_seed(2)
    layer.q_norm = norm_of(torch.randn(32, generator=generator).to(dtype))
    layer.k_norm = norm_of(torch.randn(32, generator=generator).to(dtype))
    layer.config = types.SimpleNamespace(model_type="qwen3_5_text", rms_norm_eps=1e-6)
    layer.qkv_proj = lambda hidden: (hidden, None)
    layer.rotary_emb = types.SimpleNamespace(
        cos_sin_cache=torch.zeros((8, 8), dtype=dtype),
        mrope_section=[2, 1, 1],
        mrope_interleaved=True,
        rotary_dim=8,
    )
    layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.attn_output_gate = 4, 1, 32, True
    calls: list[Any] = []

    def operator(**arguments: Any) -> Any:
        calls.append(arguments)
        raise Stop

    monkeypatch.setattr(torch.ops.vllm, "triton_split_qkv_rmsnorm_mrope", operator, raising=False)
    return layer, calls


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_passes_the_same_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, fresh: Callable[..., None]
) -> None:
    layer, calls = attention(monkeypatch, dtype)
    build(layer)
    hidden = torch.randn((3, 320)).to(dtype)
    for on in (True, False):
        fresh(gemma_weight_plus_one, on)
        with pytest.raises(Stop):
            layer.forward(torch.arange(3), torch.empty_like(hidden), hidden)
    ours, theirs = calls
    assert ours["q_weight"] is getattr(layer.q_norm, gemma_weight_plus_one.ATTRIBUTE)
    assert ours["k_weight"] is getattr(layer.k_norm, gemma_weight_plus_one.ATTRIBUTE)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert bits(value) == bits(theirs[name])
        else:
            assert value == theirs[name]


def test_traced_forward_reads_the_modules_tensor(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, as a whole: no addition in the graph, the kept tensor is an input of it, later
    refreshes arrive, and what is read is one constant and one attribute of the module.
    """
    device.custom = False
    monkeypatch.setattr(torch_npu, "npu_add_rms_norm", add_rms_norm)
    norm = norm_of(torch.randn(64, generator=torch.Generator().manual_seed(3)))
    build(norm)
    x = torch.randn((2, 64), generator=torch.Generator().manual_seed(4))
    graphs: list[Any] = []
    inputs: list[list[int]] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)

        def run(*arguments: Any) -> Any:
            inputs.append([it.data_ptr() for it in arguments if isinstance(it, torch.Tensor)])
            return graph(*arguments)

        return run

    # without guards, as vLLM runs what it compiled
    compiled = torch.compile(
        norm.forward_oot,
        fullgraph=True,
        backend=backend,
        options={"guard_filter_fn": lambda guards: [False for _ in guards]},
    )
    kept = getattr(norm, gemma_weight_plus_one.ATTRIBUTE)
    with torch.no_grad():
        for seed in range(3):
            ours = compiled(x, x)
            theirs = add_rms_norm(x, x, 1.0 + norm.weight.detach(), 1e-6)
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[2])
            norm.weight.data.copy_(torch.randn(64, generator=torch.Generator().manual_seed(seed)))
            weight_changes.mark()
            weight_caches.settle()
    assert len(graphs) == 1 and len(inputs) == 3
    assert all(kept.data_ptr() in pointers for pointers in inputs)
    assert norm.weight.data_ptr() not in inputs[0]
    additions = [node for node in graphs[0].graph.nodes if "add" in str(node.target) and 1.0 in node.args]
    assert not additions
    assert set(gemma_weight_plus_one.of.__code__.co_names) == {"ENABLED", "getattr", "ATTRIBUTE", "weight"}


def test_switch_off_builds_and_reads_nothing(device: Device, fresh: Callable[..., None]) -> None:
    fresh(gemma_weight_plus_one, False)
    norm = norm_of(torch.ones(8))
    build(norm)
    assert gemma_weight_plus_one.ATTRIBUTE not in vars(norm)
    setattr(norm, gemma_weight_plus_one.ATTRIBUTE, torch.full((8,), 99.0))
    norm.forward_oot(torch.ones((1, 8)), torch.ones((1, 8)))
    assert device.weights[0].tolist() == [2.0] * 8


def test_other_norms_get_nothing() -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    other = RMSNorm(8)
    build(other, nn.LayerNorm(8))
    assert gemma_weight_plus_one.ATTRIBUTE not in vars(other)
    odd = norm_of(torch.ones(8))
    odd.weight = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    build(odd)
    assert gemma_weight_plus_one.ATTRIBUTE not in vars(odd)
