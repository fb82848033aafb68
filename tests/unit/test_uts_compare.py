"""Comparing two runs of upstream's unit tests (tests/upstream/uts.py)."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "upstream"))

import run_uts
import uts

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.ut.test_a" name="test_ok"/>
<testcase classname="tests.ut.test_a" name="test_bad"><failure message="x"/></testcase>
<testcase classname="tests.ut.test_a" name="test_teardown"/>
<testcase classname="tests.ut.test_a" name="test_teardown"><error message="x"/></testcase>
<testcase classname="tests.ut.test_b" name="test_later"><skipped message="x"/></testcase>
</testsuite></testsuites>"""

outcome_maps = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.sampled_from(uts.OUTCOMES), min_size=1
)


def run(name: str, outcomes: dict[str, str]) -> uts.Run:
    return uts.Run(name, Counter(outcomes.items()), None if name == "base" else {"some_switch": True})


def test_junit_is_read_with_repeated_ids(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT, encoding="utf-8")
    outcomes = uts.read_junit(path)
    assert outcomes["tests.ut.test_a::test_teardown", "passed"] == 1
    assert outcomes["tests.ut.test_a::test_teardown", "error"] == 1
    assert uts.Run("base", outcomes, None).line() == "base: 2 passed, 1 failed, 1 error, 1 skipped"


@pytest.mark.parametrize("text", ["", "<testsuites/>", "<testsuites><testsuite>"])
def test_no_results_are_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(uts.ResultError, match=r"junit\.xml"):
        uts.read_junit(path)
    with pytest.raises(uts.ResultError, match="no test results"):
        uts.read_junit(tmp_path / "absent.xml")


@given(outcome_maps)
def test_equal_runs_have_no_differences(outcomes: dict[str, str]) -> None:
    base = run("base", outcomes)
    assert uts.differences(base, run("tuned", outcomes), uts.Expected(base.counts())) == []


@given(outcome_maps, outcome_maps)
def test_any_difference_is_named(one: dict[str, str], other: dict[str, str]) -> None:
    base = run("base", one)
    faults = uts.differences(base, run("tuned", other), uts.Expected(base.counts()))
    changed = {test for test in one.keys() | other.keys() if one.get(test) != other.get(test)}
    assert {fault.partition(":")[0] for fault in faults} == changed


def test_the_same_wrong_counts_in_both_runs_are_a_fault() -> None:
    base = run("base", {"a": "failed"})
    faults = uts.differences(base, run("tuned", {"a": "failed"}), uts.Expected({"passed": 1}))
    assert faults == ["base: 1 failed; expected 1 passed"]


def test_each_tree_must_be_what_it_is_called() -> None:
    same = Counter({("a", "passed"): 1})
    faults = uts.differences(
        uts.Run("base", same, {}), uts.Run("tuned", same, None), uts.Expected({"passed": 1})
    )
    assert len(faults) == 2
    assert "no pristine base" in faults[0]
    assert "nothing was compared" in faults[1]


def test_expected_counts_of_an_unknown_release(tmp_path: Path) -> None:
    expected = Path(uts.__file__).with_name("expected.yaml")
    assert uts.read_expected(expected, "0.23.0").counts == {"passed": 1710, "skipped": 30}
    with pytest.raises(uts.ResultError, match=r"no counts for '9\.9\.9', only for 0\.23\.0"):
        uts.read_expected(expected, "9.9.9")


KNOWN = uts.Known("t::old", "some_switch", "failed", "asserts one copy per call", "tests/patches/test_x.py")


