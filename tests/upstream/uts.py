"""Outcomes of upstream's unit tests: reading them from JUnit XML and comparing two runs. Pure; run_uts.py
runs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
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
    """One run. name: ``base`` or ``tuned``; switches: what was installed, None for a tree without Strata."""

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


def read_expected(path: Path, version: str) -> dict[str, int]:
    """The counts recorded for ``version``. Raises ResultError where there are none."""
    known = yaml.safe_load(path.read_text(encoding="utf-8"))
    if version not in known:
        raise ResultError(
            f"{path}: no counts for {version!r}, only for {', '.join(known)}; record those of this base"
        )
    counts: dict[str, int] = known[version]
    return counts


def differences(base: Run, tuned: Run, expected: dict[str, int]) -> list[str]:
    """What is wrong, one line each; empty if both runs agree test by test and the base's counts are those
    expected."""
    faults = []
    if base.counts() != expected:
        faults.append(f"{base.line()}; expected {spelled(expected)}")
    for test, outcome in sorted((base.outcomes - tuned.outcomes) + (tuned.outcomes - base.outcomes)):
        in_base = base.outcomes[test, outcome] > tuned.outcomes[test, outcome]
        faults.append(f"{test}: {outcome} in {base.name if in_base else tuned.name} only")
    if base.switches is not None:
        faults.append("the base carries vllm_ascend.strata: it is no pristine base")
    if tuned.switches is None:
        faults.append("the tuned tree carries no vllm_ascend.strata: nothing was compared")
    return faults
