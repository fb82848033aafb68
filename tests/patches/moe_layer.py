"""One MoE layer of vllm-ascend on the device of moe_device.py, for the tests of several patches.

The layer's forward functions, the dispatcher and the MLPs are the real ones. The weights, the router and the
preparation for a group of ranks are stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import moe_device
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from vllm.forward_context import override_forward_context
from vllm_ascend import ascend_forward_context
from vllm_ascend.ascend_forward_context import _EXTRA_CTX, MoECommType
from vllm_ascend.ops.fused_moe import fused_moe_0_23_0, token_dispatcher
from vllm_ascend.ops.fused_moe.fused_moe import AscendFusedMoE
from vllm_ascend.ops.fused_moe.moe_comm_method import AllGatherCommImpl
from vllm_ascend.ops.fused_moe.moe_runtime_args import MoEPrepareOutput, build_fused_experts_input
from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAllGather
from vllm_ascend.quantization.quant_type import QuantType
from vllm_ascend.strata import (
    cumulative_group_list,
    shared_expert_overlap,
    shared_expert_weight_prefetch,
    skip_dispatch_combine_events,
)
from vllm_ascend.utils import AscendDeviceType

SWITCHED = (
    skip_dispatch_combine_events,
    shared_expert_overlap,
    cumulative_group_list,
    shared_expert_weight_prefetch,
)
"""The patches of this layer; those that a test does not turn on are off."""

HIDDEN, INTERMEDIATE, EXPERTS = 16, 8, 4


@dataclass(frozen=True)
class Case:
    """One layer and one step. overlap: shared experts on their own stream; gate: flash-comm3's gate
    stream; rank: of two expert-parallel ones; fusion: the fused int8 matmul."""

    seed: int = 0
    tokens: int = 5
    top_k: int = 2
    quantised: bool = False
    shared: bool = True
    quantised_shared: bool = False
    overlap: bool = False
    gate: bool = False
    internal_router: bool = False
    eplb: bool = False
    expert_parallel: bool = False
    v2_runner: bool = False
    rank: int = 1
    fusion: bool = False
    comm: MoECommType = MoECommType.ALLGATHER
    shared_expert_dp: bool = False
    capturing: bool = False

    @property
    def events_of_experts(self) -> int:
        """What upstream records per call: before dispatch, before combine, and before the second quantised
        matmul."""
        return 3 if self.quantised else 2


cases = st.builds(
    Case,
    seed=st.integers(0, 2**16),
    tokens=st.integers(1, 9),
    top_k=st.integers(1, EXPERTS),
    quantised=st.booleans(),
    shared=st.booleans(),
    quantised_shared=st.booleans(),
    overlap=st.booleans(),
    gate=st.booleans(),
    internal_router=st.booleans(),
    eplb=st.booleans(),
    expert_parallel=st.booleans(),
    v2_runner=st.booleans(),
)


class SharedExperts(torch.nn.Module):
    """A SwiGLU MLP whose linear layers return (output, bias), with int8 weights on request."""

    def __init__(self, quantised: bool) -> None:
        super().__init__()
        self.gate_up_proj = self._linear(HIDDEN, 2 * INTERMEDIATE, quantised)
        self.down_proj = self._linear(INTERMEDIATE, HIDDEN, quantised)

    @staticmethod
    def _linear(inputs: int, outputs: int, quantised: bool) -> Any:
        weight = torch.randn(inputs, outputs) / inputs**0.5

        class Linear(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
                return x.float().matmul(weight).to(x.dtype), None

        linear = Linear()
        linear.weight = weight.T
        if quantised:
            values, scale = moe_device.quantise(weight.T.contiguous())
            linear.weight, linear.weight_scale, linear.weight_scale_fp32 = values.T, scale, scale
        return linear

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Experts:
    """In place of a quantisation method: softmax top-k routing, then the real fused_experts of the comm
    method."""

    def __init__(self, case: Case) -> None:
        self.case = case
        local = EXPERTS // 2 if case.expert_parallel else EXPERTS
        self.w1 = torch.randn(local, HIDDEN, 2 * INTERMEDIATE) / HIDDEN**0.5
        self.w2 = torch.randn(local, INTERMEDIATE, HIDDEN) / INTERMEDIATE**0.5
        self.fail = False

    def apply(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, top_k: int, **kwargs: Any
    ) -> Any:
        if self.fail:
            raise ArithmeticError("experts failed")
        weights, ids = torch.softmax(router_logits.float(), -1).topk(top_k)
        quantisation: dict[str, Any] = {"quant_type": QuantType.NONE, "w1": self.w1, "w2": self.w2}
        if self.case.quantised:
            quantisation = {"quant_type": QuantType.W8A8}
            for name, weight in (("w1", self.w1), ("w2", self.w2)):
                flat = weight.transpose(1, 2).reshape(-1, weight.shape[1])
                values, scale = moe_device.quantise(flat)
                shape = (weight.shape[0], weight.shape[2])
                quantisation[name] = [values.view(*shape, -1).transpose(1, 2)]
                quantisation[f"{name}_scale"] = [scale.view(shape).to(torch.bfloat16)]
        return _EXTRA_CTX.moe_comm_method.fused_experts(
            build_fused_experts_input(
                hidden_states=x,
                topk_weights=weights.to(x.dtype),
                topk_ids=ids.to(torch.int32),
                dynamic_eplb=layer.dynamic_eplb,
                expert_map=kwargs["expert_map"],
                log2phy=kwargs["log2phy"],
                **quantisation,
            )
        )


class CommMethod(AllGatherCommImpl):
    """The real all-gather method on one rank: preparing and finalising move nothing."""

    def __init__(self, case: Case) -> None:
        local = EXPERTS // 2 if case.expert_parallel else EXPERTS
        self.token_dispatcher = TokenDispatcherWithAllGather(
            top_k=case.top_k, num_experts=EXPERTS, num_local_experts=local
        )
        self.use_fusion_ops = case.fusion

    def prepare(self, hidden_states: torch.Tensor, router_logits: torch.Tensor, **_: Any) -> MoEPrepareOutput:
        return MoEPrepareOutput(hidden_states, router_logits, None, None, None)

    def finalize(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def expert_map(case: Case) -> torch.Tensor | None:
    """Where each expert is on this rank of two, -1 for the other rank's."""
    if not case.expert_parallel:
        return None
    local = EXPERTS // 2
    return torch.tensor([e - case.rank * local if e // local == case.rank else -1 for e in range(EXPERTS)])


def build_layer(case: Case) -> Any:
    """An AscendFusedMoE with the attributes that its forward functions read."""
    layer = AscendFusedMoE.__new__(AscendFusedMoE)
    torch.nn.Module.__init__(layer)
    attributes = {
        "quant_method": Experts(case),
        "quant_type": QuantType.W8A8 if case.quantised else QuantType.NONE,
        "_shared_experts": SharedExperts(case.quantised_shared) if case.shared else None,
        "multistream_overlap_shared_expert": case.overlap and case.shared,
        "multistream_overlap_gate": case.gate and case.shared,
        "shared_multistream_overlap_gate": case.gate and case.shared,
        "enable_npugraph_ex_static_kernel": False,
        "enable_shared_expert_dp": case.shared_expert_dp,
        "use_overlapped": True,
        "_gate": SimpleNamespace(weight_fp32=torch.randn(EXPERTS, HIDDEN)) if case.internal_router else None,
        "top_k": case.top_k,
        "moe_config": SimpleNamespace(num_experts=EXPERTS),
        "dynamic_eplb": case.eplb,
        "multi_stage": False,
        "_expert_map": expert_map(case),
        "log2phy": torch.tensor([2, 0, 3, 1]) if case.eplb else None,
        "e_score_correction_bias": None,
        "_original_routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    }
    for name in (
        "renormalize", "use_grouped_topk", "topk_group", "num_expert_group", "custom_routing_function",
        "activation", "apply_router_weight_on_input", "global_redundant_expert_num", "tid2eid",
    ):  # fmt: skip
        attributes[name] = None
    local = EXPERTS // 2 if case.expert_parallel else EXPERTS
    attributes["moe_load"] = torch.zeros(local, dtype=torch.int64)
    for name, value in attributes.items():
        object.__setattr__(layer, name, value) if isinstance(value, Experts) else setattr(layer, name, value)
    return layer


def build_context(case: Case) -> SimpleNamespace:
    """A forward context as the V1 or the V2 runner fills it."""
    extra = {
        "moe_comm_method": CommMethod(case),
        "moe_comm_type": case.comm,
        "capturing": case.capturing,
        "in_profile_run": False,
        "flash_comm_v1_enabled": False,
        "eplb_heat_collection_status": True,
    }
    if case.v2_runner:
        return SimpleNamespace(additional_kwargs=extra, all_moe_layers=None)
    return SimpleNamespace(**extra, additional_kwargs={}, all_moe_layers=None)


@contextmanager
def environment(case: Case, on: Iterable[ModuleType] = ()) -> Iterator[tuple[Any, Any, moe_device.Device]]:
    """(layer, forward context, device) in place, with the switches of these modules on and the others off."""
    with pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(case.seed)
        device = moe_device.Device()
        device.install(patch)
        for module in SWITCHED:
            patch.setattr(module, "ENABLED", module in on)
        runner = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=case.v2_runner)
        patch.setattr(ascend_forward_context, "envs_vllm", runner)
        patch.setattr(token_dispatcher, "get_ep_group", lambda: SimpleNamespace(rank_in_group=case.rank))
        patch.setattr(cumulative_group_list, "get_ascend_device_type", lambda: AscendDeviceType.A2)
        patch.setattr(AscendFusedMoE, "gate_stream", torch.npu.Stream())
        patch.setattr(fused_moe_0_23_0, "shared_expert_dp_enabled", lambda: case.shared_expert_dp)
        patch.setattr(fused_moe_0_23_0, "tensor_model_parallel_all_reduce", device.all_reduce)
        patch.setattr(
            fused_moe_0_23_0,
            "select_experts",
            lambda **k: torch.softmax(k["router_logits"], -1).topk(k["top_k"]),
        )
        gathered = SimpleNamespace(maybe_all_gather_and_maybe_unpad=lambda x, *_: x)
        patch.setattr(torch.ops, "vllm", gathered)
        layer, context = build_layer(case), build_context(case)
        with override_forward_context(context):
            yield layer, context, device
