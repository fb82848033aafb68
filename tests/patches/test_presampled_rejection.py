"""Rejection from token ids against the rejection sampler's own forward on logits with these argmaxes.

The PyTorch functions run in this process; upstream's Triton kernels run in Triton's interpreter, in a process
of their own.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm_ascend.strata import presampled_rejection

VOCABULARY = 12


@pytest.fixture(autouse=True)
def config(ascend_config: Any) -> Any:
    return ascend_config


def all_greedy(requests: int) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(requests),
        presence_penalties=torch.zeros(requests),
        repetition_penalties=torch.ones(requests),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def spec_metadata(drafts: list[list[int]]) -> SpecDecodeMetadata:
    """As the runner lays it out: each request's draft rows, then its bonus row."""
    counts = [len(tokens) for tokens in drafts]
    target, bonus, row = [], [], 0
    for count in counts:
        target += range(row, row + count)
        bonus.append(row + count)
        row += count + 1
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([token for tokens in drafts for token in tokens], dtype=torch.int32),
        num_draft_tokens=counts,
        cu_num_draft_tokens=torch.from_numpy(np.cumsum(counts)).to(torch.int32),
        cu_num_sampled_tokens=torch.from_numpy(np.cumsum([count + 1 for count in counts])).to(torch.int32),
        target_logits_indices=torch.tensor(target, dtype=torch.int32),
        bonus_logits_indices=torch.tensor(bonus, dtype=torch.int32),
        logits_indices=torch.arange(row, dtype=torch.int32),
    )


def rejection_sampler() -> Any:
    from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
    from vllm_ascend.sample.sampler import AscendSampler

    return AscendRejectionSampler(AscendSampler())


def compare(drafts: list[list[int]], target: list[int], bonus: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Output of the new method for given ids and of upstream's forward for logits whose argmaxes they are."""
    metadata = spec_metadata(drafts)
    rows = len(target) + len(bonus)
    logits = (
        torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(rows)).clamp(-3, 3).to(dtype)
    )
    logits[metadata.target_logits_indices.long(), torch.tensor(target, dtype=torch.int64)] = 4.0
    logits[metadata.bonus_logits_indices.long(), torch.tensor(bonus, dtype=torch.int64)] = 4.0
    sampler = rejection_sampler()
    theirs = sampler(metadata, None, logits, all_greedy(len(bonus)))
    ours = sampler.forward_greedy_presampled(
        metadata, torch.tensor(target, dtype=torch.int64), torch.tensor(bonus, dtype=torch.int64)
    )
    assert ours.logprobs_tensors is None and theirs.logprobs_tensors is None
    assert ours.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype == torch.int32
    assert torch.equal(ours.sampled_token_ids, theirs.sampled_token_ids)
    return ours.sampled_token_ids


@st.composite
def batches(draw: Callable[..., Any]) -> tuple[list[list[int]], list[int], list[int]]:
    """Drafts that often agree with the targets, some of them -1, in equal or mixed numbers per request."""
    limit = draw(st.integers(1, 5))
    uniform = draw(st.booleans())
    requests = draw(st.integers(1, 6))
    token = st.integers(0, VOCABULARY - 1)
    drafts, target = [], []
    for _ in range(requests):
        count = limit if uniform else draw(st.integers(0, limit))
        targets = draw(st.lists(token, min_size=count, max_size=count))
        drafts.append(
            [
                draw(st.sampled_from([right, right, right, right, (right + 1) % VOCABULARY, -1]))
                for right in targets
            ]
        )
        target += targets
    return drafts, target, draw(st.lists(token, min_size=requests, max_size=requests))


@settings(max_examples=200)
@given(batch=batches(), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_equal_to_forward(batch: tuple[list[list[int]], list[int], list[int]], dtype: torch.dtype) -> None:
    from vllm_ascend.sample import rejection_sampler as upstream

    assert upstream.HAS_TRITON is False
    compare(*batch, dtype)


CASES: list[tuple[list[list[int]], list[int], list[int], list[list[int]]]] = [
    ([[1], [2]], [1, 3], [7, 8], [[1, 7], [3, -1]]),
    ([[1, 2, 3]], [1, 2, 3], [9], [[1, 2, 3, 9]]),
    ([[1, 2, 3]], [1, 5, 3], [9], [[1, 5, -1, -1]]),
    ([[-1, 2]], [1, 2], [9], [[1, -1, -1]]),
    ([[], [4, 4]], [4, 4], [6, 7], [[6, -1, -1], [4, 4, 7]]),
    ([[], []], [], [6, 7], [[6], [7]]),
]


@pytest.mark.parametrize(("drafts", "target", "bonus", "expected"), CASES)
def test_by_hand(
    drafts: list[list[int]], target: list[int], bonus: list[int], expected: list[list[int]]
) -> None:
    assert compare(drafts, target, bonus, torch.float32).tolist() == expected


def test_one_draft_each_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream has a function of its own for one draft per request, which does not wait for the device."""
    from vllm_ascend.sample import rejection_sampler as upstream

    monkeypatch.setattr(upstream, "rejection_greedy_sample_pytorch", lambda *_: pytest.fail("the long way"))
    metadata = spec_metadata([[1], [2]])
    ids = torch.tensor([1, 3])
    output = presampled_rejection.forward(metadata, ids, torch.tensor([7, 8]))
    assert output.sampled_token_ids.tolist() == [[1, 7], [3, -1]]


def test_ids_that_do_not_fit() -> None:
    metadata = spec_metadata([[1, 2], [3]])
    fits, bonus = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    presampled_rejection.forward(metadata, fits, bonus)
    for target, last in ((fits[:2], bonus), (fits, bonus[:1]), (fits, bonus.unsqueeze(-1))):
        with pytest.raises(ValueError, match="presampled ids of shapes"):
            presampled_rejection.forward(metadata, target, last)


def test_too_many_drafts() -> None:
    from vllm_ascend.sample.rejection_sampler import MAX_SPEC_LEN

    metadata = spec_metadata([[1]])
    metadata = dataclasses.replace(metadata)
    metadata.max_spec_len = MAX_SPEC_LEN + 1
    with pytest.raises(ValueError, match="drafts per request"):
        presampled_rejection.forward(metadata, torch.tensor([1]), torch.tensor([1]))


def test_inputs_are_read_only() -> None:
    metadata = spec_metadata([[1, 2], [3, 4]])
    target, bonus = torch.tensor([1, 2, 3, 5]), torch.tensor([7, 8])
    presampled_rejection.forward(metadata, target, bonus)
    assert target.tolist() == [1, 2, 3, 5] and bonus.tolist() == [7, 8]
    assert metadata.draft_token_ids.tolist() == [1, 2, 3, 4]


def test_switch_constant_is_bound() -> None:
    from vllm_ascend.strata import switches

    assert ("presampled_rejection", presampled_rejection.__name__, "ENABLED") in switches._constants


def test_equal_through_the_triton_kernels() -> None:
    """Random batches through upstream's Triton kernels, both ways, in Triton's interpreter."""
    script = Path(__file__).with_name("triton_rejection.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "40 batches equal, 10 of them with one draft per request"
