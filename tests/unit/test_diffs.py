"""Diffs land at fuzz 0, only where their whole old block is, and merge as their changed lines."""

from __future__ import annotations

import difflib
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata.diffs import diff_files, place_diff
from strata.spans import PlaceFault, Placement, Span
from strata.trees import Trees

OLD = "def f():\n    a = 1\n    b = 2\n    return a + b\n\n\nX = 1\n\n\ndef g():\n    return 3\n"


def make_diff(old: str, new: str, file: str = "vllm_ascend/x.py", context: int = 3) -> str:
    """A unified diff as git writes it, with its mark for a missing last line break."""
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{file}", f"b/{file}", n=context)
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    pieces = text.split("\n")
    return [p + "\n" for p in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


def apply(source: str, spans: list[Span]) -> str:
    for span in sorted(spans, key=lambda s: (s.start, s.end), reverse=True):
        source = source[: span.start] + span.text + source[span.end :]
    return source


def applied(diff: str, source: str) -> str:
    return apply(source, [s for _, p in place_diff(diff, lambda _: source) for s in p.spans])


def fault(diff: str, source: str | None = OLD) -> PlaceFault:
    with pytest.raises(PlaceFault) as caught:
        place_diff(diff, lambda _: source)
    return caught.value


def placements(new: str, old: str = OLD, file: str = "vllm_ascend/x.py") -> list[Placement]:
    return [p for _, p in place_diff(make_diff(old, new, file), lambda _: old)]


# --- where it lands


def test_only_changed_lines_become_spans() -> None:
    (placed,) = placements(OLD.replace("b = 2", "b = 3"))
    (span,) = placed.spans
    assert (OLD[span.start : span.end], span.text) == ("    b = 2\n", "    b = 3\n")
    assert (placed.symbol, placed.line) == ("f", 3)
    assert OLD[slice(*placed.region)] == OLD[: OLD.index("\n\n\nX")]


def test_separate_changes_of_one_hunk_are_separate_spans_of_their_symbols() -> None:
    new = OLD.replace("a = 1", "a = 9").replace("X = 1", "X = 2").replace("return 3", "return 4")
    assert [(p.symbol, len(p.spans)) for p in placements(new)] == [("f", 1), ("X", 1), ("g", 1)]


def test_insertions_belong_to_the_block_of_their_indentation() -> None:
    inner = OLD.replace("a + b\n", "a + b\n    # more\n    c\n")
    outer = OLD.replace("a + b\n", "a + b\nY = 2\n")
    assert [p.symbol for p in placements(inner)] == ["f"]
    assert [p.symbol for p in placements(outer)] == ["<module>"]


def test_a_change_over_several_symbols_locks_them_all() -> None:
    new = OLD.replace("    return a + b\n\n\nX = 1\n", "    return 5\n\n\nX = 2\n").replace(
        "\n\n\nX = 2", "\nX = 2"
    )
    assert {p.symbol for p in placements(new)} >= {"f", "X"}


def test_token_files_use_their_symbols() -> None:
    old = "int x;\nvoid f()\n{\n    a();\n}\n"
    found = placements(old.replace("a()", "b()"), old, "csrc/x.cpp")
    assert [(p.symbol, old[slice(*p.region)]) for p in found] == [("f", "void f()\n{\n    a();\n}")]
    assert [p.symbol for p in placements(old.replace("int x", "int y"), old, "csrc/x.cpp")] == [""]


def test_any_offset_where_the_block_is_unique() -> None:
    diff = make_diff(OLD, OLD.replace("b = 2", "b = 3"))
    moved = "import os\n" * 40 + OLD
    assert applied(diff, moved) == "import os\n" * 40 + OLD.replace("b = 2", "b = 3")


def test_doubled_block_needs_its_stated_line() -> None:
    diff = make_diff(OLD, OLD.replace("return 3", "return 4"))
    assert applied(diff, OLD + OLD) == OLD.replace("return 3", "return 4") + OLD
    error = fault(diff, "\n" + OLD + OLD)
    assert (error.code, error.line) == ("E-AMBIGUOUS", 9)
    assert "line 9" in error.candidates[0]


@pytest.mark.parametrize("change", [("a = 1", "a = 7"), ("return a", "return  a"), ("b = 2\n", "b = 2\n\n")])
def test_changed_context_is_a_conflict_with_the_nearest_place(change: tuple[str, str]) -> None:
    error = fault(make_diff(OLD, OLD.replace("b = 2", "b = 3")), "# new\n" + OLD.replace(*change))
    assert error.code == "E-CONFLICT"
    assert error.line in (1, 2)
    assert error.candidates


def test_swapped_hunks_conflict() -> None:
    old = "".join(f"{n}\n" for n in range(30))
    new = old.replace("\n3\n", "\nthree\n").replace("\n25\n", "\ntwenty\n")
    moved = "".join(f"{n}\n" for n in [*range(15, 30), *range(15)])
    assert fault(make_diff(old, new), moved).code == "E-CONFLICT"


def test_near_changes_move_the_neighbours_and_far_ones_do_not() -> None:
    old = "".join(f"{n}\n" for n in range(40))
    diff = make_diff(old, old.replace("\n20\n", "\ntwenty\n"), "csrc/x.txt")

    def neighbours(source: str) -> str:
        return place_diff(diff, lambda _: source)[0][1].neighbours

    assert neighbours(old.replace("\n5\n", "\nfive\n")) == neighbours(old)
    assert neighbours(old.replace("\n15\n", "\nfifteen\n")) != neighbours(old)


# --- forms


def test_mail_headers_signatures_prefixes_and_time_stamps() -> None:
    diff = make_diff(OLD, OLD.replace("b = 2", "b = 3"))
    head = "From 1234 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] x\n\nWhy.\n---\n x.py | 2 +-\n\n"
    mail = f"{head}{diff}-- \n2.39.5\n\n"
    assert applied(mail, OLD) == OLD.replace("b = 2", "b = 3")
    assert diff_files(mail) == ["vllm_ascend/x.py"]
    plain = diff.replace("a/vllm", "vllm").replace("b/vllm", "vllm")
    plain = plain.replace("x.py\n", "x.py\t2026-01-01 00:00:00\n", 2)
    assert diff_files(plain) == ["vllm_ascend/x.py"]
    quoted = diff.replace("a/vllm_ascend/x.py", '"a/vllm_ascend/\\303\\244.py"')
    quoted = quoted.replace("b/vllm_ascend/x.py", '"b/vllm_ascend/\\303\\244.py"')
    assert diff_files(quoted) == ["vllm_ascend/ä.py"]


def test_line_breaks() -> None:
    crlf, new = OLD.replace("\n", "\r\n"), OLD.replace("b = 2", "b = 3")
    inside = make_diff(crlf, new.replace("\n", "\r\n"))
    assert applied(inside, crlf) == new.replace("\n", "\r\n")
    converted = make_diff(OLD, new).replace("\n", "\r\n")  # the patch file went through an editor
    assert applied(converted, OLD) == new
    assert applied(converted, crlf) == new.replace("\n", "\r\n")
    assert fault(make_diff(OLD, new), crlf).code == "E-CONFLICT"


@pytest.mark.parametrize(
    ("old", "new"), [("a\nb", "a\nc"), ("a\nb", "a\nb\n"), ("a\nb\n", "a\nb"), ("a", "a\nb")]
)
def test_missing_last_line_break(old: str, new: str) -> None:
    assert applied(make_diff(old, new), old) == new


def test_context_lines_whose_trailing_space_was_eaten() -> None:
    diff = make_diff(OLD, OLD.replace("X = 1", "X = 2")).replace("\n \n", "\n\n")
    assert applied(diff, OLD) == OLD.replace("X = 1", "X = 2")


HEAD = "diff --git a/x.py b/x.py\n"


@pytest.mark.parametrize(
    ("diff", "words"),
    [
        ("", "no diff"),
        ("hello\n", "no diff"),
        (HEAD + "similarity index 100%\nrename from x.py\nrename to y.py\n", "renames"),
        (HEAD + "old mode 100644\nnew mode 100755\n", "mode"),
        (HEAD + "index 1..2 100644\nGIT binary patch\nliteral 3\n", "binary"),
        ("Binary files a/x and b/x differ\n", "binary"),
        (HEAD + "deleted file mode 100644\n--- a/x.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "deletes"),
        ("--- a/x.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "deletes"),
        ("--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+a\n", "adds the file x.py"),
        ("--- a/x.py\n+++ b/y.py\n@@ -1 +1 @@\n-a\n+b\n", "renames"),
        ("--- a/../x.py\n+++ b/../x.py\n@@ -1 +1 @@\n-a\n+b\n", "leaves the tree"),
        ("--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n-a\n+b\n", "malformed"),
        ("--- a/x.py\n+++ b/x.py\n@@ -1,2 +1 @@\n a\n a\n", "malformed"),
        ("--- a/x.py\n+++ b/x.py\n", "malformed"),
        ("@@ -1 +1 @@\n-a\n+b\n", "malformed"),
        ("--- a/x.py\n+++ b/x.py\n@@ -3,0 +4 @@\n+b\n", "no context"),
        ("@@@ -1 -1 +1 @@@\n- a\n", "merge"),
        (
            "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n",
            "two parts",
        ),
    ],
)
def test_refused(diff: str, words: str) -> None:
    error = fault(diff, "a\n")
    assert error.code == "E-EDIT"
    assert words in error.message
    assert error.expected


def test_missing_file() -> None:
    error = fault(make_diff(OLD, OLD.replace("1", "2")), None)
    assert error.code == "E-CONFLICT"
    assert "vllm_ascend/x.py" in error.message


# --- properties


LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "d()", "a\f", "é"]), max_size=25)


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, str]:
    """A text of few different lines, and the text after random edits; with or without a last break."""
    lines = draw(LINES)
    new = list(lines)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(new)))
        new[at : at + draw(st.integers(0, 3))] = draw(
            st.lists(st.sampled_from(["a", "x", "  c", ""]), max_size=3)
        )
    texts = []
    for some in (lines, new):
        texts.append("\n".join(some) + ("\n" if some and draw(st.booleans()) else ""))
    return texts[0], texts[1]


