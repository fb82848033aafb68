"""The commands as a user types them: output, exit codes, what is written, what bad input gives."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from series_tools import VERSION, code, make_series, make_trees
from strata.cli import main
from strata.export import is_build_input
from strata.udiff import unified

FILE = "vllm_ascend/mod.py"
SOURCE = code(
    """
    import os


    def step(x):
        y = compute(x)
        return y


    def compute(x):
        return x + 1
    """
)
CMAKE = "set(SOURCES\n    a.cpp\n)\n"
PATCHES: dict[str, Any] = {
    "base-part": {
        "kind": "build",
        "files": {"vllm_ascend/strata/helper.py": "def help_it(x):\n    return x\n"},
    },
    "fast-step": {
        "kind": "perf",
        "title": "A faster step",
        "why": "Because steps are slow.",
        "switch": {"name": "fast_step", "default": True},
        "requires": ["base-part"],
        "evidence": [
            {"source": "a report", "metric": "ms", "before": 7.02, "after": 5.12, "verified_here": False}
        ],
        "uses": [f"{FILE}::compute"],
        "edits": [{"at": f"{FILE}::step", "find": "compute($X)", "replace": "help_it(compute($X))"}],
    },
    "build-list": {
        "kind": "build",
        "edits": [{"at": "csrc/CMakeLists.txt", "find": "a.cpp", "after": "b.cpp"}],
    },
}
FILES = {FILE: SOURCE, "csrc/CMakeLists.txt": CMAKE}


class Shell:
    """Runs ``strata`` in this process on one repository and one pair of trees."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.trees, self._capsys = directory / "root", directory / "trees", capsys
        make_series(self.root, PATCHES)
        make_trees(self.trees, FILES)

    def __call__(self, *words: str, places: bool = True) -> tuple[int, str, str]:
        given = ["--root", str(self.root), "--trees", str(self.trees), "--base", VERSION] if places else []
        status = main([*words, *given])
        out, err = self._capsys.readouterr()
        return status, out, err

    def content(self) -> dict[str, str]:
        return {
            p.relative_to(self.trees).as_posix(): p.read_text()
            for p in sorted(self.trees.rglob("*"))
            if p.is_file() and ".strata" not in p.parts
        }

    def tamper(self, old: str, new: str) -> None:
        path = self.trees / "vllm-ascend" / FILE
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


@pytest.fixture
def ready(shell: Shell) -> Shell:
    assert shell("affirm", "--all", "--reason", "read it all")[0] == 0
    return shell


def test_check_before_and_after_affirm(shell: Shell) -> None:
    status, out, err = shell("check")
    assert status == 1
    assert "NO_LOCK" in out and 'strata affirm fast-step --reason "…"' in out
    assert err == ""
    status, out, _ = shell("affirm", "fast-step", "--reason", "read step and compute")
    assert status == 0
    assert "affirmed fast-step: patches/locks/0.23.0/fast-step.yaml" in out
    lock = yaml.safe_load((shell.root / "patches/locks/0.23.0/fast-step.yaml").read_text())
    assert [e["at"] for e in lock["edits"]] == [f"{FILE}::step"]
    assert [u["at"] for u in lock["uses"]] == [f"{FILE}::compute"]
    assert lock["affirmed"][0]["reason"] == "read step and compute"
    assert set(lock["base"]["trees"]) == {"vllm", "vllm-ascend"}
    assert shell("check", "fast-step")[0] == 0
    assert shell("check")[0] == 1


def test_check_names_the_function_that_changed(ready: Shell) -> None:
    assert ready("check")[0] == 0
    ready.tamper("return y", "return y + 1")
    status, out, _ = ready("check")
    assert status == 1
    assert "NEEDS_REVIEW (near): step changed upstream since the patch was affirmed" in out
    assert "3 patches on 0.23.0: 1 needs a person: fast-step" in out


def test_json_says_the_same(ready: Shell) -> None:
    ready.tamper("x + 1", "x + 2")
    status, out, _ = ready("check", "--json")
    data = json.loads(out)
    assert status == data["exit"] == 1
    assert {p["id"]: p["verdict"] for p in data["patches"]} == {
        "base-part": "UNTOUCHED",
        "fast-step": "CONTRACT_CHANGED",
        "build-list": "UNTOUCHED",
    }
    one = json.loads(ready("check", "build-list", "--json")[1])
    assert [p["id"] for p in one["patches"]] == ["build-list"] and one["exit"] == 0


