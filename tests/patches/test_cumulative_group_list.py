"""cumulative-group-list: the routing operator's cumulative sums are the cumsum of its counts, the layer
computes the same bits from them, and only the path that gains asks for them.

The real fused_experts, dispatcher and unified_apply_mlp on the device of moe_device.py; "upstream" is the
same code with the switch off.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layer import EXPERTS, HIDDEN, Case, cases, environment
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.ops.fused_moe import moe_mlp
from vllm_ascend.ops.fused_moe.moe_runtime_args import build_fused_experts_input, build_token_dispatch_input
from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAllGather
from vllm_ascend.quantization.quant_type import QuantType
from vllm_ascend.strata import cumulative_group_list as cumulative
from vllm_ascend.strata import skip_dispatch_combine_events
from vllm_ascend.utils import AscendDeviceType

layers = st.builds(
    lambda case, fusion, rank: replace(case, fusion=fusion, rank=rank, gate=False),
    cases,
    st.booleans(),
    st.sampled_from([0, 1]),
)


class Counting(TorchDispatchMode):
    """The operators dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@dataclass
class Outcome:
    """routed, load: of the layer; dispatched: what the dispatcher handed out; calls: operators, those of the
    stand-in device among them."""

    routed: torch.Tensor
    load: torch.Tensor
    dispatched: Any
    calls: Counter[str]


def step(case: Case, on: Iterable[ModuleType] = (cumulative,)) -> Outcome:
    """One call of the layer's forward_impl."""
    with environment(case, on) as (layer, _, _), pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []
        real = TokenDispatcherWithAllGather.token_dispatch

        def dispatch(self: Any, token_dispatch_input: Any) -> Any:
            seen.append(real(self, token_dispatch_input=token_dispatch_input))
            return seen[-1]

        patch.setattr(TokenDispatcherWithAllGather, "token_dispatch", dispatch)
        hidden = torch.randn(case.tokens, HIDDEN).to(torch.bfloat16)
        logits = torch.randn(case.tokens, EXPERTS)
        with Counting() as counting:
            routed = layer.forward_impl(hidden, logits)
        (dispatched,) = seen
        return Outcome(routed, layer.moe_load, dispatched, counting.calls)


def gains(case: Case) -> bool:
    return case.quantised and case.fusion and not case.eplb


class TestLayer:
    @settings(max_examples=150)
    @given(layers)
    def test_same_bits(self, case: Case) -> None:
        upstream, patched = step(case, []), step(case)
        assert torch.equal(upstream.routed, patched.routed)
        assert torch.equal(upstream.load, patched.load)

    @settings(max_examples=150)
    @given(layers)
    def test_the_list_and_its_type_go_together(self, case: Case) -> None:
        """Both places: what the operator reports is what its readers are told."""
        upstream, patched = step(case, []).dispatched, step(case).dispatched
        assert upstream.group_list_type == 1
        if gains(case):
            assert patched.group_list_type == 0
            assert torch.equal(patched.group_list, upstream.group_list.cumsum(0))
        else:
            assert patched.group_list_type == 1
            assert torch.equal(patched.group_list, upstream.group_list)
        assert patched.group_list.dtype == torch.int64

    @settings(max_examples=60)
    @given(layers)
    def test_what_is_saved(self, case: Case) -> None:
        """One cumsum on the path that gains; nothing is added anywhere."""
        upstream, patched = step(case, []).calls, step(case).calls
        if gains(case):
            assert (upstream["cumsum"], patched["cumsum"]) == (1, 0)
        else:
            assert upstream == patched

    @settings(max_examples=40)
    @given(layers)
    def test_two_expert_parallel_ranks(self, case: Case) -> None:
        """The ranks' parts add up as upstream's do, and their row ends to the number of rows."""
        case = replace(case, expert_parallel=True, quantised=True, fusion=True, eplb=False)
        upstream = [step(replace(case, rank=rank), []) for rank in (0, 1)]
        patched = [step(replace(case, rank=rank)) for rank in (0, 1)]
        assert torch.equal(sum(o.routed for o in upstream), sum(o.routed for o in patched))
        assert sum(int(o.dispatched.group_list[-1]) for o in patched) == case.tokens * case.top_k

    @settings(max_examples=40)
    @given(layers)
    def test_with_skipped_events(self, case: Case) -> None:
        """skip-dispatch-combine-events edits fused_experts and quant_apply_mlp too."""
        both = step(case, [cumulative, skip_dispatch_combine_events])
        assert torch.equal(step(case, []).routed, both.routed)
        assert both.dispatched.group_list_type == (0 if gains(case) else 1)

    @pytest.mark.parametrize("comm", MoECommType)
    def test_other_communication(self, comm: MoECommType) -> None:
        """The MLP's MC2 branch reads the same list."""
        case = Case(quantised=True, fusion=True, comm=comm)
        assert torch.equal(step(case, []).routed, step(case).routed)

    def test_the_readers_agree_on_both_kinds(self) -> None:
        counts = torch.tensor([3, 0, 2, 0])
        ends = torch.tensor([3, 3, 5, 5])
        assert torch.equal(moe_mlp.cumsum_group_list(counts, 1, 0), ends)
        assert moe_mlp.cumsum_group_list(ends, 0, 0) is ends
        assert torch.equal(moe_mlp.cumsum_group_list(ends, 0, 1), counts)


