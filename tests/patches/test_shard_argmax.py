"""The argmax over vocabulary shards against upstream's gather and argmax, simulated and in two processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import shard_head
import torch
import tp2
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers import logits_processor as vllm_logits_processor
from vllm_ascend.strata import shard_argmax

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def config(ascend_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(shard_argmax, "_in_full", set())
    return ascend_config


class Ranks:
    """All ranks of a group in one process, one after the other: a gather returns what the ranks would have
    sent.
    """

    def __init__(
        self, full: torch.Tensor, vocabulary: int, ranks: int, padding: int, **processor: Any
    ) -> None:
        from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

        self.world_size = ranks
        self.rank_in_group = 0
        self.full = full
        self.gathered_bytes = 0
        self.heads = [shard_head.head(full, vocabulary, rank, ranks, padding) for rank in range(ranks)]
        self.processor = AscendLogitsProcessor(vocabulary, **processor)
        self.sent: list[torch.Tensor] = []

    def all_gather(self, sent: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0 and sent.is_contiguous()
        assert any(torch.equal(sent, pairs) for pairs in self.sent)
        return torch.cat(self.sent)

    def gather_columns(self, local: torch.Tensor) -> torch.Tensor:
        """vLLM's gather of the logits: the ranks' columns side by side."""
        hidden = shard_head.rows(len(self.full))
        columns = [head.quant_method.apply(head, hidden) for head in self.heads]
        assert torch.equal(local.view(torch.uint8), columns[self.rank_in_group].view(torch.uint8))
        return torch.cat(columns, dim=-1)


@pytest.fixture
def in_group(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ranks], None]:
    def enter(group: Ranks) -> None:
        monkeypatch.setattr(shard_argmax, "get_tp_group", lambda: group)
        monkeypatch.setattr(vllm_logits_processor, "tensor_model_parallel_all_gather", group.gather_columns)

    return enter


def asked(group: Ranks, rank: int) -> Any:
    """What a model on this rank gets for its logits when an argmax is wanted."""
    group.rank_in_group = rank
    model = shard_head.Model(group.processor, group.heads[rank])
    return shard_argmax.logits(model.compute_logits, shard_head.rows(len(group.full)))


def compare(group: Ranks, enter: Callable[[Ranks], None]) -> torch.Tensor:
    """Every rank's argmax over shards against upstream's argmax of the gathered logits."""
    enter(group)
    hidden = shard_head.rows(len(group.full))
    upstream = group.processor(group.heads[0], hidden)
    answers = [asked(group, rank) for rank in range(group.world_size)]
    assert all(isinstance(answer, shard_argmax.ShardLogits) for answer in answers)
    group.sent = [shard_argmax.best(answer.local, answer.first) for answer in answers]
    expected = upstream.argmax(dim=-1)
    for answer in answers:
        ours = answer.argmax(dim=-1)
        assert ours.dtype == expected.dtype == torch.int64
        assert torch.equal(ours, expected), (ours, expected)
    return expected


LAYOUTS = st.sampled_from(
    [
        (64, 2, 64),
        (100, 2, 64),
        (65, 4, 64),
        (130, 4, 64),
        (128, 4, 64),
        (7, 2, 2),
        (5, 3, 3),
        (1, 2, 2),
        (9, 3, 9),
    ]
)


@settings(max_examples=120)
@given(layout=LAYOUTS, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 10**6))
def test_equal_to_the_gathered_argmax(layout: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    """Ties, NaN, infinities, zeros of both signs; no padding, padding, uneven and empty shards; two to four
    ranks.
    """
    vocabulary, ranks, padding = layout
    width = shard_head.padded(vocabulary, padding)
    with pytest.MonkeyPatch.context() as patch:

        def enter(group: Ranks) -> None:
            patch.setattr(shard_argmax, "get_tp_group", lambda: group)
            patch.setattr(vllm_logits_processor, "tensor_model_parallel_all_gather", group.gather_columns)

        compare(Ranks(shard_head.special_rows(6, width, dtype, seed), vocabulary, ranks, padding), enter)


@pytest.mark.parametrize("scale", [0.25, 1.7, -2.0, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_as_upstream_scales(scale: float, dtype: torch.dtype, in_group: Any) -> None:
    full = shard_head.special_rows(8, 128, dtype, 3)
    compare(Ranks(full, 100, 2, 64, scale=scale), in_group)


def test_no_padding_masks_nothing(in_group: Any) -> None:
    """Qwen3.5's vocabulary over two ranks has no padding; masking its last zero columns would mask all."""
    full = torch.randn((4, 248_320), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert shard_head.padded(248_320, 64) == 248_320
    expected = compare(Ranks(full, 248_320, 2, 64), in_group)
    assert expected.max() > 0


def test_padding_never_wins(in_group: Any) -> None:
    full = torch.full((2, 128), 9.0)
    full[:, :100] = -5.0
    full[1, 77] = -4.0
    assert compare(Ranks(full, 100, 2, 64), in_group).tolist() == [0, 77]


def test_ids_beyond_the_integers_of_float32() -> None:
    """2^24 + 1 is the first id that a float32 can't hold."""
    local = torch.tensor([[0.0, 5.0, 1.0]])
    pairs = torch.stack([shard_argmax.best(local - 9, 0), shard_argmax.best(local, 2**24)])
    assert pairs.dtype == torch.int32
    assert shard_argmax.combine(pairs).tolist() == [2**24 + 1]


def test_the_lowest_id_wins_ties_across_ranks(in_group: Any) -> None:
    full = torch.zeros((3, 64))
    full[0, [5, 40]] = 7.0
    full[1, [31, 32]] = 7.0
    full[2, [33, 63]] = 7.0
    assert compare(Ranks(full, 64, 2, 64), in_group).tolist() == [5, 31, 33]


def test_only_the_last_dimension() -> None:
    shard = shard_argmax.ShardLogits(torch.zeros((2, 4)), 0, 8, SimpleNamespace())
    with pytest.raises(ValueError, match="not dim 0"):
        shard.argmax(dim=0)


def plain_group(**processor: Any) -> Ranks:
    return Ranks(torch.randn((3, 64), generator=torch.Generator().manual_seed(0)), 64, 2, 64, **processor)


def test_nobody_asks_nothing_changes(in_group: Any) -> None:
    group = plain_group()
    in_group(group)
    logits = group.processor(group.heads[0], shard_head.rows(3))
    assert isinstance(logits, torch.Tensor) and torch.equal(logits, group.full)


class TestRefusals:
    """Heads that can't answer: the model's logits come back as ever, gathered."""

    def full(self, group: Ranks, enter: Callable[[Ranks], None]) -> None:
        enter(group)
        result = asked(group, 0)
        assert isinstance(result, torch.Tensor)
        assert result.shape == (3, 64)
        assert not shard_argmax._in_full

    def test_soft_cap(self, in_group: Any) -> None:
        self.full(plain_group(soft_cap=30.0), in_group)

    def test_one_rank(self, in_group: Any) -> None:
        self.full(Ranks(torch.zeros((3, 64)), 64, 1, 64), in_group)

    def test_gather_to_one_rank(self, in_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        group = plain_group()
        group.processor.use_all_gather = False
        monkeypatch.setattr(vllm_logits_processor, "tensor_model_parallel_gather", group.gather_columns)
        self.full(group, in_group)

    def test_logits_as_input(self, in_group: Any) -> None:
        group = plain_group(logits_as_input=True)
        in_group(group)
        assert isinstance(asked(group, 0), torch.Tensor)

    def test_another_processor_class(self, in_group: Any) -> None:
        group = plain_group()

        class Own(type(group.processor)):  # type: ignore[misc]
            pass

        group.processor = Own(64)
        self.full(group, in_group)

    def test_lora_on_the_head(self, in_group: Any) -> None:
        """LoRA calls the class's forward with its own object as self."""
        from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

        group = plain_group()
        wrapper = object.__new__(LogitsProcessorWithLoRA)
        torch.nn.Module.__init__(wrapper)
        wrapper.base_layer = group.processor
        seen = []
        object.__setattr__(wrapper, "_get_logits", lambda *a, **k: seen.append(1) or group.full.clone())
        group.processor = wrapper
        self.full(group, in_group)
        assert seen == [1]

    def test_added_vocabulary(self, in_group: Any) -> None:
        group = plain_group()
        full = torch.zeros((3, 128))
        group.heads = [shard_head.head(full, 64, rank, 2, 64, added=8) for rank in range(2)]
        group.full = full
        self.full(group, in_group)

    def test_a_head_of_another_group(self, in_group: Any) -> None:
        group = plain_group()
        group.heads = [shard_head.head(torch.zeros((3, 64)), 64, 0, 1, 64)] * 2
        group.gather_columns = lambda local: local  # type: ignore[method-assign]
        self.full(group, in_group)

    def test_a_head_of_another_rank(self, in_group: Any) -> None:
        group = plain_group()
        group.heads = group.heads[::-1]
        group.gather_columns = lambda local: torch.cat([local, local], dim=-1)  # type: ignore[method-assign]
        self.full(group, in_group)

    def test_not_a_vocabulary_parallel_head(self, in_group: Any) -> None:
        group = plain_group()
        group.heads = [SimpleNamespace(**vars(head)) for head in group.heads]
        self.full(group, in_group)

    def test_sharded_sampling(self, in_group: Any, config: Any) -> None:
        config.enable_reduce_sample = True
        group = plain_group()
        in_group(group)
        assert isinstance(asked(group, 0), torch.Tensor)

    def test_head_tensor_parallelism(self, in_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_argmax, "lmhead_tp_enable", lambda: True)
        self.full(plain_group(), in_group)

    def test_another_dtype(self, in_group: Any) -> None:
        group = plain_group()
        for head in group.heads:
            head.quant_method.full = group.full.double()
        group.full = group.full.double()
        self.full(group, in_group)


class Working(shard_head.Model):
    """A model that does something with its logits."""

    work: Callable[[Any], Any]

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return type(self).work(super().compute_logits(hidden_states))


WORK: dict[str, Callable[[Any], Any]] = {
    "slices": lambda logits: logits[..., :60],
    "scales": lambda logits: logits * 2,
    "scales in place": lambda logits: logits.mul_(2),
    "converts": lambda logits: logits.float(),
    "calls torch": lambda logits: torch.tanh(logits),
    "looks at the shape": lambda logits: logits if logits.shape[-1] == 64 else None,
    "returns another": lambda logits: (
        shard_argmax.ShardLogits(logits.local, 0, 64, logits.group)
        if isinstance(logits, shard_argmax.ShardLogits)
        else logits
    ),
    "returns nothing": lambda logits: None if isinstance(logits, shard_argmax.ShardLogits) else logits,
}


@pytest.mark.parametrize("work", WORK)
def test_a_model_that_works_on_its_logits_gets_them(work: str, in_group: Any) -> None:
    kind = type("Kind", (Working,), {"work": staticmethod(WORK[work])})
    group = plain_group()
    in_group(group)
    model = kind(group.processor, group.heads[0])
    expected = model.compute_logits(shard_head.rows(3))
    for _ in range(2):
        result = shard_argmax.logits(model.compute_logits, shard_head.rows(3))
        assert torch.equal(result, expected)
    assert shard_argmax._in_full == {kind}
    assert shard_argmax._request is None


def test_a_model_that_asks_twice_gets_both(in_group: Any) -> None:
    class Twice(shard_head.Model):
        def compute_logits(self, hidden_states: torch.Tensor) -> Any:
            super().compute_logits(hidden_states)
            return super().compute_logits(hidden_states)

    group = plain_group()
    in_group(group)
    model = Twice(group.processor, group.heads[0])
    assert torch.equal(shard_argmax.logits(model.compute_logits, shard_head.rows(3)), group.full)


@pytest.mark.parametrize("fault", [AttributeError, TypeError, RuntimeError])
def test_a_models_own_fault_is_raised(fault: type[Exception], in_group: Any) -> None:
    class Broken(shard_head.Model):
        def compute_logits(self, hidden_states: torch.Tensor) -> Any:
            raise fault("own")

    group = plain_group()
    in_group(group)
    with pytest.raises(fault, match="own"):
        shard_argmax.logits(Broken(group.processor, group.heads[0]).compute_logits, shard_head.rows(3))
    assert shard_argmax._request is None
    assert isinstance(group.processor(group.heads[0], shard_head.rows(3)), torch.Tensor)


class TestProof:
    """The device's argmax over shards is compared with its own over whole rows before it is trusted."""

    KEY = ("cpu", torch.bfloat16, 32, 2, 60)

    @pytest.fixture(autouse=True)
    def nothing_proven(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_argmax, "_proofs", {})

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "layout", [(32, 2, 60), (1, 2, 2), (16, 4, 33), (4, 2, 1), (124_160, 2, 248_320)]
    )
    def test_holds_here(self, dtype: torch.dtype, layout: tuple[int, int, int]) -> None:
        assert shard_argmax.proven(("cpu", dtype, *layout))

    def test_once_per_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[Any] = []
        prove = shard_argmax._prove
        monkeypatch.setattr(shard_argmax, "_prove", lambda *key: tried.append(key) or prove(*key))
        for _ in range(3):
            assert shard_argmax.proven(self.KEY)
        assert tried == [self.KEY]

    def test_not_while_capturing(self, in_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_argmax, "_capturing", lambda: True)
        monkeypatch.setattr(shard_argmax, "_prove", lambda *_: pytest.fail("waited for the device"))
        group = plain_group()
        in_group(group)
        assert isinstance(asked(group, 0), torch.Tensor)
        assert not shard_argmax._proofs and not shard_argmax._in_full

    def test_capturing_with_a_proof(self, in_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        group = plain_group()
        in_group(group)
        assert isinstance(asked(group, 0), shard_argmax.ShardLogits)
        monkeypatch.setattr(shard_argmax, "_capturing", lambda: True)
        assert isinstance(asked(group, 0), shard_argmax.ShardLogits)

    @pytest.mark.parametrize("capturing", [True, False])
    def test_capture_is_read_from_the_forward_context(self, capturing: bool, monkeypatch: Any) -> None:
        from vllm_ascend import ascend_forward_context

        assert not shard_argmax._capturing()
        monkeypatch.setattr(shard_argmax, "is_forward_context_available", lambda: True)
        monkeypatch.setattr(ascend_forward_context, "_EXTRA_CTX", SimpleNamespace(capturing=capturing))
        assert shard_argmax._capturing() is capturing

    @pytest.mark.parametrize(
        "kernel",
        [
            lambda x: x.shape[1] - 1 - x.flip(1).float().max(dim=-1).indices,
            lambda x: x.float().nan_to_num(nan=float("-inf"), posinf=float("inf")).max(dim=-1).indices,
            lambda x: (
                torch.where(x.float().abs() < torch.finfo(x.dtype).tiny, 0.0, x.float()).max(dim=-1).indices
            ),
            lambda x: torch.where(x.isnan(), float("inf"), x.float()).max(dim=-1).indices,
        ],
        ids=["last of ties", "ignores NaN", "flushes subnormals", "NaN as infinity"],
    )
    def test_a_kernel_that_picks_otherwise_is_not_trusted(
        self, kernel: Callable[[torch.Tensor], torch.Tensor], in_group: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        argmax = torch.Tensor.argmax

        def device(tensor: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
            if tensor.dtype is not torch.bfloat16:
                return argmax(tensor, dim=dim, keepdim=keepdim)
            picked = kernel(tensor)
            return picked.unsqueeze(-1) if keepdim else picked

        monkeypatch.setattr(torch.Tensor, "argmax", device)
        group = plain_group()
        in_group(group)
        for head in group.heads:
            head.quant_method.full = group.full.bfloat16()
        assert not shard_argmax.proven(self.KEY)
        group.full = group.full.bfloat16()
        assert isinstance(asked(group, 0), torch.Tensor)


# ---- two processes ----


def real_heads(rank: int, seeds: int) -> list[str]:
    """Real head, product, logits processor and gather against the argmax over shards. Returns mismatches."""
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor, AscendParallelLMHead

    wrong = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        vocabulary = (248, 250, 256, 65, 1000)[seed % 5]
        dtype = DTYPES[seed % 3]
        lm_head = AscendParallelLMHead(vocabulary, 16, bias=seed % 2 == 1, params_dtype=dtype)
        width = lm_head.num_embeddings_per_partition
        weight = torch.randint(-2, 3, (2 * width, 16), generator=generator).to(dtype)
        lm_head.weight.data = weight[rank * width : (rank + 1) * width].clone()
        bias = None
        if lm_head.bias is not None:
            bias = torch.randn((2 * width,), generator=generator).to(dtype)[rank * width : (rank + 1) * width]
        processor = AscendLogitsProcessor(vocabulary, scale=(1.0, 0.5)[seed % 2])
        hidden = torch.randint(-2, 3, (9, 16), generator=generator).to(dtype)
        expected = processor(lm_head, hidden, bias).argmax(dim=-1)

        class Biased(shard_head.Model):
            def compute_logits(self, hidden_states: torch.Tensor, bias: Any = bias) -> Any:
                return self.logits_processor(self.lm_head, hidden_states, bias)

        answer = shard_argmax.logits(Biased(processor, lm_head).compute_logits, hidden)
        if not isinstance(answer, shard_argmax.ShardLogits):
            wrong.append(f"{seed}: full logits")
        elif not torch.equal(answer.argmax(dim=-1), expected):
            wrong.append(f"{seed}: {answer.argmax(dim=-1)} for {expected}")
    return wrong


def given_rows(rank: int, seeds: int) -> tuple[list[str], int]:
    """Rows of special values over real gathers. Returns mismatches, and rows whose tie crosses the border."""
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    wrong, across = [], 0
    for seed in range(seeds):
        vocabulary = (64, 100, 66, 128)[seed % 4]
        full = shard_head.special_rows(16, shard_head.padded(vocabulary, 64), DTYPES[seed % 3], seed)
        lm_head = shard_head.head(full, vocabulary, rank, 2, 64)
        processor = AscendLogitsProcessor(vocabulary)
        expected = processor(lm_head, shard_head.rows(16)).argmax(dim=-1)
        width = lm_head.num_embeddings_per_partition
        best = full[:, :vocabulary].amax(dim=-1, keepdim=True)
        ties = full[:, :vocabulary] == best
        across += int((ties[:, :width].any(dim=-1) & ties[:, width:].any(dim=-1)).sum())
        answer = shard_argmax.logits(shard_head.Model(processor, lm_head).compute_logits, shard_head.rows(16))
        assert isinstance(answer, shard_argmax.ShardLogits)
        ours = answer.argmax(dim=-1)
        if not torch.equal(ours, expected):
            wrong.append(f"{seed}: {ours} for {expected}")
    return wrong, across


def gathered_bytes(rank: int) -> tuple[int, int]:
    """Bytes that this rank sends for one row of Qwen3.5's vocabulary: upstream, over shards."""
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    sent: list[int] = []
    group = tp2.group()
    all_gather = group.all_gather

    def count(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        sent.append(tensor.numel() * tensor.element_size())
        return all_gather(tensor, dim)

    group.all_gather = count
    try:
        full = torch.zeros((1, 248_320), dtype=torch.bfloat16)
        model = shard_head.Model(AscendLogitsProcessor(248_320), shard_head.head(full, 248_320, rank, 2, 64))
        model.compute_logits(shard_head.rows(1)).argmax(dim=-1)
        shard_argmax.logits(model.compute_logits, shard_head.rows(1)).argmax(dim=-1)
    finally:
        group.all_gather = all_gather
    assert len(sent) == 2
    return sent[0], sent[1]


def test_two_processes_with_real_heads() -> None:
    assert tp2.run(real_heads, 30) == [[], []]


def test_two_processes_with_special_rows() -> None:
    (wrong, across), (wrong_other, _) = tp2.run(given_rows, 24)
    assert wrong == wrong_other == []
    assert across > 50, "too few ties across ranks to tell"


def test_one_pair_per_row_goes_over_the_wire() -> None:
    assert tp2.run(gathered_bytes) == [(248_320, 8), (248_320, 8)]
