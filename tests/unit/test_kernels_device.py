"""The device path's decisions, and its whole run on a small release of our own making."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata import kernels_build
from strata.errors import StrataError
from strata.kernels_device import GIB, JOB_BYTES, available_memory, compiler_of, job_limit, preflight
from strata.kernels_tree import BUILD_SCRIPT, CATLASS, PACKAGE, unit_for

SCRIPT = """#!/bin/bash
set -euo pipefail
if [[ "$2" =~ ^ascend910_93 ]]; then
    CUSTOM_OPS_ARRAY=("first_op" "second_op")
    SOC_ARG="ascend910_93"
fi
[ -z "${FAIL:-}" ] || exit 7
tbe="$1/vllm_ascend/_cann_ops_custom/vendors/v/op_impl/ai_core/tbe"
rm -rf "$1/vllm_ascend/_cann_ops_custom"
mkdir -p "$tbe/v_impl/dynamic" "$tbe/config/ascend910_93"
echo "options = ['-I${INCLUDE:-}/x']" > "$tbe/v_impl/dynamic/first_op.py"
info="$tbe/config/ascend910_93/aic-ascend910_93-ops-info.json"
echo '{"First": {"opFile": {"value": "'"${MADE:-first_op}"'"}}}' > "$info"
env > "$tbe/env"
echo "$1 $2 $(pwd)" > "$tbe/arguments"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    kernel = tree / "csrc" / "mc2" / "first_op" / "op_kernel"
    kernel.mkdir(parents=True)
    (kernel / "first_op.cpp").write_text('#include "catlass/catlass.hpp"\n')
    (tree / "csrc" / "attention" / "second_op" / "op_kernel_aicpu").mkdir(parents=True)
    (tree / BUILD_SCRIPT).write_text(SCRIPT)
    (tree / "csrc" / "CMakeLists.txt").write_text("include(cmake/strata_relocatable.cmake)\n")
    (tree / CATLASS / "catlass").mkdir(parents=True)
    (tree / CATLASS / "catlass" / "catlass.hpp").touch()
    old = tree / PACKAGE / "vendors" / "v"
    old.mkdir(parents=True)
    (old / "gone.txt").touch()
    return tree


@pytest.fixture
def ascend(tmp_path: Path) -> Path:
    root = tmp_path / "Ascend"
    (root / "ascend-toolkit" / "latest").mkdir(parents=True)
    (root / "nnal" / "atb").mkdir(parents=True)
    (root / "ascend-toolkit" / "set_env.sh").write_text(
        f'export ASCEND_HOME_PATH="{root}/ascend-toolkit/latest"\n'
    )
    (root / "nnal" / "atb" / "set_env.sh").write_text("export ATB_HOME_PATH=/atb\n")
    return root


def stage(tmp_path: Path, tree: Path, ascend: Path, changed: dict[str, str]) -> tuple[int, Path]:
    base = tmp_path / "base.json"
    base.write_text(
        json.dumps({"name": "0.0.1-a3", "version": "0.0.1", "variant": "a3", "soc_version": "ascend910_9391"})
    )
    for name, text in changed.items():
        path = tmp_path / "changed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    arguments = [
        "--base-json",
        base,
        "--tree",
        tree,
        "--changed",
        tmp_path / "changed",
        "--out",
        tmp_path / "out",
    ]
    code = kernels_build.main([*map(str, arguments), "--ascend", str(ascend)])
    return code, tmp_path / "out"


@given(st.integers(0, 1 << 44), st.integers(1, 512))
def test_the_job_limit_fits_memory_and_cores(available: int, cores: int) -> None:
    jobs = job_limit(available, cores)
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * JOB_BYTES <= available


