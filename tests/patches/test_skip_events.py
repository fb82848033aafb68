"""skip-dispatch-combine-events: no event where nobody waits, the same events where somebody does, the same
numbers always.

The real forward_impl, shared_forward_impl, _forward_shared_experts, fused_experts, dispatcher and MLPs of
vllm-ascend run on the device of moe_device.py. "Upstream" is the same code with the switch off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import moe_device
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from moe_layer import EXPERTS, HIDDEN, INTERMEDIATE, Case, cases, environment
from vllm.forward_context import override_forward_context
from vllm_ascend import ascend_forward_context
from vllm_ascend.ascend_forward_context import _EXTRA_CTX, MoECommType
from vllm_ascend.flash_common3_context import get_flash_common3_context
from vllm_ascend.ops.fused_moe import fused_moe, moe_mlp
from vllm_ascend.ops.fused_moe.fused_moe import AscendFusedMoE, FusedMoEResult
from vllm_ascend.ops.fused_moe.moe_comm_method import AllGatherCommImpl, FusedMC2CommImpl
from vllm_ascend.strata import skip_dispatch_combine_events as events

FLAG = "skip_dispatch_combine_events"


def flag_of(context: Any) -> Any:
    """What the forward context says, whichever runner filled it."""
    return context.additional_kwargs.get(FLAG, getattr(context, FLAG, None))


@dataclass
class Outcome:
    """What one call gave: tensors, the load counter, the trace, and the flag afterwards."""

    tensors: list[torch.Tensor]
    load: torch.Tensor
    trace: moe_device.Trace
    flag: Any


def step(case: Case, on: bool, entry: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Outcome:
    """One call of ``entry(layer, hidden_states, router_logits)``."""
    with environment(case, [events] if on else []) as (layer, context, device):
        hidden = torch.randn(case.tokens, HIDDEN).to(torch.bfloat16)
        logits = torch.randn(case.tokens, EXPERTS)
        result = entry(layer, hidden, logits)
        values = result if isinstance(result, tuple) else (result,)
        tensors = [v.routed_out if isinstance(v, FusedMoEResult) else v for v in values]
        return Outcome(tensors, layer.moe_load, device.trace, flag_of(context))


def shared_forward(layer: Any, hidden: torch.Tensor, logits: torch.Tensor) -> Any:
    return layer.shared_forward_impl(hidden, logits)


def routed_forward(layer: Any, hidden: torch.Tensor, logits: torch.Tensor) -> Any:
    return layer.forward_impl(hidden, logits)


def same_results(one: Outcome, other: Outcome) -> bool:
    return (
        len(one.tensors) == len(other.tensors)
        and all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
        and torch.equal(one.load, other.load)
    )


def operators(outcome: Outcome) -> list[moe_device.Entry]:
    return outcome.trace.of("op")


class TestLayer:
    @settings(max_examples=150)
    @given(cases)
    def test_shared_forward(self, case: Case) -> None:
        """Overlap on: nothing changes. Overlap off: the experts' events go, and nothing else."""
        upstream = step(case, False, shared_forward)
        patched = step(case, True, shared_forward)
        assert same_results(upstream, patched)
        assert operators(upstream) == operators(patched)
        assert not patched.flag
        own_events = 2 if case.internal_router else 1  # around the router: before_routed_experts and its like
        if case.overlap and case.shared:
            assert patched.trace.entries == upstream.trace.entries
            assert len(patched.trace.of("record")) >= own_events + case.events_of_experts
        else:
            gate_events = len(upstream.trace.of("record")) - own_events - case.events_of_experts
            assert len(patched.trace.of("record")) == own_events + gate_events

    @settings(max_examples=80)
    @given(cases)
    def test_what_is_skipped_was_no_wait(self, case: Case) -> None:
        """The ground for skipping: with the overlap off each stream waits only for an event of its own,
        already recorded."""
        case = replace(case, overlap=False, gate=False)
        entries = step(case, False, shared_forward).trace.entries
        trace = moe_device.Trace(entries)
        for number, entry in enumerate(entries):
            if entry.kind == "wait":
                assert trace.recorded_on(entry.what) == entry.stream
                assert any(e.kind == "record" and e.what == entry.what for e in entries[:number])

    @settings(max_examples=60)
    @given(cases)
    def test_before_routed_experts_is_still_waited_for(self, case: Case) -> None:
        """The first event of the layer is the one that its correctness needs."""
        case = replace(case, shared=True, gate=False)
        patched = step(case, True, shared_forward).trace
        first = patched.of("record")[0]
        assert any(wait.what == first.what for wait in patched.of("wait"))

    @settings(max_examples=60)
    @given(cases)
    def test_a_layer_that_hands_out_no_events_records_none(self, case: Case) -> None:
        """forward_impl for its tensor alone, as the runner calls it where there are no shared experts."""
        case = replace(case, shared=False)
        upstream = step(case, False, routed_forward)
        patched = step(case, True, routed_forward)
        assert same_results(upstream, patched)
        assert len(upstream.trace.of("record")) == case.events_of_experts
        assert patched.trace.of("record") == []
        assert operators(upstream) == operators(patched)

    @pytest.mark.parametrize("quantised", [False, True])
    def test_the_overlap_really_uses_two_streams(self, quantised: bool) -> None:
        """Else "the same events" would prove little."""
        case = Case(overlap=True, quantised=quantised, quantised_shared=quantised)
        trace = step(case, True, shared_forward).trace
        crossing = [wait for wait in trace.of("wait") if trace.recorded_on(wait.what) != wait.stream]
        assert len(crossing) >= 3

    def test_the_harness_computes_a_mixture_of_experts(self) -> None:
        """Against a dense computation, so that equal results mean something."""
        case = Case(tokens=7, shared=False)
        with environment(case, [events]) as (layer, _, _):
            hidden = torch.randn(7, HIDDEN).to(torch.bfloat16)
            logits = torch.randn(7, EXPERTS)
            routed = layer.forward_impl(hidden, logits)
            weights, ids = torch.softmax(logits, -1).topk(2)
            expected = torch.zeros(7, HIDDEN)
            for token in range(7):
                for weight, expert in zip(weights[token], ids[token], strict=True):
                    gate, up = (
                        (hidden[token].float() @ layer.quant_method.w1[expert])
                        .to(torch.bfloat16)
                        .float()
                        .chunk(2)
                    )
                    expected[token] += weight * (
                        (F.silu(gate) * up).to(torch.bfloat16).float() @ layer.quant_method.w2[expert]
                    )
        torch.testing.assert_close(routed.float(), expected, atol=0.05, rtol=0.05)

    @pytest.mark.parametrize("before", [None, False, True])
    @pytest.mark.parametrize("v2_runner", [False, True])
    def test_a_failure_gives_the_flag_back(self, before: bool | None, v2_runner: bool) -> None:
        with environment(Case(shared=False, v2_runner=v2_runner), [events]) as (layer, context, _):
            _EXTRA_CTX.skip_dispatch_combine_events = before
            layer.quant_method.fail = True
            with pytest.raises(ArithmeticError):
                layer.forward_impl(torch.randn(2, HIDDEN), torch.randn(2, EXPERTS))
            assert flag_of(context) is before

    def test_a_layer_inside_another_ones_experts(self) -> None:
        """An overlapping layer keeps its events even where the surrounding one wants none."""
        with environment(Case(overlap=True), [events]) as (layer, context, device):
            with events.Needed(_EXTRA_CTX, needed=False):
                layer.shared_forward_impl(torch.randn(2, HIDDEN), torch.randn(2, EXPERTS))
                assert flag_of(context) is True
            assert flag_of(context) is None
            assert len(device.trace.of("record")) >= 3

    def test_flash_comm3_takes_no_events(self) -> None:
        """With the gate stream the shared experts run inside forward_impl; the events have no reader."""
        case = Case(gate=True)
        patched = step(case, True, shared_forward)
        assert same_results(step(case, False, shared_forward), patched)
        assert get_flash_common3_context() is not None
        own = 1 + 1 + 1  # before_routed_experts, and one for each of the two wait_stream calls
        assert len(patched.trace.of("record")) == own


