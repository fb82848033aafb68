"""scripts/bootstrap.sh: the mirror from apt's sources, and its errors. Nothing is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bootstrap.sh"


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian 12"\n')
    return tmp_path


def run(apt: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "STRATA_APT_DIR": str(apt),
        "STRATA_OS_RELEASE": str(apt / "os-release"),
        **environment,
    }
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, env=env, check=False)


def mirrors(apt: Path) -> list[list[str]]:
    done = run(apt, "mirror", "bookworm")
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_deb822(apt: Path) -> None:
    (apt / "sources.list.d" / "debian.sources").write_text(
        "Types: deb deb-src\n# a comment in the stanza\nURIs: http://off.example/d\nSuites: bookworm\n"
        "Enabled: no\n\nTypes: deb\nURIs: http://on.example/d\n http://second.example/d\n"
        "Suites: bookworm\n bookworm-updates\n"
        "Components: main\nSigned-By: /keys/d.gpg\n"
    )
    assert mirrors(apt) == [
        ["bookworm", "http://on.example/d", "/keys/d.gpg"],
        ["bookworm-updates", "http://on.example/d", "/keys/d.gpg"],
    ]


def test_one_line(apt: Path) -> None:
    (apt / "sources.list").write_text(
        "# deb http://no.example bookworm main\ndeb-src http://src.example/d bookworm main\n"
        "deb [arch=amd64 signed-by=/keys/l.gpg] http://one.example/d bookworm main contrib\n"
        "deb http://sec.example/s bookworm-security main\n"
    )
    found = mirrors(apt)
    assert found[0] == ["bookworm", "http://one.example/d", "/keys/l.gpg"]
    assert found[1][:2] == ["bookworm-security", "http://sec.example/s"]


def test_another_suites_mirror_serves(apt: Path) -> None:
    (apt / "sources.list").write_text("deb http://one.example/d trixie main\n")
    assert mirrors(apt)[0][:2] == ["bookworm", "http://one.example/d"]


def test_no_mirror_is_one_error(apt: Path) -> None:
    done = run(apt, "mirror", "bookworm")
    assert done.returncode == 2
    assert done.stderr.startswith("E-MIRROR: ") and "next:" in done.stderr


def test_elsewhere_than_debian_the_engine_is_asked_for(apt: Path) -> None:
    (apt / "os-release").write_text("ID=other\n")
    done = run(apt, "engine", DOCKER_HOST="unix:///nonexistent.sock")
    assert done.returncode == 2 and done.stderr.startswith("E-ENGINE: ") and "DOCKER_HOST" in done.stderr


def test_unknown_step(apt: Path) -> None:
    done = run(apt, "everything")
    assert done.returncode == 2 and done.stderr.startswith("E-USAGE: ")