def experts_input(**changes: Any) -> Any:
    """Input of a layer on the path that gains, with changes."""
    one = torch.ones(1)
    arguments: dict[str, Any] = {
        "hidden_states": one,
        "topk_weights": one,
        "topk_ids": one,
        "w1": one,
        "w2": one,
        "quant_type": QuantType.W8A8,
        "dynamic_eplb": False,
    }
    if changes.get("quant_type") in (
        QuantType.MXFP8,
        QuantType.MXFP4,
        QuantType.W4A8MXFP,
        QuantType.W4A16MXFP4,
    ):
        changes["mxfp_act_quant_type"] = torch.float8_e4m3fn
    return build_fused_experts_input(**arguments | changes)


class TestCondition:
    @pytest.fixture(autouse=True)
    def on_an_a3(self, monkeypatch: pytest.MonkeyPatch, enable: Callable[..., None]) -> None:
        enable(cumulative)
        monkeypatch.setattr(cumulative, "get_ascend_device_type", lambda: AscendDeviceType.A3)

    def test_the_path_that_gains(self) -> None:
        assert cumulative.wanted(experts_input(), True)

    @pytest.mark.parametrize("quant_type", [q for q in QuantType if q is not QuantType.W8A8])
    def test_other_weights(self, quant_type: QuantType) -> None:
        assert not cumulative.wanted(experts_input(quant_type=quant_type), True)

    @pytest.mark.parametrize(
        "change",
        [
            {"dynamic_eplb": True},
            {"w1_scale_bias": torch.ones(1)},
            {"w1_offset": torch.ones(1)},
            {"pertoken_scale": torch.ones(1)},
            {"activation": MoEActivation.SWIGLUSTEP},
        ],
    )
    def test_readers_of_counts(self, change: dict[str, Any]) -> None:
        assert not cumulative.wanted(experts_input(**change), True)

    @pytest.mark.parametrize("fusion", [False, None, MagicMock()])
    def test_no_fused_matmul(self, fusion: Any) -> None:
        assert not cumulative.wanted(experts_input(), fusion)

    @pytest.mark.parametrize("device", AscendDeviceType)
    def test_socs(self, monkeypatch: pytest.MonkeyPatch, device: AscendDeviceType) -> None:
        monkeypatch.setattr(cumulative, "get_ascend_device_type", lambda: device)
        assert cumulative.wanted(experts_input(), True) is (
            device in (AscendDeviceType.A2, AscendDeviceType.A3)
        )

    def test_switch_off(self, enable: Callable[..., None]) -> None:
        enable(cumulative, False)
        assert not cumulative.wanted(experts_input(), True)

    def test_a_dispatcher_called_directly_counts(self) -> None:
        """Callers that say nothing get upstream's list, and so does a test double."""
        plain = build_token_dispatch_input(fused_experts_input=experts_input())
        assert cumulative.kind(plain) == 1
        assert cumulative.kind(MagicMock()) == 1
        asked = build_token_dispatch_input(fused_experts_input=experts_input(), cumulative_group_list=True)
        assert cumulative.kind(asked) == 0

    def test_every_gate_has_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The gate is open only where the fused matmul of quant_apply_mlp is what runs, and it gets the list
        as it is."""
        fused = MagicMock(return_value=(torch.ones(1, 2, dtype=torch.int8), torch.ones(1), None))
        monkeypatch.setattr(moe_mlp.DeviceOperator, "npu_grouped_matmul_swiglu_quant", fused)
        monkeypatch.setattr(moe_mlp.DeviceOperator, "npu_grouped_matmul_gmm2", MagicMock())
        monkeypatch.setattr(moe_mlp, "_EXTRA_CTX", SimpleNamespace(moe_comm_type=MoECommType.ALLGATHER))
        opened = 0
        for eplb, fusion, step_activation in itertools.product((False, True), repeat=3):
            activation = MoEActivation.SWIGLUSTEP if step_activation else MoEActivation.SILU
            if not cumulative.wanted(experts_input(dynamic_eplb=eplb, activation=activation), fusion):
                continue
            opened += 1
            fused.reset_mock()
            ends = torch.tensor([1])
            moe_mlp.quant_apply_mlp(
                hidden_states=torch.ones(1, 2, dtype=torch.int8),
                w1=[torch.ones(1, 2, 4)],
                w1_scale=[torch.ones(1, 4)],
                w2=[torch.ones(1, 2, 2)],
                w2_scale=[torch.ones(1, 2)],
                group_list=ends,
                group_list_type=0,
                dynamic_scale=torch.ones(1),
                fusion=fusion,
                dynamic_eplb=eplb,
                activation=activation,
            )
            assert fused.call_args.kwargs["group_list"] is ends
        assert opened == 1
