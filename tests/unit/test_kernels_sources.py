"""The kernels stage on the real 0.23.0 sources and package: what passes, and that the check can fail.

Needs the trees that ``make sources`` makes (``STRATA_TREES``), g++ and cmake.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from strata import kernels as ops
from strata import kernels_build, kernels_cpu
from strata.errors import StrataError
from strata.kernels_descriptors import from_package, without_binary
from strata.kernels_prove import environment, passed, prove
from strata.kernels_tree import PACKAGE, Package, directory_of, unit_for
from strata.kernels_wrappers import compile_options, described, generate
from strata.plan import plan_series
from strata.series import load_series
from strata.trees import Trees

pytestmark = [pytest.mark.sources, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
CANN = ROOT / "images" / "cpu" / "standin" / "cann"
FAKE = ROOT / "tests" / "image" / "fake_device_base"
PATCH = "relocatable-op-includes"
UNIT = "ascend910b"
CATLASS_USERS = {"chunk_fwd_o", "chunk_gated_delta_rule_fwd_h", "matmul_allreduce_add_rmsnorm"}


@pytest.fixture(scope="module")
def trees() -> Path:
    path = Path(os.environ.get("STRATA_TREES", "/nonexistent"))
    if not (path / "vllm-ascend" / PACKAGE / "vendors").is_dir():
        pytest.fail(f"no vllm-ascend tree with its operator package at STRATA_TREES={path}: run make sources")
    for tool in ("g++", "cmake"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is missing: install it (Debian: apt-get install {tool})")
    return path


@pytest.fixture(scope="module")
def changed(trees: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tuned image's edits stage hands to the kernels stage when the series is this patch."""
    plan = plan_series(load_series(ROOT), Trees.at(trees), "0.23.0", only=[PATCH])
    assert [f.finding.render() for f in plan.faults] == []
    target = tmp_path_factory.mktemp("changed")
    for (_, name), text in plan.files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    return target


def copy_of(trees: Path, target: Path) -> Path:
    """A tree to build in: sources and package, without binaries and without what no build reads."""
    source = trees / "vllm-ascend"
    ignored = shutil.ignore_patterns("examples", "docs", "*.o", "*.so", "__pycache__")
    shutil.copytree(source / "csrc", target / "csrc", ignore=ignored)
    shutil.copytree(source / PACKAGE, target / PACKAGE, ignore=ignored)
    return target


