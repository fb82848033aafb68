"""Lock files: what they hold, that they are written whole, and what happens to bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.config import parse_yaml, validate
from strata.errors import StrataError
from strata.lock import (
    Affirmation,
    Lock,
    LockBase,
    LockedEdit,
    LockedUse,
    blob_hash,
    likeness,
    lock_path,
    locked_versions,
    read_lock,
    render_lock,
    sketch,
    write_lock,
)
from strata.model import At

PRINT = "py1:" + "0" * 32


def lock(**parts: object) -> Lock:
    base = LockBase(version="0.23.0", trees={"vllm": "b", "vllm-ascend": "a"})
    return Lock.model_validate({"fp": 1, "base": base, **parts})


FULL = lock(
    edits=(
        LockedEdit(
            at=At.parse("vllm_ascend/z.py::C.m"),
            fingerprint=PRINT,
            body=PRINT,
            neighbours=(PRINT,),
            on={"other": PRINT},
            moved_to=At.parse("vllm_ascend/y.py::C.m"),
            sketch="0" * 16,
            file_blob="0" * 40,
        ),
        LockedEdit(at=At.parse("vllm_ascend/a.py::<module>"), fingerprint=PRINT),
        LockedEdit(at=At.parse("csrc/CMakeLists.txt"), fingerprint="tok1:" + "f" * 32),
    ),
    uses=(LockedUse(at=At.parse("vllm::vllm/v1/x.py::f"), fingerprint=PRINT, body=PRINT),),
    affirmed=(
        Affirmation(symbol="*", verdict="NO_LOCK", reason="read: it's fine", date="2026-01-31"),
        Affirmation(
            symbol="vllm::vllm/v1/x.py::f",
            verdict="SHADOWED",
            reason="r",
            date="2026-02-01",
            condition="310P",
        ),
    ),
)


def test_written_and_read_again(tmp_path: Path) -> None:
    path = write_lock(tmp_path, "one", FULL)
    assert path == lock_path(tmp_path, "0.23.0", "one")
    again = read_lock(tmp_path, "0.23.0", "one")
    assert again is not None
    assert sorted(map(str, again.edits)) == sorted(map(str, FULL.edits))
    assert again.affirmed == FULL.affirmed
    assert again.base == FULL.base
    assert render_lock(again) == path.read_text()
    assert read_lock(tmp_path, "0.23.0", "two") is None


def test_stable_order_and_small_diffs() -> None:
    turned = FULL.model_copy(update={"edits": FULL.edits[::-1]})
    assert render_lock(turned) == render_lock(FULL)
    changed = FULL.model_copy(
        update={
            "edits": (FULL.edits[0].model_copy(update={"fingerprint": "py1:" + "1" * 32}), *FULL.edits[1:])
        }
    )
    before, after = render_lock(FULL).splitlines(), render_lock(changed).splitlines()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_a_failed_write_leaves_the_old_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lock(tmp_path, "one", FULL)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StrataError) as error:
        write_lock(tmp_path, "one", lock())
    monkeypatch.undo()
    assert error.value.findings[0].code == "E-WRITE"
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["one.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        "fp: 2\nbase: {version: 0.23.0}\n",
        "fp: 1\nbase: {version: 0.23.0}\nedit: []\n",
        "fp: 1\nbase: {version: 0.23.0}\nedits: [{at: a.py, fingerprint: abc}]\n",
        "fp: 1\nbase: {version: 0.23.0}\naffirmed: [{symbol: x, verdict: y, reason: '', date: 2026-01-01}]\n",
        "fp: 1\nbase: {version: 0.23.0}\naffirmed: [{symbol: x, verdict: y, reason: r, date: yesterday}]\n",
        "fp: 1\nfp: 1\nbase: {version: 0.23.0}\n",
        "[]",
        "fp: [",
    ],
)
def test_bad_locks_are_findings(tmp_path: Path, text: str) -> None:
    path = lock_path(tmp_path, "0.23.0", "one")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(StrataError) as error:
        read_lock(tmp_path, "0.23.0", "one")
    assert str(path) in error.value.findings[0].where


def test_a_lock_of_another_base_is_refused(tmp_path: Path) -> None:
    write_lock(tmp_path, "one", FULL)
    other = lock_path(tmp_path, "0.24.0", "one")
    other.parent.mkdir(parents=True)
    other.write_text(lock_path(tmp_path, "0.23.0", "one").read_text())
    with pytest.raises(StrataError) as error:
        read_lock(tmp_path, "0.24.0", "one")
    assert error.value.findings[0].code == "E-LOCK"


def test_releases_in_order(tmp_path: Path) -> None:
    assert locked_versions(tmp_path) == []
    for version in ("0.23.0", "0.9.1", "0.24.0rc1", "0.24.0", "odd"):
        (tmp_path / "patches" / "locks" / version).mkdir(parents=True)
    assert locked_versions(tmp_path) == ["odd", "0.9.1", "0.23.0", "0.24.0rc1", "0.24.0"]


def test_git_blob_hash() -> None:
    # `git hash-object` of an empty file, and of "hello\n"
    assert blob_hash("") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert blob_hash("hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


WORDS = st.lists(
    st.sampled_from(
        [
            "alpha",
            "beta",
            "gamma",
            "delta",
            "=",
            "(",
            ")",
            "+",
            "return",
            "if",
            "else",
            "for",
            "in",
            "x",
            "y",
            "z",
        ]
    ),
    min_size=30,
    max_size=60,
)


@given(WORDS)
def test_likeness_of_the_same_code_is_one_whatever_the_white_space(words: list[str]) -> None:
    assert likeness(sketch(" ".join(words)), sketch("\n  ".join(words))) == 1.0


def test_a_changed_line_stays_likelier_than_other_code() -> None:
    body = "\n".join(f"    value_{n} = compute_{n}(left, right, {n})" for n in range(12))
    near = body.replace("compute_5", "evaluate_5")
    far = "\n".join(f"    for key, item in table_{n}.items():\n        item.close(key)" for n in range(12))
    assert likeness(sketch(body), sketch(near)) > 0.8
    assert likeness(sketch(body), sketch(near)) > likeness(sketch(body), sketch(far)) + 0.1


def test_no_token_of_the_code_is_in_a_lock() -> None:
    text = render_lock(
        lock(edits=(LockedEdit(at=At.parse("a/b.py::f"), fingerprint=PRINT, sketch=sketch("secret = 1")),))
    )
    assert "secret" not in text
    assert validate(parse_yaml(text, "x"), Lock, "x").edits[0].sketch is not None
