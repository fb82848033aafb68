"""The stand-in toolkit by itself: what it refuses, and that its answers come from a real preprocessor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from strata.errors import StrataError
from strata.kernels_prove import environment

CANN = Path(__file__).resolve().parents[2] / "images" / "cpu" / "standin" / "cann"
TOOLKIT = CANN / "ascend-toolkit" / "latest"
BISHENG = TOOLKIT / "compiler" / "ccec_compiler" / "bin" / "bisheng"


def bisheng(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BISHENG), *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.fail("g++ is missing: install it (Debian: apt-get install g++)")


def test_it_refuses_to_compile(tmp_path: Path) -> None:
    done = bisheng("-c", "kernel.cpp", "-o", str(tmp_path / "kernel.o"))
    assert done.returncode == 2 and "only -E" in done.stderr and not (tmp_path / "kernel.o").exists()


@pytest.mark.parametrize("arch", ["dav-c220-scalar", "dav-m300-vec", "cube"])
def test_it_refuses_an_architecture_that_it_does_not_know(arch: str) -> None:
    done = bisheng("-E", f"--cce-aicore-arch={arch}", "kernel.cpp")
    assert done.returncode == 2 and arch in done.stderr


@pytest.mark.usefixtures("_compiler")
def test_cores_see_their_macros_and_a_missing_header_stops(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(
        "#ifdef __DAV_CUBE__\nint cube;\n#endif\n"
        "#ifdef __DAV_VEC__\nint vec;\n#endif\n"
        "#ifdef WANT\n#include WANT\n#endif\n"
    )
    options = ["-c", "-O3", "-x", "cce", "-mllvm", "-cce-x=1", "--cce-auto-sync=off", "-E", str(source)]
    for core, other in (("cube", "vec"), ("vec", "cube")):
        done = bisheng(*options, f"--cce-aicore-arch=dav-c220-{core}")
        assert done.returncode == 0 and f"int {core};" in done.stdout and f"int {other};" not in done.stdout
    done = bisheng(*options, '-DWANT="not_there.h"', "--cce-aicore-arch=dav-c220-vec")
    assert done.returncode != 0 and "not_there.h" in done.stderr


def test_the_environment_is_the_real_ones_names(tmp_path: Path) -> None:
    scripts = [CANN / "ascend-toolkit" / "set_env.sh", CANN / "nnal" / "atb" / "set_env.sh"]
    env = environment(scripts, {"PATH": os.environ["PATH"]})
    assert env["ASCEND_HOME_PATH"] == env["ASCEND_TOOLKIT_HOME"] == str(TOOLKIT)
    assert Path(env["ATB_HOME_PATH"]).is_dir() and Path(env["ASCEND_OPP_PATH"]).is_dir()
    assert shutil.which("bisheng", path=env["PATH"]) == str(BISHENG)
    assert env["PYTHONPATH"].split(":")[0] == str(TOOLKIT / "python" / "site-packages")
    # nothing empty: an empty entry would mean the current directory
    assert "" not in env["LD_LIBRARY_PATH"].split(":") and "" not in env["PYTHONPATH"].split(":")


def test_a_missing_environment_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as caught:
        environment([tmp_path / "set_env.sh"])
    assert caught.value.findings[0].code == "E-ENV" and str(tmp_path) in caught.value.findings[0].expected


def test_a_failing_environment_script_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "set_env.sh"
    script.write_text("echo broken >&2; return 3\n")
    with pytest.raises(StrataError) as caught:
        environment([script])
    assert "broken" in caught.value.findings[0].found


def _para_check(script: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TOOLKIT / "python" / "site-packages")}
    return subprocess.run(
        [sys.executable, "-B", "-c", script], env=env, capture_output=True, text=True, check=False
    )


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    head = (
        "from tbe.common.utils import para_check as p\n"
        "t = lambda: dict(shape=[1], ori_shape=[1], format='ND', ori_format='ND', dtype='int8')\n"
        "@p.check_op_params(p.REQUIRED_INPUT, p.OPTION_INPUT, p.OPTION_ATTR_INT, p.KERNEL_NAME)\n"
        "def op(x, y=None, k=0, kernel_name='op'): return x['param_name']\n"
    )
    assert _para_check(head + "print(op(t()), op(t(), t(), 3))").stdout.split() == ["x", "x"]
    for call in ("op(None)", "op(t(), 5)", "op(t(), None, 'three')", "op({'shape': [1]})"):
        done = _para_check(head + call)
        assert done.returncode != 0 and "ParameterError" in done.stderr, call
