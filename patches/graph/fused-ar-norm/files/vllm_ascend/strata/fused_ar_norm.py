"""Output projection, all-reduce, residual add and norm of a Qwen3.5 decoder layer as one operator.

After attention (full or gated delta net) a layer multiplies with its output projection, sums over the two
tensor-parallel ranks, adds the residual and normalises. An operator
``matmul_allreduce_add_rmsnorm910c`` would do that in one kernel for up to 40 rows. Python cannot write that
kernel; this module decides where it may stand in, calls it there, and does what upstream does everywhere
else. Without the operator in the image no layer is linked and upstream's code runs.

Two decisions, at two times. Whether a layer may ever use the operator is decided when it is built
(:func:`facts_of`, :func:`refusals`). How many rows a step has is seen only inside an opaque operator of ours,
``vllm::strata_fused_ar_norm``: in traced code a test of the number of tokens would be answered once, for the
sizes of the trace. With more rows that operator calls the very modules that upstream calls, in the same
order, so its results are upstream's bit for bit.

In a linked layer the projection is put off: attention hands on the projection's input instead of its output.
Both are as wide, which is one of the conditions, so that upstream's buffer between attention and layer holds
either.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm_ascend.strata import switches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENABLED: bool = switches.bind("fused_ar_norm", __name__)

OPERATOR = "matmul_allreduce_add_rmsnorm910c"
ARGUMENTS = (*("Tensor",) * 4, "str", "int", "int", "float", "bool", "bool")
"""x [rows, k], weight [n, k], residual [rows, n], gamma [n], group, ranks, rank, epsilon, weight is [n, k],
gather the second result: the schema of upstream's operator of that name for the 910B."""
MAX_ROWS = 40
RANKS = 2
K_PER_RANK = 2048
ND_FORMATS = (0, 1)
"""Values of weight_nz_mode that leave an unquantised weight in ND format; 2 turns it into NZ."""

_MARK = "_strata_fused_ar_norm"
_layers: weakref.WeakValueDictionary[str, torch.nn.Module] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Facts:
    """What decides whether a layer may use the operator.

    schema: argument types of the installed operator, None without one; plain: the projection is unquantised,
    without bias, reduces its result itself and no operator of vllm-ascend stands in for it; k_per_rank and
    hidden: columns and rows of the rank's weight; lora: modules may be exchanged after loading.
    """

    schema: tuple[str, ...] | None
    ranks: int
    dtype: torch.dtype
    weight_nz_mode: int
    k_per_rank: int
    hidden: int
    plain: bool
    gemma_norm: bool
    layer_scale: bool
    flash_comm: bool
    context_parallel: bool
    lora: bool


def refusals(facts: Facts) -> list[str]:
    """Why the operator may not be used, one line for each reason; empty if it may."""
    table = (
        (facts.schema == ARGUMENTS, f"no operator {OPERATOR} with the arguments known here"),
        (facts.ranks == RANKS, f"{facts.ranks} tensor-parallel ranks, not {RANKS}"),
        (facts.dtype is torch.bfloat16, f"weights are {facts.dtype}, not bfloat16"),
        (facts.weight_nz_mode in ND_FORMATS, f"weight_nz_mode {facts.weight_nz_mode}: weights are not ND"),
        (facts.k_per_rank == K_PER_RANK, f"{facts.k_per_rank} columns per rank, not {K_PER_RANK}"),
        (facts.hidden == facts.k_per_rank, f"hidden size {facts.hidden} is not {facts.k_per_rank}"),
        (facts.plain, "the projection is quantised, has a bias, or has its own communication"),
        (facts.gemma_norm, "the norm is no Gemma norm"),
        (not facts.layer_scale, "layer_scale"),
        (not facts.flash_comm, "flash communication splits the tokens"),
        (not facts.context_parallel, "context parallelism splits the tokens"),
        (not facts.lora, "LoRA exchanges the projection"),
    )
    return [reason for holds, reason in table if not holds]