@pytest.fixture(scope="module")
def patched(trees: Path, changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_of(trees, tmp_path_factory.mktemp("patched") / "vllm-ascend")
    shutil.copytree(changed, tree, dirs_exist_ok=True)
    return tree


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return environment([CANN / "ascend-toolkit" / "set_env.sh", CANN / "nnal" / "atb" / "set_env.sh"])


@pytest.fixture(scope="module")
def moved(patched: Path, tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Package:
    """The regenerated package, away from where it was made."""
    work = tmp_path_factory.mktemp("assemble")
    made = kernels_cpu.assemble(patched, "ascend910b1", [], work / "w", env["ASCEND_HOME_PATH"])
    target = tmp_path_factory.mktemp("elsewhere") / "operators"
    made.root.rename(target)
    shutil.rmtree(work / "w")
    return Package.at(target)


def base_json(directory: Path, variant: str, soc: str) -> Path:
    path = directory / "base.json"
    path.write_text(
        json.dumps({"name": f"0.23.0-{variant}", "version": "0.23.0", "variant": variant, "soc_version": soc})
    )
    return path


def stage(directory: Path, variant: str, soc: str, tree: Path, inputs: Path, ascend: Path) -> int:
    base = base_json(directory, variant, soc)
    arguments = [
        "--base-json",
        base,
        "--tree",
        tree,
        "--changed",
        inputs,
        "--out",
        directory / "out",
        "--ascend",
        ascend,
    ]
    return kernels_build.main([str(a) for a in arguments])


def test_the_recorded_operators_are_the_release_s(trees: Path) -> None:
    recorded = ops.release(ROOT, "0.23.0")
    assert ops.compare(recorded, trees / "vllm-ascend") == []
    assert {c: len(recorded.on(c)) for c in (UNIT, "ascend910_93")} == {UNIT: 39, "ascend910_93": 42}
    assert len(recorded.planned) == 1, "the published 43 is these 42 and one more"


def test_as_shipped_no_wrapper_passes(trees: Path, env: dict[str, str]) -> None:
    package = Package.at(trees / "vllm-ascend" / PACKAGE)
    outcomes = prove(package, from_package(package, UNIT), env)
    good, bad = passed(outcomes)
    assert (len(good), len(bad)) == (0, 36)
    assert without_binary(package, UNIT) == []
    assert {o.reason.split(": ", 1)[1] for o in outcomes} == {
        "fatal error: /workspace/vllm-ascend/csrc/common/include/cann_compat.h: No such file or directory"
    }


def test_unpatched_the_generator_gives_the_shipped_wrappers(trees: Path, tmp_path: Path) -> None:
    tree = trees / "vllm-ascend"
    package, unit = Package.at(tree / PACKAGE), unit_for(tree, "ascend910b1")
    autogen, headers = compile_options(
        tree, unit.operators, tmp_path, "/usr/local/Ascend/ascend-toolkit/latest"
    )
    made = generate(tree, described(package, UNIT), UNIT, autogen, tmp_path)
    assert headers is None

    def text(path: Path) -> list[str]:
        lines = path.read_text(encoding="utf-8").replace(str(tree), "/workspace/vllm-ascend").splitlines()
        return [line for line in lines if not line.startswith("Copyright")]

    different = [p.name for p in sorted(made.glob("*.py")) if text(p) != text(package.wrappers / p.name)]
    assert different == [] and len(list(made.glob("*.py"))) == 36


def test_patched_only_the_options_differ_from_the_shipped_wrappers(trees: Path, moved: Package) -> None:
    shipped = Package.at(trees / "vllm-ascend" / PACKAGE)
    for keys in shipped.descriptions(UNIT).values():
        name = keys["opFile"]["value"] + ".py"
        before = (shipped.wrappers / name).read_text(encoding="utf-8").splitlines()
        after = (moved.wrappers / name).read_text(encoding="utf-8").splitlines()
        lines = [
            x
            for x in difflib.unified_diff(before, after, n=0)
            if x[0] in "+-" and x[:3] not in ("+++", "---")
        ]
        kinds = {x[1:].split("=")[0].strip() for x in lines if not x[1:].startswith("Copyright")}
        allowed = {"custom_all_compile_options"} | (
            {"custom_compile_options"} if name[:-3] in CATLASS_USERS else set()
        )
        assert kinds == allowed, name


def test_absent_inputs_are_really_absent(moved: Package) -> None:
    descriptors = from_package(moved, UNIT, absent=True)
    causal = next(d for d in descriptors if d.op_file == "causal_conv1d")
    assert None in causal.inputs and None not in causal.inputs[:2]
    assert sum(None in d.inputs for d in descriptors) > 10


def test_without_its_catlass_exactly_its_users_fail(
    moved: Package, env: dict[str, str], tmp_path: Path
) -> None:
    less = tmp_path / "less"
    shutil.copytree(moved.root, less)
    package = Package.at(less)
    shutil.rmtree(package.sources / "common" / "catlass")
    good, bad = passed(prove(package, from_package(package, UNIT), env))
    assert (len(good), set(bad)) == (33, CATLASS_USERS)


def test_a_header_from_outside_the_package_is_a_failure(
    moved: Package, env: dict[str, str], tmp_path: Path
) -> None:
    """A wrapper that reaches back into a source tree that is still there must not pass."""
    less = tmp_path / "less"
    shutil.copytree(moved.root, less)
    package = Package.at(less)
    stray = tmp_path / "stray"
    stray.mkdir()
    wrapper = package.wrappers / "hc_post.py"
    text = wrapper.read_text(encoding="utf-8")
    header = "'-include' + os.path.join(PYF_PATH, '..', 'ascendc', 'common', 'cann_compat.h')"
    assert header in text
    (package.sources / "common" / "cann_compat.h").rename(stray / "cann_compat.h")
    wrapper.write_text(text.replace(header, repr(f"-include{stray}/cann_compat.h")), encoding="utf-8")
    one = [d for d in from_package(package, UNIT) if d.op_file == "hc_post"]
    assert [o.outside for o in prove(package, one, env)] == [(f"{stray}/cann_compat.h",)]


def test_the_stage_passes_every_wrapper_and_writes_only_what_differs(
    trees: Path, changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = copy_of(trees, tmp_path / "vllm-ascend")
    assert stage(tmp_path, "cpu", "ascend910b1", tree, changed, CANN) == 0
    said = capsys.readouterr().out
    assert said.count("running 36 descriptors") == 2 and "FAIL" not in said and said.count(" ok ") == 72
    assert said.count("36 of 36 operators pass from a package moved elsewhere") == 2
    result = json.loads((tmp_path / "out" / "operators.json").read_text())
    assert (result["compiler"], result["package"], result["relocatable"]) == ("stand-in", "regenerated", True)
    by_compiler = [o["compiler"] for o in result["operators"]]
    assert (by_compiler.count("stand-in"), by_compiler.count(None)) == (36, 3)
    written = [p for p in (tmp_path / "out" / "tree").rglob("*") if p.is_file()]
    shipped = trees / "vllm-ascend"
    for path in written:
        old = shipped / path.relative_to(tmp_path / "out" / "tree")
        assert not old.is_file() or old.read_bytes() != path.read_bytes()
    assert sum(p.suffix == ".py" for p in written) == 36
    assert not [p for p in written if p.suffix in (".o", ".so")]
    assert not [p for p in written if p.stat().st_mode & 0o044 != 0o044], "readable by everyone"


def test_a_kernel_whose_header_is_missing_stops_the_stage(
    trees: Path, changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = copy_of(trees, tmp_path / "vllm-ascend")
    inputs = tmp_path / "inputs"
    shutil.copytree(changed, inputs)
    name = "csrc/moe/hc_post/op_kernel/hc_post.cpp"
    (inputs / name).parent.mkdir(parents=True)
    (inputs / name).write_text(
        '#include "not_shipped.h"\n' + (tree / name).read_text(encoding="utf-8"), encoding="utf-8"
    )
    assert stage(tmp_path, "cpu", "ascend910b1", tree, inputs, CANN) == 1
    text = capsys.readouterr().err
    assert "E-OPERATOR: 1 of 36" in text and "hc_post" in text and "not_shipped.h" in text
    assert not (tmp_path / "out" / "tree").exists() and not (tmp_path / "out" / "operators.json").exists()


def test_without_the_patch_a_changed_kernel_is_proved_in_place(trees: Path, tmp_path: Path) -> None:
    tree = copy_of(trees, tmp_path / "vllm-ascend")
    name = "csrc/moe/hc_post/op_kernel/hc_post.cpp"
    (tmp_path / "inputs" / name).parent.mkdir(parents=True)
    (tmp_path / "inputs" / name).write_text(
        "// ours\n" + (tree / name).read_text(encoding="utf-8"), encoding="utf-8"
    )
    assert stage(tmp_path, "cpu", "ascend910b1", tree, tmp_path / "inputs", CANN) == 0
    assert json.loads((tmp_path / "out" / "operators.json").read_text())["relocatable"] is False


def test_on_910_93_every_catlass_operator_preprocesses_from_the_package(
    patched: Path, moved: Package, env: dict[str, str], tmp_path: Path
) -> None:
    """No wheel has the 910_93 wrappers: options by the tree's CMake, marks resolved as a wrapper would."""
    unit = unit_for(patched, "ascend910_9391")
    autogen, headers = compile_options(patched, unit.operators, tmp_path / "w", env["ASCEND_HOME_PATH"])
    assert headers is not None
    common = tmp_path / "package" / "ascendc" / "common"
    shutil.copytree(moved.sources / "common", common)
    options = {}
    for line in (autogen / "custom_compile_options.ini").read_text().splitlines():
        op_type, _, text = line.split(",")
        options[op_type] = text.split(";")
    toolkit = Path(env["ASCEND_HOME_PATH"])
    types = {
        "dispatch_ffn_combine": "DispatchFFNCombine",
        "dispatch_ffn_combine_w4_a8": "DispatchFFNCombineW4A8",
        "dispatch_ffn_combine_bf16": "DispatchFFNCombineBF16",
        "dispatch_gmm_combine_decode": "DispatchGmmCombineDecode",
    }
    for name, op_type in types.items():
        directory = directory_of(patched, name)
        assert directory is not None
        kernel = tmp_path / "package" / "ascendc" / name
        shutil.copytree(directory / "op_kernel", kernel)
        assert any("__STRATA_SHIPPED__/catlass/include" in o for o in options[op_type]), name
        assert not [o for o in options[op_type] if o.startswith(("-I/", "-include/"))], name
        words = [o.replace("__STRATA_SHIPPED__", str(common)) for o in [*options["ALL"], *options[op_type]]]
        tikcfw = toolkit / "compiler" / "tikcpp" / "tikcfw"
        roots = [tikcfw, tikcfw / "impl", tikcfw / "interface", toolkit / "include", common]
        head = ["bisheng", "-c", "-x", "cce", "-std=c++17", *words, *[f"-I{r}" for r in roots]]
        for core in ("cube", "vec"):
            tail = [
                "-E",
                str(kernel / f"{name}.cpp"),
                "-o",
                "/dev/null",
                f"--cce-aicore-arch=dav-c220-{core}",
            ]
            done = subprocess.run([*head, *tail], env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{name} {core}: {done.stderr[:600]}"
            without = [w for w in head if w != f"-I{common}/catlass/include"]
            done = subprocess.run([*without, *tail], env=env, capture_output=True, text=True, check=False)
            assert done.returncode != 0 and "fatal error: catlass/" in done.stderr, (
                f"{name} passes without catlass"
            )


def test_an_include_that_does_not_travel_stops_the_configuration(patched: Path, tmp_path: Path) -> None:
    tree = tmp_path / "vllm-ascend"
    shutil.copytree(patched, tree)
    lists = tree / "csrc" / "moe" / "hc_post" / "op_host" / "CMakeLists.txt"
    text = lists.read_text(encoding="utf-8")
    lists.write_text(
        text.replace("OP_NAME HcPost\n        OPTIONS", "OP_NAME HcPost\n        OPTIONS -I/opt/build/only")
    )
    assert lists.read_text(encoding="utf-8") != text
    with pytest.raises(StrataError) as caught:
        compile_options(tree, unit_for(tree, "ascend910b1").operators, tmp_path / "w", "/cann")
    finding = caught.value.findings[0]
    assert finding.code == "E-OPTIONS" and any("/opt/build/only" in line for line in finding.details)


def test_the_build_tree_gets_the_headers_that_the_package_gets(patched: Path, tmp_path: Path) -> None:
    """Binaries are compiled in the build tree with the same options: there, too, they must resolve."""
    csrc = patched / "csrc"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(x NONE)\n"
        f'include("{csrc}/cmake/strata_relocatable.cmake")\ninclude("{csrc}/cmake/func.cmake")\n'
        f'set(OPS_ADV_UTILS_KERNEL_INC "{csrc}/common/include/kernel")\n'
        f'add_ops_src_copy(TARGET_NAME copy COMPUTE_UNIT u SRC "{csrc}/moe/hc_post" '
        f'DST "{tmp_path}/src/hc_post")\n'
    )
    for command in (
        ["-S", str(tmp_path), "-B", str(tmp_path / "b")],
        ["--build", str(tmp_path / "b"), "--target", "copy"],
    ):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    common = tmp_path / "src" / "ascendc" / "common"
    for name in (
        "cann_compat.h",
        "catlass/include/catlass/catlass.hpp",
        "moe/common/kernel_utils/block",
        "mem.h",
    ):
        assert (common / name).exists(), name


@pytest.mark.parametrize("relocatable", [True, False])
def test_the_device_path_on_the_release_s_own_build_script(
    relocatable: bool, trees: Path, changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = copy_of(trees, tmp_path / "vllm-ascend")
    shutil.copy(FAKE / "csrc_build.sh", tree / "csrc" / "build.sh")
    makeself = tree / "csrc" / "third_party" / "makeself"
    makeself.mkdir()
    for name in ("makeself.sh", "makeself-header.sh"):
        (makeself / name).touch()
    monkeypatch.setenv("STRATA_FAKE_PACKAGE", str(FAKE / "fake_package.py"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))  # the release's script writes to the user's git configuration
    inputs = changed
    if not relocatable:
        inputs = tmp_path / "inputs"
        (inputs / "csrc").mkdir(parents=True)
        (inputs / "csrc" / "version.info").write_text("changed\n")
    assert stage(tmp_path, "a3", "ascend910_9391", tree, inputs, FAKE / "ascend") == 0
    result = json.loads((tmp_path / "out" / "operators.json").read_text())
    assert (result["package"], result["relocatable"], result["compiler"]) == ("built", relocatable, None)
    assert len(result["operators"]) == 42
    record = json.loads(
        (tmp_path / "out" / "tree" / PACKAGE / "vendors/custom_transformer/fake-build.json").read_text()
    )
    assert record["arguments"]["soc"] == "ascend910_93" and len(record["arguments"]["ops"]) == 42
    seen = record["environment"]
    assert seen["STRATA_FAKE_CANN"] == seen["STRATA_FAKE_ATB"] == "sourced"
    assert seen["SOC_VERSION"] == "ascend910_9391" and int(seen["MAX_JOBS"]) >= 1
    assert seen["CPATH"].startswith(str(tree / "csrc" / "third_party" / "catlass"))
