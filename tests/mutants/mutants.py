"""Mutants of our own code: reading them, making them, choosing some, judging a run. Pure; run.py runs them.

``tests/mutants/<patch id>.yaml`` is a list of::

    - file: files/vllm_ascend/strata/x.py   # in the patch's directory
      find: "    return ENABLED and ready"  # one whole line of it, which must occur exactly once
      replace: "    return ready"           # what stands there in the mutant; may be empty or several lines
      tests: [tests/patches/test_x.py]      # what must fail; all below tests/patches, or all below tests/unit
      breaks: import                        # only for a mutant that is meant to break importing the file

A ``find`` without leading space matches a line of any indentation, which the mutant keeps.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

MINIMUM = 3
"""Mutants that a patch with Python logic must have."""
KINDS = ("tests/patches", "tests/unit")
_REQUIRED = ("file", "find", "replace", "tests")

State = Literal["caught", "survived", "broken", "timeout", "void"]


class MutantError(ValueError):
    """A mutant that cannot be made, or a file of mutants that cannot be read. The message says where."""


@dataclass(frozen=True)
class Mutant:
    """One changed line. number: its place in the patch's file, from 1; file: below the patch's directory."""

    patch: str
    number: int
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    breaks_import: bool = False

    @property
    def id(self) -> str:
        """``greedy-fast-path#2``."""
        return f"{self.patch}#{self.number}"

    @property
    def in_repository(self) -> bool:
        """Whether its tests are the repository's unit tests, which read the patch's own files."""
        return self.tests[0].startswith("tests/unit/")

    @property
    def target(self) -> str:
        """Where the file lies in a patched tree."""
        return self.file.removeprefix("files/")


@dataclass(frozen=True)
class Report:
    """What a pytest run said (plugin/strata_mutant_report.py).

    failed: node ids of tests that failed themselves; errors: of tests and files that did not get that far;
    passed: of those that passed; rootdir: what the node ids are relative to; imported: which of the
    files asked about the process imported.
    """

    failed: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    rootdir: str = ""
    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. by: node ids of the tests that caught it; note: for a person."""

    mutant: Mutant
    state: State
    by: tuple[str, ...] = ()
    note: str = ""
    seconds: float = 0.0


def read(path: Path) -> list[Mutant]:
    """The mutants of the patch that the file is named after. Raises MutantError for anything unexpected."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise MutantError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, list) or not content:
        raise MutantError(f"{path}: expected a list of mutants, found {type(content).__name__}")
    return [
        _parse(entry, path.stem, number, f"{path}, mutant {number}")
        for number, entry in enumerate(content, 1)
    ]


def _parse(entry: Any, patch: str, number: int, where: str) -> Mutant:
    if not isinstance(entry, Mapping):
        raise MutantError(f"{where}: expected {', '.join(_REQUIRED)}; found {entry!r}")
    missing = [key for key in _REQUIRED if key not in entry]
    unknown = [str(key) for key in entry if key not in (*_REQUIRED, "breaks")]
    if missing or unknown:
        raise MutantError(
            f"{where}: missing {', '.join(missing) or 'nothing'}, unknown {', '.join(unknown) or 'nothing'}; "
            f"known are {', '.join(_REQUIRED)}, breaks"
        )
    for key in ("file", "find", "replace"):
        if not isinstance(entry[key], str):
            raise MutantError(f"{where}: {key} is {entry[key]!r}, expected text; put it in quotes")
    if not entry["file"].startswith("files/") or ".." in entry["file"].split("/"):
        raise MutantError(f"{where}: file is {entry['file']!r}, expected a new file of the patch, files/…")
    if not entry["find"].strip() or "\n" in entry["find"].rstrip("\n"):
        raise MutantError(f"{where}: find is {entry['find']!r}, expected one line")
    tests = entry["tests"]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise MutantError(f"{where}: tests is {tests!r}, expected a list of test files")
    if not any(all(test.startswith(f"{kind}/") for test in tests) for kind in KINDS):
        raise MutantError(f"{where}: tests are {tests!r}; expected all below one of {', '.join(KINDS)}")
    if entry.get("breaks", "import") != "import":
        raise MutantError(f"{where}: breaks is {entry['breaks']!r}; the only value is import")
    return Mutant(
        patch,
        number,
        entry["file"],
        entry["find"].rstrip("\n"),
        entry["replace"].rstrip("\n"),
        tuple(tests),
        "breaks" in entry,
    )


