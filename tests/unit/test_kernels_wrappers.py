"""The generator's inputs and the relative form of compile options."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.kernels_wrappers import description_ini, options_project

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "patches" / "build" / "relocatable-op-includes"


def _relocatable() -> ModuleType:
    path = PATCH / "files" / "csrc" / "cmake" / "scripts" / "util" / "strata_relocatable.py"
    spec = importlib.util.spec_from_file_location("strata_relocatable", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


relocatable = _relocatable()


def test_a_description_starts_each_tensor_at_its_name_and_attributes_at_their_list() -> None:
    text = description_ini(
        {
            "Op": {
                "attr_k": {"type": "int"},
                "input10": {"dtype": "int8", "name": "last"},
                "output0": {"name": "y"},
                "input2": {"format": "ND", "name": "third"},
                "attr": {"list": "k"},
                "opFile": {"value": "op"},
            }
        }
    )
    assert text.splitlines() == [
        "[Op]",
        "input2.name=third",
        "input2.format=ND",
        "input10.name=last",
        "input10.dtype=int8",
        "output0.name=y",
        "attr.list=k",
        "attr_k.type=int",
        "opFile.value=op",
    ]


PLAIN = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), min_size=1).filter(
    lambda o: "__STRATA_" not in o and not o.startswith(relocatable._FLAGS)
)


@given(st.dictionaries(st.sampled_from(["__ALLSOC__", "ascend910b"]), st.lists(PLAIN)))
def test_options_without_a_mark_are_written_as_the_release_writes_them(options: dict[str, list[str]]) -> None:
    assert relocatable.expression(options) == str(options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("-include__STRATA_SHIPPED__/cann_compat.h", "-include/pkg/dynamic/../ascendc/common/cann_compat.h"),
        ("-I__STRATA_SHIPPED__/catlass/include", "-I/pkg/dynamic/../ascendc/common/catlass/include"),
        ("__STRATA_SHIPPED__", "/pkg/dynamic/../ascendc/common"),
        ("-I__STRATA_TOOLKIT__/aarch64-linux/ascendc/include", "-I/cann/aarch64-linux/ascendc/include"),
    ],
)
def test_marks_become_paths_of_the_wrapper_and_the_toolkit_in_use(option: str, value: str) -> None:
    text = relocatable.expression({"__ALLSOC__": ["-O3", option]})
    names = {"os": os, "PYF_PATH": "/pkg/dynamic", "toolkit_path": "/cann"}
    assert eval(text, names) == {"__ALLSOC__": ["-O3", value]}


@pytest.mark.parametrize("option", ["-I/build/host", "-include/build/host/x.h", "-isystem/x"])
def test_an_absolute_include_stops_the_generator(option: str) -> None:
    with pytest.raises(ValueError, match="build host"):
        relocatable.expression({"__ALLSOC__": [option]})


def test_the_options_project_repeats_the_statements_of_the_tree_only(tmp_path: Path) -> None:
    (tmp_path / "csrc" / "cmake").mkdir(parents=True)
    (tmp_path / "csrc" / "moe" / "op" / "op_host").mkdir(parents=True)
    (tmp_path / "csrc" / "moe" / "op" / "op_host" / "CMakeLists.txt").touch()
    (tmp_path / "csrc" / "CMakeLists.txt").write_text(
        "project(x)\n# list(APPEND OPS_COMPILE_OPTIONS -commented)\nlist(APPEND OPS_COMPILE_OPTIONS -kept)\n"
    )
    text = options_project(tmp_path, ["op", "unknown"], tmp_path / "out", "/cann", "python3")
    assert "list(APPEND OPS_COMPILE_OPTIONS -kept)" in text and "-commented" not in text
    assert "project(x)" not in text
    entered = [line for line in text.splitlines() if line.startswith("strata_enter(")]
    assert entered == [f'strata_enter("{tmp_path}/csrc/moe/op/op_host")']
    assert "strata_relocatable" not in text
