"""weight-prefetch-stream, attention-weight-prefetch, shared-expert-weight-prefetch: values untouched, streams
forked and joined in pairs, operators that survive dead-code elimination, layers linked by index.

The real AscendQwen3_5DecoderLayer.forward, Qwen3_5Model and Qwen3_5MultiTokenPredictor classes, and the MoE
layer of moe_layer.py, on the device of moe_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import moe_device
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layer import EXPERTS, HIDDEN, Case, cases, environment
from torch._dynamo.backends.common import aot_autograd
from vllm.forward_context import override_forward_context
from vllm.model_executor.models.qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5Model
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MultiTokenPredictor
from vllm.model_executor.models.utils import PPMissingLayer
from vllm_ascend import utils
from vllm_ascend.ops import register_custom_ops  # noqa: F401  (upstream's own prefetch operators)
from vllm_ascend.strata import attention_weight_prefetch as attention
from vllm_ascend.strata import shared_expert_overlap, skip_dispatch_combine_events
from vllm_ascend.strata import shared_expert_weight_prefetch as shared
from vllm_ascend.strata import weight_prefetch_stream as stream

CPU = torch.library.Library("vllm", "IMPL")
CPU.impl("strata_prefetch_attention", attention._prefetch, "CPU")
CPU.impl("strata_join_prefetch", attention._join, "CPU")
CPU.impl("prefetch_postprocess", lambda stop_flag: None, "CPU")

FORK, JOIN = torch.ops.vllm.strata_prefetch_attention, torch.ops.vllm.strata_join_prefetch
SIZE = 8


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[moe_device.Device]:
    """The device, with fresh streams and nothing open; afterwards nothing may be left open."""
    device = moe_device.Device()
    device.install(monkeypatch)
    monkeypatch.setattr(utils, "_PREFETCH_STREAM", None)
    monkeypatch.setattr(stream, "_open", False)
    device.trace.op("start")  # the default stream is number 0
    yield device
    assert not stream._open


@pytest.fixture
def context() -> Iterator[None]:
    with override_forward_context(SimpleNamespace(flash_comm_v1_enabled=False, additional_kwargs={})):
        yield


class TestStream:
    def test_order(self, device: moe_device.Device) -> None:
        weights = [torch.zeros(4, 4), torch.zeros(2)]
        assert stream.fork(torch.zeros(3, 1), weights) == 64 + 8
        device.trace.op("other")
        stream.join()
        kinds = [(e.kind, e.stream, e.what) for e in device.trace.entries]
        assert kinds == [
            ("op", 0, "start"),
            ("record", 0, 0),
            ("wait", 1, 0),
            ("op", 1, "prefetch 64"),
            ("op", 1, "prefetch 8"),
            ("op", 0, "other"),
            ("record", 1, 1),
            ("wait", 0, 1),
        ]
        assert [id(w) for w in device.prefetched] == [id(w) for w in weights]

    @settings(max_examples=60)
    @given(st.lists(st.sampled_from(["fork", "join", "empty fork"]), max_size=12))
    def test_a_join_waits_exactly_for_something_forked(self, steps: list[str]) -> None:
        """Waiting for a stream that was not forked is an error during a capture."""
        with pytest.MonkeyPatch.context() as patch:
            device = moe_device.Device()
            device.install(patch)
            patch.setattr(utils, "_PREFETCH_STREAM", None)
            patch.setattr(stream, "_open", False)
            device.trace.op("start")
            forked = False
            for step in steps:
                before = len(device.trace.entries)
                if step == "join":
                    stream.join()
                    assert (len(device.trace.entries) > before) is forked
                    forked = False
                else:
                    stream.fork(torch.zeros(1), [] if step == "empty fork" else [torch.zeros(1)])
                    forked = forked or step == "fork"
                    assert (len(device.trace.entries) > before) is (step == "fork")
            assert stream._open is forked

    @settings(max_examples=60)
    @given(st.lists(st.integers(0, 100), max_size=6), st.integers(0, 300))
    def test_budget(self, sizes: list[int], budget: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            device = moe_device.Device()
            device.install(patch)
            patch.setattr(stream, "_open", False)
            weights = [torch.zeros(size, dtype=torch.int8) for size in sizes]
            issued = stream.fork(torch.zeros(1), weights, budget)
            asked = [int(str(e.what).split()[1]) for e in device.trace.of("op")]
            assert issued == sum(asked) == min(sum(sizes), budget)
            assert [s for s in sizes if s][: len(asked)][:-1] == asked[:-1]

    def test_too_many_tokens(self, device: moe_device.Device) -> None:
        assert stream.fork(torch.zeros(stream.MAX_TOKENS + 1, 1), [torch.zeros(1)]) == 0
        stream.join()
        assert len(device.trace.entries) == 1
        assert stream.fork(torch.zeros(stream.MAX_TOKENS, 1), [torch.zeros(1)]) == 4
        stream.join()

    def test_offloaded_weights_are_passed_over(self, device: moe_device.Device) -> None:
        here, there = torch.zeros(1), torch.zeros(1, device="meta")
        assert stream.fork(torch.zeros(1), [there, here]) == 4
        stream.join()
        assert stream.fork(torch.zeros(1), [there]) == 0

    def test_weights_are_read_at_each_use(self) -> None:
        layer = torch.nn.Linear(2, 2)
        (first,) = stream.weights_of([layer, None, torch.nn.Identity(), SimpleNamespace(weight=None)])
        assert first is layer.weight
        layer.weight = torch.nn.Parameter(torch.zeros(2, 2))
        assert stream.weights_of([layer]) == [layer.weight]


class Attention(torch.nn.Module):
    """Writes a projection of its input into ``output``; notes itself in the trace."""

    def __init__(self, names: Iterable[str], trace: moe_device.Trace | None) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(SIZE, SIZE, bias=False))
        self.names, self.trace = tuple(names), trace

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor, positions: Any = None) -> None:
        if self.trace is not None:
            self.trace.op("attention")
        output.copy_(getattr(self, self.names[0])(hidden_states))


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return x * 0.5 if residual is None else ((x + residual) * 0.5, x + residual)


class Mlp(torch.nn.Module):
    def __init__(self, trace: moe_device.Trace | None) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trace is not None:
            self.trace.op("mlp")
        return torch.tanh(x)


def decoder_layer(index: int, full: bool, trace: moe_device.Trace | None = None) -> Any:
    """A Qwen3_5DecoderLayer whose parts are small."""
    layer = Qwen3_5DecoderLayer.__new__(Qwen3_5DecoderLayer)
    torch.nn.Module.__init__(layer)
    layer.layer_idx, layer.layer_scale = index, False
    layer.layer_type = "full_attention" if full else "linear_attention"
    if full:
        layer.self_attn = Attention(("qkv_proj", "o_proj"), trace)
    else:
        layer.linear_attn = Attention(("in_proj_qkvz", "in_proj_ba", "out_proj"), trace)
    layer.input_layernorm, layer.post_attention_layernorm, layer.mlp = Norm(), Norm(), Mlp(trace)
    return layer


def module_of(cls: type, **children: Any) -> Any:
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    for name, child in children.items():
        setattr(module, name, child)
    return module


def decoder(kinds: list[bool], first: int = 0, missing: int = 0, trace: Any = None) -> Any:
    """A Qwen3_5Model with layers from index ``first`` on, as a pipeline stage has it; ``missing`` more follow
    elsewhere.
    """
    here = [decoder_layer(first + n, full, trace) for n, full in enumerate(kinds)]
    absent = [PPMissingLayer() for _ in range(first)], [PPMissingLayer() for _ in range(missing)]
    return module_of(Qwen3_5Model, layers=torch.nn.ModuleList([*absent[0], *here, *absent[1]]))


def predictor(number: int) -> Any:
    layers = torch.nn.ModuleList(decoder_layer(n, True) for n in range(number))
    return module_of(Qwen3_5MultiTokenPredictor, layers=layers)


def real_layers(model: Any) -> list[Any]:
    return [layer for layer in model.layers if isinstance(layer, Qwen3_5DecoderLayer)]


def run(layers: list[Any], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden, residual = x, None
    for layer in layers:
        hidden, residual = layer(hidden_states=hidden, residual=residual, positions=None)
    return hidden, residual


def linked(layer: Any) -> tuple[Any, bool]:
    return getattr(layer, "strata_next_attention", None), getattr(layer, "strata_joins_prefetch", False)


class TestLinking:
    @settings(max_examples=60)
    @given(
        st.lists(st.booleans(), min_size=1, max_size=6),
        st.integers(0, 3),
        st.integers(0, 2),
        st.integers(0, 2),
        st.booleans(),
    )
    def test_by_index(self, kinds: list[bool], first: int, missing: int, mtp: int, mtp_before: bool) -> None:
        """Each layer to the next of this stage; neither the last one nor MTP layers, wherever they stand."""
        target, drafter = decoder(kinds, first, missing), predictor(mtp)
        parts = {"mtp": drafter, "model": target} if mtp_before else {"model": target, "mtp": drafter}
        root = torch.nn.ModuleDict({"language_model": torch.nn.ModuleDict(parts)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "ENABLED", True)
            patch.setattr(attention, "_projections", {})
            attention.link(root)
            names = dict(root.named_modules())
            layers = real_layers(target)
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                name, joins = linked(layer)
                assert joins is (layer is not layers[0])
                assert (name is None) is (following is None)
                if following is not None:
                    assert names[name] is following
                    assert following.layer_idx == layer.layer_idx + 1
                    mixer = (
                        following.self_attn
                        if following.layer_type == "full_attention"
                        else following.linear_attn
                    )
                    assert list(attention._projections[name]) == list(mixer.children())
            assert all(linked(layer) == (None, False) for layer in drafter.layers)

    def test_two_layers_of_one_index(self, enable: Callable[..., None]) -> None:
        enable(attention)
        model = decoder([True, False])
        model.layers[1].layer_idx = 0
        with pytest.raises(attention.LinkError, match=r"layers\.0 and layers\.1 both have layer index 0"):
            attention.link(model)

    def test_a_gap_is_no_link(self, enable: Callable[..., None]) -> None:
        enable(attention)
        model = decoder([True, True])
        model.layers[1].layer_idx = 5
        attention.link(model)
        assert [linked(layer) for layer in model.layers] == [(None, False)] * 2

    def test_another_model(self, enable: Callable[..., None]) -> None:
        enable(attention)
        attention.link(
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([decoder_layer(0, True)]))
        )
        assert attention._projections == {}

    def test_switch_off(self) -> None:
        model = decoder([True, False])
        attention.link(model)
        assert [linked(layer) for layer in model.layers] == [(None, False)] * 2

    def test_loading_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The real NPUWorker.load_model, for the model without its graph wrapper."""
        import vllm_ascend.worker.worker as worker_module
        from vllm_ascend.worker.worker import NPUWorker

        order: list[Any] = []
        runner = SimpleNamespace(
            load_model=lambda: order.append("load"), get_model=lambda: order.append("get") or "the model"
        )
        config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=False), weight_transfer_config=None
        )
        monkeypatch.setattr(worker_module, "set_current_vllm_config", lambda _: torch.no_grad())
        monkeypatch.setattr(attention, "link", order.append)
        NPUWorker.load_model(SimpleNamespace(vllm_config=config, model_runner=runner))
        assert order[0] == "load"
        assert order[-2:] == ["get", "the model"]


