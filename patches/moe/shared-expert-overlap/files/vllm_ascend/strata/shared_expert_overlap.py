"""The shared experts' all-reduce on the stream that computed them.

With ``multistream_overlap_shared_expert`` the shared experts run on a stream of their own, and their sum over
the tensor-parallel ranks waits until the default stream has joined it, behind the routed experts' combine.
Here it is issued on that stream, right after the computation, so that it can run beside the combine; the join
that follows covers it.

What makes this safe, and when it is not done:

- The overlap is off: the shared experts ran on the default stream, and only there is their result ordered.
- The experts run as one fused operator (FUSED_MC2): that operator and a collective on another stream can
  wait for each other forever, which is why vllm-ascend refuses the overlap for one of the two.
- No collective is due (all-gather, shared-expert data parallelism): nothing is issued, as upstream.

Graph capture needs no case of its own: fork and join are events, recorded and waited for in the same order.
Neither does memory: the result is allocated for the side stream and used on the default one, as upstream's
is, and whatever the side stream does next starts with waiting for the next layer's ``before_routed_experts``
event, recorded behind that use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("shared_expert_overlap", __name__)

_BESIDE = frozenset({MoECommType.ALLTOALL, MoECommType.MC2})
"""Where a sum is due and the routed experts are separate operators."""


class ExtraContext(Protocol):
    """The part of vllm-ascend's extra forward context that this module uses."""

    moe_comm_type: MoECommType | None


def reduce_on_side_stream(
    layer: torch.nn.Module,
    shared_out: torch.Tensor,
    context: ExtraContext,
    shared_expert_dp: Callable[[], bool],
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, bool]:
    """(shared experts' output, whether it is the sum already); called on the stream that computed it.

    layer: its ``multistream_overlap_shared_expert`` says whether that is a stream of its own, True only;
    shared_out: [tokens, hidden], this rank's part; shared_expert_dp: whether every rank has the whole result;
    all_reduce: vLLM's tensor-parallel sum, whose return value is the result.
    """
    if (
        not ENABLED
        or layer.multistream_overlap_shared_expert is not True
        or context.moe_comm_type not in _BESIDE
        or shared_expert_dp()
    ):
        return shared_out, False
    return all_reduce(shared_out), True
