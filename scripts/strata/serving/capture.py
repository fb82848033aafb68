"""The capture rule: which token counts get a graph, and how many sequences those graphs cover.

Sizes are counted in tokens. With N speculative tokens a decode step has N+1 tokens a sequence (the bonus
token is the +1), so legal sizes are multiples of m = N+1; with sequence parallelism over TP ranks m =
max(N+1, TP), and N+1 and TP must both divide it. Source: vLLM 0.23.0 ``config/vllm.py`` (default grid) and
``config/compilation.py`` (adjustment), with vllm-ascend's default bound ``max_num_seqs * (N+1)``, at most
512.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strata.errors import Finding, StrataError

DEFAULT_BOUND = 512
MAX_TOKENS_PER_SEQUENCE = 16
"""N+1 at most: the limit that vllm-ascend's attention backends assert (TND layout)."""
_EVERY = 16
_MAX_TP_LISTED = 16


def unit(n: int, tp: int = 1, sequence_parallel: bool = False) -> int:
    """m, the unit of capture sizes in tokens, for ``n`` speculative tokens (0: none) over ``tp`` ranks.

    E-SPEC where n+1 exceeds 16, E-CAPTURE-UNIT where n+1 and tp have no common unit (both with the legal
    values).
    """
    if not 0 <= n < MAX_TOKENS_PER_SEQUENCE:
        raise StrataError(
            Finding(
                "E-SPEC",
                f"{n} speculative tokens: N+1 is at most {MAX_TOKENS_PER_SEQUENCE}",
                expected=f"0 to {MAX_TOKENS_PER_SEQUENCE - 1}",
                found=str(n),
                hint=f"take {MAX_TOKENS_PER_SEQUENCE - 1} or fewer; gains flatten long before that",
            )
        )
    tokens = n + 1
    if not sequence_parallel or tp <= 1:
        return tokens
    m = max(tokens, tp)
    if m % tokens or m % tp:
        legal_n = [str(k) for k in legal_tokens(tp) if k]
        legal_tp = [str(k) for k in range(1, _MAX_TP_LISTED + 1) if tokens % k == 0]
        raise StrataError(
            Finding(
                "E-CAPTURE-UNIT",
                f"with sequence parallelism no capture size suits both N+1={tokens} and TP={tp}",
                expected=f"N+1 and TP both dividing max(N+1, TP)={m}",
                found=f"N={n}, TP={tp}",
                hint=f"for TP={tp} take N = {', '.join(legal_n)}; for N={n} take TP = {', '.join(legal_tp)} "
                f"(or a multiple of {tokens}); or turn sequence parallelism off",
            )
        )
    return m


def legal_tokens(tp: int) -> list[int]:
    """The N (0 included) that go with sequence parallelism over ``tp`` ranks, up to N+1 = 16."""
    return [
        k - 1 for k in range(1, MAX_TOKENS_PER_SEQUENCE + 1) if max(k, tp) % k == 0 and max(k, tp) % tp == 0
    ]


def default_grid(bound: int, max_num_tokens: int | None = None) -> list[int]:
    """vLLM's default sizes up to ``bound`` tokens: 1, 2, 4, then steps of 8 below 256, then steps of 16.

    max_num_tokens: ``max_num_batched_tokens``; it lowers the bound, and joins the grid where it lies within
    it.
    """
    if max_num_tokens is not None:
        bound = min(bound, max_num_tokens)
    sizes = (
        {s for s in (1, 2, 4) if s <= bound}
        | set(range(8, min(bound + 1, 256), 8))
        | set(range(256, bound + 1, 16))
    )
    if max_num_tokens is not None and max_num_tokens <= bound:
        sizes.add(max_num_tokens)
    return sorted(sizes)


