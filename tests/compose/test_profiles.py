"""Each compose profile on a CPU host: comes up healthy, answers, shows its metrics, goes down clean; errors
are clear.

Needs the image that ``make image`` builds (STRATA_IMAGE, or the one in ``.env``). Traffic goes to 127.0.0.1
only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
UP_SECONDS = 900
PROFILES = ("c1", "mtp", "throughput")


def image() -> str:
    """The image under test; a missing one is a failure with the next step."""
    name = os.environ.get("STRATA_IMAGE", "")
    env_file = ROOT / ".env"
    if not name and env_file.is_file():
        lines = dict(
            line.split("=", 1) for line in env_file.read_text().splitlines() if "=" in line and line[0] != "#"
        )
        name = lines.get("STRATA_IMAGE", "")
    name = name or "strata:0.23.0-cpu"
    found = subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False)
    assert found.returncode == 0, f"no image {name}: run make image VERSION=0.23.0 first"
    return name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Project:
    """One compose project of this test run, with its own name, port and empty .env."""

    name: str
    port: int
    env_file: Path
    variables: Mapping[str, str]

    def compose(self, *arguments: str, timeout: int = UP_SECONDS) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG")}
        command = [
            "docker",
            "compose",
            "-p",
            self.name,
            "--project-directory",
            str(self.env_file.parent),
            "--env-file",
            str(self.env_file),
            "-f",
            str(ROOT / "compose.yaml"),
            "-f",
            str(ROOT / "compose.cpu.yaml"),
            *arguments,
        ]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**kept, "STRATA_IMAGE": image(), "PORT": str(self.port), **self.variables},
        )

    def up(self, profile: str) -> subprocess.CompletedProcess[str]:
        return self.compose(
            "--profile", profile, "up", "-d", "--wait", "--wait-timeout", str(UP_SECONDS - 60)
        )

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.compose("--profile", "*", "down", "--volumes", "--timeout", "60")

    def logs(self, profile: str) -> str:
        done = subprocess.run(
            ["docker", "logs", f"{self.name}-{profile}-1"], capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def state(self, profile: str) -> dict[str, Any]:
        done = subprocess.run(
            ["docker", "inspect", f"{self.name}-{profile}-1"], capture_output=True, text=True, check=True
        )
        state: dict[str, Any] = json.loads(done.stdout)[0]["State"]
        return state

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        data = json.dumps(body).encode() if body is not None else None
        query = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(query, timeout=120) as answer:
            text: str = answer.read().decode("utf-8", errors="replace")
            return text


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    env_file = tmp_path / ".env"
    env_file.touch()
    made = Project(f"stratatest{os.getpid()}", free_port(), env_file, {})
    yield made
    made.down()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_serves_and_goes_down_clean(project: Project, profile: str) -> None:
    up = project.up(profile)
    log = project.logs(profile)
    assert up.returncode == 0, up.stderr + log
    assert project.state(profile)["Health"]["Status"] == "healthy"

    models = json.loads(project.request("/v1/models"))["data"]
    assert [m["id"] for m in models] == ["strata"]
    for temperature in (0, 1):
        body = {
            "model": "strata",
            "prompt": "one two one two one two",
            "max_tokens": 24,
            "temperature": temperature,
            "ignore_eos": True,
        }
        answer = json.loads(project.request("/v1/completions", body))
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["choices"][0]["text"]
    chat = {
        "model": "strata",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    events = [
        line[6:]
        for line in project.request("/v1/chat/completions", chat).splitlines()
        if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(e) for e in events[:-1]]
    assert pieces[-1]["usage"]["completion_tokens"] == 12
    assert sum(bool(p["choices"]) for p in pieces) > 2, "a stream comes in pieces"

    metrics = project.request("/metrics")
    assert "vllm:num_requests_waiting{" in metrics
    drafts = [
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("vllm:spec_decode_num_drafts_total{")
    ]
    assert bool(drafts) == (profile == "mtp"), "only mtp speculates"

    assert "accepted by the parser of vLLM 0.23.0 with vllm-ascend as its platform" in log
    assert "CPU engine: --additional-config enable_cpu_binding=true: dropped, an NPU option" in log
    assert ("CPU engine: speculation mtp with 4 tokens: n-grams" in log) == (profile == "mtp")

    stop = project.compose("--profile", profile, "stop", "--timeout", "60")
    assert stop.returncode == 0, stop.stderr
    state = project.state(profile)
    assert state["ExitCode"] in (0, 143), project.logs(profile)[-3000:]
    assert not state["OOMKilled"]
    assert project.down().returncode == 0
    left = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={project.name}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert left == ""


def test_a_port_in_use_is_one_clear_error(project: Project) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        project.port = taken.getsockname()[1]
        up = project.up("c1")
    assert up.returncode != 0
    assert str(project.port) in up.stderr
    assert "in use" in up.stderr or "already allocated" in up.stderr


@pytest.mark.parametrize(
    ("variables", "code", "told"),
    [
        ({"MAX_NUM_SEQS": "many"}, "E-ENV", "a whole number"),
        ({"SPECULATIVE_METHOD": "qwen35_mtp"}, "E-METHOD", "qwen3_5_mtp"),
        ({"GRAPH_MODE": "FULL_DECODE"}, "E-CONFIG", "GRAPH_MODE"),
        ({"MAX_NUM_SEQS": "4000"}, "E-CAPTURE", "max_num_batched_tokens"),
    ],
)
def test_a_bad_value_stops_the_start_with_one_error(
    project: Project, variables: dict[str, str], code: str, told: str
) -> None:
    project.variables = variables
    up = project.up("mtp")
    assert up.returncode != 0
    log = project.logs("mtp")
    assert project.state("mtp")["ExitCode"] == 2
    assert log.count(f"{code}: ") == 1
    assert told in log
    assert "Traceback" not in log


def test_a_misspelt_value_in_the_env_file_stops_the_start(project: Project) -> None:
    project.env_file.write_text("MAX_NUM_SEQ=4\n")
    assert project.up("c1").returncode != 0
    assert "did you mean MAX_NUM_SEQS?" in project.logs(
        "c1"
    ) or "did you mean STRATA_MAX_NUM_SEQS?" in project.logs("c1")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    options = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
    return subprocess.run(
        ["docker", "run", "--rm", "--network", "none", *options, image(), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "code"),
    [({"STRATA_PROFILE_KIND": "npu"}, "E-STANDIN"), ({"STRATA_PRESET": "througput"}, "E-PRESET")],
)
def test_what_cannot_serve_here_says_so(variables: dict[str, str], code: str) -> None:
    done = run("serve", **variables)
    assert done.returncode == 2
    assert done.stderr.count(f"{code}: ") == 1
    assert "Traceback" not in done.stderr


def test_run_exec_and_shells_see_one_environment(project: Project) -> None:
    """docker run, docker exec with and without a shell: the same CANN and ATB paths."""
    wanted = ("ASCEND_HOME_PATH", "ATB_HOME_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PATH")
    show = f"import os; print({{k: os.environ.get(k) for k in {wanted!r}}})"
    by_run = run("python3", "-c", show).stdout.strip().splitlines()[-1]
    name = f"{project.name}-env"
    subprocess.run(
        ["docker", "run", "-d", "--name", name, "--network", "none", image(), "sleep", "120"],
        check=True,
        capture_output=True,
    )
    try:
        seen = {
            how: subprocess.run(
                ["docker", "exec", name, *command], capture_output=True, text=True, check=True
            )
            .stdout.strip()
            .splitlines()[-1]
            for how, command in {
                "bash -c": ["bash", "-c", f'python3 -c "{show}"'],
                "sh -c": ["sh", "-c", f'python3 -c "{show}"'],
                "no shell": ["python3", "-c", show],
                "strata entrypoint": ["strata", "entrypoint", "python3", "-c", show],
            }.items()
        }
    finally:
        subprocess.run(["docker", "rm", "-f", name], check=True, capture_output=True)
    assert "/usr/local/Ascend" in by_run
    assert set(seen.values()) == {by_run}