def mlp_arguments(site: str) -> dict[str, Any]:
    """Arguments of quant_apply_mlp that reach each of its three recording sites."""
    torch.manual_seed(1)
    experts, rows = 2, torch.tensor([3, 4])
    x = torch.randn(7, HIDDEN).to(torch.bfloat16)
    int8 = {
        "w1": [torch.randint(-100, 100, (experts, HIDDEN, 2 * INTERMEDIATE), dtype=torch.int8)],
        "w2": [torch.randint(-100, 100, (experts, INTERMEDIATE, HIDDEN), dtype=torch.int8)],
        "w1_scale": [torch.rand(experts, 2 * INTERMEDIATE) / 100],
        "w2_scale": [torch.rand(experts, HIDDEN) / 100],
    }
    if site == "weight only":
        arguments = {name: value[0] for name, value in int8.items()}
        arguments["w1_scale"], arguments["w2_scale"] = (
            arguments[n][:, None, :].to(torch.bfloat16) for n in ("w1_scale", "w2_scale")
        )
        return {
            "hidden_states": x,
            **arguments,
            "w1_offset": torch.zeros(1),
            "w2_offset": torch.zeros(1),
            "group_list": rows,
        }
    values, scale = moe_device.quantise(x)
    return {
        "hidden_states": values,
        "dynamic_scale": scale,
        **int8,
        "group_list": rows,
        "fusion": site == "MC2, fused",
    }


