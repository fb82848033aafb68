"""fused-ar-norm: where the operator may stand in, and that everything else is upstream's, bit for bit.

The real forwards of the decoder layer, full attention and gated delta net around fakes of what needs a
device; vllm-ascend's RowParallelLinear and vLLM's GemmaRMSNorm. Two gloo processes for the all-reduce. The
operator, which no image has yet, is a recorder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import tp2
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm_ascend.strata import fused_ar_norm
from vllm_ascend.strata.fused_ar_norm import ARGUMENTS, MAX_ROWS, Facts, refusals

WIDTH = 2048
GOOD = Facts(
    schema=ARGUMENTS,
    ranks=2,
    dtype=torch.bfloat16,
    weight_nz_mode=1,
    k_per_rank=WIDTH,
    hidden=WIDTH,
    plain=True,
    gemma_norm=True,
    layer_scale=False,
    flash_comm=False,
    context_parallel=False,
    lora=False,
)
BAD: dict[str, tuple[Any, ...]] = {
    "schema": (None, ARGUMENTS[:-1], ("Tensor", *ARGUMENTS)),
    "ranks": (1, 4),
    "dtype": (torch.float16, torch.float32, torch.int8),
    "weight_nz_mode": (2,),
    "k_per_rank": (1024, 4096),
    "hidden": (1024, 5120),
    "plain": (False,),
    "gemma_norm": (False,),
    "layer_scale": (True,),
    "flash_comm": (True,),
    "context_parallel": (True,),
    "lora": (True,),
}
SCHEMA = (
    "(Tensor x, Tensor weight, Tensor residual, Tensor gamma, str group, int ranks, int rank, "
    "float epsilon, bool trans, bool gather) -> (Tensor, Tensor)"
)
_operator_library = torch.library.Library("_C_ascend", "FRAGMENT")
_cpu_library = torch.library.Library("vllm", "FRAGMENT")
_cpu_library.impl("strata_fused_ar_norm", fused_ar_norm.run, "CPU")


class TestGuard:
    def test_every_fact_is_covered(self) -> None:
        assert BAD.keys() == {field.name for field in dataclasses.fields(Facts)}
        assert refusals(GOOD) == []
        assert refusals(dataclasses.replace(GOOD, weight_nz_mode=0)) == []

    @pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
    def test_each_alone_refuses(self, name: str, value: Any) -> None:
        reasons = refusals(dataclasses.replace(GOOD, **{name: value}))
        # the hidden size and the columns are compared with each other too
        assert len(reasons) == (2 if name == "k_per_rank" else 1)

    @given(st.sets(st.sampled_from(sorted(BAD))))
    def test_allowed_only_if_all_hold(self, names: set[str]) -> None:
        facts = dataclasses.replace(GOOD, **{name: BAD[name][0] for name in names})
        assert bool(refusals(facts)) is bool(names)

    def test_without_the_operator_there_is_no_schema(self) -> None:
        assert not hasattr(torch.ops._C_ascend, "no_such_operator_910c")
        with patch.object(fused_ar_norm, "OPERATOR", "no_such_operator_910c"):
            assert fused_ar_norm.operator_schema() is None

    def test_the_schema_is_read_from_the_operator(self) -> None:
        _operator_library.define(f"strata_test_read{SCHEMA}")
        _operator_library.define("strata_test_other(Tensor x, Tensor weight) -> Tensor")
        with patch.object(fused_ar_norm, "OPERATOR", "strata_test_read"):
            assert fused_ar_norm.operator_schema() == ARGUMENTS
        with patch.object(fused_ar_norm, "OPERATOR", "strata_test_other"):
            assert fused_ar_norm.operator_schema() == ("Tensor", "Tensor")


class Linear(nn.Module):
    """A row-parallel projection of one rank that counts its calls."""

    def __init__(self, columns: int = WIDTH, rows: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16) / 64, requires_grad=False)
        self.tp_rank, self.tp_size, self.calls = 1, 2, 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.calls += 1
        return nn.functional.linear(x, self.weight), None


def gemma_norm() -> nn.Module:
    """vLLM's norm on the CPU, with a weight that is not zero."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    with set_current_vllm_config(VllmConfig()):
        norm = object.__new__(GemmaRMSNorm)
        nn.Module.__init__(norm)
    norm.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16) / 8, requires_grad=False)
    norm.variance_epsilon = 1e-6
    norm.forward = norm.forward_native
    return norm


