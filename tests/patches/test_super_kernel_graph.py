"""super-kernel-graph: the real ACLGraphWrapper captures, closes the scope and fuses, in that order, or does
as upstream does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import graph_compiler
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm_ascend.compilation import acl_graph
from vllm_ascend.compilation.acl_graph import ACLGraphWrapper
from vllm_ascend.compilation.compiler_interface import _configure_backend
from vllm_ascend.strata import super_kernel_graph
from vllm_ascend.strata.super_kernel_graph import SuperKernelGraphError

AFTER_EVERY_KERNEL = {"dcci_after_kernel_end": [".*"]}
FUSED = [
    "capture",
    "begin full_model",
    "model",
    "end full_model",
    "captured",
    f"optimize {{'optimize_options': {AFTER_EVERY_KERNEL}}}",
]
PLAIN = ["capture", "model", "captured"]


class Device:
    """What happens on the device while a graph is captured, in order. fails: name of the call that raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fuses: bool = True, scopes: bool = True) -> None:
        self.events: list[str] = []
        self.fails: str | None = None
        device = self

        class Graph:
            def replay(self) -> None:
                device.happen("replay")

        if fuses:
            Graph.super_kernel_optimize = lambda graph, **options: device.happen(f"optimize {options}")

        class Capture:
            def __init__(self, graph: Graph, pool: Any) -> None:
                assert isinstance(graph, Graph) and pool == "pool"

            def __enter__(self) -> None:
                device.happen("capture")

            def __exit__(self, *error: Any) -> None:
                device.happen("captured" if error[0] is None else "abandoned")

        monkeypatch.setattr(torch.npu, "NPUGraph", Graph)
        monkeypatch.setattr(torch.npu, "graph", Capture)
        monkeypatch.setattr(torch.npu, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
        for name in ("begin", "end"):
            if scopes:
                call = lambda scope, name=name: device.happen(f"{name} {scope}")  # noqa: E731
                monkeypatch.setattr(torch.npu, f"super_kernel_scope_{name}", call, raising=False)
            else:
                monkeypatch.delattr(torch.npu, f"super_kernel_scope_{name}", raising=False)

    def happen(self, event: str) -> None:
        self.events.append(event)
        if self.fails and event.startswith(self.fails):
            raise RuntimeError(f"aclsk said no to {event}")


@pytest.fixture
def option(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """``option(asked, static)``: the configuration of this process."""

    def configure(asked: Any = True, static: Any = True) -> SimpleNamespace:
        compilation = SimpleNamespace(enable_super_kernel=asked, enable_static_kernel=static)
        config = SimpleNamespace(ascend_compilation_config=compilation)
        monkeypatch.setattr(super_kernel_graph, "get_ascend_config", lambda: config)
        return compilation

    return configure


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], Callable[[], Any]]:
    """``wrapper(device)``: a call of a real wrapper around a model that says so on the device."""

    def build(device: Device) -> Callable[[], Any]:
        context = SimpleNamespace(
            batch_descriptor=BatchDescriptor(4),
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            capturing=False,
            additional_kwargs={},
        )
        monkeypatch.setattr(acl_graph, "get_forward_context", lambda: context)
        monkeypatch.setattr(acl_graph, "_EXTRA_CTX", SimpleNamespace(is_draft_model=False))
        monkeypatch.setattr(acl_graph, "validate_cudagraph_capturing_enabled", lambda: None)
        monkeypatch.setattr(acl_graph, "weak_ref_tensors", lambda tensors: tensors)
        platform = SimpleNamespace(get_global_graph_pool=lambda: "pool")
        monkeypatch.setattr(acl_graph, "current_platform", platform)

        def model(x: torch.Tensor) -> torch.Tensor:
            device.happen("model")
            return x + 1

        config = SimpleNamespace(compilation_config=SimpleNamespace())
        wrapped = ACLGraphWrapper(model, config, CUDAGraphMode.FULL)
        return lambda: wrapped(torch.zeros(4))

    return build


def test_capture_scope_model_and_then_fusion(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any
) -> None:
    """Once for a graph, before it can be replayed; the output is the captured one."""
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch)
    call = wrapper(device)
    assert call().tolist() == [1.0] * 4
    assert device.events == FUSED
    call()
    assert device.events == [*FUSED, "replay"]


@pytest.mark.parametrize("asked", [True, False, None, "yes", 1])
@pytest.mark.parametrize("static", [True, False, None])
@pytest.mark.parametrize("on", [True, False])
def test_only_where_the_option_took_effect(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any, asked: Any, static: Any, on: bool
) -> None:
    enable(super_kernel_graph, on)
    option(asked, static)
    device = Device(monkeypatch)
    wrapper(device)()
    assert device.events == (FUSED if on and asked is True and static is True else PLAIN)


