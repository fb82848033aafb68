"""Presampled tokens against upstream's logits and samplers: two processes for equality, the runner's own code
with stand-ins around it for the way from ``execute_model`` to the sampler's output.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import shard_head
import torch
import tp2
from hypothesis import given, settings
from hypothesis import strategies as st
from test_presampled_rejection import all_greedy, spec_metadata
from vllm import SamplingParams
from vllm.model_executor.layers import logits_processor as vllm_logits_processor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm_ascend.strata import presampled_rejection, presampled_tokens, shard_argmax

CPU = torch.device("cpu")
VOCABULARY = 64
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def switches_on(enable: Callable[..., None], ascend_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    enable(presampled_tokens)
    enable(presampled_rejection)
    monkeypatch.setattr(shard_argmax, "_in_full", set())
    return ascend_config


def min_tokens(requests: dict[int, tuple[int, list[int], set[int]]]) -> MinTokensLogitsProcessor:
    """vLLM's processor with (min_tokens, output so far, stop tokens) by batch index, all arriving."""
    processor = MinTokensLogitsProcessor(None, CPU, False)
    added = []
    for index, (least, output, stop) in requests.items():
        params = SamplingParams(min_tokens=least, max_tokens=least + 9, stop_token_ids=sorted(stop))
        params._all_stop_token_ids = set(stop)
        added.append((index, params, [1], output))
    if added:
        processor.update_state(BatchUpdate(batch_size=8, removed=[], added=added, moved=[]))
    return processor


def runner(model: Any, requests: int, vocabulary: int, processors: list[Any]) -> Any:
    """What the real ``_sample`` and the hooks read of a runner, for a batch of plain greedy requests."""
    from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
    from vllm_ascend.sample.sampler import AscendSampler
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    sampler = AscendSampler()
    built = SimpleNamespace(
        model=model,
        broadcast_pp_output=False,
        is_pooling_model=False,
        debugger=None,
        sampler=sampler,
        rejection_sampler=AscendRejectionSampler(sampler),
        input_batch=SimpleNamespace(
            sampling_metadata=dataclasses.replace(
                all_greedy(requests), logitsprocs=LogitsProcessors(processors)
            ),
            vocab_size=vocabulary,
            num_reqs=requests,
            update_async_output_token_ids=lambda: None,
        ),
    )
    built._sample = MethodType(NPUModelRunner._sample, built)
    return built


SCHEDULED = SimpleNamespace(has_structured_output_requests=False, pending_structured_output_tokens=False)


def ours(built: Any, spec: Any, rows: int) -> tuple[SamplerOutput, bool]:
    """The sampler's output the new way, and whether it was presampled."""
    logits, tokens = presampled_tokens.logits_or_tokens(built, SCHEDULED, spec, shard_head.rows(rows))
    assert (logits is None) is (tokens is not None)
    return presampled_tokens.sample(built, tokens, logits, spec), tokens is not None


def theirs(built: Any, spec: Any, rows: int) -> SamplerOutput:
    return built._sample(built.model.compute_logits(shard_head.rows(rows)), spec)


def differs(mine: SamplerOutput, upstream: SamplerOutput) -> bool:
    a, b = mine.sampled_token_ids, upstream.sampled_token_ids
    return (
        a.dtype != b.dtype
        or a.shape != b.shape
        or not torch.equal(a, b)
        or mine.logprobs_tensors is not None
        or upstream.logprobs_tensors is not None
    )


def random_batch(seed: int, vocabulary: int, speculative: bool) -> tuple[int, int, Any, dict[int, Any]]:
    """(requests, rows, spec metadata, min_tokens state) of a random batch."""
    random = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    requests = pick(1, 6)
    state = {}
    for index in range(requests):
        if pick(0, 3) > 0:
            output = [7] * pick(0, 5)
            stop = {pick(0, vocabulary) for _ in range(pick(0, 6))}
            state[index] = (len(output) + pick(1, 5), output, stop)
    if not speculative:
        return requests, requests, None, state
    single = pick(0, 3) == 0
    drafts = [[pick(-1, vocabulary) for _ in range(1 if single else pick(0, 5))] for _ in range(requests)]
    spec = spec_metadata(drafts)
    return requests, len(spec.logits_indices), spec, state


