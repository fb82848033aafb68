"""The writer: all or nothing under kills, full disks and changed files; idempotent; reversible."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from series_tools import VERSION, make_series, make_trees
from strata import apply
from strata.apply import already_applied, compile_check, revert, unfinished, write
from strata.errors import StrataError
from strata.plan import Plan, plan_series
from strata.series import Series
from strata.trees import Trees

FILES = {
    "vllm_ascend/a.py": "def f():\r\n    return one()\r\n",
    "vllm_ascend/b.py": "X = [\n    1,\n]\n",
    "csrc/CMakeLists.txt": "set(A 1)\n",
    "vllm::vllm/c.py": "def g():\n    return two()\n",
}
PATCHES: dict[str, dict[str, Any]] = {
    "p": {
        "edits": [
            {"at": "vllm_ascend/a.py::f", "find": "one()", "replace": "1"},
            {"at": "vllm::vllm/c.py::g", "find": "two()", "replace": "2"},
        ],
        "files": {"vllm_ascend/strata/deep/n.py": "N = 1\n", "vllm_ascend/strata/__init__.py": ""},
    },
    "q": {
        "edits": [{"at": "vllm_ascend/b.py::X", "add_item": {"value": "2"}}],
        "files": {"vllm/z.py": "Z = 1\n"},
    },
}
State = dict[str, tuple[bytes, int]]


class Case:
    """A small series planned on small trees."""

    def __init__(self, tmp_path: Path) -> None:
        self.trees = make_trees(tmp_path / "trees", FILES)
        self.trees.path("vllm-ascend", "vllm_ascend/b.py").chmod(0o640)
        self.series: Series = make_series(tmp_path / "root", PATCHES)
        self.before = self.state()
        self.plan: Plan = plan_series(self.series, self.trees, VERSION)
        self.plan.raise_faults()
        self.after = dict(self.before)
        for (tree, file), text in self.plan.files.items():
            name = str(self.trees.path(tree, file))
            self.after[name] = (text.encode(), self.before.get(name, (b"", 0o644))[1])

    def state(self) -> State:
        """Every file of both trees but Strata's own records: content and mode."""
        found: State = {}
        for root in self.trees.roots.values():
            for path in sorted(root.rglob("*")):
                if path.is_file() and apply.STATE not in path.relative_to(root).parts:
                    found[str(path)] = (path.read_bytes(), path.stat().st_mode & 0o777)
        return found

    def directories(self) -> list[Path]:
        return [p for root in self.trees.roots.values() for p in root.rglob("*") if p.is_dir()]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """These kills end a process, not the machine: what fsync is for cannot be seen, only waited for."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(StrataError) as found:
        call()
    return found.value.findings[0].code


class Failing(apply.Disk):
    """Fails the n-th operation (from 1): ``fail`` raises or ends the process; a write first puts half its
    data."""

    def __init__(self, n: int, fail: Callable[[Path], None], forever: bool = False) -> None:
        self.left, self.fail, self.forever = n, fail, forever

    def _count(self, path: Path) -> bool:
        self.left -= 1
        return self.left == 0 or (self.forever and self.left < 0)

    def put(self, path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
        if self._count(path):
            path.write_bytes(data[: len(data) // 2])
            self.fail(path)
        super().put(path, data, mode, owner)

    def move(self, source: Path, target: Path) -> None:
        if self._count(source):
            self.fail(source)
        super().move(source, target)

    def remove(self, path: Path) -> None:
        if self._count(path):
            self.fail(path)
        super().remove(path)

    def make_directory(self, path: Path) -> None:
        if self._count(path):
            self.fail(path)
        super().make_directory(path)

    def remove_directory(self, path: Path) -> None:
        if self._count(path):
            self.fail(path)
        super().remove_directory(path)


def die(path: Path) -> None:
    os._exit(77)


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def denied(path: Path) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; its exit code, 0 where the work came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_write_then_nothing_more_to_do(case: Case) -> None:
    written = write(case.plan, case.trees)
    assert {str(p) for p in written} == {n for n, v in case.after.items() if case.before.get(n) != v}
    assert case.state() == case.after
    assert already_applied(case.series, case.trees)
    times = {p: p.stat().st_mtime_ns for p in written}
    assert write(case.plan, case.trees) == []
    assert {p: p.stat().st_mtime_ns for p in written} == times


def test_revert_leaves_no_trace(case: Case) -> None:
    directories = case.directories()
    write(case.plan, case.trees)
    assert len(revert(case.trees)) == len(case.plan.files)
    assert case.state() == case.before
    assert case.directories() == directories
    assert revert(case.trees) == []
    assert not already_applied(case.series, case.trees)


def test_another_series_on_patched_trees_is_refused(case: Case, tmp_path: Path) -> None:
    write(case.plan, case.trees)
    other = make_series(tmp_path / "other", {"p": PATCHES["p"]})
    assert code_of(lambda: already_applied(other, case.trees)) == "E-DIRTY"
    assert case.state() == case.after


def test_patched_files_that_were_changed_are_named(case: Case) -> None:
    write(case.plan, case.trees)
    path = case.trees.path("vllm", "vllm/c.py")
    path.write_text("mine\n")
    with pytest.raises(StrataError) as found:
        already_applied(case.series, case.trees)
    assert found.value.findings[0].details == ("vllm::vllm/c.py",)
    assert found.value.exit_code == 1
    assert code_of(lambda: revert(case.trees)) == "E-DIRTY"
    assert path.read_text() == "mine\n"


def test_sources_put_back_by_hand_count_as_pristine(case: Case) -> None:
    write(case.plan, case.trees)
    for name, (data, _) in case.before.items():
        Path(name).write_bytes(data)
    for name in case.after.keys() - case.before.keys():
        Path(name).unlink()
    assert not already_applied(case.series, case.trees)
    assert len(write(case.plan, case.trees)) == len(case.plan.files)


def test_a_file_changed_after_the_plan_is_refused(case: Case) -> None:
    path = case.trees.path("vllm-ascend", "vllm_ascend/a.py")
    path.write_bytes(path.read_bytes() + b"# more\n")
    now = case.state()
    assert code_of(lambda: write(case.plan, case.trees)) == "E-DIRTY"
    assert case.state() == now


def test_a_new_file_that_appeared_after_the_plan_is_refused(case: Case) -> None:
    path = case.trees.path("vllm", "vllm/z.py")
    path.write_text("theirs\n")
    assert code_of(lambda: write(case.plan, case.trees)) == "E-DIRTY"
    assert path.read_text() == "theirs\n"


def test_a_link_is_not_cut_off(case: Case, tmp_path: Path) -> None:
    path = case.trees.path("vllm-ascend", "vllm_ascend/a.py")
    path.rename(tmp_path / "elsewhere.py")
    path.symlink_to(tmp_path / "elsewhere.py")
    assert code_of(lambda: write(case.plan, case.trees)) == "E-WRITE"
    assert path.is_symlink()
    assert case.state() == case.before


def test_a_plan_with_faults_is_not_written(case: Case, tmp_path: Path) -> None:
    bad = {**PATCHES, "r": {"edits": [{"at": "vllm_ascend/a.py::f", "find": "gone()", "replace": "1"}]}}
    plan = plan_series(make_series(tmp_path / "bad", bad), case.trees, VERSION)
    assert code_of(lambda: write(plan, case.trees)) == "E-CONFLICT"
    assert case.state() == case.before


def test_what_does_not_compile_is_not_written(case: Case, tmp_path: Path) -> None:
    # parses, but is no code: return outside a function
    bad = {"r": {"edits": [{"at": "vllm_ascend/b.py", "append": "return 1"}]}}
    plan = plan_series(make_series(tmp_path / "bad", bad), case.trees, VERSION)
    assert [(f.finding.code, f.patch) for f in plan.faults] == [("E-COMPILE", "r")]  # check says so already
    plan.faults.clear()
    with pytest.raises(StrataError) as found:
        compile_check(plan)
    assert found.value.findings[0].code == "E-COMPILE"
    assert found.value.findings[0].patch == "r"
    assert code_of(lambda: write(plan, case.trees)) == "E-COMPILE"
    assert case.state() == case.before


def test_a_record_that_cannot_be_read_stops(case: Case) -> None:
    write(case.plan, case.trees)
    (case.trees.roots["vllm-ascend"] / ".strata" / "applied.json").write_text("{")
    assert code_of(lambda: already_applied(case.series, case.trees)) == "E-STATE"


def test_one_writer_at_a_time(case: Case) -> None:
    handle = os.open(case.trees.roots["vllm-ascend"], os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert code_of(lambda: write(case.plan, case.trees)) == "E-BUSY"
    finally:
        os.close(handle)
    assert case.state() == case.before


def test_the_stamp_says_what_was_applied(case: Case) -> None:
    write(case.plan, case.trees)
    stamp = json.loads((case.trees.roots["vllm-ascend"] / ".strata" / "applied.json").read_text())
    assert stamp["digest"] == case.series.digest()
    assert stamp["patches"] == ["p", "q"]
    assert {(t["tree"], t["file"]) for t in stamp["targets"]} == set(case.plan.files)


def operations(case: Case, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    """How many operations the work takes, counted on a run that succeeds."""
    counter = Failing(10**9, die)
    monkeypatch.setattr(apply, "DISK", counter)
    work()
    monkeypatch.setattr(apply, "DISK", apply.Disk())
    return 10**9 - counter.left


@pytest.mark.slow
def test_killed_at_any_operation_the_next_run_finds_all_or_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = operations(case, monkeypatch, lambda: write(case.plan, case.trees))
    revert(case.trees)
    assert total > 20
    halves = 0
    for n in range(1, total + 1):
        monkeypatch.setattr(apply, "DISK", Failing(n, die))
        assert in_child(lambda: write(case.plan, case.trees)) == 77
        monkeypatch.setattr(apply, "DISK", apply.Disk())
        halves += unfinished(case.trees)
        done = already_applied(case.series, case.trees)
        assert case.state() == (case.after if done else case.before), f"operation {n}"
        assert not unfinished(case.trees)
        assert bool(write(case.plan, case.trees)) is not done
        assert case.state() == case.after
        revert(case.trees)
        assert case.state() == case.before
    assert halves > len(case.plan.files)  # the journal was put to use


@pytest.mark.slow
def test_killed_while_recovering_the_run_after_that_recovers(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = operations(case, monkeypatch, lambda: write(case.plan, case.trees))
    revert(case.trees)
    for first in range(total // 2, total + 1, 3):
        for second in range(1, 14, 2):
            monkeypatch.setattr(apply, "DISK", Failing(first, die))
            in_child(lambda: write(case.plan, case.trees))
            monkeypatch.setattr(apply, "DISK", Failing(second, die))
            in_child(lambda: already_applied(case.series, case.trees))
            monkeypatch.setattr(apply, "DISK", apply.Disk())
            done = already_applied(case.series, case.trees)
            assert case.state() == (case.after if done else case.before), f"operations {first}, {second}"
            revert(case.trees)


@pytest.mark.slow
@pytest.mark.parametrize("fail", [full, denied])
def test_a_full_disk_or_a_refusal_leaves_the_trees_as_they_were(
    case: Case, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Path], None]
) -> None:
    total = operations(case, monkeypatch, lambda: write(case.plan, case.trees))
    revert(case.trees)
    for n in range(1, total + 1):
        monkeypatch.setattr(apply, "DISK", Failing(n, fail))
        with pytest.raises(StrataError) as found:
            write(case.plan, case.trees)
        monkeypatch.setattr(apply, "DISK", apply.Disk())
        assert found.value.findings[0].code == "E-WRITE"
        assert found.value.exit_code == 2
        assert not unfinished(case.trees), f"operation {n}"
        assert case.state() == case.before, f"operation {n}"


@pytest.mark.slow
def test_a_disk_that_stays_full_is_told_and_mended_by_the_next_run(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = operations(case, monkeypatch, lambda: write(case.plan, case.trees))
    revert(case.trees)
    for n in range(1, total + 1):
        monkeypatch.setattr(apply, "DISK", Failing(n, denied, forever=True))
        assert code_of(lambda: write(case.plan, case.trees)) == "E-WRITE"
        monkeypatch.setattr(apply, "DISK", apply.Disk())
        assert not already_applied(case.series, case.trees)
        assert case.state() == case.before, f"operation {n}"


@pytest.mark.slow
def test_an_interrupt_is_passed_on_with_the_trees_as_they_were(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    total = operations(case, monkeypatch, lambda: write(case.plan, case.trees))
    revert(case.trees)
    for n in range(1, total + 1):
        monkeypatch.setattr(apply, "DISK", Failing(n, interrupt))
        with pytest.raises(KeyboardInterrupt):
            write(case.plan, case.trees)
        monkeypatch.setattr(apply, "DISK", apply.Disk())
        assert case.state() == case.before, f"operation {n}"


@pytest.mark.slow
def test_killed_while_reverting_the_next_run_goes_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    write(case.plan, case.trees)
    total = operations(case, monkeypatch, lambda: revert(case.trees))
    for n in range(1, total + 1):
        write(case.plan, case.trees)
        monkeypatch.setattr(apply, "DISK", Failing(n, die))
        assert in_child(lambda: revert(case.trees)) == 77
        monkeypatch.setattr(apply, "DISK", apply.Disk())
        done = already_applied(case.series, case.trees)
        assert case.state() == (case.after if done else case.before), f"operation {n}"
        revert(case.trees)
        assert case.state() == case.before


def test_trees_must_be_trees(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    with pytest.raises(StrataError) as found:
        Trees.at(tmp_path)
    assert {f.code for f in found.value.findings} == {"E-TREE"}


def test_nothing_is_written_through_a_directory_that_leads_out(case: Case, tmp_path: Path) -> None:
    new = {"n": {"files": {"vllm_ascend/strata/n.py": "x = 1\n"}}}
    (tmp_path / "elsewhere").mkdir()
    (case.trees.roots["vllm-ascend"] / "vllm_ascend/strata").symlink_to(tmp_path / "elsewhere")
    plan = plan_series(make_series(tmp_path / "linked", new), case.trees, VERSION)
    assert code_of(lambda: write(plan, case.trees)) == "E-WRITE"
    assert list((tmp_path / "elsewhere").iterdir()) == []
