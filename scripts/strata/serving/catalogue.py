"""Writes the catalogue of a base from what is installed in it: its parser, its configuration classes, its
sources.

Runs in the base's Python with vllm-ascend as the platform; everything is imported inside the functions.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from strata.serving import keys
from strata.serving.facts import Catalogue, Flag

# option of the command line -> attribute of vllm.config that holds its class
_CONFIGS = {
    "compilation-config": "CompilationConfig",
    "speculative-config": "SpeculativeConfig",
    "profiler-config": "ProfilerConfig",
    "structured-outputs-config": "StructuredOutputsConfig",
    "kv-transfer-config": "KVTransferConfig",
    "kv-events-config": "KVEventsConfig",
    "eplb-config": "EPLBConfig",
}


_TAKES: dict[int | str | None, Literal["nothing", "one", "many", "maybe"]] = {
    0: "nothing",
    None: "one",
    "?": "maybe",
    "+": "many",
    "*": "many",
}


def build() -> Catalogue:
    """The catalogue of the installed vLLM and vllm-ascend. ImportError where they cannot be loaded."""
    import vllm.config
    import vllm.envs
    import vllm_ascend
    import vllm_ascend.envs
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

    package = Path(vllm_ascend.__file__).parent
    methods = sorted(set(_leaves(SpeculativeMethod)))
    environment = {*vllm.envs.environment_variables, *vllm_ascend.envs.env_variables}
    return Catalogue(
        version=_release(),
        flags=tuple(_flags()),
        configs={
            option: tuple(_fields(getattr(vllm.config, name)))
            for option, name in _CONFIGS.items()
            if hasattr(vllm.config, name)
        },
        additional=tuple(keys.of_package(package)),
        graph_modes=tuple(m.name for m in CUDAGraphMode),
        methods=tuple(methods),
        mtp_aliases=tuple(sorted(set(_leaves(MTPModelTypes)) - {"mtp"})),
        environment=tuple(sorted(environment)),
    )


def as_yaml(entry: Catalogue) -> str:
    """The catalogue as the text of its file."""
    data: dict[str, Any] = {
        "version": entry.version,
        "graph_modes": list(entry.graph_modes),
        "methods": list(entry.methods),
        "mtp_aliases": list(entry.mtp_aliases),
        "additional": list(entry.additional),
        "configs": {k: list(v) for k, v in entry.configs.items()},
        "flags": [f.model_dump(mode="json", exclude_none=True) for f in entry.flags],
        "environment": list(entry.environment),
    }
    head = (
        "# What this release's parser and sources take. Written by `strata preset catalogue` in its image;\n"
        "# do not edit: tests/image/test_serving_parse.py compares it with the installed release.\n"
    )
    return head + yaml.safe_dump(data, sort_keys=False, width=118, default_flow_style=None)


def _release() -> str:
    from importlib.metadata import version

    return ".".join(version("vllm_ascend").split("+")[0].split(".")[:3])


def _leaves(annotation: Any) -> Iterator[str]:
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _leaves(argument)


def _fields(cls: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        if not field.init or field.name.startswith("_"):
            continue
        yield prefix + field.name
        if depth == 0 and dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            yield from _fields(field.type, f"{prefix}{field.name}.", depth + 1)


def parser() -> argparse.ArgumentParser:
    """The installed ``vllm serve`` parser, with prefixes of options refused: a prefix means another option
    tomorrow.
    """
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made: argparse.ArgumentParser = make_arg_parser(
        FlexibleArgumentParser(prog="vllm serve", allow_abbrev=False)
    )
    return made


def _flags() -> Iterator[Flag]:
    for action in parser()._actions:
        if not action.option_strings:
            continue
        takes = _TAKES.get(action.nargs, "one")
        kind = getattr(action.type, "__name__", None)
        yield Flag(
            names=tuple(action.option_strings),
            takes=takes,
            type=kind
            if kind in ("int", "float", "str")
            else ("int" if kind == "human_readable_int" else None),
            choices=tuple(str(c) for c in action.choices) if action.choices and kind == "str" else None,
        )
