"""Vocabulary-parallel heads for tests: the real logits processor over columns that a test gives.

A head's ``quant_method`` hands out this rank's columns of a given matrix instead of multiplying, so that
ties, infinities and NaN can be put anywhere. Layout and indices come from vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding, pad_vocab_size


class Given:
    """A quantization method whose product is a given matrix, this rank's columns of it."""

    def __init__(self, full: torch.Tensor) -> None:
        self.full = full

    def apply(
        self, layer: Any, hidden_states: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        width = layer.num_embeddings_per_partition
        rows = self.full[hidden_states[:, 0].long()]
        local = rows[:, layer.tp_rank * width : (layer.tp_rank + 1) * width].clone()
        return local if bias is None else local + bias


def head(
    full: torch.Tensor, vocabulary: int, rank: int, ranks: int, padding: int, added: int = 0
) -> VocabParallelEmbedding:
    """One rank's head over ``full`` [rows, padded vocabulary]; hidden state i, a column of indices, gives row
    i.
    """
    layer = object.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(layer)
    layer.tp_rank, layer.tp_size = rank, ranks
    layer.org_vocab_size = vocabulary
    layer.num_embeddings = vocabulary + added
    layer.org_vocab_size_padded = pad_vocab_size(vocabulary, padding)
    layer.num_embeddings_padded = pad_vocab_size(layer.org_vocab_size_padded + added, padding)
    layer.num_embeddings_per_partition = layer.num_embeddings_padded // ranks
    layer.shard_indices = layer._get_indices(
        layer.num_embeddings_padded,
        layer.org_vocab_size_padded,
        layer.num_embeddings,
        vocabulary,
        rank,
        ranks,
    )
    shard = layer.shard_indices
    layer.num_org_embeddings_per_partition = shard.org_vocab_end_index - shard.org_vocab_start_index
    layer.quant_method = Given(full)
    return layer


def padded(vocabulary: int, padding: int, added: int = 0) -> int:
    """The width of the gathered row."""
    return pad_vocab_size(pad_vocab_size(vocabulary, padding) + added, padding)


class Model:
    """A model whose logits are what its logits processor makes of its head."""

    def __init__(self, processor: Any, lm_head: Any) -> None:
        self.logits_processor = processor
        self.lm_head = lm_head

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)


def rows(count: int) -> torch.Tensor:
    """Hidden states [count, 1] that ask :class:`Given` for its rows in order."""
    return torch.arange(count, dtype=torch.float32).unsqueeze(1)


SPECIAL = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-40, 6e-8, 1.0, 1.0078125, 3.0, -3.0]


def special_rows(count: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[count, width] of few distinct values, so that rows are full of ties, infinities, NaN and zeros of both
    signs.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    chosen = torch.randint(0, len(SPECIAL), (count, width), generator=generator)
    full = values[chosen]
    for row in range(count):
        # each kind of extreme value is in about half of the rows only, else every row would end in NaN
        if torch.rand((), generator=generator) < 0.6:
            full[row][full[row].isnan()] = 0.5
        if torch.rand((), generator=generator) < 0.5:
            full[row][full[row] == float("inf")] = 2.0
        if torch.rand((), generator=generator) < 0.1:
            full[row] = float("-inf")
    return full