def test_apply_twice_and_revert(ready: Shell) -> None:
    before = ready.content()
    status, out, err = ready("apply")
    assert status == 0 and "3 patches applied: 3 files written" in out
    assert "checking 3 patches" in err
    after = ready.content()
    assert "help_it(compute(x))" in after[f"vllm-ascend/{FILE}"]
    assert "b.cpp" in after["vllm-ascend/csrc/CMakeLists.txt"]
    status, out, _ = ready("apply")
    assert status == 0 and "already applied" in out
    assert ready.content() == after
    status, _, err = ready("check")
    assert status == 2 and "E-DIRTY" in err and "strata apply --revert" in err
    assert ready("apply", "--revert")[0] == 0
    assert ready.content() == before


def test_apply_refuses_and_writes_nothing(ready: Shell, tmp_path: Path) -> None:
    ready.tamper("return y", "return y + 1")
    before = ready.content()
    for words in (("apply",), ("apply", "--out", str(tmp_path / "out")), ("apply", "--dry-run")):
        status, _, err = ready(*words)
        assert status == 1
        assert "NEEDS_REVIEW: step changed upstream" in err
        assert "nothing was written" in err
    assert ready.content() == before
    assert not (tmp_path / "out").exists()


def test_dry_run_lists_and_writes_nothing(ready: Shell) -> None:
    before = ready.content()
    status, out, _ = ready("apply", "--dry-run")
    assert status == 0
    assert f"would write vllm-ascend: {FILE}" in out
    assert ready.content() == before


def test_out_for_the_image_build(ready: Shell, tmp_path: Path) -> None:
    before = ready.content()
    out = tmp_path / "out"
    for _ in range(2):
        status, told, _ = ready("apply", "--out", str(out))
        assert status == 0 and "2 source files, 1 build inputs" in told
        assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
            "csrc/vllm-ascend/csrc/CMakeLists.txt",
            "proof.json",
            "series.json",
            f"source/vllm-ascend/{FILE}",
            "source/vllm-ascend/vllm_ascend/strata/helper.py",
        ]
    assert ready.content() == before
    data = json.loads((out / "series.json").read_text())
    assert [p["id"] for p in data["patches"]] == list(PATCHES)
    assert data["patches"][1]["switch"] == {"name": "fast_step", "default": True}
    assert len(data["digest"]) == 64


def test_without(ready: Shell, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ready("apply", "--out", str(out), "--without", "build-list")[0] == 0
    assert list((out / "csrc").rglob("*")) == []
    status, _, err = ready("apply", "--out", str(out), "--without", "base-part")
    assert status != 0 and "E-ORPHANED" in err and "fast-step" in err
    status, _, err = ready("apply", "--without", "fast-stap")
    assert status != 0 and "did you mean 'fast-step'?" in err


def test_a_disk_that_refuses(ready: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert ready("apply", "--out", str(out))[0] == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    status, _, err = ready("apply", "--out", str(out))
    monkeypatch.undo()
    assert status == 2 and "E-WRITE" in err and "No space left" in err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_diff_applies_with_git(ready: Shell) -> None:
    status, out, _ = ready("diff")
    assert status == 0
    tree = ready.trees / "vllm-ascend"
    (tree.parent / "all.diff").write_text(out)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "apply", "--check", "../all.diff"], cwd=tree, check=True)
    subprocess.run(["git", "apply", "../all.diff"], cwd=tree, check=True)
    assert "help_it(compute(x))" in (tree / FILE).read_text()
    assert (tree / "vllm_ascend/strata/helper.py").read_text() == "def help_it(x):\n    return x\n"


def test_diff_of_one_patch_has_what_it_requires(ready: Shell) -> None:
    _, out, _ = ready("diff", "fast-step")
    assert "helper.py" in out and "CMakeLists" not in out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\n", "a\nc\n"),
        ("a\nb", "a\nb\n"),
        ("a\nb\n", "a\nb"),
        ("a\r\nb\r\n", "a\r\nc\r\n"),
        ("a\n\x0cb\n", "a\n\x0cc\n"),
        ("", "x\n"),
        (None, "x\ny"),
        ("x\n" * 40, "x\n" * 20 + "y\n" + "x\n" * 20),
    ],
)
def test_diffs_of_awkward_texts_apply(tmp_path: Path, before: str | None, after: str) -> None:
    if before is not None:
        (tmp_path / "f.txt").write_bytes(before.encode())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    diff = unified("f.txt", before, after)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff.encode(), check=True)
    assert (tmp_path / "f.txt").read_bytes() == after.encode()


def test_why_a_patch(ready: Shell) -> None:
    status, out, _ = ready("why", "fast-step")
    assert status == 0
    for words in (
        "A faster step",
        "Because steps are slow.",
        "switch: fast_step, default on",
        "requires: base-part",
        "ms: 7.02 → 5.12; a report; not verified here",
        f"{FILE}::step (line 5)",
        f"{FILE}::compute",
        "on 0.23.0: UNTOUCHED",
        "NO_LOCK *: read it all",
    ):
        assert words in out, words


