"""The image's entrypoint without an image: guards, environment, hand-over, what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.errors import StrataError
from strata.serving import __main__, entrypoint, environment, health, image

ROOT = Path(__file__).resolve().parents[2]
ENV_SCRIPT = ROOT / "layers" / "serving" / "rootfs" / "etc" / "strata" / "env.sh"


@pytest.fixture(scope="module", autouse=True)
def no_variables_of_the_test_run() -> Iterator[None]:
    """The entrypoint refuses STRATA_ variables that it does not know, and a test run has some of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("STRATA_")]:
            patch.delenv(name)
        yield


def image_json(tmp_path: Path, **more: Any) -> Path:
    base = {
        "name": "0.23.0-cpu",
        "version": "0.23.0",
        "variant": "cpu",
        "python": sys.executable,
        "serve_python": sys.executable,
        "stubs": None,
    } | more.pop("base", {})
    path = tmp_path / "image.json"
    path.write_text(
        json.dumps(
            {"base": base, "proof": {"live": "passed"}, "series": {"patches": []}, "operators": [], **more}
        )
    )
    return path


def described(tmp_path: Path, **more: Any) -> image.Image:
    return image.load(image_json(tmp_path, **more))


DEVICE = {"base": {"name": "0.23.0-a3", "variant": "a3", "serve_python": None}}


def test_what_an_image_says(tmp_path: Path) -> None:
    patches = [{"id": "a", "state": "applied"}, {"id": "b", "state": "left out"}]
    operators = [{"name": "X", "compiler": "stand-in"}, {"name": "Y", "compiler": "bisheng"}]
    this = described(tmp_path, series={"patches": patches}, operators=operators)
    assert this.patches == ("a",)
    assert this.standin_operators == ("X",)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"base": {"name": "x"}}', '{"base": 3}'])
def test_an_image_that_does_not_say_what_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "image.json"
    path.write_text(text)
    for candidate in (path, tmp_path / "missing.json"):
        with pytest.raises(StrataError) as caught:
            image.load(candidate)
        assert caught.value.findings[0].code == "E-IMAGE"


@pytest.mark.parametrize(
    ("more", "kind", "devices", "code"),
    [
        ({}, "cpu", [], None),
        ({}, "", [], None),
        ({}, "npu", [], "E-STANDIN"),
        ({}, "", ["/dev/davinci0"], "E-STANDIN"),
        (DEVICE, "npu", ["/dev/davinci0"], None),
        (DEVICE, "npu", [], "E-DEVICE"),
        (DEVICE, "cpu", [], "E-STANDIN"),
        (
            {**DEVICE, "operators": [{"name": "X", "compiler": "stand-in"}]},
            "npu",
            ["/dev/davinci0"],
            "E-STANDIN",
        ),
        ({}, "npus", [], "E-ENV"),
    ],
)
def test_where_an_image_may_serve(
    tmp_path: Path, more: dict[str, Any], kind: str, devices: list[str], code: str | None
) -> None:
    found = image.may_serve(described(tmp_path, **more), {"STRATA_PROFILE_KIND": kind}, devices)
    assert [f.code for f in found] == ([code] if code else [])
    assert all(f.hint for f in found)


def test_device_nodes_are_counted_by_number(tmp_path: Path) -> None:
    for name in ("davinci10", "davinci2", "davinci_manager", "null"):
        (tmp_path / name).touch()
    assert image.devices(tmp_path) == [str(tmp_path / "davinci2"), str(tmp_path / "davinci10")]


# the environment


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "env.sh"
    path.write_text(
        'export A_HOME="/opt/a b"\nexport LD_LIBRARY_PATH="/opt/a/lib:${LD_LIBRARY_PATH:-}"\n'
        'export PYTHONPATH="/opt/a/py:$PYTHONPATH"\necho noise\nlocal_only=1\n'
    )
    return path


def test_what_the_script_exports_arrives(script: Path) -> None:
    before = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/mine", "MULTI": "a\nb"}
    after = environment.effective(before, script)
    assert after["A_HOME"] == "/opt/a b"
    assert after["PYTHONPATH"] == "/opt/a/py:/mine"
    assert after["MULTI"] == "a\nb"
    assert "local_only" not in after
    assert environment.effective(after, script) == after, "a second run changes nothing"
    assert set(environment.difference(before, after)) == {"A_HOME", "LD_LIBRARY_PATH", "PYTHONPATH"}


def test_a_failing_script_is_told(tmp_path: Path) -> None:
    path = tmp_path / "env.sh"
    path.write_text("echo broken >&2; exit 4\n")
    with pytest.raises(StrataError) as caught:
        environment.effective({"PATH": os.environ["PATH"]}, path)
    assert "broken" in caught.value.findings[0].found
    with pytest.raises(StrataError):
        environment.effective({}, tmp_path / "none.sh")


