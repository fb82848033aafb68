"""Composition of a series: what commutes, what overlaps, what stands on another patch's result."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from series_tools import VERSION, codes, make_plan, make_series, make_trees
from strata.model import At, Edit
from strata.plan import plan_series

FILE = "vllm_ascend/m.py"
SOURCE = "import os\n\n\ndef f(x):\n    a = one(x)\n    b = two(a)\n    return b\n"
PATH = ("vllm-ascend", FILE)


def edit(symbol: str = "", **parts: Any) -> dict[str, Any]:
    return {"at": FILE + (f"::{symbol}" if symbol else ""), **{k.rstrip("_"): v for k, v in parts.items()}}


def patch(*edits: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {"edits": list(edits), **parts}


def test_disjoint_edits_commute(tmp_path: Path) -> None:
    patches = {
        "a": patch(edit("f", find="one(x)", replace="1")),
        "b": patch(edit("f", find="two(a)", replace="2")),
        "c": patch(edit("f", find="return b", before="c()")),
    }
    results = {
        make_plan(tmp_path / "".join(order), {FILE: SOURCE}, {i: patches[i] for i in order}).files[PATH]
        for order in itertools.permutations(patches)
    }
    assert results == {"import os\n\n\ndef f(x):\n    a = 1\n    b = 2\n    c()\n    return b\n"}


def test_insertions_at_one_point_follow_series_order(tmp_path: Path) -> None:
    patches = {i: patch(edit("f", find="return b", before=f"{i}()")) for i in ("p", "q")}
    first = make_plan(tmp_path / "1", {FILE: SOURCE}, patches).files[PATH]
    second = make_plan(tmp_path / "2", {FILE: SOURCE}, dict(reversed(patches.items()))).files[PATH]
    assert "    p()\n    q()\n    return b" in first
    assert "    q()\n    p()\n    return b" in second


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"find": "one(x)", "replace": "1"}, {"find": "one(x)", "replace": "2"}),
        ({"find": "a = one(x)", "replace": "a = 1"}, {"find": "one(x)", "replace": "2"}),
        ({"find": "a = one(x)", "delete": True}, {"find": "one(x)", "add_item": {"value": "2"}}),
        ({"find": "a = one(x)", "delete": True}, {"find": "a = one(x)", "before": "y()"}),
        ({"find": "a = one(x)\nb = two(a)", "wrap": "if x:\n    $BODY"},
         {"find": "b = two(a)\nreturn b", "wrap": "if y:\n    $BODY"}),
        ({"find": "b = two(a)\nreturn b", "replace": "return 1"}, {"find": "return b", "wrap": "if y:\n    $BODY"}),
    ],
)  # fmt: skip
def test_overlaps_name_both_patches(tmp_path: Path, left: dict[str, Any], right: dict[str, Any]) -> None:
    for n, order in enumerate(((left, right), (right, left))):
        plan = make_plan(
            tmp_path / str(n),
            {FILE: SOURCE},
            {i: patch(edit("f", **e)) for i, e in zip("pq", order, strict=True)},
        )
        assert codes(plan) == ["E-OVERLAP"]
        text = plan.faults[0].finding.render()
        assert "p and q" in text
        assert "on: p" in text


def test_equal_wraps_nest_in_series_order(tmp_path: Path) -> None:
    patches = {i: patch(edit("f", find="a = one(x)", wrap=f"with {i}:\n    $BODY")) for i in ("p", "q")}
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert "    with p:\n        with q:\n            a = one(x)\n" in plan.files[PATH]


@pytest.mark.parametrize("order", [("p", "w"), ("w", "p")])
def test_the_start_of_a_function_is_outside_of_a_wrap_of_its_first_statement(
    order: tuple[str, str], tmp_path: Path
) -> None:
    both = {
        "p": patch(edit("f", prepend="if known(x):\n    return x")),
        "w": patch(edit("f", find="a = one(x)", wrap="if not done(x):\n    $BODY")),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, {name: both[name] for name in order})
    assert "    if known(x):\n        return x\n    if not done(x):\n        a = one(x)\n" in plan.files[PATH]


def test_equal_imports_of_two_patches_are_one(tmp_path: Path) -> None:
    patches = {i: patch(edit(import_="from z import q")) for i in ("p", "q")}
    assert make_plan(tmp_path, {FILE: SOURCE}, patches).files[PATH].count("from z import q") == 1


def test_one_name_imported_from_two_places_is_an_overlap(tmp_path: Path) -> None:
    patches = {i: patch(edit(import_=f"from {i} import q")) for i in ("y", "z")}
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert codes(plan) == ["E-OVERLAP"]
    assert "import q differently" in plan.faults[0].finding.message


def test_all_faults_are_collected(tmp_path: Path) -> None:
    patches = {
        "a": patch(edit("g", find="x", replace="y"), edit("f", find="three()", replace="y")),
        "b": patch({"at": "vllm_ascend/n.py::f", "find": "x", "replace": "y"}),
        "c": patch(edit("f", find="x", replace="y")),
        "d": patch(files={FILE: "x = 1\n"}),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert codes(plan) == ["E-SYMBOL-GONE", "E-CONFLICT", "E-FILE-GONE", "E-FILE-EXISTS"]
    assert [(f.patch, f.edit) for f in plan.faults] == [("a", 0), ("a", 1), ("b", 0), ("d", None)]
    assert all(f.finding.hint and f.finding.where for f in plan.faults)


def test_a_missing_file_names_where_it_may_have_gone(tmp_path: Path) -> None:
    files = {FILE: SOURCE, "vllm_ascend/ops/old_name.py": "x = 1\n", "vllm_ascend/new/kept.py": "x = 1\n"}
    patches = {
        "a": patch({"at": "vllm_ascend/ops/old_names.py::f", "find": "x", "replace": "y"}),
        "b": patch({"at": "vllm_ascend/old/kept.py::f", "find": "x", "replace": "y"}),
    }
    plan = make_plan(tmp_path, files, patches)
    assert plan.faults[0].finding.details == ("vllm_ascend/ops/old_name.py",)
    assert plan.faults[1].finding.details[0] == "vllm_ascend/new/kept.py"


# --- on


def test_on_sees_the_result_of_that_patch_only(tmp_path: Path) -> None:
    patches = {
        "base": patch(edit("f", find="one(x)", replace="fast(x)")),
        "other": patch(edit("f", find="two(a)", replace="fast(x)")),
        "top": patch(edit("f", find="fast($A)", replace="faster($A)", on="base")),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert not plan.faults
    assert "a = faster(x)\n    b = fast(x)\n" in plan.files[PATH]
    top = next(p for p in plan.placed if p.patch == "top")
    assert top.on == "base"
    assert "b = two(a)" in top.source


def test_on_reaches_into_wraps_and_new_files(tmp_path: Path) -> None:
    patches = {
        "w": patch(edit("f", find="a = one(x)\nb = two(a)", wrap="with w:\n    $BODY"), files={"vllm_ascend/n.py": "y = 1\n"}),  # noqa: E501
        "i": patch(edit("f", find="a = one(x)", before="before()")),
        "o": patch(edit("f", find="b = two(a)", in_="with w:", after="after()", on="w"),
                   {"at": "vllm_ascend/n.py", "find": "1", "replace": "2", "on": "w"}),
        "p": patch(edit("f", find="after()", replace="after(1)", on="o")),
    }  # fmt: skip
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert not plan.faults, plan.faults
    assert plan.files[PATH].endswith(
        "    with w:\n        before()\n        a = one(x)\n        b = two(a)\n        after(1)\n    return b\n"
    )
    assert plan.files["vllm-ascend", "vllm_ascend/n.py"] == "y = 2\n"


def test_on_refuses_text_that_another_patch_changes(tmp_path: Path) -> None:
    patches = {
        "base": patch(edit("f", find="a = one(x)", after="mid(x, x + 1)")),
        "other": patch(edit("f", find="b = two(a)", replace="b = three(a)")),
        "top": patch(edit("f", find="mid(x, $A)\nb = two(a)", replace="pass", on="base")),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert codes(plan) == ["E-OVERLAP"]
    assert "other" in plan.faults[0].finding.found


def test_a_patch_s_new_file_is_edited_with_on_only(tmp_path: Path) -> None:
    patches = {
        "a": patch(files={"vllm_ascend/n.py": "y = 1\n"}),
        "b": patch({"at": "vllm_ascend/n.py", "find": "1", "replace": "2"}),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert codes(plan) == ["E-FILE-GONE"]
    assert "on: a" in plan.faults[0].finding.hint


# --- variants


def variants(*named: list[str] | None) -> dict[str, Any]:
    finds = ("one(x)", "three(x)", "four(x)")
    return patch(*(
        edit("f", find=find, replace="1", **({"for": versions} if versions else {}))
        for find, versions in zip(finds, named, strict=False)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("named", "version", "expected"),
    [
        ((None, ["0.25.1rc1"]), "0.23.0", []),
        ((None, ["v0.23.0"]), "0.23.0", ["E-VARIANT"]),  # the one without 'for' matches as well
        ((["0.23.0"], ["0.25.1rc1"]), "0.23.0", []),
        ((["0.23.0"], ["0.25.1rc1"]), "v0.23.0", []),
        ((["0.23.0"], ["0.25.1rc1"]), "0.24.0", ["E-VARIANT"]),
        ((["0.23.0"], ["0.23.0"]), "0.23.0", ["E-VARIANT"]),
        ((["0.25.1rc1"], ["0.23.0"]), "0.23.0", ["E-CONFLICT"]),
        ((["0.25.1rc1"],), "0.23.0", []),
    ],
)
def test_one_variant_per_base(
    tmp_path: Path, named: tuple[list[str] | None, ...], version: str, expected: list[str]
) -> None:
    source = SOURCE if named != (None, ["v0.23.0"]) else SOURCE.replace("two(a)", "three(x)")
    plan = make_plan(tmp_path, {FILE: source}, {"a": variants(*named)}, version=version)
    assert codes(plan) == expected


def test_a_variant_stands_in_for_the_default_that_no_longer_matches(tmp_path: Path) -> None:
    source = SOURCE.replace("one(x)", "three(x)")
    plan = make_plan(tmp_path, {FILE: source}, {"a": variants(None, ["0.24.0"])}, version="0.24.0")
    assert not plan.faults
    assert "a = 1" in plan.files[PATH]


# --- new files, manifest, only, moved, diff


def test_new_files_and_manifest(tmp_path: Path) -> None:
    patches = {
        "a": patch(
            files={"vllm_ascend/strata/x.py": "x = 1\n"},
            manifest="vllm_ascend/strata/series.json",
            kind="runtime",
        ),
        "b": patch(
            edit("f", find="one(x)", replace="1"), kind="perf", switch={"name": "b_switch", "default": False}
        ),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    data = json.loads(plan.files["vllm-ascend", "vllm_ascend/strata/series.json"])
    assert data["base"] == VERSION
    assert data["digest"] == plan.digest
    assert data["patches"] == [
        {"id": "a", "group": "group", "kind": "runtime", "title": "a", "switch": None},
        {
            "id": "b",
            "group": "group",
            "kind": "perf",
            "title": "b",
            "switch": {"name": "b_switch", "default": False},
        },
    ]
    assert plan.original["vllm-ascend", "vllm_ascend/strata/x.py"] is None


def test_only_takes_what_is_required_along(tmp_path: Path) -> None:
    patches = {
        "a": patch(edit("f", find="one(x)", replace="1")),
        "b": patch(edit("f", find="two(a)", replace="2"), requires=["a"]),
        "c": patch(edit("f", find="return b", replace="return 3")),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches, only=["b"])
    assert plan.patches == ["a", "b"]
    assert plan.files[PATH].endswith("a = 1\n    b = 2\n    return b\n")


def test_moved_symbols_take_their_edits_along(tmp_path: Path) -> None:
    files = {FILE: "def g(x):\n    return one(x)\n"}
    moved = {At.parse(f"{FILE}::f"): At.parse(f"{FILE}::g")}
    plan = make_plan(tmp_path, files, {"a": patch(edit("f", find="one(x)", replace="1"))}, moved=moved)
    assert plan.files[PATH] == "def g(x):\n    return 1\n"
    assert plan.placed[0].at.symbol == "g"


def test_an_ordinary_diff_lands_beside_edits(tmp_path: Path) -> None:
    diff = f"--- a/{FILE}\n+++ b/{FILE}\n@@ -4,4 +4,4 @@\n def f(x):\n     a = one(x)\n-    b = two(a)\n+    b = 2\n     return b\n"  # noqa: E501
    patches = {
        "d": {"edits": [{"diff": "fix.patch"}], "diffs": {"fix.patch": diff}},
        "a": patch(edit("f", find="one(x)", replace="1")),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert not plan.faults, plan.faults[0].finding.render()
    assert plan.files[PATH].endswith("a = 1\n    b = 2\n    return b\n")


def test_a_diff_of_a_missing_file_names_where_it_may_have_gone(tmp_path: Path) -> None:
    gone = FILE.replace("m.py", "mm.py")
    diff = f"--- a/{gone}\n+++ b/{gone}\n@@ -1,2 +1,2 @@\n-import os\n+import sys\n \n"
    plan = make_plan(
        tmp_path, {FILE: SOURCE}, {"d": {"edits": [{"diff": "fix.patch"}], "diffs": {"fix.patch": diff}}}
    )
    assert codes(plan) == ["E-FILE-GONE"]
    assert plan.faults[0].finding.details[0] == FILE


def test_a_diff_that_overlaps_an_edit_names_both(tmp_path: Path) -> None:
    diff = f"--- a/{FILE}\n+++ b/{FILE}\n@@ -5,2 +5,2 @@\n-    a = one(x)\n+    a = 1\n     b = two(a)\n"
    patches = {
        "d": {"edits": [{"diff": "fix.patch"}], "diffs": {"fix.patch": diff}},
        "a": patch(edit("f", find="one(x)", replace="1")),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert codes(plan) == ["E-OVERLAP"]
    assert "fix.patch" in plan.faults[0].finding.found


def test_a_result_that_does_not_parse_blames_its_patch(tmp_path: Path) -> None:
    patches = {
        "good": patch(edit("f", find="two(a)", replace="2")),
        "bad": patch(edit("f", find="a", nth=1, replace="g(1)")),
    }
    plan = make_plan(tmp_path, {FILE: SOURCE}, patches)
    assert [(f.patch, f.finding.code) for f in plan.faults] == [("bad", "E-RESULT")]


def test_two_deletes_that_empty_a_block_are_told(tmp_path: Path) -> None:
    source = "def f():\n    a()\n    b()\n"
    patches = {"p": patch(edit("f", find="a()", delete=True)), "q": patch(edit("f", find="b()", delete=True))}
    plan = make_plan(tmp_path, {FILE: source}, patches)
    assert codes(plan) == ["E-RESULT"]
    assert "p, q together" in plan.faults[0].finding.message


def test_a_new_file_that_does_not_parse(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, {FILE: SOURCE}, {"a": patch(files={"vllm_ascend/n.py": "def f(:\n"})})
    assert codes(plan) == ["E-RESULT"]


def test_a_file_of_the_base_that_cannot_be_read(tmp_path: Path) -> None:
    trees = make_trees(tmp_path / "trees", {FILE: SOURCE})
    trees.path(*PATH).write_bytes(b"x = '\xff'\n")
    series = make_series(tmp_path / "root", {"a": patch(edit("f", find="one(x)", replace="1"))})
    assert codes(plan_series(series, trees, VERSION)) == ["E-READ"]


def test_an_unchanged_file_is_not_in_the_plan(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, {FILE: SOURCE}, {"a": patch(edit(import_="import os"))})
    assert not plan.files
    assert len(plan.placed) == 1


def test_the_digest_covers_patch_files(tmp_path: Path) -> None:
    """An edited .patch makes another series: else `apply` would take the old result for the new one."""
    diff = f"--- a/{FILE}\n+++ b/{FILE}\n@@ -7,1 +7,1 @@\n-    return b\n+    return 1\n"
    series = make_series(tmp_path, {"d": {"edits": [{"diff": "fix.patch"}], "diffs": {"fix.patch": diff}}})
    before = series.digest()
    (series["d"].directory / "fix.patch").write_text(diff.replace("return 1", "return 2"))
    assert series.digest() != before


@pytest.mark.parametrize("file", ["vllm_ascend/./a.py", "vllm_ascend//a.py", "./a.py", "a\0.py", "a/"])
def test_a_file_has_one_name(file: str) -> None:
    """Edits of one file under two names would not see each other."""
    with pytest.raises(ValueError, match="path inside the tree"):
        At.parse(file)


def test_a_diff_names_a_file_as_an_edit_does(tmp_path: Path) -> None:
    text = "--- ./vllm_ascend//a.py\n+++ ./vllm_ascend//a.py\n@@ -1,2 +1,2 @@\n-x = 1\n+x = 2\n y = 1\n"
    files = {"vllm_ascend/a.py": "x = 1\ny = 1\n"}
    edits = [{"diff": "f.patch"}, {"at": "vllm_ascend/a.py", "find": "y = 1", "replace": "y = 2"}]
    plan = make_plan(tmp_path, files, {"p": {"edits": edits, "diffs": {"f.patch": text}}})
    assert codes(plan) == []
    assert plan.files == {("vllm-ascend", "vllm_ascend/a.py"): "x = 2\ny = 2\n"}


def test_a_directory_is_no_file_to_edit(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, {}, {"p": {"edits": [{"at": "vllm_ascend", "find": "x", "delete": True}]}})
    assert codes(plan) == ["E-FILE-GONE"]


def test_an_edit_for_no_base_is_refused() -> None:
    with pytest.raises(ValueError, match="for"):
        Edit.model_validate({"at": "a.py", "for": [], "append": "x = 1"})


def test_endless_expressions_are_faults(tmp_path: Path) -> None:
    deep = "1" + "+1" * 20000
    files = {"vllm_ascend/a.py": "def f(x):\n    y = 1\n    return x\n"}
    at = "vllm_ascend/a.py::f"
    for edit in ({"at": at, "find": deep, "delete": True}, {"at": at, "find": "x", "replace": deep}):
        assert codes(make_plan(tmp_path, files, {"p": {"edits": [edit]}})) == ["E-EDIT"]
    new = {"p": {"edits": [], "files": {"vllm_ascend/strata/a.py": f"x = {deep}\n"}}}
    assert codes(make_plan(tmp_path, files, new)) == ["E-RESULT"]


def test_a_variant_names_a_release(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no release"):
        Edit.model_validate({"at": "a.py", "for": ["23.x"], "append": "x = 1"})
    edits = [{"at": "vllm_ascend/a.py", "for": ["0.23"], "append": "x = 1"}]
    plan = make_plan(tmp_path, {"vllm_ascend/a.py": "y = 1\n"}, {"p": {"edits": edits}}, version="0.23.0")
    assert plan.files == {("vllm-ascend", "vllm_ascend/a.py"): "y = 1\nx = 1\n"}