@pytest.mark.parametrize("what", [f"{FILE}::step", FILE, "step", "mod.py"])
def test_why_a_place(ready: Shell, what: str) -> None:
    status, out, _ = ready("why", what)
    assert status == 0
    assert f"fast-step edits {FILE}::step" in out


def test_why_nothing(ready: Shell) -> None:
    status, _, err = ready("why", "nowhere")
    assert status == 1 and "E-PATCH" in err


def test_affirm_shows_what_changed(ready: Shell) -> None:
    ready.tamper("return y", "return y + 1")
    status, out, _ = ready("affirm", "fast-step", "--reason", "a plus one does not matter")
    assert status == 0
    assert "fast-step: NEEDS_REVIEW near vllm_ascend/mod.py::step (line 5)" in out
    assert "locked py1:" in out and "return y" not in out
    assert ready("check")[0] == 0
    status, out, _ = ready("affirm", "fast-step", "--reason", "again")
    assert status == 0 and "nothing to affirm" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("fast-step",), "Missing option '--reason'"),
        (("fast-step", "--reason", "   "), "needs a reason"),
        (("fast-step", "--reason", "..."), "needs a reason"),
        (("--reason", "x"), "name patches"),
        (("fast-step", "--all", "--reason", "x"), "name patches"),
        (("fast-stap", "--reason", "x"), "did you mean 'fast-step'?"),
        (("--symbol", "/a.py::b", "--reason", "x"), "must be a path inside the tree"),
    ],
)
def test_affirm_bad_input(ready: Shell, words: tuple[str, ...], told: str) -> None:
    before = {p: p.read_bytes() for p in ready.root.rglob("*.yaml")}
    status, _, err = ready("affirm", *words)
    assert status == 2
    assert told in err
    assert {p: p.read_bytes() for p in ready.root.rglob("*.yaml")} == before


def test_affirm_refuses_a_conflict(ready: Shell) -> None:
    ready.tamper("compute(x)\n    return y", "other(x)\n    return y")
    lock = ready.root / "patches/locks/0.23.0/fast-step.yaml"
    before = lock.read_bytes()
    status, _, err = ready("affirm", "fast-step", "--reason", "please")
    assert status == 1 and "CONFLICT cannot be affirmed" in err
    assert lock.read_bytes() == before


# --- where to work


def test_the_root_is_found_upwards(ready: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = ready.root / "patches" / "group"
    monkeypatch.chdir(inside)
    assert ready("check", "--trees", str(ready.trees), places=False)[0] == 0  # the newest base with locks


def test_no_series_here(tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = shell("check", places=False)
    assert status == 2 and "E-ROOT" in err and "layers/source/series.yaml" in err
    status, _, err = shell("check", "--root", str(tmp_path / "none"), places=False)
    assert status == 2 and "E-ROOT" in err


def test_no_sources(shell: Shell) -> None:
    status, _, err = shell("check", "--root", str(shell.root), "--base", VERSION, places=False)
    assert status == 2 and "E-TREE" in err and "make sources" in err


def test_not_a_pair_of_trees(shell: Shell, tmp_path: Path) -> None:
    words = ["check", "--root", str(shell.root), "--base", VERSION, "--trees", str(tmp_path)]
    status, _, err = shell(*words[:-1], str(tmp_path / "root"), places=False)
    assert status == 2 and "E-TREE" in err
    status, out, _ = shell(*words[:-1], str(tmp_path / "root"), "--json", places=False)
    assert status == 2 and json.loads(out)["exit"] == 2


def test_no_base_known(shell: Shell) -> None:
    status, _, err = shell("check", "--root", str(shell.root), "--trees", str(shell.trees), places=False)
    assert status == 2 and "E-BASE" in err


def test_an_unknown_patch(ready: Shell) -> None:
    status, _, err = ready("check", "fast-stap")
    assert status == 2 and "did you mean 'fast-step'?" in err


@pytest.mark.parametrize("content", [b"\xff\xfe", b"fp: [", b"fp: 1\nbase: {version: 0.23.0}\nedit: []\n"])
def test_a_bad_lock(ready: Shell, content: bytes) -> None:
    lock = ready.root / "patches/locks/0.23.0/fast-step.yaml"
    lock.write_bytes(content)
    status, _, err = ready("check")
    assert status == 2 and "fast-step.yaml" in err and "Traceback" not in err


def test_a_damaged_source_file(ready: Shell) -> None:
    (ready.trees / "vllm-ascend" / FILE).write_bytes(b"x = '\xff'\n")
    status, out, err = ready("check")
    assert status != 0 and "E-READ" in out + err


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("csrc/a/b.cpp", True),
        ("csrc/cmake/scripts/x.py", True),
        ("CMakeLists.txt", True),
        ("cmake/x.cmake", True),
        ("setup.py", True),
        ("vllm_ascend/csrc_helper.py", False),
        ("vllm_ascend/setup.py", False),
        ("vllm_ascend/ops/a.py", False),
    ],
)
def test_build_inputs(file: str, expected: bool) -> None:
    assert is_build_input(file) is expected


