"""The stop-token mask of ``min_tokens`` under speculation, kept on the device as long as it holds.

vLLM's ``MinTokensLogitsProcessor.apply_with_spec_decode`` builds two index arrays on the host in every
step and copies them from pageable memory, which waits for the device. The arrays follow from three things
only: how many draft tokens each request has, how many of its leading drafts are still below its min_tokens,
and its stop tokens. In the steady state (every draft of a request is below min_tokens) none of them changes
from step to step, though the outputs grow.

Equal to upstream because the cached arrays are used only while those three compare equal, by content, with
the ones they were built from; otherwise they are built anew. One structure per processor is kept, so memory
stays bounded by one mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("min_tokens_mask_cache", __name__)

_ATTRIBUTE = "_strata_min_tokens_mask"

Entry = tuple[int, int, "set[int] | frozenset[int]"]
"""(index in the persistent batch, number of leading draft rows to mask, stop token ids)."""


@dataclass(frozen=True)
class Mask:
    """Device indices for one batch structure.

    num_draft_tokens: drafts per request, by batch index; entries: what is masked, with frozen copies of the
    stop tokens; indices: (rows, token ids), two int64 tensors of equal length on the processor's device,
    None if nothing is masked.
    """

    num_draft_tokens: tuple[int, ...]
    entries: tuple[Entry, ...]
    indices: tuple[torch.Tensor, torch.Tensor] | None


def apply(
    processor: MinTokensLogitsProcessor, logits: torch.Tensor, num_draft_tokens: list[int]
) -> torch.Tensor:
    """Set the stop tokens of drafts below min_tokens to -inf, in place, as
    ``processor.apply_with_spec_decode`` does.

    logits: [sum of num_draft_tokens, vocabulary], float32; num_draft_tokens: drafts per request, by batch
    index.
    Returns ``logits``. Calls the processor's own method if the switch is off, for a subclass or another
    kind of list, and with sharded logits (``enable_reduce_sample``).
    """
    if (
        not ENABLED
        or type(processor) is not MinTokensLogitsProcessor
        or type(num_draft_tokens) is not list
        or get_ascend_config().enable_reduce_sample is True
    ):
        return processor.apply_with_spec_decode(logits, num_draft_tokens)
    if not processor.min_toks:
        return logits
    drafts = tuple(num_draft_tokens)
    entries = masked_entries(processor.min_toks, drafts)
    mask: Mask | None = getattr(processor, _ATTRIBUTE, None)
    if mask is None or mask.num_draft_tokens != drafts or mask.entries != entries:
        mask = build(processor, drafts, entries)
        setattr(processor, _ATTRIBUTE, mask)
    if mask.indices is not None:
        logits.index_put_(mask.indices, processor.neg_inf_tensor)
    return logits


def masked_entries(
    min_toks: Mapping[int, tuple[int, Sequence[int], set[int]]], num_draft_tokens: Sequence[int]
) -> tuple[Entry, ...]:
    """What has to be masked now.

    min_toks: batch index -> (min_tokens, output tokens so far, stop token ids), the processor's state.
    Requests without stop tokens and those that have no draft below min_tokens are left out. Raises
    IndexError, as upstream does, for a request beyond ``num_draft_tokens``.
    """
    entries: list[Entry] = []
    for index, (min_tokens, output, stop_tokens) in min_toks.items():
        if stop_tokens:
            rows = min(max(min_tokens - len(output), 0), num_draft_tokens[index])
            if rows > 0:
                entries.append((index, rows, stop_tokens))
    return tuple(entries)


def build(
    processor: MinTokensLogitsProcessor, num_draft_tokens: tuple[int, ...], entries: tuple[Entry, ...]
) -> Mask:
    """The mask of one batch structure; copies two index arrays to the device (from pinned memory where it
    is used).
    """
    frozen = tuple((index, rows, frozenset(stop_tokens)) for index, rows, stop_tokens in entries)
    if not frozen:
        return Mask(num_draft_tokens, frozen, None)
    starts = [0]
    for count in num_draft_tokens:
        starts.append(starts[-1] + count)
    row_ids: list[int] = []
    token_ids: list[int] = []
    for index, rows, stop_tokens in frozen:
        for row in range(starts[index], starts[index] + rows):
            row_ids += [row] * len(stop_tokens)
            token_ids += stop_tokens
    return Mask(num_draft_tokens, frozen, (_on_device(processor, row_ids), _on_device(processor, token_ids)))


def _on_device(processor: MinTokensLogitsProcessor, values: list[int]) -> torch.Tensor:
    host = torch.tensor(values, dtype=torch.int64, pin_memory=processor.pin_memory)
    return host.to(processor.device, non_blocking=True)