@pytest.mark.usefixtures("context")
class TestDecoder:
    @settings(max_examples=30)
    @given(st.lists(st.booleans(), min_size=1, max_size=5), st.integers(1, 3))
    def test_order_and_values(self, kinds: list[bool], tokens: int) -> None:
        with (
            pytest.MonkeyPatch.context() as patch,
            override_forward_context(SimpleNamespace(flash_comm_v1_enabled=False, additional_kwargs={})),
        ):
            device = moe_device.Device()
            device.install(patch)
            patch.setattr(utils, "_PREFETCH_STREAM", None)
            patch.setattr(stream, "_open", False)
            model = decoder(kinds, trace=device.trace)
            x = torch.randn(tokens, SIZE)
            upstream = run(list(model.layers), x)
            plain = list(device.trace.entries)
            assert {e.what for e in plain} <= {"attention", "mlp"}
            device.trace.entries.clear()
            patch.setattr(attention, "ENABLED", True)
            patch.setattr(attention, "_projections", {})
            attention.link(model)
            patched = run(list(model.layers), x)
            assert all(torch.equal(a, b) for a, b in zip(upstream, patched, strict=True))
            assert not stream._open
            expected: list[str] = []
            size = SIZE * SIZE * 4
            for number, _ in enumerate(kinds):
                expected += ["attention"]
                if number + 1 < len(kinds):
                    prefetches = 2 if kinds[number + 1] else 3
                    expected += ["record 0", "wait 1", *[f"1 prefetch {size}"] * prefetches]
                expected += ["mlp"]
                if number + 1 < len(kinds):
                    expected += ["record 1", "wait 0"]
            seen = [
                f"{e.kind} {e.stream}"
                if e.kind != "op"
                else f"{e.stream} {e.what}"
                if e.stream
                else str(e.what)
                for e in device.trace.entries
            ]
            assert seen == expected
            weights = [w for layer in model.layers[1:] for w in layer.parameters()]
            assert [id(w) for w in device.prefetched] == [id(w) for w in weights]

    def test_a_drafter_prefetches_nothing(
        self, device: moe_device.Device, enable: Callable[..., None]
    ) -> None:
        enable(attention)
        drafter = predictor(2)
        attention.link(torch.nn.ModuleDict({"model": decoder([True]), "mtp": drafter}))
        run(list(drafter.layers), torch.randn(2, SIZE))
        assert device.prefetched == []

    def test_a_long_prompt_forks_and_joins_nothing(
        self, device: moe_device.Device, enable: Callable[..., None]
    ) -> None:
        enable(attention)
        model = decoder([True, False, True])
        attention.link(model)
        run(list(model.layers), torch.randn(stream.MAX_TOKENS + 1, SIZE))
        assert len(device.trace.entries) == 1