# --- the real trees


@pytest.mark.sources
def test_the_series_diff_applies_to_the_release(
    real_trees: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    root = Path(__file__).resolve().parents[2]
    status = main(
        [
            "diff",
            "--root",
            str(root),
            "--base",
            VERSION,
            "--trees",
            str(real_trees.roots["vllm-ascend"].parent),
        ]
    )
    out = capsys.readouterr().out
    assert status == 0 and out.startswith("diff --git")
    files = [line.split(" b/", 1)[1] for line in out.splitlines() if line.startswith("diff --git ")]
    both = all(
        file.split("/", 1)[0] in real_trees.roots for file in files
    )  # a series on both trees names them
    for file in files:
        tree, name = file.split("/", 1) if both else ("vllm-ascend", file)
        source = real_trees.path(tree, name)
        if source.exists():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tmp_path / file)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=out.encode(), check=True)
    assert all((tmp_path / file).is_file() for file in files)


@pytest.mark.parametrize(
    "text",
    ["title: 2026-13-45\n", "a: " + "[" * 3000, "a: " * 2000, 'edits: [{diff: "a\\0b"}]\n'],
    ids=["no-such-date", "brackets", "colons", "null-byte"],
)
def test_no_yaml_ends_in_a_traceback(ready: Shell, text: str) -> None:
    (ready.root / "patches/group/fast-step/patch.yaml").write_text(text)
    status, _, err = ready("check")
    assert status == 2 and "patch.yaml" in err and "next:" in err


def test_a_name_that_no_file_has_is_a_finding(shell: Shell) -> None:
    make_series(shell.root, {"odd": {"edits": [{"diff": "a\0b"}]}, **PATCHES})
    status, out, _ = shell("check", "odd")
    assert status == 1 and "E-READ" in out


def test_on_needs_no_quotes(shell: Shell) -> None:
    """YAML 1.1 reads the bare key ``on`` as true."""
    text = f"""
        title: second
        why: a test
        kind: build
        edits:
        - at: {FILE}::step
          on: fast-step
          find: help_it($X)
          replace: help_it($X, 1)
        - {{at: "{FILE}::step", on: fast-step, find: return y, before: log(y)}}
        """
    make_series(shell.root, {**PATCHES, "second": {}})
    (shell.root / "patches/group/second/patch.yaml").write_text(code(text))
    status, out, err = shell("diff", "second")
    assert status == 0, err
    assert "+    y = help_it(compute(x), 1)" in out and "+    log(y)" in out


def test_check_says_what_apply_would_refuse(shell: Shell) -> None:
    broken = {"kind": "build", "edits": [{"at": f"{FILE}::step", "find": "return y", "before": "break"}]}
    make_series(shell.root, {**PATCHES, "broken": broken})
    assert shell("affirm", "fast-step", "base-part", "build-list", "--reason", "read")[0] == 0
    status, out, _ = shell("check", "broken")
    assert status == 1 and "E-COMPILE" in out and "break" in out
    assert shell("apply", "--dry-run")[0] == 1
    assert shell("diff")[0] == 1


@pytest.mark.parametrize("name", ["", "../..", "x", "0.23.0/"])
def test_a_base_is_a_version(ready: Shell, name: str) -> None:
    places = ("--root", str(ready.root), "--trees", str(ready.trees))
    status, _, err = ready("affirm", "--all", "--reason", "read", *places, "--base", name, places=False)
    assert status == 2 and "E-BASE" in err and "0.23.0" in err
    assert not (ready.root / "fast-step.yaml").exists()


def test_a_base_may_be_written_as_its_tag(ready: Shell) -> None:
    places = ("--root", str(ready.root), "--trees", str(ready.trees))
    assert ready("check", *places, "--base", f"v{VERSION}", places=False)[0] == 0


def test_diff_follows_what_moved(ready: Shell) -> None:
    ready.tamper("def step(x)", "def stride(x)")
    status, out, _ = ready("check", "fast-step")
    assert status == 0 and "MOVED" in out
    status, out, err = ready("diff", "fast-step")
    assert status == 0, err
    assert "+    y = help_it(compute(x))" in out


def test_a_series_of_nothing_leaves_the_trees_free(ready: Shell) -> None:
    nothing = [w for i in PATCHES for w in ("--without", i)]
    assert ready("apply", *nothing)[0] == 0
    assert ready("check")[0] == 0
    assert ready("apply")[0] == 0
