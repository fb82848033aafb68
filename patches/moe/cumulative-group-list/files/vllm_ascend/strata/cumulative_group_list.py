"""Row ends of the experts instead of row counts, straight from the routing operator.

After all-gather dispatch the routing operator reports the rows of each local expert as counts. The fused int8
matmul wants cumulative sums, so every layer adds a cumsum of its own; the second matmul takes either. The
routing operator can report cumulative sums itself.

Whether that gains depends on who reads the list, so it is decided where that is known and carried to the
dispatcher in its input. It gains for the fused int8 matmul only. Everywhere else counts stay: for readers of
counts (dynamic EPLB, weights with a scale bias, the Triton SwiGLU kernel, which looks for the total behind
the end of a cumulative list), for unquantised rows, whose two fast routing kernels need counts, and on SoCs
with another routing operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm_ascend.quantization.quant_type import QuantType
from vllm_ascend.strata import switches
from vllm_ascend.utils import AscendDeviceType, get_ascend_device_type

if TYPE_CHECKING:
    from vllm_ascend.ops.fused_moe.moe_stage_contracts import MoEFusedExpertsInput, MoETokenDispatchInput

ENABLED: bool = switches.bind("cumulative_group_list", __name__)

CUMULATIVE = 0
COUNTS = 1
"""The routing operator's ``expert_tokens_num_type`` and the matmuls' ``group_list_type`` agree on these."""


def wanted(experts: MoEFusedExpertsInput, use_fusion_ops: bool) -> bool:
    """Whether the one reader of the group list, besides the second matmul, is the fused int8 matmul.

    experts: one layer's input; use_fusion_ops: whether the fused matmul is configured. The dispatcher then
    quantises the rows while routing them.
    """
    return (
        ENABLED
        and use_fusion_ops is True
        and experts.quant.quant_type == QuantType.W8A8
        and not experts.dynamic_eplb
        and experts.weights.w1_scale_bias is None
        and experts.weights.w1_offset is None
        and experts.routing.pertoken_scale is None
        and experts.activation != MoEActivation.SWIGLUSTEP
        and get_ascend_device_type() in (AscendDeviceType.A2, AscendDeviceType.A3)
    )


def kind(dispatch_input: MoETokenDispatchInput) -> int:
    """CUMULATIVE or COUNTS, the same for the routing operator and for the readers of its list."""
    return CUMULATIVE if dispatch_input.cumulative_group_list is True else COUNTS
