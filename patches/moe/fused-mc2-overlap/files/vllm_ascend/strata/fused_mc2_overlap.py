"""Fused MC2 together with the shared experts on a stream of their own, for those who ask for it.

vllm-ascend turns ``multistream_overlap_shared_expert`` off under fused MC2 (value 1): the fused operator and
the shared experts' all-reduce on another stream can wait for each other forever. Without that all-reduce
there is nothing to wait for, and there is none where every rank has the whole shared experts
(``enable_shared_expert_dp``). Then, and only on request, the overlap stays on.

A request that could meet the deadlock stops the start; it is never half honoured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from vllm_ascend.strata import switches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCH = "fused_mc2_overlap"
SIDE_STREAM_SWITCH = "shared_expert_overlap"
"""The switch of the patch that sums the shared experts on their own stream."""
KEY = "allow_fused_mc2_overlap"
OPTION = f"additional_config[{KEY!r}]"


class OverlapError(ValueError):
    """The overlap was asked for where it can deadlock."""


class AscendConfig(Protocol):
    """The part of vllm-ascend's configuration that this module uses."""

    enable_fused_mc2: int
    enable_shared_expert_dp: bool
    multistream_overlap_shared_expert: bool


def excluded(config: AscendConfig, vllm_config: VllmConfig, additional_config: Mapping[str, Any]) -> bool:
    """Whether the overlap has to go, as upstream has it, because fused MC2 is on.

    Raises OverlapError for a request that is no boolean, and for one that could deadlock: without
    shared-expert data parallelism, or with the all-reduce on the side stream.
    """
    allowed = additional_config.get(KEY, False)
    if not isinstance(allowed, bool):
        raise OverlapError(f"{OPTION} is {allowed!r}; expected true or false")
    if config.enable_fused_mc2 != 1 or not config.multistream_overlap_shared_expert:
        return False
    if not allowed:
        return True
    table = switches.table_of(vllm_config)
    if not table[SWITCH]:
        _log().warning("%s is ignored: the Strata switch %s is off.", OPTION, SWITCH)
        return True
    if not config.enable_shared_expert_dp:
        raise OverlapError(
            f"{OPTION} needs enable_shared_expert_dp (with expert parallelism and a tensor parallel size "
            "above 1): without it the shared experts' all-reduce and the fused MC2 operator on two streams "
            "can wait for each other forever. Set it, or leave the overlap or fused MC2 out"
        )
    if table.values.get(SIDE_STREAM_SWITCH, False):
        raise OverlapError(
            f"{OPTION} and the Strata switch {SIDE_STREAM_SWITCH} exclude each other: no collective may be "
            "issued on the shared experts' stream beside fused MC2. "
            f"Start with STRATA_SWITCHES={SIDE_STREAM_SWITCH}=off"
        )
    _log().warning(
        "Fused MC2 with the shared experts on their own stream, as %s asks for. Upstream excludes this and "
        "has seen no gain from it.",
        OPTION,
    )
    return False


def _log() -> Any:
    from vllm.logger import logger

    return logger