def compiled_operators(function: Callable[..., Any], *inputs: Any) -> list[str]:
    """The prefetch operators, ours and upstream's, in the graph that AOTAutograd hands to a backend, after
    dead-code elimination there as well.
    """
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*inputs)
    (graph,) = graphs
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if "prefetch" in name]


@pytest.mark.usefixtures("context")
class TestDeadCode:
    def test_the_operators_survive(self, device: moe_device.Device, enable: Callable[..., None]) -> None:
        enable(attention)
        model = decoder([False, False, True])
        attention.link(model)
        x = torch.randn(2, SIZE)
        names = compiled_operators(lambda x: run(list(model.layers), x), x)
        assert names == ["vllm.strata_prefetch_attention.default", "vllm.strata_join_prefetch.default"] * 2
        assert len(device.prefetched) == 3 + 2

    def test_without_the_mark_they_are_gone(
        self, device: moe_device.Device, enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What happens to an operator without result and effect: the published form, and upstream's own."""
        enable(attention)
        effectful = torch.fx.node._side_effectful_functions
        unmarked = effectful - {FORK, FORK.default, JOIN, JOIN.default}
        assert len(unmarked) == len(effectful) - 4
        monkeypatch.setattr(torch.fx.node, "_side_effectful_functions", unmarked)
        model = decoder([False, True])
        attention.link(model)
        x = torch.randn(2, SIZE)
        assert compiled_operators(lambda x: run(list(model.layers), x), x) == []

        def upstream(x: torch.Tensor) -> torch.Tensor:
            torch.ops.vllm.prefetch_postprocess(x)
            return x + 1

        assert compiled_operators(upstream, x) == []

    def test_switch_off_leaves_the_graph_alone(self) -> None:
        model = decoder([False, True])
        assert compiled_operators(lambda x: run(list(model.layers), x), torch.randn(2, SIZE)) == []


layers = st.builds(lambda case, capturing: replace(case, capturing=capturing), cases, st.booleans())


def moe_step(
    case: Case, on: Iterable[ModuleType], already_open: bool = False
) -> tuple[Any, moe_device.Device]:
    """One call of the layer's forward; ``already_open``: with a prefetch forked before it."""
    with environment(case, on) as (layer, _, device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_SHARED_EXPERTS_CALCULATION_STREAM", None)
        patch.setattr(utils, "_PREFETCH_STREAM", None)
        patch.setattr(stream, "_open", False)
        device.trace.op("start")
        hidden = torch.randn(case.tokens, HIDDEN).to(torch.bfloat16)
        logits = torch.randn(case.tokens, EXPERTS)
        if already_open:
            stream.fork(hidden, [torch.zeros(1)])
        result = layer.shared_forward_impl(hidden, logits)
        assert stream._open is (already_open and (shared not in on or not case.shared))
        return result if isinstance(result, tuple) else (result,), device


class TestSharedExperts:
    @settings(max_examples=80)
    @given(layers, st.booleans())
    def test_values_and_order(self, case: Case, others: bool) -> None:
        """Alone and together with the other patches of the layer."""
        rest = [shared_expert_overlap, skip_dispatch_combine_events] if others else []
        upstream, before = moe_step(case, rest)
        patched, after = moe_step(case, [shared, *rest])
        assert all(torch.equal(a, b) for a, b in zip(upstream, patched, strict=True))
        plain = [e.what for e in before.trace.of("op")]
        kept = [e.what for e in after.trace.of("op") if not str(e.what).startswith("prefetch")]
        assert kept == plain
        if not case.shared:
            assert after.trace.entries == before.trace.entries
            return
        entries = after.trace.entries
        prefetches = [n for n, e in enumerate(entries) if str(e.what).startswith("prefetch")]
        (side,) = {entries[n].stream for n in prefetches}
        assert side != 0
        assert prefetches == [3, 4]  # behind start, record and wait: before anything of the layer
        assert [e.stream for e in entries if e.stream == side] == [side] * 4
        assert entries[-2].kind == "record" and entries[-2].stream == side
        assert entries[-1].kind == "wait" and entries[-1].stream == 0
        assert entries[-1].what == entries[-2].what

    def test_what_is_prefetched(self) -> None:
        _, device = moe_step(Case(), [shared])
        gate_up, down = device.prefetched
        assert gate_up.shape[0] == 2 * down.shape[1]

    def test_an_open_prefetch_is_joined(self) -> None:
        """That of the attention weights, forked before the MLP; the next layer then waits for nothing."""
        _, device = moe_step(Case(), [shared], already_open=True)
        assert len(device.prefetched) == 3
        moe_step(Case(shared=False), [shared], already_open=True)
        moe_step(Case(), [], already_open=True)

    def test_a_long_prompt(self) -> None:
        _, before = moe_step(Case(tokens=stream.MAX_TOKENS + 1), [])
        _, after = moe_step(Case(tokens=stream.MAX_TOKENS + 1), [shared])
        assert after.trace.entries == before.trace.entries