class TestRecordingSites:
    @pytest.mark.parametrize("site", ["MC2", "MC2, fused", "weight only", "general", "general, fused"])
    @pytest.mark.parametrize("flag", [True, False, None, "a test double"])
    def test_quantised_mlp(self, monkeypatch: pytest.MonkeyPatch, site: str, flag: Any) -> None:
        """Only True skips; the numbers are the same either way."""
        device = moe_device.Device()
        device.install(monkeypatch)
        comm = MoECommType.MC2 if site.startswith("MC2") else MoECommType.ALLGATHER
        value = MagicMock() if flag == "a test double" else flag
        monkeypatch.setattr(moe_mlp, "_EXTRA_CTX", SimpleNamespace(moe_comm_type=comm, **{FLAG: value}))
        arguments = mlp_arguments(site)
        if site == "general, fused":
            arguments["fusion"] = True
        out, event = moe_mlp.quant_apply_mlp(**arguments)
        monkeypatch.setattr(moe_mlp, "_EXTRA_CTX", SimpleNamespace(moe_comm_type=comm))
        again, recorded = moe_mlp.quant_apply_mlp(
            **mlp_arguments(site) | {"fusion": arguments.get("fusion", False)}
        )
        assert torch.equal(out, again)
        assert recorded is not None
        assert (event is None) is (flag is True)
        assert len(device.trace.of("record")) == (1 if flag is True else 2)

    @pytest.mark.parametrize("flag", [True, False, None, "a test double"])
    def test_fused_experts(self, flag: Any) -> None:
        with environment(Case(), [events]) as (layer, context, device):
            setattr(context, FLAG, MagicMock() if flag == "a test double" else flag)
            arguments = {"expert_map": None, "log2phy": None}
            hidden, logits = torch.randn(3, HIDDEN).bfloat16(), torch.randn(3, EXPERTS)
            result = layer.quant_method.apply(layer, hidden, logits, 2, **arguments)
            skipped = flag is True
            assert (result.before_dispatch_evt is None) is skipped
            assert (result.before_combine_evt is None) is skipped
            assert result.before_gmm2_evt is None  # unquantised experts have no such event
            assert len(device.trace.of("record")) == (0 if skipped else 2)

    def test_a_context_that_is_a_test_double_records(self) -> None:
        with environment(Case(), [events]) as (_, _, device):
            assert events.record(MagicMock()) is not None
            assert events.record(SimpleNamespace()) is not None
            assert len(device.trace.of("record")) == 2

    def test_310p_experts_are_as_upstream(self) -> None:
        """Its layers never set the flag: their forward is another class's."""
        from vllm_ascend._310p.fused_moe.fused_moe import AscendFusedMoE310
        from vllm_ascend._310p.fused_moe.moe_comm_method import AllGatherCommImpl310

        assert AscendFusedMoE310.forward_impl is not AscendFusedMoE.forward_impl
        assert AllGatherCommImpl310.fused_experts is AllGatherCommImpl.fused_experts
        names = AscendFusedMoE310.forward_impl.__code__.co_names
        assert not {"strata_events", FLAG} & set(names)

    def test_fused_mc2_has_nothing_to_skip(self) -> None:
        assert "record_event" not in FusedMC2CommImpl.fused_experts.__code__.co_names

    def test_the_flag_is_a_known_extra_attribute(self) -> None:
        assert FLAG in ascend_forward_context._ExtraForwardContextProxy.extra_attrs
        with override_forward_context(SimpleNamespace(additional_kwargs={})):
            assert _EXTRA_CTX.skip_dispatch_combine_events is None


class TestSwitchOff:
    @settings(max_examples=40)
    @given(cases)
    def test_the_forward_context_is_not_touched(self, case: Case) -> None:
        with environment(case) as (layer, context, device):
            layer.forward_impl(
                torch.randn(2, HIDDEN).bfloat16(), torch.randn(2, EXPERTS), return_with_event=True
            )
            assert FLAG not in vars(context)
            assert FLAG not in context.additional_kwargs
            assert len(device.trace.of("record")) >= case.events_of_experts

    def test_awaited(self) -> None:
        """The condition itself: an unknown layer counts as one whose events are awaited."""
        on, off = (SimpleNamespace(multistream_overlap_shared_expert=value) for value in (True, False))
        assert [events.awaited(layer, True) for layer in (on, off, SimpleNamespace(), MagicMock())] == [
            True,
            False,
            True,
            True,
        ]
        assert not any(events.awaited(layer, False) for layer in (on, off, SimpleNamespace()))
        assert fused_moe.AscendFusedMoE is AscendFusedMoE
