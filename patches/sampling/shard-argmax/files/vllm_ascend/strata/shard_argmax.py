"""The argmax of vocabulary-parallel logits, without gathering them.

A logits processor over a vocabulary that is split across the tensor-parallel group multiplies the hidden
states with its own columns and then gathers the columns of all ranks, only for an argmax in greedy decoding.
The argmax of the whole row is the best of the ranks' own bests: one (value, token id) pair per row and rank
goes over the wire instead of the vocabulary.

:func:`logits` asks a model for its logits and says that an argmax is all that is wanted. The logits processor
then hands out :class:`ShardLogits`, an opaque object. A model that returns what its processor made returns
that very object; one that does anything with its logits first (maps ids, scales, slices) can't, is found out
by that, and gets its logits in full from then on.

Equal to the argmax of the gathered logits because

- the local columns come from the same matrix product that upstream gathers, cut to the columns that upstream
  keeps, and scaled as upstream scales them (a soft cap is refused: tanh merges values, and need not treat
  equal inputs equally in every lane of a kernel);
- token ids are column numbers of the gathered row; a layout where they are not (added vocabulary) is refused;
- pairs travel as two int32 words, the value's float32 bits and the id, so that no id is rounded;
- ranks are compared in the order of their columns and the first best wins, NaN above all: what an argmax over
  the whole row does, tried once on the device per dtype and layout before it is trusted (:func:`proven`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.forward_context import is_forward_context_available
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.utils import lmhead_tp_enable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Key = tuple[str, torch.dtype, int, int, int]
"""(device type, dtype, columns per rank, ranks, columns that count)."""

_proofs: dict[Key, bool] = {}
_in_full: set[type] = set()
_request: _Request | None = None


class ShardLogits:
    """This rank's columns of the logits, of which only an argmax can be had.

    local: [rows, own columns], bfloat16, float16 or float32; own columns may be none. first: the token id of
    column 0. vocabulary: columns of the whole row. group: the ranks that hold the row together.
    """

    __slots__ = ("first", "group", "local", "vocabulary")

    def __init__(self, local: torch.Tensor, first: int, vocabulary: int, group: GroupCoordinator) -> None:
        self.local = local
        self.first = first
        self.vocabulary = vocabulary
        self.group = group

    def argmax(self, dim: int = -1) -> torch.Tensor:
        """Token ids int64 [rows], as the argmax of the whole rows. A collective: every rank of the group has
        to call it. Raises ValueError for another dim than the last.
        """
        if dim not in (-1, 1):
            raise ValueError(f"the logits of a shard have an argmax along the vocabulary only, not dim {dim}")
        return reduce(best(self.local, self.first), self.group)


class _Request:
    """One call of a model's compute_logits whose logits are wanted for an argmax only."""

    __slots__ = ("answer", "calls")

    def __init__(self) -> None:
        self.answer: ShardLogits | None = None
        self.calls = 0


def logits(
    compute_logits: Callable[..., torch.Tensor | None], *arguments: Any, **named: Any
) -> torch.Tensor | ShardLogits | None:
    """What ``compute_logits`` returns, or ShardLogits where that is the same to an argmax.

    compute_logits: a model's bound method. All ranks of the tensor-parallel group have to call this alike.
    A model that was found to work on its logits is called once more, and in full ever after.
    """
    global _request
    model = type(getattr(compute_logits, "__self__", compute_logits))
    if model in _in_full:
        return compute_logits(*arguments, **named)
    request = _request = _Request()
    try:
        result: Any = compute_logits(*arguments, **named)
    except (AttributeError, TypeError):
        # an operation on the opaque object; anything else shows again in the call below
        if request.answer is None:
            raise
        result = None
    finally:
        _request = None
    if request.answer is None or (result is request.answer and request.calls == 1):
        return result
    _in_full.add(model)
    return compute_logits(*arguments, **named)


def answer(
    processor: Any, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None
) -> ShardLogits | None:
    """The logits processor's side of :func:`logits`: None if nobody asked, or this head can't be answered.

    hidden_states: [rows, hidden]; lm_head, embedding_bias: the processor's own arguments. Refused: processors
    of another class (LoRA's stands in for the processor), soft caps, heads that are not split or carry added
    vocabulary, ``enable_reduce_sample`` and head tensor parallelism (both gather in their own ways).
    """
    request = _request
    if request is None:
        return None
    request.calls += 1
    group = get_tp_group()
    if not splits(processor, lm_head, group):
        return None
    shard = lm_head.shard_indices
    width = lm_head.num_embeddings_per_partition
    own = min(max(processor.org_vocab_size - shard.padded_org_vocab_start_index, 0), width)
    local = lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
    key = (local.device.type, local.dtype, width, group.world_size, processor.org_vocab_size)
    if not proven(key):
        return None
    local = local[..., :own]
    if processor.scale != 1.0:
        local *= processor.scale
    request.answer = ShardLogits(local, shard.padded_org_vocab_start_index, processor.org_vocab_size, group)
    return request.answer


