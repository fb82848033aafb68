"""What Strata reads from a release's operator build, on a tree of our own making."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from strata.cli import main
from strata.errors import StrataError
from strata.kernels import Operator, Release, compare
from strata.kernels_tree import BUILD_SCRIPT, Package, kind_of, needs_catlass, unit_for, units

SCRIPT = """
if [[ "$SOC_VERSION" =~ ^ascend910b ]]; then
    CUSTOM_OPS_ARRAY=(
        "first_op"
        # "left_out"
        "second_op"
    )
    SOC_ARG="ascend910b"
elif [[ "$SOC_VERSION" =~ ^ascend910_93 ]]; then
    CUSTOM_OPS_ARRAY=("first_op")
    SOC_ARG="ascend910_93"
else
    exit 0
fi
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "csrc").mkdir()
    (tmp_path / BUILD_SCRIPT).write_text(SCRIPT)
    kernel = tmp_path / "csrc" / "moe" / "first_op" / "op_kernel"
    kernel.mkdir(parents=True)
    (kernel / "first_op.cpp").write_text('#include "catlass/arch/arch.hpp"\n')
    (tmp_path / "csrc" / "attention" / "second_op" / "op_kernel_aicpu").mkdir(parents=True)
    return tmp_path


def package(root: Path, unit: str = "ascend910b") -> Package:
    tbe = root / "vendors" / "custom_x" / "op_impl" / "ai_core" / "tbe"
    (tbe / "custom_x_impl" / "dynamic").mkdir(parents=True)
    (tbe / "config" / unit).mkdir(parents=True)
    (tbe / "config" / unit / f"aic-{unit}-ops-info.json").write_text(
        json.dumps({"First": {"opFile": {"value": "first_op"}}})
    )
    return Package.at(root)


def test_families_with_their_operators_and_no_comments() -> None:
    found = units(SCRIPT)
    assert [(u.family, u.compute_unit, u.operators) for u in found] == [
        ("ascend910b", "ascend910b", ("first_op", "second_op")),
        ("ascend910_93", "ascend910_93", ("first_op",)),
    ]


def test_the_soc_chooses_the_family(tree: Path) -> None:
    assert unit_for(tree, "ascend910b1").compute_unit == "ascend910b"
    assert unit_for(tree, "ascend910_9391").compute_unit == "ascend910_93"


def test_a_soc_without_operators_is_named_with_those_known(tree: Path) -> None:
    with pytest.raises(StrataError) as caught:
        unit_for(tree, "ascend310p1")
    finding = caught.value.findings[0]
    assert finding.code == "E-SOC" and "ascend910_93" in finding.expected and finding.found == "ascend310p1"


def test_a_tree_without_operator_build(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as caught:
        unit_for(tmp_path, "ascend910b1")
    assert caught.value.findings[0].code == "E-TREE"


def test_kinds_and_catlass_come_from_the_sources(tree: Path) -> None:
    assert [kind_of(tree, n) for n in ("first_op", "second_op", "third_op")] == ["aicore", "aicpu", "missing"]
    assert needs_catlass(tree, "first_op") and not needs_catlass(tree, "second_op")


def test_a_package_has_exactly_one_vendor(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as caught:
        Package.at(tmp_path)
    assert caught.value.findings[0].code == "E-PACKAGE" and "0 of them" in caught.value.findings[0].found
    found = package(tmp_path)
    assert found.descriptions("ascend910b").keys() == {"First"}
    with pytest.raises(StrataError) as caught:
        found.descriptions("ascend910_93")
    assert "ascend910b" in caught.value.findings[0].expected


def test_the_recorded_list_is_compared_with_the_tree(tree: Path) -> None:
    first = Operator(name="first_op", kind="aicore", chips=("ascend910b", "ascend910_93"), catlass=True)
    second = Operator(name="second_op", kind="aicpu", chips=("ascend910b",))
    assert compare(Release(operators=(first, second)), tree) == []
    assert [f.message for f in compare(Release(operators=(first,)), tree)] == [
        "second_op on ascend910b: the release's build and the file differ"
    ]
    wrong = second.model_copy(update={"kind": "aicore"})
    assert [f.found for f in compare(Release(operators=(first, wrong)), tree)] == [
        "kind aicore, catlass false"
    ]


def test_the_command_lists_what_the_file_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--chip", "ascend910_93", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 42 and sum(o["kind"] == "aicpu" for o in listed) == 3
    assert {o["name"] for o in listed if o["catlass"]} == {
        "chunk_fwd_o",
        "chunk_gated_delta_rule_fwd_h",
        "dispatch_ffn_combine",
        "dispatch_ffn_combine_bf16",
        "dispatch_ffn_combine_w4_a8",
        "dispatch_gmm_combine_decode",
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "--version", "0.23.1"], "E-VERSION"),
        (["list", "--chip", "ascend910c"], "E-CHIP"),
        (["verify", "--tree", "/nonexistent"], "E-TREE"),
        (["prove", "--package", "/nonexistent"], "E-PACKAGE"),
    ],
)
def test_bad_arguments_give_one_clear_error(
    arguments: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"{code}: ")
