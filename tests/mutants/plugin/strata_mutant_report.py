"""pytest plugin: what a run on a mutant came to, as JSON in the file that STRATA_MUTANT_REPORT names.

STRATA_MUTANT_ROOT names the directory that ``vllm_ascend`` must come from; a run on anything else is refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

_failed: list[str] = []
_errors: list[str] = []
_passed: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test other code than the mutant's."""
    root = os.environ.get("STRATA_MUTANT_ROOT")
    if root:
        spec = importlib.util.find_spec("vllm_ascend")
        origin = spec.origin if spec else None
        if not origin or not origin.startswith(f"{root}/"):
            raise pytest.UsageError(f"vllm_ascend would be imported from {origin}, not from {root}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell a test that failed from one that a fixture failed."""
    if report.failed:
        (_failed if report.when == "call" else _errors).append(report.nodeid)
    elif report.passed and report.when == "call":
        _passed.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that could not be imported."""
    if report.failed:
        _errors.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report."""
    root = os.environ.get("STRATA_MUTANT_ROOT")
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    imported = [os.path.relpath(f, root) for f in files if root and f and f.startswith(f"{root}/")]
    content = {
        "failed": _failed,
        "errors": _errors,
        "passed": _passed,
        "rootdir": str(session.config.rootpath),
        "imported": sorted(file for file in imported if "/strata/" in file),
    }
    Path(os.environ["STRATA_MUTANT_REPORT"]).write_text(json.dumps(content), encoding="utf-8")
