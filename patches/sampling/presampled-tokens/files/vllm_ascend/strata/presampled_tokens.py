"""Greedy target tokens from vocabulary shards, at the place where the logits would be computed.

For an all-greedy batch sampling comes down to an argmax of each row, and where the vocabulary is split over
the tensor-parallel group that argmax needs no gathered logits (:mod:`vllm_ascend.strata.shard_argmax`). The
ids are taken in ``execute_model``, kept as the last field of its state, and made into the sampler's output by
``sample_tokens``.

Equal to upstream under :func:`applies`: what is left of the sampler then is a conversion to float32 (exact
and in order), the stop tokens that ``min_tokens`` forbids, and the argmax; of the rejection sampler the same
for bonus rows, and for draft rows also the replacement of NaN and infinities, done here by the same calls on
this rank's columns. ``min_tokens`` counts output tokens, which asynchronous scheduling fills in late:
``update_async_output_token_ids`` runs first, as in ``_sample``; nothing between the two places changes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
from vllm_ascend.sample.sampler import AscendSampler
from vllm_ascend.strata import presampled_rejection, shard_argmax, switches
from vllm_ascend.utils import is_310p, lmhead_tp_enable

ENABLED: bool = switches.bind("presampled_tokens", __name__)

_ATTRIBUTE = "_strata_shard_stop_mask"

Indices = tuple[torch.Tensor, torch.Tensor]
"""(rows, columns), int64 of equal length, on the device."""

Entry = tuple[int, int, frozenset[int]]
"""(index in the persistent batch, number of leading draft rows to mask, stop token ids)."""


@dataclass(frozen=True)
class StopMask:
    """What ``min_tokens`` forbids in one shard, for one batch structure.

    key: the shard's bounds, the drafts per request (None without speculation) and the entries, by content.
    draft: in the rows of drafts; last: in the rows of each request's last token (its only one, or the bonus).
    None where nothing is forbidden.
    """

    key: tuple[int, int, tuple[int, ...] | None, tuple[Entry, ...]]
    draft: Indices | None
    last: Indices | None


def logits_or_tokens(
    runner: Any,
    scheduler_output: Any,
    spec_decode_metadata: SpecDecodeMetadata | None,
    sample_hidden_states: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(logits, None) as upstream computes them, or (None, token ids).

    sample_hidden_states: [rows, hidden]. Token ids: int64 [requests], or under speculation [drafts +
    requests], drafts first. Collective over the tensor-parallel group, whose ranks decide alike.
    """
    compute = runner.model.compute_logits
    if not ENABLED or not applies(runner, scheduler_output, spec_decode_metadata):
        return compute(sample_hidden_states), None
    runner.input_batch.update_async_output_token_ids()
    logits = shard_argmax.logits(compute, sample_hidden_states)
    if not isinstance(logits, shard_argmax.ShardLogits):
        return logits, None
    return None, tokens(logits, runner.input_batch.sampling_metadata, spec_decode_metadata)


def applies(runner: Any, scheduler_output: Any, spec_decode_metadata: SpecDecodeMetadata | None) -> bool:
    """Whether sampling this batch comes down to an argmax, of logits that are split over several ranks."""
    return (
        get_tp_group().world_size > 1
        and not lmhead_tp_enable()
        and get_ascend_config().enable_reduce_sample is False
        and not is_310p()
        and runner.broadcast_pp_output is False
        and runner.is_pooling_model is False
        and runner.debugger is None
        and not scheduler_output.has_structured_output_requests
        and not scheduler_output.pending_structured_output_tokens
        and type(runner.sampler) is AscendSampler
        and (
            spec_decode_metadata is None
            or (presampled_rejection.ENABLED and type(runner.rejection_sampler) is AscendRejectionSampler)
        )
        and argmax_only(runner.input_batch.sampling_metadata, runner.input_batch.vocab_size)
    )


def argmax_only(metadata: SamplingMetadata, vocabulary: int) -> bool:
    """Whether nothing but ``min_tokens`` changes this batch's greedy tokens and nobody asks for logprobs.

    Stop tokens outside the vocabulary are left to upstream.
    """
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy is True
        and not metadata.all_random
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties is True
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_known(processor, vocabulary) for processor in metadata.logitsprocs.non_argmax_invariant)
    )


