"""The cached MinTokens mask against vLLM's own processor, on the real persistent batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm_ascend.strata import min_tokens_mask_cache

VOCABULARY = 24
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def switch_on(enable: Callable[..., None], ascend_config: Any) -> Any:
    enable(min_tokens_mask_cache)
    return ascend_config


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every mask that gets built during the test."""
    made: list[Any] = []
    build = min_tokens_mask_cache.build

    def record(*arguments: Any) -> Any:
        made.append(build(*arguments))
        return made[-1]

    monkeypatch.setattr(min_tokens_mask_cache, "build", record)
    return made


def new_processor() -> MinTokensLogitsProcessor:
    return MinTokensLogitsProcessor(None, CPU, False)


def with_state(min_toks: dict[int, tuple[int, list[int], set[int]]]) -> MinTokensLogitsProcessor:
    processor = new_processor()
    processor.min_toks = min_toks
    return processor


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed))


def hooked(processor: Any, logits: torch.Tensor, drafts: list[int]) -> torch.Tensor:
    """The edited upstream function, with nothing but min_tokens active."""
    from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler

    metadata = SimpleNamespace(
        no_penalties=True,
        bad_words_token_ids={},
        output_token_ids=[],
        allowed_token_ids_mask=None,
        logitsprocs=SimpleNamespace(non_argmax_invariant=[processor]),
    )
    sampler = object.__new__(AscendRejectionSampler)
    return AscendRejectionSampler.apply_logits_processors(
        sampler, logits, metadata, SimpleNamespace(num_draft_tokens=drafts)
    )


def assert_like_upstream(processor: Any, drafts: list[int], seed: int = 0) -> None:
    """Bit equality of edited and upstream function on the processor's present state."""
    logits = random_logits(sum(drafts), seed)
    ours, theirs = logits.clone(), logits.clone()
    theirs = MinTokensLogitsProcessor.apply_with_spec_decode(processor, theirs, list(drafts))
    result = hooked(processor, ours, drafts)
    assert result is ours
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def structure(processor: MinTokensLogitsProcessor, drafts: list[int]) -> tuple[Any, ...]:
    """An independent statement of what the mask depends on, without regard to order."""
    masked = {}
    for index, (minimum, output, stops) in processor.min_toks.items():
        rows = sum(len(output) + position < minimum for position in range(drafts[index]))
        if stops and rows:
            masked[index] = (rows, frozenset(stops))
    return tuple(drafts), frozenset(masked.items())


class Life:
    """Requests coming and going on vllm-ascend's own persistent batch."""

    SLOTS = 5

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_ascend.worker import block_table, npu_input_batch

        one = SimpleNamespace(world_size=1, rank_in_group=0)
        monkeypatch.setattr(block_table, "get_pcp_group", lambda: one)
        monkeypatch.setattr(block_table, "get_dcp_group", lambda: one)
        self.processor = new_processor()
        self.batch = npu_input_batch.NPUInputBatch(
            max_num_reqs=self.SLOTS,
            max_model_len=512,
            max_num_batched_tokens=512,
            device=CPU,
            pin_memory=False,
            vocab_size=VOCABULARY,
            block_sizes=[16],
            kernel_block_sizes=[[16]],
            logitsprocs=LogitsProcessors([self.processor]),
            is_spec_decode=True,
            num_speculative_tokens=4,
        )
        self.outputs: dict[str, list[int]] = {}
        self.count = 0

    def step(
        self, leave: list[int], arrive: list[tuple[int, set[int], int]], swap: tuple[int, int] | None
    ) -> None:
        """One step: exits by rank, arrivals as (min_tokens, stop tokens, outputs there already), a swap."""
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        for rank in leave:
            if rank < len(self.outputs):
                gone = sorted(self.outputs)[rank]
                self.batch.remove_request(gone)
                del self.outputs[gone]
        for min_tokens, stops, already in arrive:
            if len(self.outputs) < self.SLOTS:
                name = f"r{self.count:04d}"
                self.count += 1
                self.outputs[name] = [1] * already
                self.batch.add_request(
                    CachedRequestState(
                        req_id=name,
                        prompt_token_ids=[1, 2],
                        mm_features=[],
                        sampling_params=SamplingParams(
                            temperature=0.0,
                            max_tokens=400,
                            min_tokens=min_tokens,
                            stop_token_ids=sorted(stops),
                        ),
                        generator=None,
                        block_ids=([0],),
                        num_computed_tokens=2,
                        output_token_ids=self.outputs[name],
                    )
                )
        self.batch.condense()
        if swap and max(swap) < self.batch.num_reqs and swap[0] != swap[1]:
            self.batch.swap_states(*swap)
        self.batch.refresh_metadata()

    def grow(self, tokens: list[int]) -> None:
        """Append output tokens to the requests in batch order."""
        for name, number in zip(self.batch.req_ids, tokens, strict=False):
            self.outputs[name] += [1] * number


