"""Greedy rejection sampling from token ids instead of logits.

For an all-greedy batch the rejection sampler uses the logits for one thing: the argmax of each row. With the
argmax known (:mod:`vllm_ascend.strata.presampled_tokens`) what remains is upstream's comparison of drafts
with targets, run here through upstream's own kernels: its Triton kernels where Triton is there, else its
PyTorch functions, chosen as ``rejection_sample`` chooses them.
"""

from __future__ import annotations

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm_ascend.sample import rejection_sampler as upstream
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("presampled_rejection", __name__)


def forward(
    metadata: SpecDecodeMetadata, target_token_ids: torch.Tensor, bonus_token_ids: torch.Tensor
) -> SamplerOutput:
    """What ``AscendRejectionSampler.forward`` returns for an all-greedy batch whose rows have these argmaxes.

    target_token_ids: int64 [drafts], one per draft row, requests in order; bonus_token_ids: int64 or int32
    [requests]. ``sampled_token_ids`` is int32 [requests, max_spec_len + 1]: the accepted drafts, then the
    first differing target or, if all were accepted, the bonus token, then -1. No logprobs.

    Raises ValueError if the ids don't fit the metadata.
    """
    requests = len(metadata.num_draft_tokens)
    drafts = metadata.draft_token_ids
    if target_token_ids.shape != drafts.shape or bonus_token_ids.shape != (requests,):
        raise ValueError(
            f"presampled ids of shapes {tuple(target_token_ids.shape)} and {tuple(bonus_token_ids.shape)} "
            f"for {drafts.shape[0]} drafts of {requests} requests"
        )
    if metadata.max_spec_len > upstream.MAX_SPEC_LEN:
        raise ValueError(
            f"{metadata.max_spec_len} drafts per request; the kernels take {upstream.MAX_SPEC_LEN}"
        )
    output = torch.full(
        (requests, metadata.max_spec_len + 1),
        upstream.PLACEHOLDER_TOKEN_ID,
        dtype=torch.int32,
        device=target_token_ids.device,
    )
    bonus = bonus_token_ids.to(torch.int32).unsqueeze(-1)
    counts = metadata.num_draft_tokens
    if upstream.HAS_TRITON:
        grid, block_size = upstream.cal_grid_and_block_size(requests)
        upstream.rejection_greedy_sample_with_triton(
            output,
            counts,
            metadata.cu_num_draft_tokens,
            drafts,
            target_token_ids,
            bonus,
            None,
            metadata.max_spec_len,
            grid,
            block_size,
        )
    elif min(counts) == 1 and max(counts) == 1:
        upstream.rejection_greedy_sample_spec_len_1_pytorch(output, drafts, target_token_ids, bonus)
    else:
        upstream.rejection_greedy_sample_pytorch(
            output,
            metadata.cu_num_draft_tokens,
            drafts,
            target_token_ids,
            bonus,
            counts,
            metadata.max_spec_len,
        )
    return SamplerOutput(sampled_token_ids=output, logprobs_tensors=None)