@given(edited(), st.integers(1, 4))
@settings(max_examples=300)
def test_difflib_round_trip(case: tuple[str, str], context: int) -> None:
    old, new = case
    diff = make_diff(old, new, "x.txt", context)
    if not diff:
        return
    try:
        assert applied(diff, old) == new
    except PlaceFault as error:  # an empty file has nothing to recognise
        assert old == ""
        assert error.code == "E-EDIT"


@given(edited(), st.lists(st.sampled_from(["a", "b", "y"]), min_size=1, max_size=5))
def test_unique_lines_are_found_at_any_offset(case: tuple[str, str], above: list[str]) -> None:
    old, new = ("".join(f"{n} {line}\n" for n, line in enumerate(text.split("\n"))) for text in case)
    prefix = "".join(line + "\n" for line in above)
    diff = make_diff(old, new, "x.txt")
    if diff:
        assert applied(diff, prefix + old) == prefix + new


@given(edited())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_agrees_with_git_apply(tmp_path: Path, case: tuple[str, str]) -> None:
    old, new = case
    diff = make_diff(old, new, "x.txt")
    if not diff or not old or not new:
        return
    target = tmp_path / "x.txt"
    target.write_bytes(old.encode())
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    run = subprocess.run(command, cwd=tmp_path, input=diff.encode(), capture_output=True)
    assert run.returncode == 0, run.stderr
    assert target.read_bytes().decode() == applied(diff, old) == new


