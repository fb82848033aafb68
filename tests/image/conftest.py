"""Containers of the base and of the tuned image, for testinfra. A missing image is a failure that says what
to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import testinfra
from strata.engine import Engine
from testinfra.host import Host

VERSION = os.environ.get("STRATA_VERSION", "0.23.0")
TUNED = os.environ.get("STRATA_IMAGE", f"strata:{VERSION}-cpu")
BASE = os.environ.get("STRATA_BASE_IMAGE", f"strata-base:{VERSION}-cpu")


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine()


def _container(engine: Engine, tag: str, entrypoint: list[str]) -> Iterator[Host]:
    if engine.image(tag) is None:
        pytest.fail(f"no image {tag}; run: make image VERSION={VERSION}", pytrace=False)
    container = engine.client.containers.run(
        tag, entrypoint=entrypoint, command=["infinity"], detach=True, network_disabled=True, init=True
    )
    try:
        yield testinfra.get_host(f"docker://{container.id}")
    finally:
        container.remove(force=True)


@pytest.fixture(scope="session")
def tuned(engine: Engine) -> Iterator[Host]:
    """A container of the tuned image that only waits; its entrypoint is tested elsewhere."""
    yield from _container(engine, TUNED, ["sleep"])


@pytest.fixture(scope="session")
def base(engine: Engine) -> Iterator[Host]:
    """A container of its base."""
    yield from _container(engine, BASE, ["sleep"])


@pytest.fixture(scope="session")
def facts(tuned: Host) -> dict[str, Any]:
    """/etc/strata/image.json."""
    content: dict[str, Any] = json.loads(tuned.file("/etc/strata/image.json").content_string)
    return content
