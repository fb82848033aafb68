"""The survey of a series on trees: every verdict on small trees, and what random mutations may and may not
give.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from series_tools import VERSION, code, make_series, make_trees
from strata.affirm import affirm
from strata.check import Base, Survey, no_findings, survey
from strata.errors import StrataError
from strata.lock import write_lock
from strata.model import At
from strata.report import as_data, as_text
from strata.series import Series

FILE = "vllm_ascend/mod.py"
SOURCE = code(
    """
    import os


    class Sampler:
        limit = 4

        def sample(self, logits, temperature):
            scaled = logits / temperature
            token = pick(scaled, self.limit)
            self.seen.append(token)
            return token

        def other(self, x):
            return x + 1


    def pick(values, limit):
        return sorted(values)[-1:limit]
    """
)
EDIT = {"at": f"{FILE}::Sampler.sample", "find": "pick(scaled, $X)", "replace": "ours(scaled, $X)"}
PATCH = {"edits": [EDIT], "uses": [f"{FILE}::pick"]}


class Bench:
    """One series and one base below a directory, affirmed on ``source``, then looked at on other sources."""

    def __init__(self, directory: Path, patches: dict[str, Any], files: dict[str, str]) -> None:
        self.directory = directory
        self.series: Series = make_series(directory / "root", patches)
        self.put(files)

    def put(self, files: dict[str, str]) -> None:
        make_trees(self.directory / "trees", files)

    def remove(self, file: str) -> None:
        (self.directory / "trees" / "vllm-ascend" / file).unlink()

    def base(self) -> Base:
        from strata.trees import Trees

        return Base(Trees.at(self.directory / "trees"), VERSION)

    def survey(self, **options: Any) -> Survey:
        return survey(self.series, self.base(), **options)

    def affirm(self, *ids: str, symbol: str | None = None, reason: str = "read it") -> list[str]:
        base = self.base()
        locks, _ = affirm(
            survey(self.series, base),
            base,
            ids=ids,
            symbol=At.parse(symbol) if symbol else None,
            reason=reason,
            date="2026-01-31",
            trees=lambda: {"vllm": "0", "vllm-ascend": "0"},
        )
        for patch_id, lock in locks.items():
            write_lock(self.series.root, patch_id, lock)
        return list(locks)

    def names(self, patch_id: str = "one") -> list[str]:
        return [v.name for v in self.survey().verdicts[patch_id]]

    def worst(self, patch_id: str = "one") -> str:
        found = self.survey().worst(patch_id)
        return found.name if found else ""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    found = Bench(tmp_path, {"one": PATCH}, {FILE: SOURCE})
    assert found.worst() == "NO_LOCK"
    assert found.affirm("one") == ["one"]
    assert found.names() == ["UNTOUCHED", "UNTOUCHED"]
    return found


def test_without_a_lock_one_word_is_said(tmp_path: Path) -> None:
    found = Bench(tmp_path, {"one": PATCH}, {FILE: SOURCE}).survey()
    assert [v.name for v in found.verdicts["one"]] == ["NO_LOCK"]
    assert found.exit_code() == 1
    text = as_text(found, ["one"])
    assert text.count("NO_LOCK: the patch has never been affirmed") == 1
    assert "Sampler.sample" in text and "::pick" in text
    assert 'strata affirm one --reason "…"' in text


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("return x + 1", "return x + 2", "UNTOUCHED"),
        ("    limit = 4", "    limit = 5", "UNTOUCHED"),
        ("return token", "return  token  # why", "UNTOUCHED"),
        ("logits / temperature", "(logits / temperature)", "UNTOUCHED"),
        ("import os", "import os\n\n\n\nimport sys", "UNTOUCHED"),
        ("self.seen.append(token)", "self.seen.add(token)", "NEEDS_REVIEW"),
        ("logits, temperature", "logits, temperature=1", "NEEDS_REVIEW"),
        ("[-1:limit]", "[-2:limit]", "CONTRACT_CHANGED"),
        ("pick(scaled, self.limit)", "choose(scaled, self.limit)", "CONFLICT"),
        ("self.seen.append(token)", "pick(scaled, 3)", "AMBIGUOUS"),
        ("def sample(", "def sample_one(", "MOVED"),
        ("def pick(", "def pick_one(", "SYMBOL_GONE"),
        ("def sample(self", "def sample_one(self, extra", "SYMBOL_GONE"),
    ],
)
def test_a_change_upstream(bench: Bench, old: str, new: str, verdict: str) -> None:
    assert SOURCE.count(old) >= 1
    bench.put({FILE: SOURCE.replace(old, new, 1)})
    assert bench.worst() == verdict
    found = bench.survey()
    assert found.go() is (verdict in ("UNTOUCHED", "MOVED"))
    assert bool(no_findings(found, ["one"])) is not found.go()


def test_near_and_far(bench: Bench) -> None:
    bench.put({FILE: SOURCE.replace("self.seen.append(token)", "self.seen.add(token)")})
    assert "NEEDS_REVIEW (near): Sampler.sample changed upstream" in as_text(bench.survey(), ["one"])
    inside = code(
        """
        class Sampler:
            def sample(self, logits, temperature):
                if logits:
                    token = pick(logits, self.limit)
                    return token
                return None

        def pick(values, limit):
            return values
        """
    )
    edit = {"at": f"{FILE}::Sampler.sample", "find": "pick(logits, $X)", "replace": "ours(logits, $X)"}
    other = Bench(bench.directory / "far", {"one": {"edits": [edit]}}, {FILE: inside})
    other.affirm("one")
    other.put({FILE: inside.replace("return None", "return -1")})
    assert "NEEDS_REVIEW (far): Sampler.sample" in as_text(other.survey(), ["one"])


def test_file_gone(bench: Bench) -> None:
    bench.remove(FILE)
    found = bench.survey()
    assert {v.name for v in found.verdicts["one"]} == {"FILE_GONE"}


def test_moved_to_another_file_waits_for_a_word(bench: Bench) -> None:
    bench.put(
        {
            FILE: "def pick(values, limit):\n    return sorted(values)[-1:limit]\n",
            "vllm_ascend/new.py": SOURCE,
        }
    )
    found = bench.survey()
    verdict = found.worst("one")
    assert verdict is not None and verdict.name == "MOVED" and not verdict.go
    assert verdict.finding is not None and "vllm_ascend/new.py::Sampler.sample" in verdict.finding.found
    bench.affirm("one")
    again = bench.survey()
    assert again.go()
    assert "ours(scaled, self.limit)" in again.plan.files["vllm-ascend", "vllm_ascend/new.py"]


def test_moved_in_the_file_is_followed(bench: Bench) -> None:
    bench.put({FILE: SOURCE.replace("class Sampler", "class Base:\n    ...\n\n\nclass TokenSampler")})
    found = bench.survey()
    assert found.go()
    assert "ours(scaled, self.limit)" in found.plan.files["vllm-ascend", FILE]


def test_gone_symbols_have_candidates(bench: Bench) -> None:
    bench.put({FILE: SOURCE.replace("def sample(self", "def sample_tokens(self, extra")})
    text = as_text(bench.survey(), ["one"])
    assert "candidate: vllm_ascend/mod.py::Sampler.sample_tokens" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pick(scaled, self.limit)", "choose(scaled, self.limit)"),
        ("self.seen.append(token)", "pick(scaled, 3)"),
        ("def sample(self", "def drawn(me"),
    ],
)
def test_what_cannot_be_affirmed(bench: Bench, old: str, new: str) -> None:
    bench.put({FILE: SOURCE.replace(old, new, 1)})
    with pytest.raises(StrataError) as error:
        bench.affirm("one")
    assert error.value.exit_code == 1
    assert {f.code for f in error.value.findings} == {"E-AFFIRM"}


SHADOWED = {
    "vllm_ascend/utils.py": "def is_310p(): ...\n",
    "vllm_ascend/patch/__init__.py": "",
    "vllm_ascend/patch/worker/__init__.py": "",
    "vllm_ascend/patch/platform/__init__.py": "import vllm_ascend.patch.platform.patch_x\n",
    "vllm::vllm/s.py": SOURCE,
}
VLLM_PATCH = {"edits": [{**EDIT, "at": "vllm::vllm/s.py::Sampler.sample"}]}


def test_shadowed_for_edits_and_uses(tmp_path: Path) -> None:
    assign = "from vllm.s import Sampler, pick\nimport vllm.s\nSampler.sample = print\nvllm.s.pick = print\n"
    files = SHADOWED | {"vllm_ascend/patch/platform/patch_x.py": assign, FILE: SOURCE}
    user = {"edits": [EDIT], "uses": ["vllm::vllm/s.py::pick"]}
    found = Bench(tmp_path, {"one": VLLM_PATCH, "two": user}, files)
    assert found.worst("one") == found.worst("two") == "SHADOWED"
    with pytest.raises(StrataError) as error:
        found.affirm("one")
    assert "patch_x.py:3" in error.value.findings[0].render()


def test_a_conditional_shadow_is_affirmed_under_its_condition(tmp_path: Path) -> None:
    keep = code(
        """
        from vllm.s import Sampler
        _old = Sampler.sample
        def new(*a): return _old(*a)
        Sampler.sample = new
        """
    )
    found = Bench(tmp_path, {"one": VLLM_PATCH}, SHADOWED | {"vllm_ascend/patch/platform/patch_x.py": keep})
    assert "SHADOWED" in found.names()
    found.affirm("one", reason="the wrapper calls it")
    assert found.survey().go()
    found.put({"vllm_ascend/patch/platform/patch_x.py": "\n\n# moved down\n" + keep})
    assert found.survey().go()
    changed = keep.replace("_old", "_before")
    found.put({"vllm_ascend/patch/platform/patch_x.py": changed})
    assert not found.survey().go()


def test_idle_by_the_line_of_the_edit(tmp_path: Path) -> None:
    body = code(
        """
        from vllm_ascend.utils import vllm_version_is
        def f(x):
            if vllm_version_is("0.24.0"):
                return old(x)
            return x
        """
    )
    edit = {"at": f"{FILE}::f", "find": "old($X)", "replace": "new($X)"}
    found = Bench(tmp_path, {"one": {"edits": [edit]}}, {FILE: body})
    assert found.worst() == "IDLE"


def test_interactions_are_listed(tmp_path: Path) -> None:
    two = {"edits": [{"at": f"{FILE}::pick", "find": "sorted($V)", "replace": "ours($V)"}]}
    three = {"edits": [{"at": f"{FILE}::Sampler.other", "prepend": "pass"}], "uses": [f"{FILE}::Sampler"]}
    found = Bench(tmp_path, {"one": PATCH, "two": two, "three": three}, {FILE: SOURCE}).survey()
    assert [(i.patch, str(i.uses), i.edited_by) for i in found.interactions] == [
        ("one", f"{FILE}::pick", "two"),
        ("three", f"{FILE}::Sampler", "one"),
    ]


def test_smaller_series_are_planned_where_files_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """one and two share a file, three has its own: alone each of the first two is planned again, and its
    fault told.
    """
    from strata import check
    from strata.errors import Finding
    from strata.plan import Fault, Plan

    one = {"edits": [{"at": f"{FILE}::Sampler.other", "find": "x + 1", "replace": "x + 2"}]}
    two = {"edits": [{"at": f"{FILE}::pick", "prepend": "pass"}]}
    three = {"edits": [{"at": "vllm_ascend/own.py::g", "prepend": "pass"}]}
    files = {FILE: SOURCE, "vllm_ascend/own.py": "def g():\n    return 1\n"}
    found = Bench(tmp_path, {"one": one, "two": two, "three": three}, files)
    found.affirm("one", "two", "three")
    planned: list[tuple[str, ...]] = []
    real = check.plan_series

    def plan(*arguments: Any, **options: Any) -> Plan:
        result = real(*arguments, **options)
        if options.get("only"):
            planned.append(tuple(options["only"]))
            if options["only"] == ("two",):
                result.faults.append(
                    Fault("two", 0, At.parse(f"{FILE}::pick"), Finding("E-RESULT", "does not parse"))
                )
        return result

    monkeypatch.setattr(check, "plan_series", plan)
    result = found.survey()
    assert sorted(planned) == [("one",), ("two",)]
    assert result.go(["one"]) and result.go(["three"]) and not result.go(["two"])
    assert [f.message for f in no_findings(result, ["two"])] == [
        "without one: does not parse"
    ]  # once, not twice


def test_one_affirm_covers_all_patches_on_the_symbol(tmp_path: Path) -> None:
    two = {"edits": [{"at": f"{FILE}::Sampler.sample", "find": "return token", "before": "note(token)"}]}
    found = Bench(tmp_path, {"one": PATCH, "two": two}, {FILE: SOURCE})
    found.affirm("one", "two")
    found.put({FILE: SOURCE.replace("logits / temperature", "logits * temperature")})
    assert (found.worst("one"), found.worst("two")) == ("NEEDS_REVIEW", "NEEDS_REVIEW")
    assert found.affirm("one", reason="same thing") == ["one", "two"]
    assert found.survey().go()
    found.put({FILE: SOURCE.replace("logits / temperature", "logits + temperature").replace("[-1:", "[-3:")})
    assert found.affirm(symbol=f"{FILE}::Sampler.sample") == ["one", "two"]
    assert (found.worst("one"), found.worst("two")) == ("CONTRACT_CHANGED", "UNTOUCHED")


def test_affirming_twice_changes_nothing(bench: Bench) -> None:
    assert bench.affirm("one") == []


def test_another_copy_of_the_release_only_renews_the_evidence(bench: Bench) -> None:
    base = bench.base()
    before = bench.survey()
    options: dict[str, Any] = {"ids": ["one"], "symbol": None, "reason": "r", "date": "2026-02-02"}
    locks, changes = affirm(before, base, **options, trees=lambda: {"vllm": "1", "vllm-ascend": "1"})
    assert changes == []
    assert locks["one"].base.trees == {"vllm": "1", "vllm-ascend": "1"}
    old = before.locks["one"]
    assert old is not None
    assert (locks["one"].edits, locks["one"].affirmed) == (old.edits, old.affirmed)


def test_an_unknown_symbol_is_refused_with_the_near_one(bench: Bench) -> None:
    with pytest.raises(StrataError) as error:
        bench.affirm(symbol=f"{FILE}::Sampler.sampel")
    assert "did you mean vllm_ascend/mod.py::Sampler.sample?" in error.value.findings[0].hint


def test_edits_on_another_result_lock_both(tmp_path: Path) -> None:
    two = {
        "edits": [
            {"at": f"{FILE}::Sampler.sample", "on": "one", "find": "ours($$$A)", "replace": "best($$$A)"}
        ]
    }
    found = Bench(tmp_path, {"one": PATCH, "two": two}, {FILE: SOURCE})
    found.affirm("one", "two")
    lock = found.survey().locks["two"]
    assert lock is not None
    entry = lock.edits[0]
    assert set(entry.on) == {"one"} and entry.on["one"] != entry.fingerprint
    assert found.survey().go()


def test_the_same_survey_gives_the_same_report(bench: Bench) -> None:
    bench.put({FILE: SOURCE.replace("/", "*").replace("[-1:", "[-2:")})
    assert as_text(bench.survey(), ["one"]) == as_text(bench.survey(), ["one"])
    assert as_data(bench.survey(), ["one"]) == as_data(bench.survey(), ["one"])


def test_the_shape_of_the_data(bench: Bench) -> None:
    bench.put({FILE: SOURCE.replace("/", "*")})
    data = as_data(bench.survey(), ["one"])
    assert list(data) == ["base", "patches", "interactions", "exit"]
    assert data["base"] == VERSION and data["exit"] == 1
    (patch,) = data["patches"]
    assert list(patch) == ["id", "verdict", "go", "findings"]
    assert (patch["id"], patch["verdict"], patch["go"]) == ("one", "NEEDS_REVIEW", False)
    (finding,) = patch["findings"]
    assert finding["distance"] in ("near", "far")
    assert {"code", "message", "where", "expected", "found", "hint"} <= set(finding)


# --- mutations

TOKENS = re.compile(r"\w+|[^\w\s]")
START = SOURCE.index("    def sample")
STOP = SOURCE.index("    def other")
INSIDE = [m for m in TOKENS.finditer(SOURCE) if START <= m.start() < STOP]
OUTSIDE = ["x + 1", "limit = 4", "import os", "def other", "(self, x)"]


@pytest.fixture(scope="module")
def affirmed() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        found = Bench(Path(directory), {"one": {"edits": [EDIT]}}, {FILE: SOURCE})
        found.affirm("one")
        yield found


def _look(bench: Bench, text: str) -> list[str]:
    bench.put({FILE: text})
    return [v.name for v in survey(bench.series, bench.base(), subsets=False).verdicts["one"]]


SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(data=st.data())
def test_white_space_and_comments_keep_it_untouched(affirmed: Bench, data: st.DataObject) -> None:
    lines = SOURCE.splitlines()
    for _ in range(data.draw(st.integers(1, 5))):
        where = data.draw(st.integers(0, len(lines)))
        lines.insert(
            where, data.draw(st.sampled_from(["", "# a comment", "        # pick(scaled, 9)", "   "]))
        )
    tail = data.draw(st.sampled_from(["", "  ", "  # note"]))
    line = data.draw(st.integers(0, len(lines) - 1))
    lines[line] += tail
    assert _look(affirmed, "\n".join(lines) + "\n") == ["UNTOUCHED"]


@SLOW
@given(match=st.sampled_from(INSIDE), how=st.sampled_from(["drop", "rename", "double"]))
def test_a_token_changed_in_the_symbol_is_never_untouched(
    affirmed: Bench, match: re.Match[str], how: str
) -> None:
    change: Callable[[str], str] = {
        "drop": lambda t: "",
        "rename": lambda t: t + "_x",
        "double": lambda t: f"{t} {t}",
    }[how]
    text = SOURCE[: match.start()] + change(match[0]) + SOURCE[match.end() :]
    names = _look(affirmed, text)
    if (
        "UNTOUCHED" in names
    ):  # only where the token means nothing: the same tree, such as a doubled parenthesis
        import ast

        assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(SOURCE))
        return
    moved = names == ["MOVED"]
    if moved:  # the symbol's own name, and nothing else
        assert match[0] == "sample"
    else:
        assert set(names) <= {"NEEDS_REVIEW", "CONFLICT", "AMBIGUOUS", "SYMBOL_GONE"}, names


@SLOW
@given(
    old=st.sampled_from(OUTSIDE),
    extra=st.sampled_from(["\nVALUE = 3\n", "\ndef more():\n    return 1\n", ""]),
)
def test_a_change_in_another_symbol_keeps_it_untouched(affirmed: Bench, old: str, extra: str) -> None:
    new = {"x + 1": "x - 1", "limit = 4": "limit = 40", "import os": "import sys", "def other": "def another"}
    text = SOURCE.replace(old, new.get(old, "(self, x, y=0)"), 1) + extra
    assert _look(affirmed, text) == ["UNTOUCHED"]


# --- the real trees


@pytest.mark.sources
def test_the_repository_s_own_series_on_the_release(real_trees: Any) -> None:
    """Every patch of this repository may go on the release it is locked for."""
    from strata.series import load_series

    root = Path(__file__).resolve().parents[2]
    found = survey(load_series(root), Base(real_trees, VERSION))
    assert not no_findings(found, found.series.ids), as_text(found, found.series.ids)


def test_a_used_symbol_that_is_not_clear_is_not_called_gone(tmp_path: Path) -> None:
    files = {"vllm_ascend/a.py": "def f(): pass\n\n\ndef f(): pass\n", "vllm_ascend/b.py": "def (\n"}
    uses = ["vllm_ascend/a.py::f", "vllm_ascend/b.py::g"]
    series = make_series(tmp_path / "root", {"p": {"uses": uses}})
    result = survey(series, Base(make_trees(tmp_path / "trees", files), VERSION))
    found = [(v.name, v.finding.code) for v in result.verdicts["p"] if v.finding]
    assert found == [("AMBIGUOUS", "E-AMBIGUOUS"), ("CONFLICT", "E-PARSE")]