def adjust(sizes: Iterable[int], m: int) -> list[int]:
    """vLLM's rounding: each size up to a multiple of ``m``, kept where that does not exceed the largest given
    size.

    Where nothing is left but one unit fits, that unit. Empty where not even that fits (vLLM refuses to start
    then).
    """
    given = sorted(set(sizes))
    if not given or m <= 1:
        return given
    top = given[-1]
    rounded = sorted({-(-s // m) * m for s in given if -(-s // m) * m <= top})
    return rounded or ([m] if m <= top else [])


def covered(sizes: Sequence[int], n: int) -> int:
    """How many sequences of n+1 tokens the largest size holds; every batch above runs without a graph."""
    return max(sizes, default=0) // (n + 1)


def defaults(max_num_seqs: int, n: int, max_num_tokens: int | None = None, m: int | None = None) -> list[int]:
    """The sizes that the base ends with when no list is given: default bound, default grid, adjustment."""
    bound = min(max_num_seqs * (n + 1), DEFAULT_BOUND)
    return adjust(default_grid(bound, max_num_tokens), m or n + 1)


def concurrencies(max_num_seqs: int) -> list[int]:
    """The sequence counts worth a graph of their own: each up to 16, then steps of 8 to 64, 16 to 256, 32
    above.

    Ends exactly at ``max_num_seqs``. Fewer graphs start faster and take less memory; the padding lost is
    below the step.
    """
    counts = set(range(1, min(max_num_seqs, _EVERY) + 1))
    for low, high, step in ((_EVERY, 64, 8), (64, 256, 16), (256, max_num_seqs, 32)):
        counts |= set(range(low, min(high, max_num_seqs) + 1, step))
    return sorted(counts | {max_num_seqs})


def capture_sizes(
    max_num_seqs: int,
    n: int,
    wanted: Sequence[int] | None = None,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    max_num_tokens: int | None = None,
) -> list[int]:
    """The list to emit, in tokens: one size for each wanted sequence count, the last for exactly
    ``max_num_seqs``.

    wanted: sequence counts (None: :func:`concurrencies`); ``max_num_seqs`` is added. With sequence
    parallelism each size is rounded up to the common unit. E-CAPTURE where a count exceeds ``max_num_seqs``
    or is below 1, or where the last size exceeds ``max_num_tokens`` (vLLM drops such sizes without a word).
    """
    m = unit(n, tp, sequence_parallel)
    counts = sorted({*(concurrencies(max_num_seqs) if wanted is None else wanted), max_num_seqs})
    if counts[0] < 1 or counts[-1] > max_num_seqs:
        raise StrataError(
            Finding(
                "E-CAPTURE",
                "a wanted concurrency lies outside 1..max_num_seqs",
                expected=f"1 to {max_num_seqs}",
                found=", ".join(str(c) for c in counts if not 1 <= c <= max_num_seqs),
                hint="raise max_num_seqs, or drop the value",
            )
        )
    sizes = sorted({-(-c * (n + 1) // m) * m for c in counts})
    if max_num_tokens is not None and sizes[-1] > max_num_tokens:
        raise StrataError(
            Finding(
                "E-CAPTURE",
                f"{max_num_seqs} sequences of {n + 1} tokens need a graph of {sizes[-1]} tokens, "
                f"which exceeds max_num_batched_tokens={max_num_tokens}",
                expected=f"max_num_batched_tokens of at least {sizes[-1]}",
                found=str(max_num_tokens),
                hint=f"raise max_num_batched_tokens, or lower max_num_seqs to {max_num_tokens // (n + 1)}",
            )
        )
    return sizes


def check(
    sizes: Sequence[int] | None,
    max_num_seqs: int,
    n: int,
    *,
    maximum: int | None = None,
    tp: int = 1,
    sequence_parallel: bool = False,
    max_num_tokens: int | None = None,
) -> tuple[list[int], Finding | None]:
    """What a written list (or a written maximum, or nothing) ends as, and what is wrong with it.

    sizes, maximum: as given to ``cudagraph_capture_sizes`` and ``max_cudagraph_capture_size`` (None: not
    given). Returns (resulting sizes, finding); the finding is E-CAPTURE where a written list or maximum
    covers fewer sequences than ``max_num_seqs``, W-CAPTURE where the default does, with the right list.
    """
    m = unit(n, tp, sequence_parallel)
    if sizes is not None:
        written = f"sizes {list(sizes)}"
        kept = [s for s in sizes if max_num_tokens is None or s <= max_num_tokens]
        result = adjust(kept, m)
    elif maximum is not None:
        written = f"maximum {maximum} without a list"
        result = adjust(default_grid(maximum, max_num_tokens), m)
    else:
        written = "no list, so the default grid"
        result = defaults(max_num_seqs, n, max_num_tokens, m)
    reach = covered(result, n)
    if reach >= max_num_seqs:
        return result, None
    limit = max_num_seqs if max_num_tokens is None else min(max_num_seqs, max_num_tokens // (n + 1))
    right = capture_sizes(max(limit, 1), n, tp=tp, sequence_parallel=sequence_parallel)
    return result, Finding(
        "W-CAPTURE" if sizes is None and maximum is None else "E-CAPTURE",
        f"graphs cover {reach} of {max_num_seqs} sequences; the rest runs without a graph",
        expected=f"multiples of {m} up to {right[-1]} tokens ({n + 1} a sequence)",
        found=f"{written}, which becomes {result}"
        if result
        else f"{written}, of which nothing is left: no start",
        hint=f'"cudagraph_capture_sizes": {right}',
    )
