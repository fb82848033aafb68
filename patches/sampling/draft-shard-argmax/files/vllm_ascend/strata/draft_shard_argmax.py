"""Draft tokens from an argmax over vocabulary shards.

The proposers draft greedily: each draft step takes ``compute_logits(...).argmax(dim=-1)``. What stands in for
the logits here has an argmax too (:class:`vllm_ascend.strata.shard_argmax.ShardLogits`), so the sites keep
upstream's own argmax call, and get upstream's logits where the shards can't answer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm_ascend.strata import shard_argmax, switches

ENABLED: bool = switches.bind("draft_shard_argmax", __name__)

Logits: TypeAlias = torch.Tensor | shard_argmax.ShardLogits | None


def logits(proposer: Any, hidden_states: torch.Tensor, **named: Any) -> Logits:
    """The draft model's logits [rows, vocabulary] for hidden_states [rows, hidden], or their stand-in.

    Full logits if the switch is off and while a debugger that dumps the model's tensors is attached.
    """
    compute = proposer.model.compute_logits
    if not ENABLED or getattr(proposer.runner, "debugger", None) is not None:
        return compute(hidden_states, **named)
    return shard_argmax.logits(compute, hidden_states, **named)


def step_logits(
    proposer: Any, sampling_metadata: SamplingMetadata, hidden_states: torch.Tensor, **named: Any
) -> Logits:
    """:func:`logits` for Step3.5, which may sample its drafts: full logits unless the batch drafts
    greedily.
    """
    if proposer._enable_probabilistic_draft_probs and sampling_metadata.all_greedy is not True:
        return proposer.model.compute_logits(hidden_states, **named)
    return logits(proposer, hidden_states, **named)