def test_without_the_call_the_capture_is_upstreams_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any
) -> None:
    warnings: list[str] = []
    logger = SimpleNamespace(warning_once=warnings.append, info_once=warnings.append)
    monkeypatch.setattr(super_kernel_graph, "_log", lambda: logger)
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch, fuses=False)
    wrapper(device)()
    assert device.events == PLAIN
    assert len(warnings) == 1 and "none are fused" in warnings[0]


def test_without_scopes_all_that_was_captured_is_fused(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any
) -> None:
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch, scopes=False)
    wrapper(device)()
    assert device.events == ["capture", "model", "captured", FUSED[-1]]


def test_one_scope_call_alone_is_not_used(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any
) -> None:
    """They have to be paired."""
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch)
    monkeypatch.delattr(torch.npu, "super_kernel_scope_end")
    wrapper(device)()
    assert device.events == ["capture", "model", "captured", FUSED[-1]]


@pytest.mark.parametrize(
    ("fails", "events"),
    [
        ("begin", ["capture", "begin full_model", "abandoned"]),
        ("end", [*FUSED[:4], "abandoned"]),
        ("optimize", FUSED),
    ],
)
def test_a_call_that_fails_stops_the_start_and_leaves_no_graph(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any, fails: str, events: list[str]
) -> None:
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch)
    device.fails = fails
    call = wrapper(device)
    with pytest.raises(SuperKernelGraphError, match=r"aclsk said no.*super_kernel_graph=off"):
        call()
    assert device.events == events
    device.fails = None
    call()
    assert "replay" not in device.events


@pytest.mark.parametrize("fails", ["model", "captured"])
def test_an_error_of_the_model_or_the_capture_is_upstreams(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any, fails: str
) -> None:
    """The scope is closed, nothing is fused, and the error comes out as it is."""
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch)
    device.fails = fails
    with pytest.raises(RuntimeError, match=f"aclsk said no to {fails}") as error:
        wrapper(device)()
    assert type(error.value) is RuntimeError
    assert device.events == (FUSED[:5] if fails == "captured" else [*FUSED[:4], "abandoned"])


def test_an_error_of_closing_the_scope_does_not_hide_the_models(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any
) -> None:
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch)
    device.fails = "model"

    def end(scope: str) -> None:
        raise ValueError("no scope is open")

    monkeypatch.setattr(torch.npu, "super_kernel_scope_end", end)
    with pytest.raises(RuntimeError, match="aclsk said no to model"):
        wrapper(device)()


def test_exhausted_streams_keep_upstreams_guidance(
    monkeypatch: pytest.MonkeyPatch, enable: Any, option: Any, wrapper: Any
) -> None:
    enable(super_kernel_graph)
    option()
    device = Device(monkeypatch)

    def begin(scope: str) -> None:
        raise RuntimeError("error 207008, insufficient_stream_resources")

    monkeypatch.setattr(torch.npu, "super_kernel_scope_begin", begin)
    with pytest.raises(RuntimeError, match="cudagraph_capture_sizes"):
        wrapper(device)()


@given(asked=st.booleans(), knows=st.booleans(), takes=st.booleans(), on=st.booleans())
def test_the_operator_compiler_gets_the_same_options(asked: bool, knows: bool, takes: bool, on: bool) -> None:
    """Where super kernels are compiled and npugraph_ex takes them; nothing else changes."""
    names = [*graph_compiler.BASIC, *graph_compiler.STATIC]
    names += [graph_compiler.OPTION] * knows + ["super_kernel_optimize_options"] * takes
    config_class = graph_compiler.flat_config(tuple(names))
    vllm_config = SimpleNamespace(
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        parallel_config=SimpleNamespace(local_world_size=1, data_parallel_size_local=1),
    )
    config = config_class()
    compilation = SimpleNamespace(enable_static_kernel=True, enable_super_kernel=asked and knows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setattr(super_kernel_graph, "ENABLED", on)
        _configure_backend(config, compilation, vllm_config, graph_compiler.read_flat)
    values = {name: value for name, value in vars(config).items() if value is not None}
    fuses = asked and knows
    assert values.pop("super_kernel_optimize_options", None) == (
        AFTER_EVERY_KERNEL if fuses and takes and on else None
    )
    assert values.pop("super_kernel_optimize", None) is (True if fuses else None)
    assert values.keys() == {*graph_compiler.BASIC, *graph_compiler.STATIC}
