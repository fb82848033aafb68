"""Reading source trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from series_tools import make_trees
from strata.errors import StrataError
from strata.languages import language_of
from strata.trees import Trees


def test_text_is_read_with_its_newlines(tmp_path: Path) -> None:
    trees = make_trees(tmp_path, {"vllm_ascend/a.py": "a\r\nb\rc\n☃", "vllm::vllm/b.py": "x"})
    assert trees.read("vllm-ascend", "vllm_ascend/a.py") == "a\r\nb\rc\n☃"
    assert trees.read("vllm", "vllm/b.py") == "x"
    assert trees.read("vllm", "vllm/none.py") is None
    assert trees.read("vllm", "vllm/b.py/below.py") is None


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    trees = make_trees(tmp_path, {})
    trees.path("vllm", "vllm/bad.py").mkdir()
    assert trees.read("vllm", "vllm/bad.py") is None


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    trees = make_trees(tmp_path, {})
    trees.path("vllm", "vllm/bad.py").write_bytes(b"ok\xff")
    with pytest.raises(StrataError) as found:
        trees.read("vllm", "vllm/bad.py")
    assert found.value.findings[0].code == "E-READ"
    assert "bad.py" in found.value.findings[0].where


def test_files_leave_out_caches_and_strata_s_records(tmp_path: Path) -> None:
    trees = make_trees(
        tmp_path,
        {
            "vllm_ascend/a.py": "",
            "vllm_ascend/__pycache__/a.py": "",
            ".strata/originals/a.py": "",
            "x.egg-info/a.py": "",
            "csrc/a.cpp": "",
        },
    )
    assert trees.files("vllm-ascend") == ["vllm_ascend/__init__.py", "vllm_ascend/a.py"]
    assert trees.files("vllm-ascend", (".cpp",)) == ["csrc/a.cpp"]


def test_a_missing_tree_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as found:
        Trees.at(tmp_path / "nowhere")
    assert [f.code for f in found.value.findings] == ["E-TREE", "E-TREE"]
    assert "make sources" in found.value.findings[0].hint


def test_an_unknown_tree_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StrataError):
        make_trees(tmp_path, {}).path("torch", "a.py")


def test_the_language_goes_by_the_name() -> None:
    assert [language_of(f).name for f in ("a.py", "a.pyi", "a.cpp", "CMakeLists.txt", "b.sh")] == [
        "python", "python", "tokens", "tokens", "tokens",
    ]  # fmt: skip