REQUEST = st.tuples(
    st.integers(0, 14), st.sets(st.integers(0, VOCABULARY - 1), max_size=3), st.integers(0, 6)
)
STEP = st.fixed_dictionaries(
    {
        "leave": st.lists(st.integers(0, Life.SLOTS - 1), max_size=2, unique=True),
        "arrive": st.lists(REQUEST, max_size=2),
        "swap": st.none() | st.tuples(st.integers(0, Life.SLOTS - 1), st.integers(0, Life.SLOTS - 1)),
        "drafts": st.none() | st.lists(st.integers(0, 4), min_size=Life.SLOTS, max_size=Life.SLOTS),
        "grow": st.lists(st.integers(0, 5), min_size=Life.SLOTS, max_size=Life.SLOTS),
    }
)
QUIET = st.fixed_dictionaries(
    {
        "leave": st.just([]),
        "arrive": st.just([]),
        "swap": st.none(),
        "drafts": st.none(),
        "grow": st.lists(st.integers(0, 2), min_size=Life.SLOTS, max_size=Life.SLOTS),
    }
)


@settings(max_examples=150)
@given(steps=st.lists(STEP | QUIET, min_size=2, max_size=14))
def test_equal_to_upstream_over_the_life_of_a_batch(steps: list[dict[str, Any]]) -> None:
    """Arrivals, exits, moves, growing outputs, changing drafts: a mask is reused only where allowed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        made: list[Any] = []
        build = min_tokens_mask_cache.build
        monkeypatch.setattr(min_tokens_mask_cache, "build", lambda *a: made.append(None) or build(*a))
        life = Life(monkeypatch)
        previous: tuple[Any, ...] | None = None
        for number, step in enumerate(steps):
            life.step(step["leave"], step["arrive"], step["swap"])
            drafts = (step["drafts"] or [3] * Life.SLOTS)[: life.batch.num_reqs]
            before = len(made)
            assert_like_upstream(life.processor, drafts, seed=number)
            if life.processor.min_toks:
                now = structure(life.processor, drafts)
                if len(made) == before:
                    assert now == previous, "a mask of another structure was used"
                previous = now
            life.grow(step["grow"])


@settings(max_examples=200)
@given(
    calls=st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 4),
                st.none()
                | st.tuples(
                    st.integers(0, 9), st.integers(0, 9), st.sets(st.integers(0, VOCABULARY - 1), max_size=4)
                ),
            ),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=6,
    )
)
def test_equal_to_upstream_on_any_state(calls: list[list[tuple[int, Any]]]) -> None:
    """States that follow each other without reason, on one processor: nothing may leak from call to call."""
    processor = new_processor()
    for number, requests in enumerate(calls):
        drafts = [count for count, _ in requests]
        processor.min_toks = {
            index: (state[0], [0] * state[1], state[2])
            for index, (_, state) in enumerate(requests)
            if state is not None
        }
        assert_like_upstream(processor, drafts, seed=number)
        assert_like_upstream(processor, drafts, seed=number + 100)


class TestReuse:
    def test_steady_state_builds_once(self, builds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        life = Life(monkeypatch)
        life.step([], [(300, {3, 4}, 0), (300, {5}, 0), (0, set(), 0)], None)
        for step in range(40):
            assert_like_upstream(life.processor, [4, 4, 4], seed=step)
            life.grow([1 + step % 5] * 3)
            life.step([], [], None)
        assert len(builds) == 1

    def test_steady_state_copies_nothing_to_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processor = with_state({0: (300, [], {3})})
        assert_like_upstream(processor, [4])
        monkeypatch.setattr(torch, "tensor", lambda *a, **k: pytest.fail("built a tensor"))
        monkeypatch.setattr(torch, "from_numpy", lambda *a, **k: pytest.fail("built a tensor"))
        logits = random_logits(4)
        assert torch.isinf(hooked(processor, logits, [4])[:, 3]).all()

    def test_each_step_across_min_tokens_is_its_own_structure(self, builds: list[Any]) -> None:
        output: list[int] = []
        processor = with_state({0: (6, output, {3})})
        masked = []
        while len(output) < 9:
            assert_like_upstream(processor, [4])
            masked.append(0 if builds[-1].indices is None else len(builds[-1].indices[0]))
            output.append(1)
        assert masked == [4, 4, 4, 3, 2, 1, 0, 0, 0]
        assert len(builds) == 5

    @pytest.mark.parametrize(
        "change",
        [
            lambda state: state.update({1: state.pop(0)}),
            lambda state: state.update({0: state[1], 1: state[0]}),
            lambda state: state.pop(1),
            lambda state: state.update({2: (300, [], {9})}),
            lambda state: state[0][2].add(11),
            lambda state: state[0][2].clear(),
            lambda state: state.update({0: (300, [], {5})}),
            lambda state: state[0][1].extend([1] * 298),
        ],
        ids=[
            "moved",
            "swapped",
            "left",
            "arrived",
            "stop-added",
            "stops-cleared",
            "stops-replaced",
            "crossing",
        ],
    )
    def test_every_part_of_the_key_counts(self, change: Callable[[Any], Any], builds: list[Any]) -> None:
        processor = with_state({0: (300, [], {3}), 1: (300, [], {4})})
        assert_like_upstream(processor, [3, 3, 3])
        assert_like_upstream(processor, [3, 3, 3])
        assert len(builds) == 1
        change(processor.min_toks)
        assert_like_upstream(processor, [3, 3, 3])
        assert len(builds) == 2

    @pytest.mark.parametrize("drafts", [[3, 3, 2], [2, 3, 3], [3, 2, 3], [4, 3, 3], [0, 3, 3], [3, 3, 3, 3]])
    def test_every_draft_length_counts(self, drafts: list[int], builds: list[Any]) -> None:
        processor = with_state({0: (300, [], {3}), 1: (300, [], {4})})
        assert_like_upstream(processor, [3, 3, 3])
        assert_like_upstream(processor, drafts)
        assert len(builds) == 2

    def test_one_mask_per_processor(self, builds: list[Any]) -> None:
        processor, other = with_state({0: (300, [], {3})}), with_state({0: (300, [], {4})})
        for rows in range(1, 50):
            assert_like_upstream(processor, [rows])
            assert_like_upstream(other, [rows])
        assert len(builds) == 98
        assert vars(processor)["_strata_min_tokens_mask"] is builds[-2]
        assert vars(other)["_strata_min_tokens_mask"] is builds[-1]
        assert sum(isinstance(value, min_tokens_mask_cache.Mask) for value in vars(processor).values()) == 1


class TestFallback:
    """Each condition alone hands the call to upstream's method and keeps no mask."""

    @pytest.fixture
    def upstream_calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []
        method = MinTokensLogitsProcessor.apply_with_spec_decode

        def record(self: Any, logits: torch.Tensor, drafts: Any) -> torch.Tensor:
            calls.append(drafts)
            return method(self, logits, drafts)

        monkeypatch.setattr(MinTokensLogitsProcessor, "apply_with_spec_decode", record)
        return calls

    def run(self, processor: Any, drafts: Any = None) -> torch.Tensor:
        return hooked(processor, random_logits(4), [4] if drafts is None else drafts)

    def test_not_without_reason(self, upstream_calls: list[Any]) -> None:
        self.run(with_state({0: (300, [], {3})}))
        assert upstream_calls == []

    def test_switch_off(self, upstream_calls: list[Any], enable: Callable[..., None]) -> None:
        enable(min_tokens_mask_cache, False)
        processor = with_state({0: (300, [], {3})})
        self.run(processor)
        assert upstream_calls == [[4]] and "_strata_min_tokens_mask" not in vars(processor)

    def test_sharded_logits(self, upstream_calls: list[Any], switch_on: Any) -> None:
        switch_on.enable_reduce_sample = True
        self.run(with_state({0: (300, [], {3})}))
        assert upstream_calls == [[4]]

    def test_subclass(self, upstream_calls: list[Any]) -> None:
        class Own(MinTokensLogitsProcessor):
            pass

        processor = Own(None, CPU, False)
        processor.min_toks = {0: (300, [], {3})}
        self.run(processor)
        assert upstream_calls == [[4]]

    def test_other_sequence_of_drafts(self, upstream_calls: list[Any]) -> None:
        self.run(with_state({0: (300, [], {3})}), (4,))
        assert upstream_calls == [(4,)]

    def test_switch_constant_is_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("min_tokens_mask_cache", min_tokens_mask_cache.__name__, "ENABLED") in switches._constants


class TestSameFaults:
    """What upstream refuses stays refused, with the same kind of error."""

    def both(self, processor: Any, logits: torch.Tensor, drafts: list[int]) -> None:
        with pytest.raises(Exception) as theirs:
            MinTokensLogitsProcessor.apply_with_spec_decode(processor, logits.clone(), drafts)
        with pytest.raises(Exception) as ours:
            hooked(processor, logits.clone(), drafts)
        assert ours.type is theirs.type

    def test_request_beyond_the_drafts(self) -> None:
        self.both(with_state({2: (300, [], {3})}), random_logits(4), [4])

    def test_token_beyond_the_vocabulary(self) -> None:
        self.both(with_state({0: (300, [], {VOCABULARY})}), random_logits(4), [4])

    def test_logits_of_another_type(self) -> None:
        self.both(with_state({0: (300, [], {3})}), random_logits(4).to(torch.bfloat16), [4])
