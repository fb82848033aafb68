"""The capture rule against a brute-force model of it, and the reported cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.errors import StrataError
from strata.serving import capture

SEQS = st.integers(1, 600)
N = st.integers(0, 15)


def model_adjust(sizes: list[int], m: int) -> list[int]:
    """The rule read off the cases, one candidate at a time."""
    top = max(sizes)
    legal = [t for t in range(1, top + 1) if t % m == 0]
    reached = {min((t for t in legal if t >= s), default=None) for s in sizes}
    result = sorted(t for t in reached if t is not None)
    return result or ([m] if m <= top else [])


def model_default(seqs: int, n: int) -> list[int]:
    bound = min(seqs * (n + 1), 512)
    grid = [
        t
        for t in range(1, bound + 1)
        if t in (1, 2, 4) or (t % 8 == 0 and t < 256) or (t >= 256 and t % 16 == 0)
    ]
    return model_adjust(grid, n + 1)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=20), st.integers(2, 16))
def test_adjustment_is_the_rule(sizes: list[int], m: int) -> None:
    assert capture.adjust(sizes, m) == model_adjust(sizes, m)


@given(st.lists(st.integers(1, 700), max_size=20))
def test_without_speculation_a_list_stays_as_it_is(sizes: list[int]) -> None:
    assert capture.adjust(sizes, 1) == sorted(set(sizes))


@given(SEQS, N)
def test_default_grid_is_the_rule(seqs: int, n: int) -> None:
    assert capture.defaults(seqs, n) == model_default(seqs, n)


@given(SEQS, N, st.one_of(st.none(), st.lists(st.integers(1, 600), max_size=6)))
def test_emitted_list_covers_exactly_max_num_seqs_and_survives_adjustment(
    seqs: int, n: int, wanted: list[int] | None
) -> None:
    kept = None if wanted is None else [w for w in wanted if w <= seqs]
    sizes = capture.capture_sizes(seqs, n, kept)
    assert sizes[-1] == seqs * (n + 1)
    assert all(s % (n + 1) == 0 for s in sizes)
    assert capture.adjust(sizes, n + 1) == sizes, "vLLM must leave the list as it is"
    assert capture.check(sizes, seqs, n)[1] is None
    for count in kept or ():
        assert count * (n + 1) in sizes, "no padding at a wanted concurrency"


@given(st.integers(1, 16), N, SEQS)
def test_sequence_parallel_unit_divides_or_is_refused(tp: int, n: int, seqs: int) -> None:
    try:
        m = capture.unit(n, tp, True)
    except StrataError as error:
        assert max(n + 1, tp) % (n + 1) or max(n + 1, tp) % tp
        assert error.findings[0].code == "E-CAPTURE-UNIT"
        return
    assert m % (n + 1) == 0
    assert m % tp == 0 or tp == 1
    sizes = capture.capture_sizes(seqs, n, tp=tp, sequence_parallel=True)
    assert all(s % m == 0 for s in sizes)
    assert capture.adjust(sizes, m) == sizes
    assert capture.covered(sizes, n) >= seqs


def test_concurrency_1_4_8_with_four_drafts() -> None:
    assert capture.capture_sizes(8, 4, [1, 4]) == [5, 20, 40]


def test_c01_a_list_made_without_thought_of_speculation() -> None:
    result, finding = capture.check([1, 2, 4, 8, 16, 32, 64], 128, 3)
    assert result == [4, 8, 16, 32, 64]
    assert finding is not None
    assert finding.code == "E-CAPTURE"
    assert "16 of 128" in finding.message
    assert "multiples of 4 up to 512" in finding.expected


@pytest.mark.parametrize(("seqs", "reach"), [(12, 8), (20, 16), (77, 72), (100, 96)])
def test_c02_default_grid_stops_short(seqs: int, reach: int) -> None:
    result, finding = capture.check(None, seqs, 0)
    assert result[-1] == reach
    assert finding is not None
    assert finding.code == "W-CAPTURE"
    assert f"{reach} of {seqs}" in finding.message
    assert f", {seqs}]" in finding.hint


def test_c03_no_common_unit_names_what_is_legal() -> None:
    with pytest.raises(StrataError) as caught:
        capture.unit(5, 4, True)
    hint = caught.value.findings[0].hint
    assert "N = 1, 3, 7, 11, 15" in hint
    assert "TP = 1, 2, 3, 6" in hint
    assert capture.unit(5, 4, False) == 6


def test_c04_a_maximum_counts_tokens() -> None:
    result, finding = capture.check(None, 6, 3, maximum=6)
    assert result == [4]
    assert finding is not None
    assert "1 of 6" in finding.message
    assert finding.hint.endswith("[4, 8, 12, 16, 20, 24]")
    result, finding = capture.check(None, 14, 2, maximum=42)
    assert result[-1] == 33
    assert finding is not None
    assert finding.hint.endswith("42]")


@pytest.mark.parametrize("n", [16, 40, -1])
def test_c14_at_most_sixteen_tokens_a_sequence(n: int) -> None:
    with pytest.raises(StrataError) as caught:
        capture.unit(n)
    assert caught.value.findings[0].code == "E-SPEC"
    assert capture.unit(15) == 16


def test_a_graph_larger_than_the_token_budget_is_refused() -> None:
    with pytest.raises(StrataError) as caught:
        capture.capture_sizes(100, 4, max_num_tokens=400)
    assert "lower max_num_seqs to 80" in caught.value.findings[0].hint


@pytest.mark.parametrize("wanted", [[0], [9], [1, 9]])
def test_a_wanted_concurrency_outside_is_refused(wanted: list[int]) -> None:
    with pytest.raises(StrataError):
        capture.capture_sizes(8, 0, wanted)