def splits(processor: Any, lm_head: Any, group: GroupCoordinator) -> bool:
    """Whether the gathered row is the ranks' columns in order, each column's number its token id."""
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    if (
        group.world_size < 2
        or type(processor) is not AscendLogitsProcessor
        or processor.logits_as_input
        or processor.soft_cap is not None
        or not processor.use_all_gather
        or not isinstance(lm_head, VocabParallelEmbedding)
        or lmhead_tp_enable()
        or get_ascend_config().enable_reduce_sample is not False
    ):
        return False
    # the original vocabulary fills the shard: added tokens would stand between the ranks' columns
    shard, width = lm_head.shard_indices, lm_head.num_embeddings_per_partition
    return (
        lm_head.tp_size == group.world_size
        and shard.num_org_elements_padded == width
        and shard.padded_org_vocab_start_index == group.rank_in_group * width
        and 0 < processor.org_vocab_size <= group.world_size * width < 2**31
    )


def best(local: torch.Tensor, first: int) -> torch.Tensor:
    """The best column of each row as int32 [2, rows]: the value's float32 bits, then its token id.

    local: [rows, own columns], bfloat16, float16 or float32; first: the token id of column 0. A shard without
    columns offers -inf, which loses every tie, as its rank comes last.
    """
    rows, columns = local.shape
    if columns == 0:
        values = torch.full((rows,), float("-inf"), dtype=torch.float32, device=local.device)
        ids = torch.full((rows,), first, dtype=torch.int32, device=local.device)
    else:
        index = local.argmax(dim=-1, keepdim=True)
        values = local.gather(1, index).squeeze(1).to(torch.float32)
        ids = (index.squeeze(1) + first).to(torch.int32)
    return torch.stack((values.view(torch.int32), ids))


def reduce(pairs: torch.Tensor, group: GroupCoordinator) -> torch.Tensor:
    """Token ids int64 [rows] from each rank's :func:`best`, int32 [2, rows]. A collective over ``group``."""
    return combine(group.all_gather(pairs, dim=0).view(group.world_size, 2, pairs.shape[1]))


def combine(pairs: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [rows] of the best of int32 [ranks, 2, rows]; the lowest rank wins ties, NaN is above
    all.
    """
    winner = pairs[:, 0].view(torch.float32).argmax(dim=0, keepdim=True)
    return pairs[:, 1].gather(0, winner).squeeze(0).to(torch.int64)


def proven(key: Key) -> bool:
    """Whether the device's argmax over shards is its argmax over whole rows, in this dtype and in float32.

    Tried once per key, without communication, on rows with ties, infinities, NaN, signed zeros and subnormals
    inside shards and across their borders. Waits for the device, so that it answers no while a graph is being
    captured and nothing was tried before.
    """
    known = _proofs.get(key)
    if known is None:
        if _capturing():
            return False
        known = _proofs[key] = _prove(*key)
    return known


def _prove(device: str, dtype: torch.dtype, width: int, ranks: int, vocabulary: int) -> bool:
    if dtype not in DTYPES:
        return False
    rows = _trial_rows(dtype, width, vocabulary).to(device)
    expected = rows.argmax(dim=-1).tolist()
    wide = rows.to(torch.float32)
    return all(
        tokens == expected
        for tokens in (
            wide.argmax(dim=-1).tolist(),
            _over_shards(rows, width, ranks).tolist(),
            _over_shards(wide, width, ranks).tolist(),
        )
    )


def _over_shards(rows: torch.Tensor, width: int, ranks: int) -> torch.Tensor:
    starts = [rank * width for rank in range(ranks)]
    return combine(torch.stack([best(rows[:, start : start + width], start) for start in starts]))


def _trial_rows(dtype: torch.dtype, width: int, vocabulary: int) -> torch.Tensor:
    """[trials, vocabulary] on the host."""
    inf, nan = float("inf"), float("nan")
    tiny = torch.finfo(dtype).smallest_normal / 2
    last = vocabulary - 1
    spots = sorted({0, min(1, last), min(width - 1, last), min(width, last), vocabulary // 2, last})
    trials: list[tuple[float, Sequence[float]]] = [
        (0.0, [3.0] * len(spots)),
        (-1.0, [inf] * len(spots)),
        (-inf, []),
        (-inf, [-inf, -2.0, -2.0]),
        (0.0, [inf, 1.0, nan, nan]),
        (0.0, [nan, inf]),
        (-1.0, [-2.0, -0.0, 0.0]),
        (-1.0, [-2.0, 0.0, -0.0]),
        (0.0, [-1.0, tiny]),
    ]
    rows = torch.zeros((2 * len(trials), vocabulary), dtype=dtype)
    for number, (fill, values) in enumerate(trials):
        for half, places in enumerate((spots, spots[::-1])):
            row = rows[2 * number + half]
            row.fill_(fill)
            for place, value in zip(places, values, strict=False):
                row[place] = value
    return rows


def _capturing() -> bool:
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX

    return is_forward_context_available() and _EXTRA_CTX.capturing is True
