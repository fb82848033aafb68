"""The verdict of one symbol, from what was locked and what is seen: no files, no trees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.errors import Finding
from strata.lock import Affirmation, Lock, LockBase, LockedEdit, LockedUse
from strata.model import At
from strata.shadow import Shadow
from strata.verdict import (
    AFFIRMABLE,
    ORDER,
    Found,
    Seen,
    Verdict,
    edit_verdicts,
    fault_verdict,
    gone_verdict,
    shadow_condition,
    use_verdicts,
    worst,
)

AT = At.parse("vllm_ascend/a.py::C.m")
ELSEWHERE = At.parse("vllm_ascend/b.py::C.m")
HERE = At.parse("vllm_ascend/a.py::D.m")


def fp(n: int) -> str:
    return f"py1:{n:032x}"


def locked(**edit: object) -> Lock:
    entry = LockedEdit.model_validate(
        {"at": AT, "fingerprint": fp(1), "body": fp(2), "neighbours": (fp(3),), **edit}
    )
    use = LockedUse(at=AT, fingerprint=fp(1), body=fp(2))
    return Lock(fp=1, base=LockBase(version="0.23.0"), edits=(entry,), uses=(use,))


def seen(**parts: object) -> Seen:
    return Seen(
        **{"at": AT, "place": AT, "fingerprint": fp(1), "body": fp(2), "neighbours": (fp(3),), **parts}
    )  # type: ignore[arg-type]


def only(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1
    return verdicts[0]


def test_untouched() -> None:
    verdict = only(edit_verdicts("p", locked(), seen()))
    assert (verdict.name, verdict.go, verdict.finding) == ("UNTOUCHED", True, None)


@pytest.mark.parametrize(
    ("neighbours", "near"), [((fp(3),), False), ((fp(4),), True), ((fp(3), fp(4)), False)]
)
def test_needs_review_near_and_far(neighbours: tuple[str, ...], near: bool) -> None:
    verdict = only(edit_verdicts("p", locked(), seen(fingerprint=fp(9), neighbours=neighbours)))
    assert (verdict.name, verdict.go, verdict.near, verdict.affirmable) == ("NEEDS_REVIEW", False, near, True)
    assert verdict.finding is not None
    assert "C.m" in verdict.finding.message
    assert "strata affirm p" in verdict.finding.hint
    assert (verdict.finding.expected, verdict.finding.found) == (fp(1), fp(9))


def test_moved_inside_the_file_goes() -> None:
    verdict = only(edit_verdicts("p", locked(), seen(place=HERE, fingerprint=fp(8))))
    assert (verdict.name, verdict.go) == ("MOVED", True)


def test_moved_and_changed_needs_review() -> None:
    verdict = only(edit_verdicts("p", locked(), seen(place=HERE, fingerprint=fp(8), body=fp(7))))
    assert (verdict.name, verdict.go) == ("NEEDS_REVIEW", False)


def test_moved_to_another_file_stops_and_lists_twins() -> None:
    twin = Found(At.parse("vllm_ascend/c.py::C.m"), 7, 1.0)
    verdict = only(edit_verdicts("p", locked(), seen(place=ELSEWHERE, twins=(twin,))))
    assert (verdict.name, verdict.go, verdict.affirmable) == ("MOVED", False, True)
    assert verdict.finding is not None and "vllm_ascend/c.py::C.m" in verdict.finding.render()
    assert only(edit_verdicts("p", locked(moved_to=ELSEWHERE), seen(place=ELSEWHERE))).go


def test_a_move_with_a_twin_in_the_file_is_not_clear() -> None:
    verdict = only(edit_verdicts("p", locked(), seen(place=HERE, twins=(Found(AT, 3, 1.0),))))
    assert (verdict.name, verdict.go) == ("MOVED", False)


def test_contract_changed() -> None:
    verdict = only(use_verdicts("p", locked(), seen(fingerprint=fp(9))))
    assert (verdict.name, verdict.go, verdict.affirmable) == ("CONTRACT_CHANGED", False, True)
    assert only(use_verdicts("p", locked(), seen())).go


@pytest.mark.parametrize("lock", [None, Lock(fp=1, base=LockBase(version="0.23.0"))])
def test_no_lock(lock: Lock | None) -> None:
    for verdicts in (edit_verdicts("p", lock, seen()), use_verdicts("p", lock, seen())):
        verdict = only(verdicts)
        assert (verdict.name, verdict.go, verdict.affirmable) == ("NO_LOCK", False, True)


def test_a_changed_result_of_another_patch_needs_review() -> None:
    lock = locked(on={"other": fp(5)})
    assert only(edit_verdicts("p", lock, seen(on={"other": fp(5)}))).go
    verdict = only(edit_verdicts("p", lock, seen(on={"other": fp(6)})))
    assert verdict.name == "NEEDS_REVIEW"
    assert verdict.finding is not None and "other" in verdict.finding.render()
    assert only(edit_verdicts("p", lock, seen())).name == "NEEDS_REVIEW"


ALWAYS = Shadow("assigned", "SHADOWED", "vllm_ascend/patch/platform/patch_x.py:9", "assigned over")
SOMETIMES = Shadow("dead-branch", "IDLE", "vllm_ascend/a.py:5", "not by default", "only with 310P")


@pytest.mark.parametrize("give", [edit_verdicts, use_verdicts])
def test_an_unconditional_shadow_stops_for_good(give: object) -> None:
    first, second = give("p", locked(), seen(shadows=(ALWAYS, SOMETIMES)))  # type: ignore[operator]
    assert (first.name, first.go, first.affirmable) == ("SHADOWED", False, False)
    assert second.name == "UNTOUCHED"


def test_a_conditional_shadow_stops_until_affirmed_under_its_condition() -> None:
    shade = seen(shadows=(SOMETIMES,))
    verdict = edit_verdicts("p", locked(), shade)[0]
    assert (verdict.name, verdict.go, verdict.affirmable) == ("IDLE", False, True)
    assert "310P" in verdict.condition
    word = Affirmation(
        symbol=str(AT), verdict="IDLE", reason="meant so", date="2026-01-01", condition=verdict.condition
    )
    kept = locked().model_copy(update={"affirmed": (word,)})
    assert edit_verdicts("p", kept, shade)[0].go
    other = Shadow("dead-branch", "IDLE", "vllm_ascend/a.py:5", "not by default", "only with xlite")
    assert not edit_verdicts("p", kept, seen(shadows=(other,)))[0].go


def test_the_condition_does_not_hang_on_line_numbers() -> None:
    moved = Shadow("dead-branch", "IDLE", "vllm_ascend/a.py:50", "not by default", "only with 310P")
    assert shadow_condition([SOMETIMES]) == shadow_condition([moved])


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("E-SYMBOL-GONE", "SYMBOL_GONE"),
        ("E-FILE-GONE", "FILE_GONE"),
        ("E-AMBIGUOUS", "AMBIGUOUS"),
        ("E-CONFLICT", "CONFLICT"),
        ("E-OVERLAP", "CONFLICT"),
        ("E-PARTIAL", "CONFLICT"),
        ("E-PARSE", "CONFLICT"),
        ("E-something-new", "CONFLICT"),
    ],
)
def test_faults_stop_and_cannot_be_affirmed(code: str, name: str) -> None:
    verdict = fault_verdict("p", AT, Finding(code, "m", details=("near: x",)))
    assert (verdict.name, verdict.go, verdict.affirmable) == (name, False, False)
    assert verdict.finding is not None and verdict.finding.code == code
    assert verdict.finding.hint


def test_gone_names_candidates() -> None:
    verdict = gone_verdict("p", AT, file_gone=False, likely=[Found(HERE, 12, 0.91)])
    assert verdict.name == "SYMBOL_GONE"
    assert verdict.finding is not None
    text = verdict.finding.render()
    assert "vllm_ascend/a.py::D.m (line 12), 91% alike" in text


NAMES = st.sampled_from(ORDER)


@given(st.lists(st.tuples(NAMES, st.booleans()), min_size=1))
def test_what_stops_comes_before_what_goes_and_the_worst_of_it_wins(pairs: list[tuple[str, bool]]) -> None:
    verdicts = [Verdict("p", AT, name, go) for name, go in pairs]
    found = worst(verdicts)
    assert found is not None
    stopping = [v for v in verdicts if not v.go]
    assert found.go is (not stopping)
    assert all(ORDER.index(found.name) >= ORDER.index(v.name) for v in stopping or verdicts)


@given(st.permutations([fp(3), fp(4), fp(5)]), st.integers(0, 5), st.booleans())
def test_a_changed_fingerprint_is_never_untouched(neighbours: list[str], change: int, used: bool) -> None:
    now = seen(fingerprint=fp(10 + change), body=fp(20 + change), neighbours=tuple(neighbours))
    verdict = only((use_verdicts if used else edit_verdicts)("p", locked(), now))
    assert verdict.name in AFFIRMABLE
    assert not verdict.go


def test_every_verdict_has_its_place_in_the_order() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert set(AFFIRMABLE) < set(ORDER)
    assert worst([]) is None
