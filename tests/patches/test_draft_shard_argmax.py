"""Drafts over vocabulary shards against upstream's: the real draft loops, in two processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tp2
from vllm.forward_context import override_forward_context
from vllm_ascend.strata import draft_shard_argmax, shard_argmax

HIDDEN = 16


@pytest.fixture(autouse=True)
def switch_on(enable: Callable[..., None], ascend_config: Any) -> Any:
    enable(draft_shard_argmax)
    return ascend_config


class DraftModel:
    """A small draft model with Qwen3.5's own compute_logits: the hidden state follows from token, position
    and the state before, so that a wrong draft changes all later ones.
    """

    def __init__(self, processor: Any, lm_head: Any, embedding: torch.Tensor) -> None:
        self.logits_processor = processor
        self.lm_head = lm_head
        self.embedding = embedding

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP

        return Qwen3_5MTP.compute_logits(self, hidden_states)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: None,
    ) -> torch.Tensor:
        mixed = self.embedding[input_ids.long()] + hidden_states.flip(-1) + (positions % 5).unsqueeze(-1)
        return (mixed % 5 - 2).to(hidden_states.dtype)


def proposer(model: Any, tokens: int, steps: int, dtype: torch.dtype, method: str = "mtp") -> Any:
    """The real base proposer, with the attributes that its draft loop reads."""
    from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer

    generator = torch.Generator().manual_seed(tokens)
    built = object.__new__(AscendSpecDecodeBaseProposer)
    built.__dict__.update(
        model=model,
        method=method,
        num_speculative_tokens=steps,
        parallel_drafting=False,
        pass_hidden_states_to_model=True,
        uses_mrope=False,
        uses_xdrope_dim=0,
        supports_mm_inputs=False,
        enable_shared_expert_dp=False,
        is_multimodal_model=False,
        use_cuda_graph=False,
        pcp_size=1,
        device=torch.device("cpu"),
        _share_mtp_indices=False,
        input_ids=torch.randint(0, 60, (tokens,), dtype=torch.int32, generator=generator),
        positions=torch.arange(tokens, dtype=torch.int64),
        hidden_states=torch.randint(-2, 3, (tokens, HIDDEN), generator=generator).to(dtype),
        arange=torch.arange(tokens, dtype=torch.int32),
        runner=SimpleNamespace(debugger=None, pcp_manager=None),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=tokens + 2, uses_mrope=False)),
    )
    return built


def draft(built: Any, tokens: int, requests: int) -> torch.Tensor:
    """Drafts [requests, steps] from the real loop, on copies of the buffers that it works in."""
    buffers = {name: getattr(built, name).clone() for name in ("input_ids", "positions", "hidden_states")}
    context = SimpleNamespace(flash_comm_v1_enabled=False, moe_layer_index=0, attn_metadata=None)
    with override_forward_context(context):
        result = built._run_merged_draft(
            num_input_tokens=tokens,
            batch_size=requests,
            token_indices_to_sample=torch.arange(requests) * (tokens // requests),
            target_positions=None,
            inputs_embeds=None,
            multi_steps_attn_metadata=None,
            num_tokens=tokens,
        )
    built.__dict__.update(buffers)
    return result


def integer_head(vocabulary: int, dtype: torch.dtype, seed: int) -> Any:
    """A real vocabulary-parallel head of this process's group, and weights of few values: logits full of
    ties.
    """
    from vllm_ascend.ops.vocab_parallel_embedding import AscendParallelLMHead

    lm_head = AscendParallelLMHead(vocabulary, HIDDEN, params_dtype=dtype)
    width, rank = lm_head.num_embeddings_per_partition, tp2.group().rank_in_group
    weight = torch.randint(-2, 3, (tp2.RANKS * width, HIDDEN), generator=torch.Generator().manual_seed(seed))
    lm_head.weight.data = weight[rank * width : (rank + 1) * width].to(dtype)
    return lm_head


def both_ways(work: Callable[[], Any]) -> tuple[Any, Any, int, int]:
    """(upstream's result, ours, elements that each gathered)."""
    group = tp2.group()
    all_gather = group.all_gather
    sent = [0, 0]
    results = []
    try:
        for on in (False, True):

            def count(tensor: torch.Tensor, dim: int = -1, which: int = on) -> torch.Tensor:
                sent[which] += tensor.numel()
                return all_gather(tensor, dim)

            group.all_gather = count
            draft_shard_argmax.ENABLED = on
            results.append(work())
    finally:
        group.all_gather = all_gather
        draft_shard_argmax.ENABLED = False
    return results[0], results[1], sent[0], sent[1]


def merged_drafts(rank: int, seeds: int) -> list[str]:
    """The base proposer's draft loop, both ways. Returns what differs."""
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    wrong = []
    for seed in range(seeds):
        vocabulary, dtype = (250, 256, 65, 1000)[seed % 4], (torch.bfloat16, torch.float32)[seed % 2]
        steps, requests = 1 + seed % 4, 1 + seed % 3
        tokens = 4 * requests
        embedding = torch.randint(-2, 3, (vocabulary, HIDDEN), generator=torch.Generator().manual_seed(seed))
        model = DraftModel(
            AscendLogitsProcessor(vocabulary), integer_head(vocabulary, dtype, seed), embedding
        )
        built = proposer(model, tokens, steps, dtype)
        theirs, ours, gathered, paired = both_ways(lambda b=built, t=tokens, r=requests: draft(b, t, r))
        if theirs.shape != (requests, steps) or theirs.dtype != ours.dtype or not torch.equal(theirs, ours):
            wrong.append(f"{seed}: {ours} for {theirs}")
        if paired != 2 * requests * steps:
            wrong.append(f"{seed}: {paired} elements sent for {requests} requests and {steps} drafts")
        if gathered <= paired:
            wrong.append(f"{seed}: upstream gathered {gathered} elements")
    return wrong


def step_drafts(rank: int, seeds: int) -> list[str]:
    """Step3.5's sampling of one draft step, both ways, with its own model's compute_logits."""
    from vllm.model_executor.models.step3p5_mtp import Step3p5AMultiTokenPredictor, Step3p5MTP
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor
    from vllm_ascend.spec_decode.step3p5 import AscendStep3p5MTPProposer

    class Head:
        def __init__(self, lm_head: Any, shift: int) -> None:
            self.head, self.shift = lm_head, shift

        def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.roll(self.shift, -1)

    class Predictor:
        compute_logits = Step3p5AMultiTokenPredictor.compute_logits

    class Outer:
        compute_logits = Step3p5MTP.compute_logits

    wrong = []
    for seed in range(seeds):
        vocabulary = (250, 256)[seed % 2]
        inner, model = Predictor(), Outer()
        inner.num_mtp_layers, inner.mtp_start_layer_idx = 2, 7
        inner.logits_processor = AscendLogitsProcessor(vocabulary)
        inner.layers = {
            str(7 + step): SimpleNamespace(
                shared_head=Head(integer_head(vocabulary, torch.float32, seed + step), step)
            )
            for step in range(2)
        }
        model.model = inner
        built = object.__new__(AscendStep3p5MTPProposer)
        built.__dict__.update(
            model=model,
            method="mtp",
            _enable_probabilistic_draft_probs=seed % 3 > 0,
            runner=SimpleNamespace(debugger=None),
        )
        hidden = torch.randint(-2, 3, (5, HIDDEN), generator=torch.Generator().manual_seed(seed)).float()
        for step in range(3):
            theirs, ours, gathered, paired = both_ways(
                lambda b=built, h=hidden, s=step: b._sample_draft_tokens_for_step(
                    h, SimpleNamespace(all_greedy=True), spec_step_idx=s, num_indices=5
                )
            )
            if not torch.equal(theirs[0], ours[0]) or theirs[1] is not None or ours[1] is not None:
                wrong.append(f"{seed}/{step}: {ours} for {theirs}")
            if paired != 10 or gathered <= paired:
                wrong.append(f"{seed}/{step}: {gathered} elements gathered, {paired} sent")
    return wrong


class Asked:
    """A model that says whether its logits were asked for in full."""

    def __init__(self) -> None:
        self.in_full: list[bool] = []
        self.model = self

    def compute_logits(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        self.in_full.append(shard_argmax._request is None)
        return torch.eye(8)[: len(hidden_states)]


def one_draft(method: str = "mtp", **changes: Any) -> list[bool]:
    """Whether the real draft loop asks for full logits, per draft step."""
    model = Asked()
    built = proposer(model, 4, 3, torch.float32, method)
    built.__dict__.update(changes)
    type(model).__call__ = lambda _, hidden_states, **__: hidden_states
    assert draft(built, 4, 2).shape == (2, 3)
    return model.in_full


def test_every_draft_step_asks_for_an_argmax() -> None:
    assert one_draft() == [False, False, False]


def test_switch_off(enable: Callable[..., None]) -> None:
    enable(draft_shard_argmax, False)
    assert one_draft() == [True, True, True]


def test_full_logits_for_a_debugger() -> None:
    runner = SimpleNamespace(debugger=object(), pcp_manager=None)
    assert one_draft(runner=runner) == [True, True, True]


@pytest.mark.parametrize(
    ("probabilistic", "all_greedy", "full"),
    [(False, False, False), (False, True, False), (True, True, False), (True, False, True)],
)
def test_probabilistic_drafts_get_their_logits(
    probabilistic: bool, all_greedy: bool, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_ascend.spec_decode import step3p5

    monkeypatch.setattr(
        step3p5, "compute_probs_and_sample_next_token", lambda logits, _: (logits.argmax(dim=-1), logits)
    )
    model = Asked()
    built = object.__new__(step3p5.AscendStep3p5MTPProposer)
    built.__dict__.update(
        model=model,
        method="mtp",
        _enable_probabilistic_draft_probs=probabilistic,
        runner=SimpleNamespace(debugger=None),
    )
    tokens, probabilities = built._sample_draft_tokens_for_step(
        torch.zeros((3, HIDDEN)), SimpleNamespace(all_greedy=all_greedy), spec_step_idx=1, num_indices=3
    )
    assert tokens.tolist() == [0, 1, 2]
    assert (probabilities is not None) is full
    assert model.in_full == [full]


def test_sharded_sampling_gathers_in_its_own_way(switch_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With enable_reduce_sample the loop gathers a shard's logits itself; the processor hands them out."""
    switch_on.enable_reduce_sample = True
    model = Asked()
    gathered = []
    model.logits_processor = SimpleNamespace(_gather_logits=lambda logits: gathered.append(1) or logits)
    type(model).__call__ = lambda _, hidden_states, **__: hidden_states
    built = proposer(model, 4, 3, torch.float32, "eagle")
    built.__dict__.update(model_returns_tuple=lambda: False)
    assert draft(built, 4, 2).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert gathered == [1, 1, 1]


def test_switch_constant_is_bound() -> None:
    from vllm_ascend.strata import switches

    assert ("draft_shard_argmax", draft_shard_argmax.__name__, "ENABLED") in switches._constants


def test_merged_drafts_equal() -> None:
    assert tp2.run(merged_drafts, 16) == [[], []]


def test_step_drafts_equal() -> None:
    assert tp2.run(step_drafts, 6) == [[], []]