# --- the real sources


@pytest.mark.sources
@pytest.mark.parametrize(
    ("tree", "file"),
    [
        ("vllm-ascend", "vllm_ascend/worker/model_runner_v1.py"),
        ("vllm-ascend", "csrc/torch_binding.cpp"),
        ("vllm-ascend", "csrc/build_aclnn.sh"),
        ("vllm-ascend", "csrc/CMakeLists.txt"),
        ("vllm", "vllm/v1/sample/rejection_sampler.py"),
    ],
)
def test_random_edits_of_real_files(real_trees: Trees, tree: str, file: str) -> None:
    source = real_trees.read(tree, file)
    assert source is not None
    dice = random.Random(23)
    for _ in range(3):
        lines = _lines(source)
        for _ in range(6):
            at = dice.randrange(len(lines))
            choice = dice.randrange(3)
            if choice == 0:
                del lines[at]
            elif choice == 1:
                lines.insert(
                    at, lines[at][: len(lines[at]) - len(lines[at].lstrip())].rstrip("\n") + "ours()\n"
                )
            else:
                lines[at] = lines[at].rstrip("\n") + "  # ours\n"
        new = "".join(lines)
        diff = make_diff(source, new, file)
        placed = place_diff(diff, lambda _: source)
        assert apply(source, [s for _, p in placed for s in p.spans]) == new
        for _, placement in placed:
            start, end = placement.region
            for span in placement.spans:
                assert start - 200 <= span.start and span.end <= end + 200
