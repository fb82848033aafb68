"""What `make image` promises, on a copy of this checkout.

Nothing again when nothing changed, no operator compiled for a Python patch, patches left out, bases that are not what
their patches were written for, and requests nobody can serve.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import BASE, TUNED, VERSION
from strata.engine import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
TAMPERED = "strata-test-tampered:1"
FAKE = "strata-test-fake-base:0.23.0-a3"
FAKE_TUNED = f"strata:{VERSION}-a3"
EDITED = "patches/sampling/greedy-fast-path/files/vllm_ascend/strata/greedy_fast_path.py"
MAIN = "import sys; from strata.cli import main; sys.exit(main(sys.argv[1:]))"


class Checkout:
    """A copy of the files of this checkout, sharing its downloads."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "checkout"
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        (self.root / ".strata").symlink_to(ROOT / ".strata")

    def image(self, *arguments: str, prefix: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        """`strata image build`, as `make image` calls it; prefix: a command that runs it."""
        return subprocess.run(
            [*prefix, sys.executable, "-c", MAIN, "image", "build", "--version", VERSION, *arguments],
            env={**os.environ, "PYTHONPATH": str(self.root / "scripts"), **variables},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[Checkout]:
    """The tuned image's tag is this checkout's again afterwards."""
    before = engine.image(TUNED)
    if before is None:
        pytest.fail(f"no image {TUNED}; run: make image VERSION={VERSION}", pytrace=False)
    yield Checkout(tmp_path_factory.mktemp("make-image"))
    before.tag(TUNED)


def layers(engine: Engine, tag: str) -> list[str]:
    image = engine.image(tag)
    assert image is not None, tag
    found: list[str] = image.attrs["RootFS"]["Layers"]
    return found


def one_error(done: subprocess.CompletedProcess[str], code: str, exit_code: int) -> str:
    """The command said one finding of that code and no traceback."""
    text = done.stdout + done.stderr
    assert done.returncode == exit_code, text
    assert code in done.stderr and "Traceback" not in text, text
    return text


def test_again_without_a_change(checkout: Checkout, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    before = layers(engine, TUNED)
    start = time.monotonic()
    done = checkout.image("--base", "cpu")
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert layers(engine, TUNED) == before
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert "cpu base" in first or "0.23.0-cpu" in first
    assert TUNED in last and "no NPU" in last
    with capsys.disabled():
        print(f"\nFIGURE make image, nothing changed: {seconds:.0f} s")


def test_an_edited_python_patch_compiles_no_operator(
    checkout: Checkout, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    before = layers(engine, TUNED)
    path = checkout.root / EDITED
    original = path.read_text()
    path.write_text(original + "\n# edited by a test\n")
    try:
        start = time.monotonic()
        done = checkout.image("--base", "cpu")
        seconds = time.monotonic() - start
    finally:
        path.write_text(original)
    assert done.returncode == 0, done.stderr
    after, base = layers(engine, TUNED), layers(engine, BASE)
    assert after != before, "the edit reached the image"
    assert after[len(base)] == before[len(base)], "the operators' layer is the one from before"
    with capsys.disabled():
        print(f"\nFIGURE make image after an edit of one Python patch: {seconds:.0f} s, no operator compiled")


def test_offline_with_the_network_cut(checkout: Checkout, engine: Engine) -> None:
    """The command in a network namespace of its own, where nothing but the engine's socket can be reached."""
    cut = ["unshare", "--map-root-user", "--net"] if os.geteuid() else ["unshare", "--net"]
    seen = subprocess.run([*cut, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    assert [line.split(":")[0].strip() for line in seen.splitlines()[2:]] == ["lo"], "the network is not cut"
    path = checkout.root / EDITED
    original = path.read_text()
    path.write_text(original + "\n# edited offline by a test\n")
    before = layers(engine, TUNED)
    try:
        done = checkout.image("--base", "cpu", "--offline", prefix=cut)
    finally:
        path.write_text(original)
    assert done.returncode == 0, done.stderr
    assert layers(engine, TUNED) != before


def test_a_patch_left_out(checkout: Checkout, engine: Engine) -> None:
    done = checkout.image("--base", "cpu", "--without", "relocatable-op-includes")
    assert done.returncode == 0, done.stderr
    image = engine.image(TUNED)
    assert image is not None
    assert "relocatable-op-includes" not in image.labels["ai.strata.patches"].split(",")
    assert image.labels["ai.strata.operators"] == "as shipped"


def test_a_tampered_base_stops_with_the_functions_name(checkout: Checkout, engine: Engine, tmp_path: Path) -> None:
    file = "/vllm-workspace/vllm-ascend/vllm_ascend/sample/rejection_sampler.py"
    change = (
        "import pathlib, re; p = pathlib.Path('" + file + "'); s = p.read_text(); "
        "head, name, rest = s.partition('def apply_logits_processors('); "
        "at = rest.index('return '); "
        "p.write_text(head + name + rest[:at] + 'logits = logits + 0\\n        ' + rest[at:])"
    )
    (tmp_path / "Dockerfile").write_text(f'FROM base\nRUN python -c "{change}" && python -m py_compile {file}\n')
    subprocess.run(
        [
            "docker",
            "buildx",
            "build",
            "--load",
            "--build-context",
            f"base=docker-image://{BASE}",
            "-t",
            TAMPERED,
            str(tmp_path),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    try:
        text = one_error(checkout.image("--base", TAMPERED), "NEEDS_REVIEW", 1)
    finally:
        engine.client.images.remove(TAMPERED, force=True)
    assert "AscendRejectionSampler.apply_logits_processors" in text
    assert "min-tokens-mask-cache" in text


def test_the_device_path_on_a_fake_device_base(checkout: Checkout, engine: Engine) -> None:
    subprocess.run(
        [str(ROOT / "tests/image/fake_device_base/build.sh"), BASE, FAKE], check=True, capture_output=True, text=True
    )
    try:
        done = checkout.image("--base", FAKE)
        assert done.returncode == 0, done.stderr
        image = engine.image(FAKE_TUNED)
        assert image is not None
        assert image.labels["ai.strata.soc"] == "ascend910_9391"
        assert image.labels["ai.strata.live-proof"] == "deferred"
        shown = subprocess.run(
            ["docker", "run", "--rm", "--network", "none", "--entrypoint", "cat", FAKE_TUNED, "/etc/strata/image.json"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        facts = json.loads(shown)
        assert facts["base"]["variant"] == "a3" and facts["base"]["soc_version"] == "ascend910_9391"
        assert len(facts["operators"]) >= 42
        environment = (checkout.root / ".env").read_text()
        assert f"STRATA_IMAGE={FAKE_TUNED}" in environment and "compose.cpu.yaml" not in environment
    finally:
        for tag in (FAKE_TUNED, FAKE):
            if engine.image(tag) is not None:
                engine.client.images.remove(tag, force=True)


def test_the_plan_of_a_device_build_needs_no_npu(checkout: Checkout) -> None:
    done = checkout.image("--base", "a3", "--plan")
    assert done.returncode == 0, done.stderr
    for word in ("ascend910_9391", FAKE_TUNED, "relocatable-op-includes", "42 operators", "kernels", "network"):
        assert word in done.stdout, word


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version", "0.22.0"], "E-VERSION", ["0.23.0"]),
        (["--base", "a9"], "E-BASE", ["a2", "a3", "cpu"]),
        (["--base", "a3"], "E-", ["registry"]),
        (["--base", "cpu", "--without", "relocatable-op-include"], "E-PATCH", ["relocatable-op-includes"]),
    ],
)
def test_requests_nobody_can_serve(checkout: Checkout, arguments: list[str], code: str, words: list[str]) -> None:
    text = one_error(checkout.image(*arguments), code, 2)
    for word in words:
        assert word in text


def test_no_engine_is_one_error(checkout: Checkout) -> None:
    one_error(checkout.image("--base", "cpu", DOCKER_HOST="unix:///nonexistent/docker.sock"), "E-ENGINE", 2)