def test_memory_is_the_lower_of_host_and_container(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text(f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    assert available_memory(meminfo, limit) == 8 * GIB
    limit.write_text("max\n")
    assert available_memory(meminfo, limit) == 8 * GIB
    limit.write_text(f"{2 * GIB}\n")
    assert available_memory(meminfo, limit) == 2 * GIB


def test_a_missing_catlass_stops_before_the_build_and_names_what_needs_it(
    tmp_path: Path, tree: Path, ascend: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / CATLASS / "catlass" / "catlass.hpp").unlink()
    (tree / ".gitmodules").write_text('[submodule "x"]\n    commit = 0123abc\n')
    code, out = stage(tmp_path, tree, ascend, {"csrc/moe/x/op_kernel/x.h": ""})
    text = capsys.readouterr().err
    assert code == 2 and "E-CATLASS" in text and "first_op" in text and "0123abc" in text
    assert "second_op" not in text
    assert not list((tree / PACKAGE).rglob("arguments")), "the build ran"
    assert not (out / "operators.json").exists()


def test_a_build_that_would_download_its_packer_stops(tree: Path) -> None:
    fetcher = tree / "csrc" / "cmake" / "third_party" / "makeself-fetch.cmake"
    fetcher.parent.mkdir(parents=True)
    fetcher.touch()
    with pytest.raises(StrataError) as caught:
        preflight(tree, unit_for(tree, "ascend910_9391"))
    assert [f.code for f in caught.value.findings] == ["E-THIRD-PARTY"]
    makeself = tree / "csrc" / "third_party" / "makeself"
    makeself.mkdir()
    for name in ("makeself.sh", "makeself-header.sh"):
        (makeself / name).touch()
    preflight(tree, unit_for(tree, "ascend910_9391"))


def test_the_release_build_is_called_as_the_release_calls_it(
    tmp_path: Path, tree: Path, ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("MAX_JOBS", "3")
    code, out = stage(tmp_path, tree, ascend, {"csrc/moe/x/op_kernel/x.h": "// new\n"})
    assert code == 0
    made = out / "tree" / PACKAGE / "vendors" / "v" / "op_impl" / "ai_core" / "tbe"
    assert (made / "arguments").read_text().split() == [
        str(tree.resolve()),
        "ascend910_9391",
        str(tree.resolve()),
    ]
    env = dict(line.split("=", 1) for line in (made / "env").read_text().splitlines() if "=" in line)
    assert (
        env["SOC_VERSION"] == "ascend910_9391" and env["MAX_JOBS"] == "3" and env["ATB_HOME_PATH"] == "/atb"
    )
    assert env["ASCEND_HOME_PATH"].endswith("ascend-toolkit/latest") and "VLLM_BATCH_INVARIANT" not in env
    result = json.loads((out / "operators.json").read_text())
    assert result["package"] == "built" and result["extension"] == "as shipped"
    assert result["compiler"] is None, "there is no bisheng here"
    assert result["removed"] == ["vendors/v/gone.txt"]
    assert [o["name"] for o in result["operators"]] == ["first_op", "second_op"]
    assert (tree / "csrc/moe/x/op_kernel/x.h").read_text() == "// new\n"


def test_a_changed_binding_calls_the_release_s_install_and_takes_its_new_libraries(
    tmp_path: Path, tree: Path, ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "vllm_ascend" / "old.so").write_text("old")
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\nset -e\nbash csrc/build_aclnn.sh "$PWD" "$SOC_VERSION"\n'
        "echo new > vllm_ascend/made.so\n"
        'echo "$@" "$SETUPTOOLS_SCM_PRETEND_VERSION" > called\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr("strata.kernels_device.sys.executable", str(python))
    code, out = stage(tmp_path, tree, ascend, {"csrc/torch_binding.cpp": "// new\n"})
    assert code == 0
    called = (tree / "called").read_text().split()
    assert called[:3] == ["-m", "pip", "install"] and called[-1] == "0.0.1" and str(tree.resolve()) in called
    assert {"--no-index", "--no-build-isolation", "--no-deps"} <= set(called)
    assert [p.name for p in (out / "tree" / "vllm_ascend").glob("*.so")] == ["made.so"]
    assert (out / "tree" / PACKAGE / "vendors" / "v").is_dir()
    assert json.loads((out / "operators.json").read_text())["extension"] == "built"


def test_an_extension_build_that_leaves_no_library_is_an_error(
    tmp_path: Path,
    tree: Path,
    ascend: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("strata.kernels_device.sys.executable", "/bin/true")
    assert stage(tmp_path, tree, ascend, {"csrc/torch_binding.cpp": ""})[0] == 1
    assert "left no library" in capsys.readouterr().err


def test_nothing_changed_builds_nothing(tmp_path: Path, tree: Path, ascend: Path) -> None:
    old = tree / PACKAGE / "vendors" / "v" / "op_impl" / "ai_core" / "tbe"
    (old / "v_impl" / "dynamic").mkdir(parents=True)
    (old / "v_impl" / "dynamic" / "first_op.py").write_text("x = ['-include/build/host/x.h']\n")
    (old / "config" / "ascend910_93").mkdir(parents=True)
    (old / "config" / "ascend910_93" / "aic-ascend910_93-ops-info.json").write_text(
        '{"F": {"opFile": {"value": "first_op"}}}'
    )
    code, out = stage(tmp_path, tree, ascend, {"vllm_ascend/x.py": ""})
    result = json.loads((out / "operators.json").read_text())
    assert code == 0 and result["package"] == "as shipped" and result["relocatable"] is False
    assert list((out / "tree").iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [("FAIL", "1", "E-BUILD"), ("MADE", "another", "E-BUILD")],
)
def test_a_build_that_fails_or_loses_an_operator_is_an_error(
    tmp_path: Path,
    tree: Path,
    ascend: Path,
    variable: str,
    value: str,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert stage(tmp_path, tree, ascend, {"csrc/moe/x/op_kernel/x.h": ""})[0] == 1
    assert code in capsys.readouterr().err


def test_absolute_includes_after_a_relocatable_build_are_an_error(
    tmp_path: Path,
    tree: Path,
    ascend: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tree / "csrc" / "cmake").mkdir()
    (tree / "csrc" / "cmake" / "strata_relocatable.cmake").touch()
    monkeypatch.setenv("INCLUDE", "/build/host")
    assert stage(tmp_path, tree, ascend, {"csrc/moe/x/op_kernel/x.h": ""})[0] == 1
    assert "E-RELOCATABLE" in capsys.readouterr().err


def test_a_device_base_with_the_stand_in_is_refused(
    tmp_path: Path, tree: Path, ascend: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ascend / "ascend-toolkit" / "latest" / "STAND-IN").touch()
    assert stage(tmp_path, tree, ascend, {"csrc/moe/x/op_kernel/x.h": ""})[0] == 2
    assert "E-TOOLKIT" in capsys.readouterr().err


def test_the_compiler_is_told_from_the_environment(tmp_path: Path) -> None:
    assert compiler_of({"ASCEND_HOME_PATH": str(tmp_path), "PATH": ""}) is None
    (tmp_path / "bisheng").touch()
    (tmp_path / "bisheng").chmod(0o755)
    assert compiler_of({"ASCEND_HOME_PATH": str(tmp_path), "PATH": str(tmp_path)}) == "bisheng"
    (tmp_path / "STAND-IN").touch()
    assert compiler_of({"ASCEND_HOME_PATH": str(tmp_path), "PATH": str(tmp_path)}) == "stand-in"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"name": "x"}', '{"name": 1, "version": "", "variant": "a3", "soc_version": "s"}']
)
def test_a_bad_base_description_is_an_error(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.json").write_text(text)
    code = kernels_build.main(
        ["--base-json", str(tmp_path / "base.json"), "--tree", str(tmp_path), "--out", str(tmp_path / "o")]
    )
    assert code == 2 and "E-BASE-JSON" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["base.json"]
