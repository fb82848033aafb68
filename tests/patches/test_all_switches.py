"""What holds for every switch of the series in this tree, whichever patches it has.

Toggling any switch changes the hash that vLLM's compile caches hang on, and our code reads the environment in
one place, where the switches are resolved.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_ascend.strata
from vllm.config import VllmConfig
from vllm_ascend.strata import series, switches

SERIES = series.load()
PACKAGE = Path(vllm_ascend.strata.__file__).parent
RESOLVER = "switches.py"
# file -> why it may read one setting that is no switch
ALLOWED = {"weight_caches.py": "once, after loading: whether the engine shares the process of whoever uses it"}
READERS = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
MODULES = frozenset({"vllm.envs", "vllm_ascend.envs"})
"""Modules whose attributes are read from the environment at each access."""


def hash_with(settings: dict[str, bool]) -> str:
    """The hash of a configuration with these switches set, checked by the platform as always."""
    return VllmConfig(additional_config={"strata": settings}).compute_hash()


@pytest.mark.parametrize("name", sorted(SERIES.defaults))
def test_toggling_it_changes_the_configuration_hash(name: str) -> None:
    """And setting it to its default does not."""
    default = SERIES.defaults[name]
    plain = hash_with({})
    assert hash_with({name: default}) == plain
    assert hash_with({name: not default}) != plain


def test_every_set_of_switches_has_a_hash_of_its_own() -> None:
    """The default, all on, all off, and each alone on."""
    names = sorted(SERIES.defaults)
    sets = {frozenset(SERIES.defaults.items())}
    sets |= {frozenset((name, name == alone) for name in names) for alone in names}
    sets |= {frozenset((name, on) for name in names) for on in (True, False)}
    assert len({hash_with(dict(chosen)) for chosen in sets}) == len(sets)


@pytest.mark.parametrize("on", [True, False])
def test_an_engines_configuration_has_all_of_them(engine_config: Callable[..., Any], on: bool) -> None:
    """As `vllm serve` builds it, and its hash differs from the default's."""
    config = engine_config(additional_config={"strata": {"all": on}})
    assert dict(switches.table_of(config).values) == dict.fromkeys(SERIES.defaults, on)
    assert config.compute_hash() != engine_config().compute_hash()


def environment_reads(source: str) -> Iterator[int]:
    """Line numbers at which Python code gets at the environment: through os, or vLLM's and vllm-ascend's
    envs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            yield node.lineno
        elif isinstance(node, ast.Import):
            if any(alias.name in MODULES for alias in node.names):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if (
                node.module in MODULES
                or names & MODULES
                or (
                    node.module in ("os", "posix")
                    and any(alias.name in {*READERS, "*"} for alias in node.names)
                )
            ):
                yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "import os\nx = os.environ['A']",
        "import os as o\nx = o.getenv('A')",
        "from os import environ",
        "from os import getenv as g",
        "from os import *",
        "import vllm.envs as envs",
        "from vllm import envs",
        "from vllm_ascend import envs as ascend_envs",
        "from vllm_ascend.envs import env_variables",
    ],
)
def test_a_read_is_seen(code: str) -> None:
    assert list(environment_reads(code))


@pytest.mark.parametrize("code", ["import os\nos.path.join('a')", "from vllm.config import VllmConfig"])
def test_other_code_is_not_taken_for_one(code: str) -> None:
    assert not list(environment_reads(code))


def test_only_the_resolver_reads_the_environment() -> None:
    """Our modules run in workers, in traced code and in captured graphs, where it is another one or too
    late."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert PACKAGE / RESOLVER in files and len(files) > 3
    reads = {
        str(path.relative_to(PACKAGE)): list(environment_reads(path.read_text(encoding="utf-8")))
        for path in files
    }
    for file in (RESOLVER, *ALLOWED):
        assert len(reads.pop(file)) == 1, file
    assert {file: lines for file, lines in reads.items() if lines} == {}