@pytest.mark.parametrize(
    ("on", "became", "faults"),
    [
        (True, "failed", []),
        (False, "passed", []),
        (True, "passed", ["t::old: listed as failed with some_switch on, but is as in the base"]),
        (True, "error", ["t::old: error in tuned only", "t::old: passed in base only"]),
        (False, "failed", ["t::old: failed in tuned only", "t::old: passed in base only"]),
    ],
)
def test_a_known_change_happens_where_its_switch_is_on(on: bool, became: str, faults: list[str]) -> None:
    base = run("base", {"t::old": "passed", "t::other": "passed"})
    outcomes = Counter({("t::old", became): 1, ("t::other", "passed"): 1})
    tuned = uts.Run("tuned", outcomes, {"some_switch": on})
    assert uts.differences(base, tuned, uts.Expected({"passed": 2}, (KNOWN,))) == faults


@given(outcome_maps)
def test_a_known_change_excuses_no_other_test(outcomes: dict[str, str]) -> None:
    base = run("base", {**outcomes, "t::old": "passed"})
    tuned = run("tuned", {**dict.fromkeys(outcomes, "error"), "t::old": "failed"})
    faults = uts.differences(base, tuned, uts.Expected(base.counts(), (KNOWN,)))
    changed = {test for test, outcome in outcomes.items() if outcome != "error"}
    assert {fault.partition(":")[0] for fault in faults} == changed


def test_a_switch_that_the_image_does_not_have_changes_nothing() -> None:
    same = Counter({("t::old", "passed"): 1})
    faults = uts.differences(
        uts.Run("base", same, None), uts.Run("tuned", same, {}), uts.Expected({"passed": 1}, (KNOWN,))
    )
    assert faults == []


ENTRY = {"test": "t", "switch": "s", "outcome": "failed", "reason": "r", "replaced_by": "p"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"passed": 1}, "expected counts"),
        ({"counts": {"passes": 1}}, "expected numbers of"),
        ({"counts": {"passed": 1}, "changed": [{**ENTRY, "why": "x"}]}, "has exactly"),
        ({"counts": {"passed": 1}, "changed": [{**ENTRY, "reason": " "}]}, "empty field"),
        ({"counts": {"passed": 1}, "changed": [{**ENTRY, "outcome": "passed"}]}, "expected failed"),
        ({"counts": {"passed": 1}, "changed": [ENTRY, ENTRY]}, "listed twice"),
    ],
)
def test_an_unusable_record_is_refused(tmp_path: Path, content: object, said: str) -> None:
    path = tmp_path / "expected.yaml"
    path.write_text(yaml.safe_dump({"1.0": content}), encoding="utf-8")
    with pytest.raises(uts.ResultError, match=said):
        uts.read_expected(path, "1.0")


def test_each_recorded_change_is_replaced_by_a_test_of_ours() -> None:
    """Of a switch that a patch of the series has."""
    path = Path(uts.__file__).with_name("expected.yaml")
    root = path.parents[2]
    switches = {
        spec["switch"]["name"]
        for spec in map(yaml.safe_load, (p.read_text() for p in (root / "patches").glob("*/*/patch.yaml")))
        if spec.get("switch")
    }
    assert switches
    for version in yaml.safe_load(path.read_text(encoding="utf-8")):
        for known in uts.read_expected(path, version).known:
            assert (root / known.replaced_by).is_file()
            assert known.switch in switches


def test_the_three_modes() -> None:
    assert run_uts.MODES == ("all=off", "", "all=on")
    assert [run_uts.mode_name(mode) for mode in run_uts.MODES] == [
        "tuned (all=off)",
        "tuned (defaults)",
        "tuned (all=on)",
    ]


def test_the_container_has_no_network_and_no_privilege(tmp_path: Path) -> None:
    command = run_uts.in_image("strata:test", tmp_path, "all=off")
    assert "--rm" in command
    assert command[command.index("--network") + 1] == "none"
    assert not any(word.startswith(("--privileged", "--publish")) for word in command)
    assert "STRATA_SWITCHES=all=off" in command


def test_a_directory_without_unit_tests_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = ["--base-tree", str(tmp_path), "--tuned-tree", str(tmp_path)]
    assert run_uts.main(["--version", "0.23.0", "--python", sys.executable, *trees]) == 2
    assert "no tests/ut" in capsys.readouterr().err