def mutate(source: str, mutant: Mutant, where: str) -> str:
    """``source`` with the mutant's line replaced.

    Raises MutantError if the line does not occur exactly once, and for a Python file if the result is the
    same program or none at all.
    """
    lines = source.split("\n")
    find = mutant.find.rstrip()
    exact = [index for index, line in enumerate(lines) if line.rstrip() == find]
    hits = exact or [index for index, line in enumerate(lines) if line.strip() == find]
    if len(hits) != 1:
        raise MutantError(f"{where}: {mutant.id} finds {find!r} {len(hits)} times, expected once")
    line = lines[hits[0]]
    indent = "" if exact else line[: len(line) - len(line.lstrip())]
    lines[hits[0]] = "\n".join(f"{indent}{part}" if part else "" for part in mutant.replace.split("\n"))
    result = "\n".join(lines)
    if mutant.file.endswith(".py"):
        try:
            same = ast.dump(ast.parse(result)) == ast.dump(ast.parse(source))
        except SyntaxError as error:
            raise MutantError(
                f"{where}: {mutant.id} is no Python (line {error.lineno}: {error.msg})"
            ) from error
        if same:
            raise MutantError(f"{where}: {mutant.id} is the same program")
    elif result == source:
        raise MutantError(f"{where}: {mutant.id} changes nothing")
    return result


def sample(mutants: Sequence[Mutant], number: int, seed: str) -> list[Mutant]:
    """``number`` of them, the same ones for the same seed: of different patches as long as there are any."""
    chance = random.Random(seed)
    by_patch: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=lambda m: (m.patch, m.number)):
        by_patch.setdefault(mutant.patch, []).append(mutant)
    patches = list(by_patch)
    chance.shuffle(patches)
    for rest in by_patch.values():
        chance.shuffle(rest)
    rounds = max(map(len, by_patch.values()), default=0)
    dealt = [
        by_patch[patch][turn] for turn in range(rounds) for patch in patches if turn < len(by_patch[patch])
    ]
    return sorted(dealt[:number], key=lambda m: (m.patch, m.number))


def judge(mutant: Mutant, exit_code: int, report: Report | None) -> Outcome:
    """What a pytest run on the mutant means.

    Caught is a test that failed itself. An error at collection or in a fixture catches only a mutant that is
    meant to break the import; otherwise it may have nothing to do with what the test says.
    """
    if report is None or exit_code not in (0, 1, 2):
        return Outcome(mutant, "broken", note=f"pytest ended with exit code {exit_code}")
    if mutant.breaks_import:
        if report.errors:
            return Outcome(mutant, "caught", report.errors)
        state: State = "survived" if exit_code == 0 else "broken"
        return Outcome(mutant, state, note="the import was to break and did not")
    if report.failed:
        return Outcome(mutant, "caught", report.failed)
    if report.errors:
        return Outcome(mutant, "broken", report.errors, "an error before any test failed")
    if not report.passed:
        return Outcome(mutant, "broken", note="no test ran")
    unseen = mutant.target not in report.imported
    note = f"{len(report.passed)} tests passed" + (", and none imported the file" if unseen else "")
    return Outcome(mutant, "survived", note=note)


def confirm(outcomes: Iterable[Outcome], passed: Collection[str]) -> list[Outcome]:
    """Take back what was caught by a test that does not pass without the mutant.

    passed: node ids that pass on the unchanged code. A file counts as passing if one of its tests does.
    """
    good = {*passed, *(test.partition("::")[0] for test in passed)}
    return [
        replace(o, state="void", note="its test fails, or does not run, without the mutant")
        if o.state == "caught" and good.isdisjoint(o.by)
        else o
        for o in outcomes
    ]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each, then the sum."""
    width = max((len(o.mutant.id) for o in outcomes), default=0)
    lines = []
    for o in outcomes:
        lines.append(
            f"{o.state:<8}  {o.mutant.id:<{width}}  {o.seconds:6.1f} s  {o.by[0] if o.by else o.note}"
        )
        if o.state != "caught":
            lines += [
                f"    {o.mutant.file}",
                f"    - {o.mutant.find.strip()}",
                f"    + {o.mutant.replace.strip()}",
            ]
            lines += [f"    {o.note}"] if o.by and o.note else []
    caught = sum(o.state == "caught" for o in outcomes)
    lines.append(f"{caught} of {len(outcomes)} mutants caught")
    return lines