def _known(processor: Any, vocabulary: int) -> bool:
    if type(processor) is MinTokensLogitsProcessor:
        return all(
            min(stop) >= 0 and max(stop) < vocabulary for _, _, stop in processor.min_toks.values() if stop
        )
    return type(processor) is LogitBiasLogitsProcessor and not processor.biases


def tokens(
    logits: shard_argmax.ShardLogits, metadata: SamplingMetadata, spec: SpecDecodeMetadata | None
) -> torch.Tensor:
    """Token ids int64 [requests], or [drafts + requests] under speculation. A collective.

    Without speculation the shard's logits are changed in place.
    """
    masks = [
        stop_mask(processor, logits.first, logits.local.shape[1], spec)
        for processor in metadata.logitsprocs.non_argmax_invariant
        if type(processor) is MinTokensLogitsProcessor and processor.min_toks
    ]
    if spec is None:
        return shard_argmax.reduce(_best_allowed(logits, logits.local, (m.last for m in masks)), logits.group)
    last = logits.local[spec.bonus_logits_indices]
    draft = logits.local[spec.target_logits_indices].to(torch.float32)
    limits = torch.finfo(torch.float32)
    draft = torch.nan_to_num(draft, nan=0.0, posinf=limits.max, neginf=limits.min)
    pairs = (
        _best_allowed(logits, draft, (m.draft for m in masks)),
        _best_allowed(logits, last, (m.last for m in masks)),
    )
    return shard_argmax.reduce(torch.cat(pairs, dim=1), logits.group)


def _best_allowed(
    logits: shard_argmax.ShardLogits, block: torch.Tensor, forbidden: Iterable[Indices | None]
) -> torch.Tensor:
    for indices in forbidden:
        if indices is not None:
            block.index_put_(indices, block.new_full((), float("-inf")))
    return shard_argmax.best(block, logits.first)


def stop_mask(
    processor: MinTokensLogitsProcessor, first: int, columns: int, spec: SpecDecodeMetadata | None
) -> StopMask:
    """The processor's mask for the shard of token ids [first, first + columns), kept while it holds.

    As upstream has it: a draft row is masked while the output with the drafts before it is below min_tokens;
    a request's last row while the request is tracked at all.
    """
    counts = None if spec is None else tuple(spec.num_draft_tokens)
    entries = tuple(
        (index, 0 if counts is None else min(max(least - len(output), 0), counts[index]), frozenset(stop))
        for index, (least, output, stop) in processor.min_toks.items()
    )
    key = (first, columns, counts, entries)
    mask: StopMask | None = getattr(processor, _ATTRIBUTE, None)
    if mask is None or mask.key != key:
        starts = [0]
        for count in counts or ():
            starts.append(starts[-1] + count)
        draft: list[tuple[int, int]] = []
        last: list[tuple[int, int]] = []
        for index, rows, stop in entries:
            own = [token - first for token in sorted(stop) if first <= token < first + columns]
            draft += [(starts[index] + row, column) for row in range(rows) for column in own]
            last += [(index, column) for column in own]
        mask = StopMask(key, _on_device(processor, draft), _on_device(processor, last))
        setattr(processor, _ATTRIBUTE, mask)
    return mask


def _on_device(processor: MinTokensLogitsProcessor, places: list[tuple[int, int]]) -> Indices | None:
    if not places:
        return None
    host = torch.tensor(tuple(zip(*places, strict=True)), dtype=torch.int64, pin_memory=processor.pin_memory)
    rows, columns = host.to(processor.device, non_blocking=True)
    return rows, columns


def sample(
    runner: Any,
    token_ids: torch.Tensor | None,
    logits: torch.Tensor | None,
    spec_decode_metadata: SpecDecodeMetadata | None,
) -> SamplerOutput:
    """The sampler's output from the state's token ids (see :func:`logits_or_tokens`), from upstream's
    ``_sample`` if there are none. ``sampled_token_ids`` is int32 [requests, 1], or [requests, max_spec_len +
    1] under speculation.
    """
    if token_ids is None:
        return runner._sample(logits, spec_decode_metadata)
    if spec_decode_metadata is None:
        return SamplerOutput(sampled_token_ids=token_ids.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)
    drafts = spec_decode_metadata.draft_token_ids.shape[0]
    return runner.rejection_sampler.forward_greedy_presampled(
        spec_decode_metadata, token_ids[:drafts], token_ids[drafts:]
    )
