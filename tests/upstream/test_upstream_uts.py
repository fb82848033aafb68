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


@pytest.mark.engine
@pytest.mark.slow
def test_same_outcomes_before_and_after_the_patches(capsys: pytest.CaptureFixture[str]) -> None:
    """Both runs pass what the release passes, and no single test changes its outcome."""
    expected = uts.read_expected(HERE / "expected.yaml", VERSION)
    base = run_uts.run_image("base", BASE, "")
    tuned = run_uts.run_image("tuned", TUNED, "")
    with capsys.disabled():
        print()
        faults = run_uts.compare(base, tuned, expected)
    assert not faults