def decoder_layer(kind: str, linear: nn.Module | None = None) -> nn.Module:
    """A layer with the real forwards; norms and projection real enough, no MLP, attention that scales."""
    from vllm_ascend.ops.gdn import AscendGatedDeltaNetAttention
    from vllm_ascend.patch.worker.patch_qwen3_5 import AscendQwen3_5DecoderLayer, AscendQwen3NextAttention

    linear = linear or Linear()

    def pair(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat([x, x, x], dim=-1), None

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    if kind == "full_attention":

        class Attention(nn.Module):
            forward = AscendQwen3NextAttention.forward

        attention = Attention()
        attention.config = SimpleNamespace(model_type="qwen3_next")
        attention.attn_output_gate = False
        attention.q_size = attention.kv_size = WIDTH
        attention.num_heads = attention.num_kv_heads = 8
        attention.head_dim = WIDTH // 8
        attention.qkv_proj, attention.q_norm, attention.k_norm = pair, same, same
        attention.rotary_emb = lambda positions, q, k: (q, k)
        attention.attn = lambda q, k, v: q * 2
        attention.o_proj = linear
    else:

        class Attention(nn.Module):
            forward = AscendGatedDeltaNetAttention.forward

        attention = Attention()
        attention.tp_size, attention.num_v_heads, attention.head_v_dim = 2, 32, 128
        attention.in_proj_qkv, attention.in_proj_ba = pair, pair
        attention.in_proj_z = lambda x: (x, None)
        attention._split_ba_for_tp = lambda ba: ba.chunk(2, dim=-1)
        attention.norm = lambda core, z: core + z
        attention.prefix = "gdn"
        attention.out_proj = linear

    class Layer(nn.Module):
        forward = AscendQwen3_5DecoderLayer.forward

    layer = Layer()
    layer.layer_type, layer.layer_idx, layer.layer_scale = kind, 1, False
    setattr(layer, "self_attn" if kind == "full_attention" else "linear_attn", attention)
    layer.input_layernorm, layer.post_attention_layernorm = gemma_norm(), gemma_norm()
    layer.mlp = lambda x: x * 3
    return layer


def mark(layer: nn.Module, name: str) -> None:
    """Link a layer, whatever its facts are."""
    with (
        patch.object(fused_ar_norm, "ENABLED", True),
        patch.object(fused_ar_norm, "facts_of", lambda *_: GOOD),
    ):
        fused_ar_norm.link(layer, SimpleNamespace(), name)


def gdn_core(qkv: Any, b: Any, a: Any, out: torch.Tensor, prefix: str, flag: bool) -> None:
    """In place of the device's core: something of every input."""
    out.copy_((qkv[:, :WIDTH] * 2).reshape(out.shape))


@contextmanager
def device() -> Iterator[None]:
    """What the forwards need of a device."""
    from vllm_ascend.ops import gdn
    from vllm_ascend.patch.worker import patch_qwen3_5

    with (
        patch.object(torch.ops.vllm, "qwen_gdn_attention_core", gdn_core, create=True),
        patch.object(gdn, "maybe_save_kv_layer_to_connector", lambda *_: None),
        patch.object(patch_qwen3_5, "_EXTRA_CTX", SimpleNamespace(flash_comm_v1_enabled=False)),
    ):
        yield


@pytest.fixture
def fakes() -> Iterator[None]:
    with device():
        yield


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The fused operator, recording its calls; what it returns is recognisable."""
    calls: list[tuple[Any, ...]] = []

    def fused(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(arguments)
        return torch.full_like(arguments[2], 5), torch.full_like(arguments[2], 7)

    monkeypatch.setattr(torch.ops._C_ascend, fused_ar_norm.OPERATOR, fused, raising=False)
    monkeypatch.setattr(fused_ar_norm, "group_name", lambda rank: f"tp of rank {rank}")
    return calls


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(torch.bfloat16)
    return hidden, torch.randn(rows, WIDTH, generator=generator).to(torch.bfloat16)


KINDS = ("full_attention", "linear_attention")


@pytest.mark.usefixtures("fakes")
class TestLayer:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rows", [MAX_ROWS + 1, 64])
    def test_more_rows_are_upstreams_bit_for_bit(
        self, enable: Callable[..., None], operator: list[Any], kind: str, rows: int
    ) -> None:
        layer = decoder_layer(kind)
        plain = layer(*inputs(rows))
        mark(layer, "layer")
        enable(fused_ar_norm)
        fallen_back = layer(*inputs(rows))
        assert all(torch.equal(one, other) for one, other in zip(plain, fallen_back, strict=True))
        assert operator == []
        assert fused_ar_norm.projection(layer).calls == 2

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rows", [1, 5, MAX_ROWS])
    def test_few_rows_are_the_operators(
        self, enable: Callable[..., None], operator: list[Any], kind: str, rows: int
    ) -> None:
        """It gets the projection's input, not its output, and its results go on; upstream's modules idle."""
        layer = decoder_layer(kind)
        linear = fused_ar_norm.projection(layer)
        seen: list[torch.Tensor] = []
        hook = linear.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].clone()))
        layer(*inputs(rows))
        hook.remove()
        mark(layer, "layer")
        enable(fused_ar_norm)
        output, residual = layer(*inputs(rows))
        assert torch.equal(output, torch.full_like(output, 15)) and torch.equal(residual, output - 8)
        ((x, weight, added, gamma, *rest),) = operator
        assert torch.equal(x, seen[0]) and x.is_contiguous()
        assert weight is linear.weight
        hidden, before = inputs(rows)
        assert torch.equal(added, layer.input_layernorm(hidden, before)[1])
        assert torch.equal(gamma, 1.0 + layer.post_attention_layernorm.weight)
        assert rest == ["tp of rank 1", 2, 1, 1e-6, True, False]
        assert linear.calls == 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_switched_off_or_not_linked_it_is_upstreams(
        self, enable: Callable[..., None], operator: list[Any], kind: str
    ) -> None:
        layer, never = decoder_layer(kind), decoder_layer(kind)
        never.load_state_dict(layer.state_dict())
        mark(layer, "layer")
        off = layer(*inputs(8))
        enable(fused_ar_norm)
        unlinked = never(*inputs(8))
        assert all(torch.equal(one, other) for one, other in zip(off, unlinked, strict=True))
        assert operator == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_exchanged_projection_runs(
        self, enable: Callable[..., None], operator: list[Any], kind: str
    ) -> None:
        """Layer and attention look at the same module, so neither projects twice nor not at all."""
        layer, other = decoder_layer(kind), Linear()
        expected = decoder_layer(kind, other)
        expected.load_state_dict({**layer.state_dict(), **expected.state_dict()}, strict=False)
        expected.input_layernorm, expected.post_attention_layernorm = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        mark(layer, "layer")
        holder = layer.self_attn if kind == "full_attention" else layer.linear_attn
        setattr(holder, "o_proj" if kind == "full_attention" else "out_proj", other)
        enable(fused_ar_norm)
        pairs = zip(layer(*inputs(8)), expected(*inputs(8)), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
        assert operator == []

    def test_a_trace_serves_any_number_of_rows(
        self, enable: Callable[..., None], operator: list[Any]
    ) -> None:
        """The number of rows is tested when the operator runs, not when the layer is traced."""
        layer = decoder_layer("full_attention")
        linear = fused_ar_norm.projection(layer)
        mark(layer, "layer")
        enable(fused_ar_norm)
        graphs: list[Any] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        def after_attention(hidden: torch.Tensor, residual: torch.Tensor) -> Any:
            hidden, _ = fused_ar_norm.project(linear, hidden)
            return fused_ar_norm.norm(layer, hidden, residual)

        torch._dynamo.reset()
        traced = torch.compile(after_attention, fullgraph=True, dynamic=True, backend=backend)
        for rows, fused in ((64, 0), (8, 1), (41, 1), (40, 2)):
            output, _ = traced(*inputs(rows))
            assert output.shape == (rows, WIDTH) and len(operator) == fused
        assert len(graphs) == 1
        assert sum("strata_fused_ar_norm" in str(node.target) for node in graphs[0].graph.nodes) == 1

    def test_the_fake_has_the_shapes(self, operator: list[Any]) -> None:
        x, residual = (
            torch.empty(3, 64, device="meta"),
            torch.empty(3, 128, dtype=torch.bfloat16, device="meta"),
        )
        for tensor in fused_ar_norm.run_fake(x, residual, "layer"):
            assert (tensor.shape, tensor.dtype) == (residual.shape, residual.dtype)
            assert tensor is not residual


class TestLink:
    @pytest.fixture
    def warnings_of(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        seen: list[str] = []
        monkeypatch.setattr(fused_ar_norm, "_log", lambda: SimpleNamespace(warning_once=seen.append))
        return seen

    def test_without_the_operator_it_is_idle_and_says_so(
        self, enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch, warnings_of: list[str]
    ) -> None:
        """As in every image that there is today."""
        layer = decoder_layer("full_attention")
        idle = dataclasses.replace(GOOD, schema=fused_ar_norm.operator_schema())
        monkeypatch.setattr(fused_ar_norm, "facts_of", lambda *_: idle)
        enable(fused_ar_norm)
        fused_ar_norm.link(layer, SimpleNamespace(), "layer")
        assert not hasattr(layer.self_attn.o_proj, fused_ar_norm._MARK)
        (warning,) = warnings_of
        assert fused_ar_norm.OPERATOR in warning

    def test_switched_off_it_does_not_look(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused_ar_norm, "facts_of", lambda *_: pytest.fail("looked at the layer"))
        fused_ar_norm.link(decoder_layer("full_attention"), SimpleNamespace(), "layer")

    def test_two_layers_of_one_name_stay_apart(self, operator: list[Any]) -> None:
        """A model and its drafter may both have a layer of that name."""
        first, second = decoder_layer("full_attention"), decoder_layer("full_attention")
        mark(first, "layers.0")
        mark(second, "layers.0")
        for layer in (first, second):
            name = getattr(layer.self_attn.o_proj, fused_ar_norm._MARK)
            fused_ar_norm.run(*inputs(4), name)
            assert operator[-1][1] is layer.self_attn.o_proj.weight

    @pytest.mark.parametrize("kind", KINDS)
    def test_vllms_layer_is_linked_when_it_is_built(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        """At the end of the real constructor, with its own name."""
        from vllm.model_executor.models import qwen3_5

        parts = ("QwenGatedDeltaNetAttention", "Qwen3NextAttention", "Qwen3NextMLP", "Qwen3_5RMSNorm")
        for part in parts:
            monkeypatch.setattr(qwen3_5, part, lambda *_, **__: nn.Identity())
        linked: list[Any] = []

        def link(layer: Any, config: Any, prefix: str) -> None:
            assert layer.layer_scale is True and layer.attn_layer_scale.numel() == 8
            linked.append((layer, config, prefix))

        monkeypatch.setattr(fused_ar_norm, "link", link)
        text = SimpleNamespace(
            model_type="qwen3_5_text",
            hidden_size=8,
            intermediate_size=8,
            hidden_act="silu",
            rms_norm_eps=1e-6,
            layer_scale=True,
        )
        config = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=text), cache_config=None, quant_config=None
        )
        layer = qwen3_5.Qwen3_5DecoderLayer(config, kind, prefix="model.layers.3")
        assert linked == [(layer, config, "model.layers.3")]


def on_two_ranks(rank: int, kind: str, rows: int) -> tuple[Any, ...]:
    """In each process: (facts, plain results, results of the linked layer), with the real projection."""
    from unittest.mock import MagicMock

    import vllm_ascend.ascend_config
    import vllm_ascend.ops.linear as linears
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.manual_seed(7 + rank)
    config = VllmConfig()
    with set_current_vllm_config(config):
        linear = linears.AscendRowParallelLinear(
            2 * WIDTH,
            WIDTH,
            bias=False,
            params_dtype=torch.bfloat16,
            prefix="model.layers.1.self_attn.o_proj",
        )
    linear.weight.data.normal_(std=1 / 64)
    gemm = MagicMock(side_effect=lambda x, weight, bias: nn.functional.linear(x, weight, bias))
    torch.manual_seed(3)
    layer = decoder_layer(kind, linear)
    fused_ar_norm.ENABLED = False
    with device(), patch.object(torch.ops.vllm, "unquantized_gemm", gemm, create=True):
        facts = fused_ar_norm.facts_of(layer, config)
        plain = layer(*inputs(rows))
        mark(layer, "layer")
        fused_ar_norm.ENABLED = True
        try:
            linked = layer(*inputs(rows))
        finally:
            fused_ar_norm.ENABLED = False
    assert vllm_ascend.ascend_config._ASCEND_CONFIG is not None
    return dataclasses.asdict(facts) | {"dtype": str(facts.dtype)}, plain, linked


@pytest.mark.parametrize("kind", KINDS)
def test_on_two_ranks_the_fallback_is_upstreams_bit_for_bit(kind: str) -> None:
    """And the facts of a real projection there are those that the guard wants, the operator apart."""
    results = tp2.run(on_two_ranks, kind, 48)
    for facts, plain, linked in results:
        assert all(torch.equal(one, other) for one, other in zip(plain, linked, strict=True))
        wanted = dataclasses.asdict(GOOD) | {"dtype": "torch.bfloat16", "schema": None}
        assert facts == wanted
    (_, first, _), (_, second, _) = results
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
