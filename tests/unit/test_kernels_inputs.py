"""Which changed build inputs call for which build."""

from __future__ import annotations

from pathlib import Path

import pytest
from strata.kernels_inputs import Needed, changed_files, kernel_sources, needed, overlay


@pytest.mark.parametrize(
    ("path", "operators", "extension"),
    [
        ("csrc/cmake/func.cmake", True, False),
        ("csrc/CMakeLists.txt", True, False),
        ("csrc/build_aclnn.sh", True, False),
        ("csrc/moe/causal_conv1d/op_host/causal_conv1d_tiling_validation.h", True, False),
        ("csrc/attention/recurrent_gated_delta_rule/op_kernel/kernel.h", True, False),
        ("csrc/third_party/catlass/include/catlass/catlass.hpp", True, False),
        ("csrc/torch_binding.cpp", False, True),
        ("csrc/torch_binding_meta.cpp", False, True),
        ("csrc/ops.h", False, True),
        ("csrc/kernels/bgmv.cpp", False, True),
        ("csrc/mla_preprocess/op_kernel/x.h", False, True),
        ("csrc/attention/store_kv_block_metadata/store_kv_block_metadata_torch_adpt.cpp", False, True),
        ("CMakeLists.txt", False, True),
        ("setup.py", False, True),
        ("cmake/utils.cmake", False, True),
        ("csrc/something_new/file.cpp", True, True),
        ("vllm_ascend/ops/gdn.py", False, False),
    ],
)
def test_each_input_calls_for_its_build(path: str, operators: bool, extension: bool) -> None:
    assert needed([path]) == Needed(operators, extension)


def test_nothing_changed_needs_nothing(tmp_path: Path) -> None:
    assert (
        changed_files(None) == []
        and changed_files(tmp_path / "missing") == []
        and changed_files(tmp_path) == []
    )
    assert needed([]) == Needed(False, False)


def test_kernel_sources_land_where_the_release_installs_them() -> None:
    found = kernel_sources(
        [
            "csrc/moe/op/op_kernel/arch22/a.h",
            "csrc/common/include/kernel/mem.h",
            "csrc/moe/op/op_host/b.cpp",
        ]
    )
    assert found == {
        "csrc/moe/op/op_kernel/arch22/a.h": "op/arch22/a.h",
        "csrc/common/include/kernel/mem.h": "common/mem.h",
    }


def test_the_overlay_replaces_and_adds(tmp_path: Path) -> None:
    changed, tree = tmp_path / "changed", tmp_path / "tree"
    for base, name, text in (
        (tree, "csrc/a", "old"),
        (changed, "csrc/a", "new"),
        (changed, "csrc/b/c", "more"),
    ):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    overlay(changed, tree)
    assert (tree / "csrc/a").read_text() == "new" and (tree / "csrc/b/c").read_text() == "more"
