"""Outcomes of upstream's unit tests: reading them from JUnit XML and comparing two runs. Pure; run_uts.py
runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

OUTCOMES = ("passed", "failed", "error", "skipped")
Outcomes = Counter[tuple[str, str]]
"""(test id, outcome) -> how often. An id may occur twice: a test that passes and then fails in teardown,
say."""


class ResultError(RuntimeError):
    """A result file that is missing, broken or empty."""


@dataclass(frozen=True)
class Run:
    """One run. name: for people, ``base`` or ``tuned (all=on)``, say; switches: what was installed, None for
    a tree without Strata."""

    name: str
    outcomes: Outcomes
    switches: dict[str, bool] | None

    def counts(self) -> dict[str, int]:
        """Outcome -> number of tests, without those that are 0."""
        total: Counter[str] = Counter()
        for (_, outcome), number in self.outcomes.items():
            total[outcome] += number
        return {outcome: total[outcome] for outcome in OUTCOMES if total[outcome]}

    def line(self) -> str:
        """``base: 1710 passed, 30 skipped``: the line for the CI log."""
        return f"{self.name}: {spelled(self.counts())}"


def spelled(counts: dict[str, int]) -> str:
    """``1710 passed, 30 skipped``."""
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def read_junit(path: Path) -> Outcomes:
    """Outcomes in a JUnit file as pytest writes it. Raises ResultError for a missing, broken or empty one."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ResultError(f"{path}: no test results ({error})") from error
    outcomes: Outcomes = Counter()
    for case in root.iter("testcase"):
        outcomes[f"{case.get('classname')}::{case.get('name')}", _outcome(case)] += 1
    if not outcomes:
        raise ResultError(f"{path}: no tests were run")
    return outcomes


def _outcome(case: ElementTree.Element) -> str:
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        if case.find(tag) is not None:
            return outcome
    return "passed"


@dataclass(frozen=True)
class Known:
    """A test that asserts an internal which a switch changes.

    test: its id; outcome: what becomes of it with the switch on; reason: what it asserts; replaced_by: our
    test that asserts what holds instead, as a path in the repository.
    """

    test: str
    switch: str
    outcome: str
    reason: str
    replaced_by: str


@dataclass(frozen=True)
class Expected:
    """What is known of a release. counts: outcome -> tests on the unpatched base; known: see Known."""

    counts: dict[str, int]
    known: tuple[Known, ...] = ()


def read_expected(path: Path, version: str) -> Expected:
    """What is recorded for ``version``. Raises ResultError where nothing is, or something else."""
    known = yaml.safe_load(path.read_text(encoding="utf-8"))
    if version not in known:
        raise ResultError(
            f"{path}: no counts for {version!r}, only for {', '.join(known)}; record those of this base"
        )
    content = known[version]
    where = f"{path}, {version}"
    if not isinstance(content, Mapping) or not {"counts"} <= content.keys() <= {"counts", "changed"}:
        raise ResultError(f"{where}: expected counts and, where there are any, changed; found {content!r}")
    counts = content["counts"]
    if not isinstance(counts, Mapping) or not counts.keys() <= set(OUTCOMES):
        raise ResultError(f"{where}: counts are {counts!r}, expected numbers of {', '.join(OUTCOMES)}")
    entries = tuple(_known(entry, where) for entry in content.get("changed") or ())
    if len({entry.test for entry in entries}) != len(entries):
        raise ResultError(f"{where}: a test is listed twice in changed")
    return Expected(dict(counts), entries)


def _known(entry: Any, where: str) -> Known:
    keys = ("test", "switch", "outcome", "reason", "replaced_by")
    if not isinstance(entry, Mapping) or entry.keys() != set(keys):
        raise ResultError(f"{where}: an entry of changed has exactly {', '.join(keys)}; found {entry!r}")
    if not all(isinstance(entry[key], str) and entry[key].strip() for key in keys):
        raise ResultError(f"{where}: an entry of changed has an empty field: {entry!r}")
    if entry["outcome"] not in OUTCOMES or entry["outcome"] == "passed":
        raise ResultError(f"{where}: {entry['test']}: outcome {entry['outcome']!r}; expected failed, say")
    return Known(**{key: entry[key] for key in keys})


def differences(base: Run, tuned: Run, expected: Expected) -> list[str]:
    """What is wrong, one line each; empty if both runs agree test by test and the base's counts are those
    expected.

    A test that is known to change with a switch has to change exactly so where that switch is on, and may not
    where it is off.
    """
    faults = []
    if base.counts() != expected.counts:
        faults.append(f"{base.line()}; expected {spelled(expected.counts)}")
    lost, gained = base.outcomes - tuned.outcomes, tuned.outcomes - base.outcomes
    for known in expected.known:
        if (tuned.switches or {}).get(known.switch) is not True:
            continue
        became = {outcome: number for (test, outcome), number in gained.items() if test == known.test}
        if became == {known.outcome: 1} and lost[known.test, "passed"] == 1:
            lost -= Counter({(known.test, "passed"): 1})
            gained -= Counter({(known.test, known.outcome): 1})
        elif not became:
            faults.append(
                f"{known.test}: listed as {known.outcome} with {known.switch} on, but is as in the base"
            )
    for test, outcome in sorted(lost + gained):
        side = base if lost[test, outcome] else tuned
        faults.append(f"{test}: {outcome} in {side.name} only")
    if base.switches is not None:
        faults.append("the base carries vllm_ascend.strata: it is no pristine base")
    if tuned.switches is None:
        faults.append("the tuned tree carries no vllm_ascend.strata: nothing was compared")
    return faults
