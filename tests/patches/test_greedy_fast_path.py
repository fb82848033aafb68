"""The greedy fast path against vLLM's full sampler, through AscendSampler's own forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, build_logitsprocs
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm_ascend.strata import greedy_fast_path

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def switch_on(enable: Callable[..., None], ascend_config: Any) -> Any:
    enable(greedy_fast_path)
    return ascend_config


@pytest.fixture
def sampler() -> Any:
    from vllm_ascend.sample.sampler import AscendSampler

    return AscendSampler()


def processors() -> LogitsProcessors:
    """What vLLM registers in every engine without speculation: min_p, logit_bias, min_tokens."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8), speculative_config=None)
    return build_logitsprocs(config, CPU, False, False)


def metadata(rows: int = 2, **changes: Any) -> SamplingMetadata:
    """A batch of plain greedy requests."""
    plain = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=processors(),
    )
    return dataclasses.replace(plain, **changes)


def compare(
    sampler: Any, logits: torch.Tensor, sampling_metadata: SamplingMetadata, **arguments: Any
) -> SamplerOutput:
    """Edited forward and vLLM's forward on copies: outputs must agree in every bit, type and shape."""
    ours_in, theirs_in = logits.clone(), logits.clone()
    theirs = Sampler.forward(sampler, theirs_in, sampling_metadata, **arguments)
    ours = sampler(logits=ours_in, sampling_metadata=sampling_metadata, **arguments)
    assert ours.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype == torch.int32
    assert ours.sampled_token_ids.shape == theirs.sampled_token_ids.shape == (len(logits), 1)
    assert torch.equal(ours.sampled_token_ids, theirs.sampled_token_ids)
    assert (ours.logprobs_tensors is None) == (theirs.logprobs_tensors is None)
    assert torch.equal(ours_in.view(torch.uint8), theirs_in.view(torch.uint8)), (
        "the logits were treated differently"
    )
    return ours


def fast(sampler: Any, logits: torch.Tensor, sampling_metadata: SamplingMetadata, **arguments: Any) -> bool:
    return greedy_fast_path.sample(sampler, logits, sampling_metadata, **arguments) is not None


SPECIAL = [
    float("inf"),
    float("-inf"),
    float("nan"),
    0.0,
    -0.0,
    1e-40,
    6e-8,
    1.0,
    1.0078125,
    3.0,
    -3.0,
    65504.0,
    1e38,
]


