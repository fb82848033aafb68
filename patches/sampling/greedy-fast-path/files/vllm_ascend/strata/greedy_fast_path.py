"""Greedy sampling straight from the model's logits.

vLLM's ``Sampler.forward`` converts the whole [requests, vocabulary] tensor to float32 before anything
else. If every request is greedy and nothing changes or reports the logits, the tokens are the argmax of
that conversion. bfloat16 and float16 convert to float32 exactly and in order, so the argmax of the
unconverted logits is the same token, ties and infinities included, given that the device's argmax picks
alike in both types. That last part is a property of the device's kernel: it is tried once per device type,
dtype and vocabulary size, on rows with ties, infinities, NaN and subnormals, and where the answers differ
the fast path stays off for that combination.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("greedy_fast_path", __name__)

_proven: dict[tuple[str, torch.dtype, int], bool] = {}


def sample(
    sampler: Sampler, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
) -> SamplerOutput | None:
    """The sampler's output if the fast path is the same as upstream's, else None.

    logits: [requests, vocabulary], read only. The output is upstream's: ``sampled_token_ids`` int32
    [requests, 1], no logprobs. The remaining arguments of ``Sampler.forward`` (whether this is a bonus
    token, the logprobs mode) decide nothing once no processor is active and no logprobs are asked for.
    """
    if not ENABLED or not applies(sampler, sampling_metadata) or not argmax_agrees(logits):
        return None
    sampled = sampler.greedy_sample(logits).to(torch.int32)
    return SamplerOutput(sampled_token_ids=sampled.unsqueeze(-1), logprobs_tensors=None)


def applies(sampler: Sampler, metadata: SamplingMetadata) -> bool:
    """Whether upstream's forward comes down to an argmax of the float32 logits for this batch.

    False where a subclass brings its own steps and with sharded logits (``enable_reduce_sample``), whose
    reduction over ranks is left to upstream.
    """
    return (
        metadata.all_greedy is True
        and not metadata.all_random
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties is True
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and all(idle(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
        and not _budgets_thinking(metadata)
        and type(sampler).sample is Sampler.sample
        and type(sampler).apply_logits_processors is Sampler.apply_logits_processors
        and not get_ascend_config().enable_reduce_sample
    )


def idle(processor: Any) -> bool:
    """Whether an argmax-changing processor leaves this batch alone: vLLM's own two without any request, no
    other.
    """
    if type(processor) is MinTokensLogitsProcessor:
        return not processor.min_toks
    if type(processor) is LogitBiasLogitsProcessor:
        return not processor.biases
    return False


def argmax_agrees(logits: torch.Tensor) -> bool:
    """Whether argmax of ``logits``' dtype is argmax of its float32 form on its device.

    float32 needs no proof; other types than bfloat16 and float16 are refused. The proof runs once, on [6,
    vocabulary].
    """
    dtype = logits.dtype
    if logits.ndim != 2:
        return False
    if dtype is torch.float32:
        return True
    if dtype is not torch.bfloat16 and dtype is not torch.float16:
        return False
    key = (logits.device.type, dtype, logits.shape[1])
    proven = _proven.get(key)
    if proven is None:
        proven = _proven[key] = _prove(*key)
    return proven


def _prove(device: str, dtype: torch.dtype, vocabulary: int) -> bool:
    """Compare both argmaxes on rows where kernels are known to differ: ties, infinities, NaN, signed zeros,
    subnormals.
    """
    if vocabulary < 4:
        return False
    inf, nan, tiny = float("inf"), float("nan"), torch.finfo(dtype).smallest_normal / 2
    first, middle, last = 0, vocabulary // 2, vocabulary - 1
    rows = torch.zeros((6, vocabulary), dtype=dtype)
    rows[0, middle] = rows[0, last] = 3.0
    rows[1, middle] = rows[1, last] = inf
    rows[2].fill_(-inf)
    rows[3, first] = inf
    rows[3, middle] = rows[3, last] = nan
    rows[4].fill_(-1.0)
    rows[4, middle] = -0.0
    rows[4, last] = 0.0
    rows[5, last] = tiny
    rows = rows.to(device)
    return rows.argmax(dim=-1).tolist() == rows.to(torch.float32).argmax(dim=-1).tolist()


def _budgets_thinking(metadata: SamplingMetadata) -> bool:
    holder = metadata.thinking_budget_state_holder
    return holder is not None and holder.has_tracked_requests()
