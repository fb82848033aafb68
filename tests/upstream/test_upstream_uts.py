"""vllm-ascend's own CPU unit tests in the base image and in the tuned image: the same outcomes, test by test.

Needs a Docker engine and both images. STRATA_VERSION (default 0.23.0), STRATA_BASE_IMAGE and
STRATA_TUNED_IMAGE name them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import run_uts  # noqa: E402
import uts  # noqa: E402

VERSION = os.environ.get("STRATA_VERSION", "0.23.0")
BASE = os.environ.get("STRATA_BASE_IMAGE", f"strata-base:{VERSION}-cpu")
TUNED = os.environ.get("STRATA_TUNED_IMAGE", f"strata:{VERSION}-cpu")


@pytest.fixture(scope="module")
def base() -> uts.Run:
    """One run on the unpatched base."""
    return run_uts.run_image("base", BASE, "")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("switches", run_uts.MODES, ids=["all off", "defaults", "all on"])
def test_same_outcomes_before_and_after_the_patches(
    base: uts.Run, switches: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the release passes, test by test, but for the changes that expected.yaml lists for a switch that
    is on."""
    expected = uts.read_expected(HERE / "expected.yaml", VERSION)
    tuned = run_uts.run_image(run_uts.mode_name(switches), TUNED, switches)
    with capsys.disabled():
        print(f"\n{base.line()}")
        faults = run_uts.compare(base, tuned, expected)
    assert not faults
