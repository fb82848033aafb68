"""npugraph_ex as far as vllm-ascend uses it: releases that know ``super_kernel_optimize`` and releases that
do not.

Three shapes exist: a flat configuration whose reader rejects names that it has no attribute for (torch_npu
2.10.0.post4), a nested one whose reader maps names and lives in another module (2.9.0.post2 to 2.10.0.post2),
and none at all.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BASIC = ("force_eager", "inplace_pass", "clone_input", "clone_output")
STATIC = ("static_kernel_compile", "_vllm_aclnn_static_kernel_sym_range")
OPTION = "super_kernel_optimize"


def flat_config(names: tuple[str, ...]) -> type:
    """A configuration class with the options ``names``, all None."""
    return type("CompilerConfig", (), {"__init__": lambda self: self.__dict__.update(dict.fromkeys(names))})


def read_flat(config: Any, arguments: dict[str, Any]) -> None:
    """Set each option; ValueError for one that the configuration does not have."""
    for name, value in arguments["options"].items():
        if not hasattr(config, name):
            raise ValueError(f"Invalid option {name!r}")
        setattr(config, name, value)


def nested_config(names: tuple[str, ...]) -> type:
    """A configuration class that keeps its options in a part of its own."""
    content = SimpleNamespace
    return type(
        "CompilerConfig", (), {"names": names, "__init__": lambda self: setattr(self, "aclgraph", content())}
    )


def read_nested(config: Any, arguments: dict[str, Any]) -> None:
    """Set each option under another name in the nested part; KeyError for one that is not mapped."""
    known = {name: f"_{name.lstrip('_')}" for name in config.names}
    for name, value in arguments["options"].items():
        setattr(config.aclgraph, known[name], value)


class Compiled(SimpleNamespace):
    """What the backend was asked to compile, and with which configuration."""


def install(monkeypatch: pytest.MonkeyPatch, knows: bool, nested: bool = False) -> list[Compiled]:
    """Put a release of npugraph_ex in place. Returns the list that its backend appends to."""
    names = (*BASIC, *STATIC, *((OPTION,) if knows else ()))
    compiled: list[Compiled] = []

    def get_npu_backend(compiler_config: Any) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(Compiled(graph=graph, config=compiler_config))
            return graph

        return backend

    package, configs = ModuleType("npugraph_ex"), ModuleType("npugraph_ex.configs")
    package.__path__, configs.__path__ = [], []
    reader = ModuleType(f"npugraph_ex.configs.{'npugraphex_config' if nested else 'compiler_config'}")
    reader._process_kwargs_options = read_nested if nested else read_flat
    package.CompilerConfig = nested_config(names) if nested else flat_config(names)
    package.get_npu_backend = get_npu_backend
    fx = ModuleType("npugraph_ex.npu_fx_compiler")
    fx._NpuFxCompiler = type("_NpuFxCompiler", (), {"_get_compiled_gm": lambda self, graph, inputs: graph})
    package.npu_fx_compiler = fx
    for module in (package, configs, reader, fx):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return compiled


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """No npugraph_ex at all."""
    monkeypatch.setitem(sys.modules, "npugraph_ex", None)
