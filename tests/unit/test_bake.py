"""The environment baked into the image: what a run's two listings say, and how it is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
from strata import bake
from strata.errors import StrataError

LISTING = (
    "PATH=/bin\0HOME=/root\0SHLVL=0\0STRATA_SPLIT=1\0PATH=/opt/cann/bin:/bin:/bin\0HOME=/root\0SHLVL=1\0"
    "A=x=y\0LD_LIBRARY_PATH=/a::/a:/b\0_=/usr/bin/env\0"
)


def engine(answer: bytes | Exception, calls: list[Any]) -> Any:
    def run(image: str, command: list[str], **options: Any) -> bytes:
        calls.append((image, command, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(client=SimpleNamespace(containers=SimpleNamespace(run=run)))


IMAGE: Any = SimpleNamespace(id="sha256:abc")


def test_only_what_changed_and_each_path_once() -> None:
    assert bake.parse(LISTING) == {"A": "x=y", "LD_LIBRARY_PATH": "/a:/b", "PATH": "/opt/cann/bin:/bin"}


def test_the_dockerfile_ends_with_the_environment_and_the_base_is_asked_once(tmp_path: Path) -> None:
    (tmp_path / bake.SCRIPT).parent.mkdir(parents=True)
    (tmp_path / bake.SCRIPT).write_text("export A=1\n")
    original = tmp_path / "Dockerfile"
    original.write_text("FROM base\nCMD []\n")
    calls: list[Any] = []
    one = engine(LISTING.encode(), calls)
    work = tmp_path / "work"
    for _ in range(2):
        written = bake.dockerfile_with_environment(original, one, IMAGE, tmp_path, work)
    assert len(calls) == 1
    assert calls[0][2]["network_mode"] == "none"
    text = written.read_text()
    assert text.startswith("FROM base\nCMD []\n")
    assert text.endswith('ENV A="x=y"\nENV LD_LIBRARY_PATH="/a:/b"\nENV PATH="/opt/cann/bin:/bin"\n')
    (tmp_path / bake.SCRIPT).write_text("export A=2\n")
    bake.dockerfile_with_environment(original, one, IMAGE, tmp_path, work)
    assert len(calls) == 2, "another script is another question"


def test_a_failing_script_is_told(tmp_path: Path) -> None:
    error = docker.errors.ContainerError(None, 1, "bash", "x", b"set_env.sh: no such directory")
    with pytest.raises(StrataError) as caught:
        bake.environment_lines(engine(error, []), IMAGE, "x", tmp_path)
    assert "no such directory" in caught.value.findings[0].found
    assert not list(tmp_path.iterdir())