@settings(max_examples=300)
@given(
    rows=st.integers(1, 5).flatmap(
        lambda count: st.integers(4, 40).flatmap(
            lambda width: st.lists(
                st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=width, max_size=width),
                min_size=count,
                max_size=count,
            )
        )
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_equal_to_upstream(rows: list[list[float]], dtype: torch.dtype) -> None:
    """Ties, signed zeros, subnormals, infinities and NaN anywhere in the rows."""
    from vllm_ascend.sample.sampler import AscendSampler

    logits = torch.tensor(rows, dtype=torch.float64).to(dtype)
    sampler, plain = AscendSampler(), metadata(len(rows))
    assert fast(sampler, logits, plain)
    compare(sampler, logits, plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_on_a_real_vocabulary(dtype: torch.dtype, sampler: Any) -> None:
    """151 936 entries: in bfloat16 the maximum is tied in most rows."""
    logits = torch.randn((16, 151_936), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype is torch.bfloat16:
        assert ((logits == logits.max(dim=-1, keepdim=True).values).sum(dim=-1) > 1).any()
    assert fast(sampler, logits, metadata(16))
    compare(sampler, logits, metadata(16))


def test_forward_returns_what_the_fast_path_made(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality alone would not notice a hook that goes the long way."""
    made: list[SamplerOutput | None] = []
    sample = greedy_fast_path.sample

    def record(*arguments: Any, **named: Any) -> SamplerOutput | None:
        made.append(sample(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(greedy_fast_path, "sample", record)
    monkeypatch.setattr(Sampler, "forward", lambda *_, **__: pytest.fail("vLLM's forward ran"))
    output = sampler(logits=torch.zeros((2, 16), dtype=torch.bfloat16), sampling_metadata=metadata())
    assert output is not None and output is made[0] and len(made) == 1


@pytest.mark.parametrize("predict_bonus_token", [False, True])
@pytest.mark.parametrize("override", [None, "raw_logits", "processed_logits"])
def test_other_arguments_decide_nothing(
    predict_bonus_token: bool, override: str | None, sampler: Any
) -> None:
    logits = torch.randn((2, 16)).to(torch.bfloat16)
    arguments = {"predict_bonus_token": predict_bonus_token, "logprobs_mode_override": override}
    assert fast(sampler, logits, metadata(), **arguments)
    compare(sampler, logits, metadata(), **arguments)


def with_processor(params: SamplingParams) -> LogitsProcessors:
    """vLLM's own processors with one request in the batch that asks for something."""
    built = processors()
    update = BatchUpdate(batch_size=2, removed=[], added=[(0, params, [1], [])], moved=[])
    for processor in built.all:
        processor.update_state(update)
    return built


class OwnProcessor(LogitsProcessor):
    """A user's processor that forbids token 0."""

    def __init__(self, *_: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, 0] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass


class Holder:
    """A thinking budget that forbids token 0 where it tracks requests."""

    def __init__(self, tracked: bool) -> None:
        self.tracked = tracked

    def has_tracked_requests(self) -> bool:
        return self.tracked

    def update_state(self, *_: Any, **__: Any) -> None:
        pass

    def apply_to_logits(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        logits[:, 0] = float("-inf")
        return logits


def allowed_mask() -> torch.Tensor:
    mask = torch.zeros((2, 16), dtype=torch.bool)
    mask[:, 0] = True
    return mask


GATES: dict[str, Callable[[], dict[str, Any]]] = {
    "some random": lambda: {"all_greedy": False, "temperature": torch.tensor([0.0, 1e-6])},
    "logprobs": lambda: {"max_num_logprobs": 2},
    "sampled logprob only": lambda: {"max_num_logprobs": 0},
    "all logprobs, as for a bonus token": lambda: {"max_num_logprobs": -1},
    "logprobs of given tokens": lambda: {"logprob_token_ids": {0: [1, 2]}},
    "penalties": lambda: {
        "no_penalties": False,
        "prompt_token_ids": torch.zeros((2, 1), dtype=torch.int64),
        "presence_penalties": torch.full((2,), 9.0),
        "output_token_ids": [[0], [0]],
    },
    "allowed tokens": lambda: {"allowed_token_ids_mask": allowed_mask()},
    "bad words": lambda: {"bad_words_token_ids": {0: [[0]]}},
    "min_tokens": lambda: {"logitsprocs": with_processor(SamplingParams(min_tokens=3, stop_token_ids=[0]))},
    "logit_bias": lambda: {"logitsprocs": with_processor(SamplingParams(logit_bias={0: -50.0}))},
    "a user's processor": lambda: {"logitsprocs": LogitsProcessors([OwnProcessor()])},
    "thinking budget": lambda: {"thinking_budget_state_holder": Holder(True)},
}


@pytest.mark.parametrize("gate", GATES)
def test_each_gate_alone_leaves_it_to_upstream(gate: str, sampler: Any) -> None:
    logits = torch.zeros((2, 16), dtype=torch.bfloat16)
    logits[:, 0], logits[:, 7] = 2.0, 1.5
    assert fast(sampler, logits, metadata())
    changed = metadata(**GATES[gate]())
    assert not fast(sampler, logits, changed)
    if gate == "penalties":
        from vllm_ascend.sample import sampler as module

        assert not module.HAS_TRITON, "this host would need the device's kernels for penalties"
    if "logprobs" not in gate or "given" in gate:
        compare(sampler, logits, changed)


def test_idle_holder_and_idle_processors_do_not_count(sampler: Any) -> None:
    logits = torch.randn((2, 16)).to(torch.bfloat16)
    idle = metadata(
        thinking_budget_state_holder=Holder(False),
        logitsprocs=with_processor(SamplingParams(min_p=0.5)),
        logprob_token_ids={},
    )
    assert {type(p).__name__ for p in idle.logitsprocs.non_argmax_invariant} == {
        "LogitBiasLogitsProcessor",
        "MinTokensLogitsProcessor",
    }
    assert fast(sampler, logits, idle)
    compare(sampler, logits, idle)


def test_fires_again_once_min_tokens_is_reached(sampler: Any) -> None:
    logits = torch.randn((2, 16)).to(torch.bfloat16)
    output: list[int] = []
    built = processors()
    params = SamplingParams(min_tokens=2, stop_token_ids=[0])
    for processor in built.all:
        processor.update_state(
            BatchUpdate(batch_size=2, removed=[], added=[(0, params, [1], output)], moved=[])
        )
    fired = []
    for _ in range(4):
        fired.append(fast(sampler, logits, metadata(logitsprocs=built)))
        compare(sampler, logits, metadata(logitsprocs=built))
        output.append(5)
        for processor in built.all:
            processor.update_state(None)
    assert fired == [False, False, True, True]


def test_contradictory_batch_fails_as_upstream(sampler: Any) -> None:
    contradictory = metadata(all_random=True)
    for forward in (Sampler.forward, type(sampler).forward):
        with pytest.raises(AssertionError):
            forward(sampler, torch.zeros((2, 16)), contradictory)


class TestOtherGates:
    LOGITS = torch.zeros((2, 16), dtype=torch.bfloat16)

    def test_switch_off(self, enable: Callable[..., None], sampler: Any) -> None:
        enable(greedy_fast_path, False)
        assert not fast(sampler, self.LOGITS, metadata())

    def test_sharded_logits(self, switch_on: Any, sampler: Any) -> None:
        switch_on.enable_reduce_sample = True
        assert not fast(sampler, self.LOGITS, metadata())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
    def test_other_dtypes(self, dtype: torch.dtype, sampler: Any) -> None:
        assert not fast(sampler, self.LOGITS.to(dtype), metadata())

    def test_float64_that_rounds_to_a_tie(self, sampler: Any) -> None:
        logits = torch.zeros((1, 8), dtype=torch.float64)
        logits[0, 1], logits[0, 2] = 1.0, 1.0 + 1e-12
        assert compare(sampler, logits, metadata(1)).sampled_token_ids.tolist() == [[1]]

    def test_other_shapes(self, sampler: Any) -> None:
        assert not fast(sampler, self.LOGITS[0], metadata())

    def test_subclass_with_steps_of_its_own(self) -> None:
        from vllm_ascend.sample.sampler import AscendSampler

        class OwnSample(AscendSampler):
            def sample(self, logits: torch.Tensor, *_: Any) -> Any:
                return logits.argmin(dim=-1), None

        class OwnProcessing(AscendSampler):
            def apply_logits_processors(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
                return -logits

        class OwnRandomPart(AscendSampler):
            pass

        assert not fast(OwnSample(), self.LOGITS, metadata())
        assert not fast(OwnProcessing(), self.LOGITS, metadata())
        assert fast(OwnRandomPart(), self.LOGITS, metadata())
        for kind in (OwnSample, OwnProcessing, OwnRandomPart):
            compare(kind(), torch.randn((2, 16)).to(torch.bfloat16), metadata())

    def test_switch_constant_is_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("greedy_fast_path", greedy_fast_path.__name__, "ENABLED") in switches._constants


class TestProof:
    """The device's argmax is compared in both types before it is trusted."""

    @pytest.fixture(autouse=True)
    def nothing_proven(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(greedy_fast_path, "_proven", {})

    def test_once_per_dtype_and_vocabulary(self, sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        proofs: list[Any] = []
        prove = greedy_fast_path._prove
        monkeypatch.setattr(greedy_fast_path, "_prove", lambda *key: proofs.append(key) or prove(*key))
        for _ in range(3):
            for dtype in DTYPES:
                for width in (16, 32):
                    assert fast(sampler, torch.zeros((2, width), dtype=dtype), metadata())
        assert sorted(proofs, key=str) == [
            ("cpu", dtype, width) for dtype in (torch.bfloat16, torch.float16) for width in (16, 32)
        ]

    @pytest.mark.parametrize(
        "kernel",
        [
            lambda x: x.shape[1] - 1 - x.flip(1).float().argmax(dim=-1),
            lambda x: x.float().nan_to_num(nan=float("-inf"), posinf=float("inf")).argmax(dim=-1),
            lambda x: torch.where(x.float().abs() < torch.finfo(x.dtype).tiny, 0.0, x.float()).argmax(dim=-1),
            lambda x: x.float().clamp(max=torch.finfo(x.dtype).max).nan_to_num(0.0).argmax(dim=-1),
            lambda x: torch.where(x.isnan(), float("inf"), x.float()).argmax(dim=-1),
        ],
        ids=["last of ties", "ignores NaN", "flushes subnormals", "saturates", "NaN as infinity"],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_kernel_that_picks_otherwise_is_not_trusted(
        self,
        dtype: torch.dtype,
        kernel: Callable[[torch.Tensor], torch.Tensor],
        sampler: Any,
        monkeypatch: Any,
    ) -> None:
        argmax = torch.Tensor.argmax

        def device_argmax(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            return kernel(tensor) if tensor.dtype is dtype else argmax(tensor, *arguments, **named)

        monkeypatch.setattr(torch.Tensor, "argmax", device_argmax)
        logits = torch.zeros((2, 16), dtype=dtype)
        assert not fast(sampler, logits, metadata())
        compare(sampler, logits, metadata())

    def test_a_vocabulary_too_small_to_try_is_left_to_upstream(self, sampler: Any) -> None:
        assert not fast(sampler, torch.zeros((2, 3), dtype=torch.bfloat16), metadata())
