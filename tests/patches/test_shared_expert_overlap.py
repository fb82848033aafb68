"""shared-expert-overlap: the sum on the stream of the shared experts exactly where that is a stream of its
own, upstream's order everywhere else, upstream's numbers always.

The real layer of moe_layer.py; "upstream" is the same code with the switch off. The all-reduce of
moe_device.py returns another tensor than it is given, so that a result which is not used shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import moe_device
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layer import EXPERTS, HIDDEN, Case, cases, environment
from vllm_ascend import utils
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.ops.fused_moe import fused_moe_0_23_0
from vllm_ascend.strata import shared_expert_overlap as overlap
from vllm_ascend.strata import skip_dispatch_combine_events as events

SUMMED = (MoECommType.ALLTOALL, MoECommType.MC2, MoECommType.FUSED_MC2)
BESIDE = (MoECommType.ALLTOALL, MoECommType.MC2)

layers = st.builds(
    lambda case, comm, dp, capturing: replace(
        case, shared=True, gate=False, comm=comm, shared_expert_dp=dp, capturing=capturing
    ),
    cases,
    st.sampled_from(MoECommType),
    st.booleans(),
    st.booleans(),
)


@dataclass
class Outcome:
    """shared, routed: what the layer returns; device: its trace."""

    shared: torch.Tensor
    routed: torch.Tensor
    device: moe_device.Device

    @property
    def entries(self) -> list[moe_device.Entry]:
        return self.device.trace.entries

    def of_stream(self, stream: int) -> list[tuple[str, int | str]]:
        return [(entry.kind, entry.what) for entry in self.entries if entry.stream == stream]

    @property
    def sums(self) -> list[moe_device.Entry]:
        return [entry for entry in self.entries if entry.what == "all_reduce"]


def step(case: Case, on: Iterable[ModuleType], layers_of_model: int = 1) -> Outcome:
    """As many layers behind each other as asked for, each taking the sum of the one before."""
    with environment(case, on) as (layer, _, device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_SHARED_EXPERTS_CALCULATION_STREAM", None)
        torch.npu.current_stream()
        hidden = torch.randn(case.tokens, HIDDEN).to(torch.bfloat16)
        logits = torch.randn(case.tokens, EXPERTS)
        for _ in range(layers_of_model):
            shared, routed = layer.shared_forward_impl(hidden, logits)
            device.trace.op("next layer")
            hidden = shared + routed
        return Outcome(shared, routed, device)


def moved(case: Case) -> bool:
    """Whether the sum belongs on the side stream."""
    return case.overlap and case.comm in BESIDE and not case.shared_expert_dp


class TestLayer:
    @settings(max_examples=150)
    @given(layers)
    def test_numbers(self, case: Case) -> None:
        upstream, patched = step(case, []), step(case, [overlap])
        assert torch.equal(upstream.shared, patched.shared)
        assert torch.equal(upstream.routed, patched.routed)

    @settings(max_examples=150)
    @given(layers)
    def test_order(self, case: Case) -> None:
        """Same operators; the sum once or, where none is due, never; and nothing else has moved."""
        upstream, patched = step(case, []), step(case, [overlap])
        due = 1 if case.comm in SUMMED and not case.shared_expert_dp else 0
        assert len(patched.sums) == len(upstream.sums) == due
        if not moved(case):
            assert patched.entries == upstream.entries
            return
        (before,), (after,) = upstream.sums, patched.sums
        assert before.stream == 0 and after.stream != 0
        assert [e for e in patched.entries if e != after] == [e for e in upstream.entries if e != before]

    @settings(max_examples=80)
    @given(layers)
    def test_the_sum_follows_the_computation_and_precedes_the_join(self, case: Case) -> None:
        case = replace(case, overlap=True, comm=MoECommType.MC2, shared_expert_dp=False)
        patched = step(case, [overlap])
        side = patched.sums[0].stream
        last_two = patched.of_stream(side)[-2:]
        assert last_two[0] == ("op", "all_reduce")
        kind, event = last_two[1]
        assert kind == "record"
        default = patched.of_stream(0)
        assert default[-2:] == [("wait", event), ("op", "next layer")]

    def test_where_nothing_overlaps_nothing_leaves_the_default_stream(self) -> None:
        """The published form would sum on a stream that never waited for the result."""
        for comm in MoECommType:
            patched = step(Case(overlap=False, comm=comm), [overlap])
            assert {entry.stream for entry in patched.entries} == {0}

    @pytest.mark.parametrize("comm", SUMMED)
    @pytest.mark.parametrize("on", [True, False])
    def test_the_result_is_the_sum(self, comm: MoECommType, on: bool) -> None:
        """Twice one rank's part, which is what the layer returns where each rank has the whole."""
        case = Case(overlap=True, comm=comm)
        part = step(replace(case, shared_expert_dp=True), [])
        assert torch.equal(step(case, [overlap] if on else []).shared, part.shared * 2)

    @pytest.mark.parametrize("quantised", [False, True])
    def test_capture_is_as_eager(self, quantised: bool) -> None:
        """A captured graph has the overlap and the sum where an eager step has them."""
        case = Case(overlap=True, comm=MoECommType.MC2, quantised=quantised, quantised_shared=quantised)
        eager, captured = step(case, [overlap]), step(replace(case, capturing=True), [overlap])
        assert captured.entries == eager.entries
        assert captured.sums[0].stream != 0

    @settings(max_examples=40)
    @given(layers, st.integers(2, 4))
    def test_memory_of_the_sum_is_not_reused_early(self, case: Case, number: int) -> None:
        """Why the result needs no record_stream: between its use on the default stream and the side stream's
        next operator lies a wait for an event recorded after that use."""
        case = replace(case, overlap=True, comm=MoECommType.MC2, shared_expert_dp=False)
        entries = step(case, [overlap], number).entries
        trace = moe_device.Trace(entries)
        side = next(e.stream for e in entries if e.what == "all_reduce")
        uses = [n for n, e in enumerate(entries) if e.what == "next layer"]
        for use, end in pairwise(uses):
            first = next(e for e in entries[use:end] if e.stream == side)
            assert first.kind == "wait"
            assert trace.recorded_on(first.what) == 0
            assert any(e.kind == "record" and e.what == first.what for e in entries[use:end])

    @settings(max_examples=60)
    @given(layers)
    def test_with_skipped_events(self, case: Case) -> None:
        """skip-dispatch-combine-events edits the same file and relies on the function that is edited here."""
        alone, both = step(case, [overlap]), step(case, [overlap, events])
        assert torch.equal(alone.shared, both.shared)
        assert torch.equal(alone.routed, both.routed)
        if case.overlap:
            assert alone.entries == both.entries
        else:
            assert [e for e in alone.entries if e.kind == "op"] == [e for e in both.entries if e.kind == "op"]

    def test_flash_comm3_is_as_upstream(self) -> None:
        """The gate stream computes and sums the shared experts by itself."""
        for case in (Case(gate=True, comm=comm) for comm in MoECommType):
            assert step(case, [overlap]).entries == step(case, []).entries


