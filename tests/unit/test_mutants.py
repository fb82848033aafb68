"""The mutation runner's pure part, its overlay, and that the repository's own mutants can be made."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "mutants"))

import mutants as m
import run as runner

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "def f(x):\n    if x:\n        return 1\n    return 2\n"
FILE = "files/vllm_ascend/strata/x.py"
TESTS = ("tests/patches/test_x.py",)


def mutant(find: str = "    return 2", replace: str = "    return 3", **other: Any) -> m.Mutant:
    return m.Mutant(
        **{"patch": "p", "number": 1, "file": FILE, "find": find, "replace": replace, "tests": TESTS, **other}
    )


class TestMutate:
    @pytest.mark.parametrize(
        ("find", "replace", "result"),
        [
            ("    return 2", "    return 3", SOURCE.replace("2", "3")),
            ("return 2", "return 3", SOURCE.replace("2", "3")),
            ("return 1", "y = 1\nreturn y", SOURCE.replace("return 1", "y = 1\n        return y")),
            ("    return 2", "", SOURCE.replace("    return 2", "")),
        ],
    )
    def test_one_line_is_replaced(self, find: str, replace: str, result: str) -> None:
        assert m.mutate(SOURCE, mutant(find, replace), "x.py") == result

    @pytest.mark.parametrize(
        ("find", "replace", "said"),
        [
            ("    return 4", "", "0 times, expected once"),
            ("        return 2", "", "0 times"),
            ("    if x:", "    if (x):", "same program"),
            ("    if x:", "    if x", "no Python"),
            ("    return 2", "    return 2  # two", "same program"),
        ],
    )
    def test_what_cannot_be_made(self, find: str, replace: str, said: str) -> None:
        with pytest.raises(m.MutantError, match=rf"x\.py: p#1 .*{said}"):
            m.mutate(SOURCE, mutant(find, replace), "x.py")

    def test_a_line_that_occurs_twice(self) -> None:
        with pytest.raises(m.MutantError, match="2 times"):
            m.mutate(SOURCE + SOURCE, mutant(), "x.py")

    def test_an_exact_line_wins_over_the_same_text_elsewhere(self) -> None:
        source = "def f(x):\n    pass\n    if x:\n        pass\n    return x\n"
        assert m.mutate(source, mutant("        pass", "        x = 1"), "x.py").count("pass") == 1

    def test_other_languages_have_to_change(self) -> None:
        with pytest.raises(m.MutantError, match="changes nothing"):
            m.mutate("a\nb", mutant("a", "a", file="files/csrc/x.cmake"), "x.cmake")

    @given(st.lists(st.text("ab =1", max_size=6), min_size=1, max_size=8), st.data())
    def test_all_other_lines_stay(self, lines: list[str], data: st.DataObject) -> None:
        where = data.draw(st.integers(0, len(lines) - 1))
        lines[where] = "  unique"
        made = m.mutate("\n".join(lines), mutant("unique", "other", file="files/x.txt"), "x")
        assert made.split("\n") == [*lines[:where], "  other", *lines[where + 1 :]]


ENTRY = {"file": FILE, "find": "a", "replace": "b", "tests": list(TESTS)}


class TestRead:
    def test_a_file_of_mutants(self, tmp_path: Path) -> None:
        path = tmp_path / "some-patch.yaml"
        path.write_text(yaml.safe_dump([ENTRY, {**ENTRY, "breaks": "import"}]))
        first, second = m.read(path)
        assert (first.id, second.id) == ("some-patch#1", "some-patch#2")
        assert not first.breaks_import and second.breaks_import
        assert first.target == "vllm_ascend/strata/x.py" and not first.in_repository

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ([], "expected a list"),
            ({"a": 1}, "expected a list"),
            (["a"], "mutant 1: expected file"),
            ([{**ENTRY, "why": "x"}], "unknown why"),
            ([{k: v for k, v in ENTRY.items() if k != "find"}], "missing find"),
            ([ENTRY, {**ENTRY, "replace": 1}], "mutant 2: replace is 1"),
            ([{**ENTRY, "find": " "}], "expected one line"),
            ([{**ENTRY, "find": "a\nb"}], "expected one line"),
            ([{**ENTRY, "file": "vllm_ascend/x.py"}], "expected a new file"),
            ([{**ENTRY, "file": "files/../x.py"}], "expected a new file"),
            ([{**ENTRY, "tests": []}], "expected a list of test files"),
            ([{**ENTRY, "tests": ["tests/patches/a.py", "tests/unit/b.py"]}], "all below one of"),
            ([{**ENTRY, "breaks": "all"}], "the only value is import"),
        ],
    )
    def test_anything_else_is_refused(self, tmp_path: Path, content: Any, said: str) -> None:
        path = tmp_path / "p.yaml"
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(m.MutantError, match=rf"p\.yaml.*{said}"):
            m.read(path)


class TestJudge:
    @pytest.mark.parametrize(
        ("code", "report", "state"),
        [
            (1, m.Report(failed=("t::a",), passed=("t::b",)), "caught"),
            (0, m.Report(passed=("t::a",)), "survived"),
            (1, m.Report(errors=("t::a",)), "broken"),
            (2, m.Report(errors=("t",)), "broken"),
            (0, m.Report(), "broken"),
            (4, m.Report(), "broken"),
            (5, m.Report(), "broken"),
            (-11, None, "broken"),
            (1, None, "broken"),
        ],
    )
    def test_only_a_failed_test_catches(self, code: int, report: m.Report | None, state: str) -> None:
        assert m.judge(mutant(), code, report).state == state

    @pytest.mark.parametrize(
        ("code", "report", "state"),
        [
            (2, m.Report(errors=("t",)), "caught"),
            (1, m.Report(errors=("t::a",)), "caught"),
            (1, m.Report(failed=("t::a",)), "broken"),
            (0, m.Report(passed=("t::a",)), "survived"),
        ],
    )
    def test_one_that_breaks_the_import(self, code: int, report: m.Report, state: str) -> None:
        assert m.judge(mutant(breaks_import=True), code, report).state == state

    def test_a_survivor_whose_file_nobody_imports_is_said(self) -> None:
        one = mutant()
        assert "none imported" in m.judge(one, 0, m.Report(passed=("t::a",))).note
        seen = m.Report(passed=("t::a",), imported=(one.target,))
        assert "none imported" not in m.judge(one, 0, seen).note

    @pytest.mark.parametrize(
        ("by", "passed", "state"),
        [
            (("t::a",), {"t::a"}, "caught"),
            (("t::a",), {"t::b"}, "void"),
            (("t::a",), set(), "void"),
            (("t::a", "t::b"), {"t::b"}, "caught"),
            (("t",), {"t::b"}, "caught"),
            (("t",), {"u::b"}, "void"),
        ],
    )
    def test_what_fails_anyway_catches_nothing(
        self, by: tuple[str, ...], passed: set[str], state: str
    ) -> None:
        (outcome,) = m.confirm([m.Outcome(mutant(), "caught", by)], passed)
        assert outcome.state == state

    def test_confirming_saves_no_survivor(self) -> None:
        outcomes = [m.Outcome(mutant(), "survived"), m.Outcome(mutant(), "timeout")]
        assert m.confirm(outcomes, {"t::a"}) == outcomes

    def test_the_table_shows_what_was_not_caught(self) -> None:
        lines = m.table([m.Outcome(mutant(), "caught", ("t::a",)), m.Outcome(mutant(number=2), "survived")])
        assert lines[-1] == "1 of 2 mutants caught"
        assert "    - return 2" in lines and "    + return 3" in lines


batches = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 5), min_size=1).map(
    lambda sizes: [mutant(patch=p, number=n) for p, size in sizes.items() for n in range(1, size + 1)]
)


@given(batches, st.integers(1, 30), st.text(max_size=5), st.randoms())
def test_a_sample_is_fixed_by_its_seed_and_spread_over_patches(
    known: list[m.Mutant], number: int, seed: str, chance: Any
) -> None:
    drawn = m.sample(known, number, seed)
    chance.shuffle(known)
    assert m.sample(known, number, seed) == drawn
    assert len(drawn) == len(set(drawn)) == min(number, len(known))
    counts = Counter(one.patch for one in drawn)
    total = Counter(one.patch for one in known)
    assert all(counts[p] >= min(total[p], max(counts.values()) - 1) for p in total)


def test_seeds_draw_differently() -> None:
    known = [mutant(patch=p, number=n) for p in "abcdef" for n in (1, 2, 3)]
    assert len({tuple(one.id for one in m.sample(known, 6, str(seed))) for seed in range(20)}) > 5


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "vllm_ascend/__init__.py": "",
        "vllm_ascend/ops/__init__.py": "a = 1",
        "vllm_ascend/strata/__init__.py": "",
        "vllm_ascend/strata/x.py": "b = 1",
        "vllm_ascend/strata/y.py": "c = 1",
        "vllm_ascend/strata/__pycache__/x.pyc": "stale",
        "setup.py": "",
    }.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def test_the_overlay_changes_one_file_and_copies_none(tree: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    runner.overlay(tree, "vllm_ascend/strata/x.py", "b = 2", view)
    real = [path.relative_to(view) for path in view.rglob("*") if path.is_file() and not path.is_symlink()]
    assert Path("vllm_ascend/strata/x.py") in real
    assert all(path == Path("vllm_ascend/strata/x.py") for path in real)
    assert (view / "vllm_ascend/ops").is_symlink() and (view / "vllm_ascend/strata/y.py").is_symlink()
    assert (view / "vllm_ascend/strata/y.py").read_text() == "c = 1"
    assert not (view / "vllm_ascend/strata/__pycache__").exists()
    assert not (view / "setup.py").exists()
    assert (tree / "vllm_ascend/strata/x.py").read_text() == "b = 1"


def test_an_overlay_without_a_change_is_the_tree(tree: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    runner.overlay(tree, "vllm_ascend/strata/x.py", None, view)
    assert (view / "vllm_ascend/strata/x.py").read_text() == "b = 1"


def test_the_container_gets_no_network_and_nothing_to_write_but_the_results(tmp_path: Path) -> None:
    command = runner.image_command("strata:test", ["a#1"], tmp_path, 2)
    assert command[command.index("--network") + 1] == "none"
    volumes = [command[index + 1] for index, word in enumerate(command) if word == "--volume"]
    assert [volume for volume in volumes if not volume.endswith(":ro")] == [f"{tmp_path}:/out"]
    assert not any(word.startswith(("--privileged", "--publish")) for word in command)
    assert command[-1] == "a#1"


@pytest.mark.parametrize(
    "arguments", [[], ["--python", "p"], ["--image", "i", "--python", "p", "--tree", "t"]]
)
def test_where_to_run_has_to_be_said_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        runner.main(arguments)
    assert stop.value.code == 2
    assert "--image, or --python and --tree" in capsys.readouterr().err


def test_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list", "no-such-patch"]) == 2
    assert "no mutants of no-such-patch" in capsys.readouterr().err


def test_a_hanging_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TIMEOUT_S", 1)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert runner._run(command, tmp_path, {}) is None


@pytest.fixture(scope="module")
def own() -> list[m.Mutant]:
    return runner.known_mutants()


def test_each_of_our_mutants_can_be_made_and_names_tests_that_exist(own: list[m.Mutant]) -> None:
    made: Callable[[m.Mutant], str] = lambda one: m.mutate(  # noqa: E731
        runner.patch_file(one).read_text(encoding="utf-8"), one, str(runner.patch_file(one))
    )
    assert own and len({(one.patch, made(one)) for one in own}) == len(own)
    assert [test for one in own for test in one.tests if not (ROOT / test).is_file()] == []


def test_every_patch_with_python_of_its_own_has_enough_mutants(own: list[m.Mutant]) -> None:
    counts = Counter(one.patch for one in own)
    series = yaml.safe_load((ROOT / "layers" / "source" / "series.yaml").read_text(encoding="utf-8"))
    patches = [patch for group in series["groups"] for patch in group["patches"]]
    with_python = [p for p in patches if any((ROOT / "patches").glob(f"*/{p}/files/**/*.py"))]
    assert len(with_python) > 3
    assert {p: counts[p] for p in with_python if counts[p] < m.MINIMUM} == {}
    assert set(counts) <= set(patches)