def link(layer: torch.nn.Module, vllm_config: VllmConfig, prefix: str) -> None:
    """Called when a decoder layer is built: mark its projection if the operator may be used.

    prefix: the layer's name in its model; a drafter may use it again. Logs once why a layer is left alone.
    """
    if not ENABLED:
        return
    reasons = refusals(facts_of(layer, vllm_config))
    if reasons:
        _log().warning_once(f"fused_ar_norm is on but idle: {'; '.join(reasons)}.")
        return
    name = prefix
    while name in _layers:
        name += "'"
    _layers[name] = layer
    setattr(projection(layer), _MARK, name)


def facts_of(layer: torch.nn.Module, vllm_config: VllmConfig) -> Facts:
    """The facts of a layer that is being built; its weights need not be loaded."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.ops.linear import AscendUnquantizedLinearMethod
    from vllm_ascend.utils import enable_sp, enable_sp_by_pass, flashcomm2_enable

    linear = projection(layer)
    parallel = vllm_config.parallel_config
    return Facts(
        schema=operator_schema(),
        ranks=linear.tp_size,
        dtype=linear.weight.dtype,
        weight_nz_mode=get_ascend_config().weight_nz_mode,
        k_per_rank=linear.weight.shape[1],
        hidden=linear.weight.shape[0],
        plain=type(linear.quant_method) is AscendUnquantizedLinearMethod
        and linear.bias is None
        and linear.reduce_results is True
        and linear.input_is_parallel is True
        and getattr(linear, "custom_op", None) is None,
        gemma_norm=isinstance(layer.post_attention_layernorm, GemmaRMSNorm),
        layer_scale=bool(layer.layer_scale),
        flash_comm=bool(enable_sp(vllm_config) or enable_sp_by_pass() or flashcomm2_enable()),
        context_parallel=parallel.prefill_context_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        lora=vllm_config.lora_config is not None,
    )


def projection(layer: torch.nn.Module) -> Any:
    """The layer's output projection, as it is now: ``o_proj`` or ``out_proj``."""
    if layer.layer_type == "linear_attention":
        return layer.linear_attn.out_proj
    return layer.self_attn.o_proj


def project(linear: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """What attention hands on: the projection of ``x`` [rows, k], or ``x`` itself where the layer does it."""
    if ENABLED and isinstance(getattr(linear, _MARK, None), str):
        return x, None
    return linear(x)


def norm(
    layer: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, new residual), both [rows, hidden], from what attention handed on."""
    if ENABLED:
        name = getattr(projection(layer), _MARK, None)
        if isinstance(name, str):
            return torch.ops.vllm.strata_fused_ar_norm(hidden, residual, name)
    return layer.post_attention_layernorm(hidden, residual)


def run(x: torch.Tensor, residual: torch.Tensor, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator ``vllm::strata_fused_ar_norm``: one kernel for few rows, upstream's modules for more.

    x: the projection's input [rows, k per rank]; residual: [rows, hidden].
    """
    layer = _layers[layer_name]
    linear = projection(layer)
    layer_norm = layer.post_attention_layernorm
    if x.dim() == 2 and 0 < x.shape[0] <= MAX_ROWS:
        output, added = getattr(torch.ops._C_ascend, OPERATOR)(
            x.contiguous(),
            linear.weight,
            residual,
            1.0 + layer_norm.weight,
            group_name(linear.tp_rank),
            RANKS,
            linear.tp_rank,
            layer_norm.variance_epsilon,
            True,
            False,
        )
        return output, added
    hidden, _ = linear(x)
    return layer_norm(hidden, residual)


def run_fake(x: torch.Tensor, residual: torch.Tensor, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of :func:`run`."""
    return torch.empty_like(residual), torch.empty_like(residual)


def operator_schema() -> tuple[str, ...] | None:
    """Types of the installed operator's arguments in order, None without one."""
    from vllm_ascend.utils import enable_custom_op

    enable_custom_op()
    try:
        schema = getattr(torch.ops._C_ascend, OPERATOR).default._schema
    except AttributeError:
        return None
    return tuple(str(argument.type) for argument in schema.arguments)


def group_name(rank: int) -> str:
    """HCCL's name of the tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    backend = get_tp_group().device_group._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(rank)


def _register() -> None:
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op("strata_fused_ar_norm", run, fake_impl=run_fake, dispatch_key="PrivateUse1")


def _log() -> Any:
    from vllm.logger import logger

    return logger


_register()
