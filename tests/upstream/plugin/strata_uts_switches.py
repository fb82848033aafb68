"""pytest plugin for upstream's own unit tests: run them with the switches that the image serves with.

Upstream's tests build no engine, so nothing would install the switches and every patch would sleep. Once all
test modules are imported this plugin resolves and installs them: the series' defaults, or what
STRATA_SWITCHES says. What it did is written as JSON to the file that STRATA_UTS_REPORT names: null for a tree
without Strata, else the installed table.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Install the switches; any failure ends the run."""
    table = None
    if importlib.util.find_spec("vllm_ascend.strata") is not None:
        from vllm_ascend.strata import switches

        config = SimpleNamespace(additional_config=None)
        switches.resolve(config)
        table = dict(switches.install(config).values)
    Path(os.environ["STRATA_UTS_REPORT"]).write_text(json.dumps(table), encoding="utf-8")