# ---- two processes ----


def batches_both_ways(rank: int, seeds: int) -> tuple[list[str], int, int]:
    """Plain and speculative batches through upstream's logits and samplers, and presampled. Returns what
    differs, rows whose token min_tokens changed, and drafts accepted.
    """
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    wrong, censored, accepted = [], 0, 0
    presampled_tokens.ENABLED = presampled_rejection.ENABLED = True
    try:
        for seed in range(seeds):
            vocabulary = (64, 100, 66, 128)[seed % 4]
            dtype = DTYPES[seed % 3]
            requests, rows, spec, state = random_batch(seed, vocabulary, seed % 2 == 1)
            full = shard_head.special_rows(rows, shard_head.padded(vocabulary, 64), dtype, seed)
            plain = full[:, :vocabulary].float()
            if seed % 5 == 0 and state:
                # rows in which nothing but infinities is left once the stop tokens are gone
                full[: rows // 2 + 1] = float("-inf")
                plain = full[:, :vocabulary].float()
            argmax = plain.argmax(dim=-1)
            for _, _, stop in state.values():
                # the best token is a stop token in most rows
                stop.update(argmax[::2].tolist())
            if spec is not None:
                target = torch.nan_to_num(plain[spec.target_logits_indices.long()], nan=0.0).argmax(dim=-1)
                agree = torch.rand(len(target), generator=torch.Generator().manual_seed(seed)) < 0.7
                spec.draft_token_ids = torch.where(agree, target.to(torch.int32), spec.draft_token_ids)
            model = shard_head.Model(
                AscendLogitsProcessor(vocabulary), shard_head.head(full, vocabulary, rank, 2, 64)
            )
            bias = LogitBiasLogitsProcessor(None, CPU, False)
            built = runner(model, requests, vocabulary, [bias, min_tokens(state)])
            upstream = theirs(built, spec, rows)
            mine, presampled = ours(built, spec, rows)
            if not presampled:
                wrong.append(f"{seed}: not presampled")
            if differs(mine, upstream):
                wrong.append(f"{seed}: {mine.sampled_token_ids} for {upstream.sampled_token_ids}")
            if spec is None:
                censored += int((upstream.sampled_token_ids[:, 0] != argmax).sum())
            else:
                accepted += int((upstream.sampled_token_ids[:, 1:] >= 0).sum())
    finally:
        presampled_tokens.ENABLED = presampled_rejection.ENABLED = False
    return wrong, censored, accepted


def test_two_processes_equal_upstream() -> None:
    (wrong, censored, accepted), (wrong_other, *_) = tp2.run(batches_both_ways, 160)
    assert wrong == wrong_other == []
    assert censored > 40 and accepted > 60, "too few rows that min_tokens or drafts decide"


# ---- one process: the other rank's columns are -inf, so what this rank finds decides ----


@pytest.fixture
def half_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    return enter_half_group(monkeypatch)


def enter_half_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    def losing(pairs: torch.Tensor, dim: int) -> torch.Tensor:
        other = shard_argmax.best(torch.full((pairs.shape[1], 2), float("-inf")), VOCABULARY // 2)
        return torch.cat([pairs, other])

    def gather(local: torch.Tensor) -> torch.Tensor:
        return torch.cat([local, torch.full_like(local, float("-inf"))], dim=-1)

    group = SimpleNamespace(world_size=2, rank_in_group=0, all_gather=losing)
    monkeypatch.setattr(shard_argmax, "get_tp_group", lambda: group)
    monkeypatch.setattr(presampled_tokens, "get_tp_group", lambda: group)
    monkeypatch.setattr(vllm_logits_processor, "tensor_model_parallel_all_gather", gather)
    return group


def half_model(full: torch.Tensor) -> shard_head.Model:
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    return shard_head.Model(AscendLogitsProcessor(VOCABULARY), shard_head.head(full, VOCABULARY, 0, 2, 64))


def batch(rows: int = 2, processors: list[Any] | None = None) -> Any:
    full = torch.zeros((rows, VOCABULARY), dtype=torch.bfloat16)
    full[:, 0], full[:, 7] = 2.0, 1.5
    given = (
        processors if processors is not None else [LogitBiasLogitsProcessor(None, CPU, False), min_tokens({})]
    )
    return runner(half_model(full), rows, VOCABULARY, given)


def presamples(built: Any, scheduled: Any = SCHEDULED, spec: Any = None, rows: int = 2) -> bool:
    logits, tokens = presampled_tokens.logits_or_tokens(built, scheduled, spec, shard_head.rows(rows))
    assert (logits is None) is (tokens is not None)
    return tokens is not None


class Holder:
    def __init__(self, tracked: bool) -> None:
        self.tracked = tracked

    def has_tracked_requests(self) -> bool:
        return self.tracked


class OwnProcessor(LogitsProcessor):
    """A user's processor."""

    def __init__(self, *_: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass


class OwnMinTokens(MinTokensLogitsProcessor):
    """A subclass may do anything."""


def biased() -> LogitBiasLogitsProcessor:
    processor = LogitBiasLogitsProcessor(None, CPU, False)
    processor.update_state(
        BatchUpdate(
            batch_size=2, removed=[], added=[(0, SamplingParams(logit_bias={0: -5.0}), [1], [])], moved=[]
        )
    )
    return processor


METADATA: dict[str, Callable[[], dict[str, Any]]] = {
    "some random": lambda: {"all_greedy": False, "temperature": torch.tensor([0.0, 1e-6])},
    "all random": lambda: {"all_random": True},
    "logprobs": lambda: {"max_num_logprobs": 2},
    "sampled logprob only": lambda: {"max_num_logprobs": 0},
    "logprobs of given tokens": lambda: {"logprob_token_ids": {0: [1, 2]}},
    "penalties": lambda: {"no_penalties": False},
    "allowed tokens": lambda: {"allowed_token_ids_mask": torch.zeros((2, VOCABULARY), dtype=torch.bool)},
    "bad words": lambda: {"bad_words_token_ids": {0: [[0]]}},
    "thinking budget": lambda: {"thinking_budget_state_holder": Holder(True)},
    "logit_bias": lambda: {"logitsprocs": LogitsProcessors([biased()])},
    "a user's processor": lambda: {"logitsprocs": LogitsProcessors([OwnProcessor()])},
    "a subclass of min_tokens": lambda: {"logitsprocs": LogitsProcessors([OwnMinTokens(None, CPU, False)])},
    "a stop token beyond the vocabulary": lambda: {
        "logitsprocs": LogitsProcessors([min_tokens({0: (4, [], {VOCABULARY})})])
    },
    "a negative stop token": lambda: {"logitsprocs": LogitsProcessors([min_tokens({0: (4, [], {-1, 5})})])},
}


@pytest.mark.parametrize("gate", METADATA)
def test_each_request_gate_alone_leaves_it_to_upstream(gate: str, half_group: Any) -> None:
    built = batch()
    assert presamples(built)
    plain = built.input_batch.sampling_metadata
    built.input_batch.sampling_metadata = dataclasses.replace(plain, **METADATA[gate]())
    assert not presamples(built)
    built.input_batch.sampling_metadata = plain
    assert presamples(built)


RUNNER: dict[str, Callable[[Any], Any]] = {
    "broadcast over pipeline stages": lambda built: setattr(built, "broadcast_pp_output", True),
    "pooling": lambda built: setattr(built, "is_pooling_model", True),
    "a debugger": lambda built: setattr(built, "debugger", object()),
    "another sampler": lambda built: setattr(built, "sampler", type("Own", (type(built.sampler),), {})()),
}


@pytest.mark.parametrize("gate", RUNNER)
def test_each_runner_gate_alone_leaves_it_to_upstream(gate: str, half_group: Any) -> None:
    built = batch()
    assert presamples(built)
    RUNNER[gate](built)
    assert not presamples(built)


@pytest.mark.parametrize("field", vars(SCHEDULED))
def test_structured_output_is_left_to_upstream(field: str, half_group: Any) -> None:
    assert not presamples(batch(), SimpleNamespace(**{**vars(SCHEDULED), field: True}))


def test_scheduler_output_has_these_fields() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    fields = {field.name: field.default for field in dataclasses.fields(SchedulerOutput)}
    assert {name: fields[name] for name in vars(SCHEDULED)} == vars(SCHEDULED)


class TestProcessGates:
    def test_switch_off(self, half_group: Any, enable: Callable[..., None]) -> None:
        enable(presampled_tokens, False)
        assert not presamples(batch())

    def test_one_rank(self, half_group: Any) -> None:
        half_group.world_size = 1
        built = batch()
        built.model.compute_logits = lambda hidden: torch.zeros((2, 4))
        assert not presampled_tokens.applies(built, SCHEDULED, None)
        assert not presamples(built)

    def test_sharded_sampling(self, half_group: Any, switches_on: Any) -> None:
        switches_on.enable_reduce_sample = True
        assert not presampled_tokens.applies(batch(), SCHEDULED, None)

    def test_head_tensor_parallelism(self, half_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert presampled_tokens.applies(batch(), SCHEDULED, None)
        monkeypatch.setattr(presampled_tokens, "lmhead_tp_enable", lambda: True)
        assert not presampled_tokens.applies(batch(), SCHEDULED, None)

    def test_310p(self, half_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(presampled_tokens, "is_310p", lambda: True)
        assert not presamples(batch())

    def test_lora_on_the_head(self, half_group: Any) -> None:
        from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

        built = batch()
        wrapper = object.__new__(LogitsProcessorWithLoRA)
        torch.nn.Module.__init__(wrapper)
        wrapper.base_layer = built.model.logits_processor
        object.__setattr__(wrapper, "_get_logits", lambda *_: torch.ones((2, VOCABULARY)))
        built.model.logits_processor = wrapper
        assert not presamples(built)

    def test_verification_without_rejection_from_ids(
        self, half_group: Any, enable: Callable[..., None]
    ) -> None:
        spec = spec_metadata([[1], [2]])
        assert presamples(batch(4), spec=spec, rows=4)
        enable(presampled_rejection, False)
        assert not presamples(batch(4), spec=spec, rows=4)
        assert presamples(batch())

    def test_another_rejection_sampler(self, half_group: Any) -> None:
        built = batch(4)
        built.rejection_sampler = type("Own", (type(built.rejection_sampler),), {})(built.sampler)
        assert not presamples(built, spec=spec_metadata([[1], [2]]), rows=4)
        assert presamples(batch())

    def test_a_model_that_works_on_its_logits(self, half_group: Any) -> None:
        class Working(shard_head.Model):
            def compute_logits(self, hidden_states: torch.Tensor) -> Any:
                return super().compute_logits(hidden_states) * 1.0

        built = batch()
        built.model = Working(built.model.logits_processor, built.model.lm_head)
        assert not presamples(built)

    def test_idle_processors_and_holder_do_not_count(self, half_group: Any) -> None:
        built = batch(
            processors=[
                MinPLogitsProcessor(
                    SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)), CPU, False
                )
            ]
        )
        built.input_batch.sampling_metadata.thinking_budget_state_holder = Holder(False)
        built.input_batch.sampling_metadata.logprob_token_ids = {}
        assert presamples(built)

    def test_switch_constant_is_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("presampled_tokens", presampled_tokens.__name__, "ENABLED") in switches._constants


# ---- min_tokens ----


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), speculative=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_min_tokens_like_upstream_while_requests_live(
    seed: int, speculative: bool, dtype: torch.dtype
) -> None:
    """Several steps on one processor: outputs grow, requests reach min_tokens, drafts change."""
    random = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        enter_half_group(patch)
        requests, _, _, state = random_batch(seed, VOCABULARY // 2, speculative)
        processor = min_tokens(state)
        for step in range(4):
            count = [int(torch.randint(0, 4, (), generator=random)) for _ in range(requests)]
            spec = spec_metadata([[3] * n for n in count]) if speculative else None
            rows = requests + sum(count) if speculative else requests
            full = shard_head.special_rows(rows, VOCABULARY, dtype, seed + step)
            full[:, VOCABULARY // 2 :] = float("-inf")
            built = runner(half_model(full), requests, VOCABULARY, [processor])
            upstream = theirs(built, spec, rows)
            mine, presampled = ours(built, spec, rows)
            assert presampled
            assert not differs(mine, upstream), (mine, upstream)
            for index, (_, output, _) in state.items():
                output += [5] * int(torch.randint(0, 3, (), generator=random)) * (index % 2 + 1)
            processor.update_state(None)


def test_mask_is_kept_while_it_holds_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    place = presampled_tokens._on_device
    monkeypatch.setattr(presampled_tokens, "_on_device", lambda *a: made.append(a) or place(*a))
    output: list[int] = []
    processor = min_tokens({0: (9, output, {3, 40})})

    def masks(first: int = 0, columns: int = 32, drafts: list[int] | None = None) -> tuple[Any, Any]:
        spec = None if drafts is None else spec_metadata([[1] * count for count in drafts])
        mask = presampled_tokens.stop_mask(processor, first, columns, spec)
        return tuple(None if m is None else torch.stack(m).tolist() for m in (mask.draft, mask.last))

    assert masks() == (None, [[0], [3]])
    output += [1, 1]
    assert masks() == (None, [[0], [3]]) and len(made) == 2
    assert masks(drafts=[2]) == ([[0, 1], [3, 3]], [[0], [3]])
    output += [1, 1]
    assert masks(drafts=[2]) == ([[0, 1], [3, 3]], [[0], [3]]) and len(made) == 4
    output += [1] * 4
    assert masks(drafts=[2]) == ([[0], [3]], [[0], [3]])
    assert masks(first=32, drafts=[2]) == ([[0], [8]], [[0], [8]])
    assert masks(first=32, columns=8, drafts=[2]) == (None, None)
    assert masks(first=32, columns=9, drafts=[2]) == ([[0], [8]], [[0], [8]])
    processor.min_toks[0][2].add(33)
    assert masks(first=32, columns=9, drafts=[2]) == ([[0, 0], [1, 8]], [[0, 0], [1, 8]])


def test_a_forbidden_infinity_loses_to_a_replaced_one(half_group: Any) -> None:
    """Draft rows: upstream makes -inf the lowest finite float32, then forbids stop tokens with -inf."""
    full = torch.full((2, VOCABULARY), float("-inf"), dtype=torch.bfloat16)
    built = runner(half_model(full), 1, VOCABULARY, [min_tokens({0: (9, [], {0, 1})})])
    mine, presampled = ours(built, spec_metadata([[2]]), 2)
    assert presampled and mine.sampled_token_ids.tolist() == [[2, 0]]
    assert theirs(built, spec_metadata([[2]]), 2).sampled_token_ids.tolist() == [[2, 0]]


def test_nan_counts_as_upstream_counts_it(half_group: Any) -> None:
    """NaN is 0 in draft rows and the best of all in bonus rows."""
    full = torch.full((2, VOCABULARY), -1.0, dtype=torch.bfloat16)
    full[:, VOCABULARY // 2 :] = float("-inf")
    full[:, 9], full[:, 4] = float("nan"), 0.5
    built = runner(half_model(full), 1, VOCABULARY, [])
    mine, presampled = ours(built, spec_metadata([[4]]), 2)
    assert presampled and mine.sampled_token_ids.tolist() == [[4, 9]]
    assert not differs(mine, theirs(built, spec_metadata([[4]]), 2))


@settings(max_examples=100)
@given(
    known=st.integers(0, 3), optimistic=st.integers(1, 4), sampled=st.integers(0, 4), least=st.integers(1, 9)
)
def test_outputs_that_arrive_late(known: int, optimistic: int, sampled: int, least: int) -> None:
    """Asynchronous scheduling: the processor counts placeholders until the batch fills the real tokens in."""
    with pytest.MonkeyPatch.context() as patch:
        enter_half_group(patch)
        full = torch.zeros((4, VOCABULARY), dtype=torch.bfloat16)
        full[:, VOCABULARY // 2 :] = float("-inf")
        full[:, 6], full[:, 2] = 3.0, 2.0
        results = []
        for presample in (False, True):
            output = [5] * known + [-1] * optimistic
            processor = MinTokensLogitsProcessor(None, CPU, False)
            processor.min_toks = {0: (least, output, {6})}
            processor.logits_slice = (
                torch.tensor([0], dtype=torch.int32),
                torch.tensor([6], dtype=torch.int32),
            )
            built = runner(half_model(full), 1, VOCABULARY, [processor])
            waits: list[int] = []
            late = built.input_batch
            late.__dict__.update(
                req_ids=["a"],
                prev_req_id_to_index={"a": 0},
                sampled_token_ids_cpu=torch.tensor([[8] * sampled + [-1] * (4 - sampled)]),
                async_copy_ready_event=SimpleNamespace(synchronize=lambda w=waits: w.append(1)),
            )
            late.sampling_metadata.output_token_ids = [output]
            late.update_async_output_token_ids = MethodType(InputBatch.update_async_output_token_ids, late)
            spec = spec_metadata([[6, 6, 6]])
            if presample:
                result, presampled = ours(built, spec, 4)
                assert presampled
                settled = copy.deepcopy(output)
                late.update_async_output_token_ids()
                assert output == settled, "a second call must change nothing"
            else:
                result = theirs(built, spec, 4)
            results.append((result.sampled_token_ids.tolist(), output))
        assert results[0] == results[1]


# ---- the runner's own code ----


def test_state_field_is_last_and_optional() -> None:
    from vllm_ascend.worker.model_runner_v1 import ExecuteModelState

    assert ExecuteModelState._fields[-1] == "pre_sampled_tokens" and len(ExecuteModelState._fields) == 13
    assert ExecuteModelState(*range(12)).pre_sampled_tokens is None


def post_process() -> Callable[..., Any]:
    """The real "post process" block of ``execute_model`` as a function of the names that it reads."""
    from vllm_ascend.worker import model_runner_v1

    source = textwrap.dedent(inspect.getsource(inspect.unwrap(model_runner_v1.NPUModelRunner.execute_model)))
    block = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.With)
        and any(isinstance(c, ast.Constant) and c.value == "post process" for c in ast.walk(node.items[0]))
    )
    names = [
        "self",
        "scheduler_output",
        "hidden_states",
        "logits_indices",
        "spec_decode_metadata",
        "kv_connector_output",
        "attn_metadata",
        "spec_decode_common_attn_metadata",
        "positions",
        "ec_connector_output",
        "cudagraph_stats",
        "batch_desc",
    ]
    function = ast.parse(f"def block({', '.join(names)}): pass")
    function.body[0].body = [block]  # type: ignore[attr-defined]
    space = dict(vars(model_runner_v1))
    space["get_pp_group"] = lambda: SimpleNamespace(
        is_last_rank=True, ranks=[0], broadcast_tensor_dict=lambda data, src: data
    )
    exec(compile(ast.fix_missing_locations(function), "post process", "exec"), space)
    return space["block"]  # type: ignore[no-any-return]


def run_block(built: Any, hidden: torch.Tensor, spec: Any = None) -> Any:
    built.__dict__.update(use_aux_hidden_state_outputs=False, pcp_size=1, execute_model_state=None)
    rows = torch.arange(0, len(hidden), 2)
    post_process()(built, SCHEDULED, hidden, rows, spec, None, None, None, None, None, None, "batch")
    return built.execute_model_state


class TestRunner:
    HIDDEN = torch.tensor([0.0, 9.0, 1.0, 9.0]).unsqueeze(1)

    def test_block_presamples(self, half_group: Any) -> None:
        state = run_block(batch(), self.HIDDEN)
        assert state.logits is None and state.pre_sampled_tokens.tolist() == [0, 0]
        assert state.sample_hidden_states.tolist() == [[0.0], [1.0]] and state.batch_desc == "batch"

    def test_block_with_switch_off(self, half_group: Any, enable: Callable[..., None]) -> None:
        enable(presampled_tokens, False)
        state = run_block(batch(), self.HIDDEN)
        assert state.logits.shape == (2, VOCABULARY) and state.pre_sampled_tokens is None

    def test_block_with_broadcast(self, half_group: Any) -> None:
        built = batch()
        built.broadcast_pp_output = True
        state = run_block(built, self.HIDDEN)
        assert state.logits.shape == (2, VOCABULARY) and state.pre_sampled_tokens is None

    def sample_tokens(self, built: Any, state: Any, grammar: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The real ``sample_tokens``; returns the sampler's output as bookkeeping gets it."""
        from vllm_ascend.worker import model_runner_v1

        pipeline = SimpleNamespace(world_size=1, is_last_rank=True)
        monkeypatch.setattr(model_runner_v1, "get_pp_group", lambda: pipeline)
        seen: list[Any] = []
        built.__dict__.update(
            kv_connector_output=None,
            is_kv_producer=False,
            use_async_scheduling=False,
            execute_model_state=state,
            device=CPU,
            need_accepted_tokens=False,
            speculative_config=None,
            supports_mm_inputs=False,
            dynamic_eplb=False,
            routed_experts_initialized=False,
            ascend_config=SimpleNamespace(profiling_chunk_config=SimpleNamespace(need_timing=False)),
            _finalize_dump_data=lambda: None,
            _bookkeeping_sync=lambda *a: seen.append(a) or (None, [], {}, ["a", "b"], {}, []),
        )
        model_runner_v1.NPUModelRunner.sample_tokens(built, grammar)
        assert built.execute_model_state is None
        ((_, output, *_),) = seen
        return output

    def state(self, **changes: Any) -> Any:
        from vllm_ascend.worker.model_runner_v1 import ExecuteModelState

        fields = dict.fromkeys(ExecuteModelState._fields)
        scheduled = SimpleNamespace(total_num_scheduled_tokens=2)
        return ExecuteModelState(**{**fields, "scheduler_output": scheduled, **changes})

    def test_plain_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built = batch()
        built._sample = lambda *_: pytest.fail("sampled again")
        state = self.state(pre_sampled_tokens=torch.tensor([4, 2]))
        output = self.sample_tokens(built, state, None, monkeypatch)
        assert output.sampled_token_ids.dtype == torch.int32 and output.sampled_token_ids.tolist() == [
            [4],
            [2],
        ]

    def test_tokens_of_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built = batch()
        built._sample = lambda *_: pytest.fail("sampled again")
        spec = spec_metadata([[4, 5], [1]])
        state = self.state(pre_sampled_tokens=torch.tensor([4, 5, 2, 8, 9]), spec_decode_metadata=spec)
        output = self.sample_tokens(built, state, None, monkeypatch)
        assert output.sampled_token_ids.tolist() == [[4, 5, 8], [2, -1, -1]]

    def test_logits_go_the_old_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built, logits, asked = batch(), torch.zeros((2, 4)), []
        built._sample = lambda *a: asked.append(a) or "output"
        output = self.sample_tokens(built, self.state(logits=logits), None, monkeypatch)
        assert output == "output" and asked[0][0] is logits and asked[0][1] is None

    def test_a_grammar_that_comes_all_the_same(
        self, half_group: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_ascend.worker import model_runner_v1

        def forbid(scheduled: Any, grammar: str, input_batch: Any, logits: torch.Tensor) -> None:
            assert grammar == "grammar" and logits.dtype == torch.float32
            logits[:, 0] = float("-inf")

        monkeypatch.setattr(model_runner_v1, "apply_grammar_bitmask", forbid)
        built = batch()
        state = self.state(pre_sampled_tokens=torch.tensor([0, 0]), sample_hidden_states=shard_head.rows(2))
        output = self.sample_tokens(built, state, "grammar", monkeypatch)
        assert output.sampled_token_ids.tolist() == [[7], [7]]

    @pytest.mark.parametrize("speculative", [False, True])
    def test_from_block_to_output(
        self, speculative: bool, half_group: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both real pieces after each other, against upstream's way on the same batch."""
        spec = spec_metadata([[0], [7]]) if speculative else None
        rows = 4 if speculative else 2
        built = batch(rows)
        hidden = torch.arange(rows).repeat_interleave(2).float().unsqueeze(1)
        state = run_block(built, hidden, spec)
        assert state.pre_sampled_tokens is not None
        state = state._replace(scheduler_output=SimpleNamespace(total_num_scheduled_tokens=rows))
        mine = self.sample_tokens(built, state, None, monkeypatch)
        assert not differs(mine, theirs(built, spec, rows))
        assert mine.sampled_token_ids.tolist() == ([[0, 0], [0, -1]] if speculative else [[0], [0]])
