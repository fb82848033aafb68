"""``mc2_tokens_per_rank_limit``: how many tokens per rank may go through the MC2 dispatch and combine.

vllm-ascend takes MC2 up to a capacity, 512 tokens per tensor-parallel rank at most, and other communication
beyond. The operator's own limit on tokens per rank depends on the SoC; its buffers grow with the capacity.
This module makes the 512 a setting of ``additional_config`` that can only be lowered: a value above the
operator's limit stops the start.

The same number stands in a second place, which asks how many tokens a decode step can have when no graph
sizes are configured. The answer decides whether all decode steps go through MC2 (then data-parallel ranks
need not agree on their token counts) and how large exchange buffers are. A lowered capacity must not lower
that answer: steps beyond the capacity exist, and ranks that did not agree would choose different
communication. So with a lowered limit the answer is the true number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_ascend.strata import switches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm_ascend.utils import AscendDeviceType

SWITCH = "mc2_token_limit"
ENABLED: bool = switches.bind(SWITCH, __name__)

KEY = "mc2_tokens_per_rank_limit"
OPTION = f"additional_config[{KEY!r}]"
UPSTREAM_LIMIT = 512
"""vllm-ascend's constant; no SoC's operator is known to take more tokens per rank."""


class LimitError(ValueError):
    """The limit is no positive number, or above what the operator takes."""


def operator_limit(device_type: AscendDeviceType) -> int:
    """Tokens per rank that the MC2 operators of this SoC take.

    Source: CANN's description of aclnnMoeDistributeDispatchV2, Bs up to 512 on Atlas A3 and up to 256 on
    Atlas A2. Elsewhere vllm-ascend's own constant counts.
    """
    from vllm_ascend.utils import AscendDeviceType

    return 256 if device_type is AscendDeviceType.A2 else UPSTREAM_LIMIT


def check(vllm_config: VllmConfig, additional_config: Mapping[str, Any]) -> None:
    """Stop a start with an unusable limit. With the switch off a given limit is ignored, with a warning.

    Raises LimitError for anything but an int from 1 to the operator's limit.
    """
    if KEY not in additional_config:
        return
    if not switches.table_of(vllm_config)[SWITCH]:
        _log().warning("%s is ignored: the Strata switch %s is off.", OPTION, SWITCH)
        return
    from vllm_ascend.utils import get_ascend_device_type

    limit, device_type = additional_config[KEY], get_ascend_device_type()
    if type(limit) is not int or limit < 1:
        raise LimitError(f"{OPTION} is {limit!r}; expected a whole number of tokens per rank, at least 1")
    most = operator_limit(device_type)
    if limit > most:
        raise LimitError(
            f"{OPTION} is {limit}, but the MC2 operators of {device_type.name} take at most {most} tokens "
            f"per rank: set {most} or less, or leave it out"
        )


def tokens_per_rank(vllm_config: VllmConfig) -> int:
    """The most tokens per rank that go through MC2: the checked setting, 512 without one or with the switch
    off.
    """
    additional = getattr(vllm_config, "additional_config", None)
    if not ENABLED or not isinstance(additional, Mapping):
        return UPSTREAM_LIMIT
    limit: int = additional.get(KEY, UPSTREAM_LIMIT)
    return limit


def decode_tokens(tokens: int, vllm_config: VllmConfig) -> int:
    """The most tokens of a decode step, where ``tokens`` is what all requests together can have.

    Upstream's cut at 512 stays while the capacity is upstream's.
    """
    return min(tokens, UPSTREAM_LIMIT) if tokens_per_rank(vllm_config) >= UPSTREAM_LIMIT else tokens


def _log() -> Any:
    from vllm.logger import logger

    return logger