class TestCondition:
    @staticmethod
    def call(layer: Any, comm: Any, dp: bool) -> tuple[Any, bool]:
        return overlap.reduce_on_side_stream(
            layer, "part", SimpleNamespace(moe_comm_type=comm), lambda: dp, lambda x: f"sum of {x}"
        )

    @pytest.mark.parametrize("on", [True, False])
    @pytest.mark.parametrize("overlapped", [True, False, None, "a test double"])
    @pytest.mark.parametrize("comm", [*MoECommType, None])
    @pytest.mark.parametrize("dp", [True, False])
    def test_truth_table(
        self, enable: Callable[..., None], on: bool, overlapped: Any, comm: Any, dp: bool
    ) -> None:
        enable(overlap, on)
        layer = SimpleNamespace(multistream_overlap_shared_expert=overlapped)
        if on and overlapped is True and comm in BESIDE and not dp:
            assert self.call(layer, comm, dp) == ("sum of part", True)
        else:
            assert self.call(layer, comm, dp) == ("part", False)

    def test_a_layer_without_shared_experts(self, enable: Callable[..., None]) -> None:
        enable(overlap)
        with environment(Case(shared=False, overlap=True, comm=MoECommType.MC2), [overlap]) as (
            layer,
            _,
            device,
        ):
            layer.shared_forward_impl(torch.randn(2, HIDDEN).bfloat16(), torch.randn(2, EXPERTS))
            assert not [e for e in device.trace.of("op") if e.what == "all_reduce"]

    def test_the_sum_is_vllms(self) -> None:
        from vllm.distributed import tensor_model_parallel_all_reduce

        assert fused_moe_0_23_0.tensor_model_parallel_all_reduce is tensor_model_parallel_all_reduce