@given(
    st.dictionaries(
        st.from_regex(r"\A[A-Z_]{1,8}\Z"),
        st.text(alphabet=st.characters(codec="ascii", exclude_categories=["C"])),
    )
)
def test_shell_lines_read_back(values: dict[str, str]) -> None:
    names = {
        k: v
        for k, v in values.items()
        if k not in ("PATH", "IFS", "PS", "_", "PWD", "UID", "EUID", "PPID", "HOME", "OLDPWD")
    }
    names = {f"X{k}": v for k, v in names.items()}
    out = subprocess.run(
        ["/bin/sh", "-c", environment.as_shell(names) + "exec env -0"],
        capture_output=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout.decode()
    read = dict(item.split("=", 1) for item in out.split("\0") if "=" in item)
    assert {k: read[k] for k in names} == names


def test_docker_lines_are_quoted() -> None:
    assert environment.as_docker({"A": 'x "y" $z \\'}) == 'ENV A="x \\"y\\" \\$z \\\\"\n'


@pytest.mark.parametrize("options", ["-c", "-ec", "-uc", "-euc"])
def test_the_script_of_the_image_keeps_strict_shells_alive(options: str) -> None:
    done = subprocess.run(
        ["/bin/bash", options, "echo $STRATA_ENV$LD_LIBRARY_PATH$-"],
        capture_output=True,
        text=True,
        check=False,
        env={"BASH_ENV": str(ENV_SCRIPT), "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr
    assert "/usr/local/lib" in done.stdout
    assert ("u" in options) == ("u" in done.stdout.split("lib")[-1])
    again = environment.effective({"STRATA_ENV": "1", "PATH": os.environ["PATH"]}, ENV_SCRIPT)
    assert "LD_LIBRARY_PATH" not in again, "marked as done: not done again"


# commands


def run(*arguments: str, script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from pathlib import Path; from strata.serving import entrypoint, environment\n"
        f"environment.effective.__defaults__ = (Path({str(script)!r}),)\n"
        "sys.exit(entrypoint.main(sys.argv[1:]))"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_")}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, **variables},
    )


def test_other_commands_run_in_the_environment_and_keep_their_arguments(script: Path) -> None:
    done = run(
        sys.executable,
        "-c",
        "import os, sys; print(os.environ['A_HOME'], sys.argv[1:])",
        "a b",
        "$HOME",
        script=script,
    )
    assert done.stdout.splitlines()[-1] == "/opt/a b ['a b', '$HOME']"
    done = run("sh", "-c", "exit 7", script=script)
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("arguments", "variables", "code"),
    [
        (["no-such-program"], {}, "E-COMMAND"),
        (["serve", "--port", "1"], {}, "E-COMMAND"),
        (["serve"], {"STRATA_IMAGE_JSON": "/none"}, "E-IMAGE"),
        ([], {"STRATA_PRESET": "c2"}, "E-PRESET"),
        ([], {"STRATA_PORT": "high"}, "E-ENV"),
        ([], {"STRATA_PROFILE_KIND": "npu"}, "E-STANDIN"),
        ([], {"MAX_NUM_SEQS": "all", "STRATA_PRESET": "mtp"}, "E-ENV"),
        ([], {"MAX_NUM_SEQS": "9000", "STRATA_PRESET": "mtp"}, "E-CAPTURE"),
    ],
)
def test_one_clear_error_and_no_traceback(
    arguments: list[str], variables: dict[str, str], code: str, script: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {"STRATA_IMAGE_JSON": str(image_json(tmp_path)), "STRATA_PORT": port, **variables}
    done = run(*arguments, script=script, **given)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("E-") >= 1
    assert code in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_told(script: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(script=script, STRATA_IMAGE_JSON=str(image_json(tmp_path)), STRATA_PORT=port)
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr


def fake_python(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_a_device_base_serves_itself(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = fake_python(tmp_path, 'for a in "$@"; do echo "[$a]"; done')
    description = {"base": {"name": "0.23.0-a3", "variant": "a3", "serve_python": None, "python": python}}
    monkeypatch.setattr(entrypoint.image, "devices", lambda: ["/dev/davinci0"])
    monkeypatch.setenv("STRATA_IMAGE_JSON", str(image_json(tmp_path, **description)))
    monkeypatch.setenv("STRATA_PORT", str(_free_port()))
    started: list[list[str]] = []

    def take(command: list[str]) -> None:
        started.append(list(command))
        raise SystemExit(0)

    monkeypatch.setattr(entrypoint, "run", take)
    with pytest.raises(SystemExit):
        entrypoint.serve([])
    (command,) = started
    assert command[:4] == [python, "-m", "vllm.entrypoints.cli.main", "serve"]
    assert "--additional-config" in command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(("exit_code", "serves"), [(0, True), (1, False), (3, False)])
def test_a_deferred_proof_runs_once_before_serving(
    exit_code: int, serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    python = fake_python(tmp_path, f"echo x >> {calls}; echo 'live-proof: told'; exit {exit_code}")
    this = described(tmp_path, base={"python": python}, proof={"live": "deferred"})
    proof = tmp_path / "proof.json"
    proof.write_text("{}")
    monkeypatch.setenv("STRATA_PROOF_JSON", str(proof))
    monkeypatch.setattr(entrypoint, "PROVED", tmp_path / "proved")
    if not serves:
        with pytest.raises(StrataError) as caught:
            entrypoint.prove(this)
        assert caught.value.findings[0].code == "E-PROOF"
        assert "live-proof: told" in caught.value.findings[0].found
        return
    entrypoint.prove(this)
    entrypoint.prove(this)
    assert calls.read_text().count("x") == 1
    proof.write_text("{ }")
    entrypoint.prove(this)
    assert calls.read_text().count("x") == 2, "another proof is another question"


def test_a_stop_before_the_hand_over_ends_it(script: Path, tmp_path: Path) -> None:
    slow = tmp_path / "env.sh"
    slow.write_text("export READY=1\n")
    program = (
        "import sys, time; from strata.serving import entrypoint\n"
        "def wait(extra):\n    print('up', flush=True); time.sleep(60)\n"
        "entrypoint.serve = wait; entrypoint.env.effective = lambda e: dict(e)\n"
        "sys.exit(entrypoint.main([]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert time.monotonic() - start < 10
    process.stdout.close()


# health, the command itself


def test_health_of_nothing_says_what_happened() -> None:
    assert "127.0.0.1" in (health.healthy(_free_port()) or "")


def test_the_command_lists_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("entrypoint", "verify", "preset", "env", "health"))
    assert __main__.main(["verfy"]) == 2
    assert "E-COMMAND" in capsys.readouterr().err
