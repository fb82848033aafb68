"""Fusing the kernels of a captured graph into super kernels: the half that follows compilation.

``enable_super_kernel`` (patch super-kernel-option) has static kernels compiled in a form that can be fused.
torch_npu fuses them in a call on the captured graph, ``NPUGraph.super_kernel_optimize``, over what was
captured between ``super_kernel_scope_begin`` and ``super_kernel_scope_end`` (``csrc/npu/Graph.cpp`` of
torch_npu). The one who captures has to make these calls, and that is vllm-ascend's graph wrapper.

Without the option, with the switch off, or where torch_npu has no such call the capture is upstream's. A call
that fails stops the start: what it leaves behind of a graph is not documented, and replaying that would be a
guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.strata import switches

ENABLED: bool = switches.bind("super_kernel_graph", __name__)

SCOPE = "full_model"
OPTIMIZE = {"dcci_after_kernel_end": [".*"]}
"""Invalidate the data cache after every kernel of a super kernel: what a kernel reads as scalars may have
been written by the one before it. Upstream's later releases fuse with the same."""
COMPILE_OPTION = "super_kernel_optimize_options"
"""The same for the operator compiler, from torch_npu 2.10.0.post4 on."""


class SuperKernelGraphError(RuntimeError):
    """Fusing a captured graph failed; the message says how to start without it."""


def active() -> bool:
    """Whether the user's request for super kernels took effect (see super_kernel_option) and the switch is
    on."""
    if not ENABLED:
        return False
    config = get_ascend_config().ascend_compilation_config
    return config.enable_super_kernel is True and config.enable_static_kernel is True


def capture(context: AbstractContextManager[Any], graph: Any) -> AbstractContextManager[Any]:
    """The context to capture ``graph`` in: ``context``, which captures it, or one that fuses it as well.

    context: ``torch.npu.graph(graph, …)``, not yet entered; graph: the NPUGraph. On leaving without an error
    the graph is fused before anybody can replay it; on leaving with one only the scope is closed.

    The returned context raises SuperKernelGraphError if a call of torch_npu fails.
    """
    if not active():
        return context
    if not callable(getattr(graph, "super_kernel_optimize", None)):
        _log().warning_once(
            "enable_super_kernel: this torch_npu has no NPUGraph.super_kernel_optimize. "
            "Static kernels are used, but none are fused."
        )
        return context
    return _fusing(context, graph)


@contextmanager
def _fusing(context: AbstractContextManager[Any], graph: Any) -> Iterator[None]:
    begin, end = scope_calls()
    with context:
        _call("super_kernel_scope_begin", begin, SCOPE)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the capture is lost already, and its error is the one to see
                end(SCOPE)
            raise
        _call("super_kernel_scope_end", end, SCOPE)
    _call("NPUGraph.super_kernel_optimize", graph.super_kernel_optimize, optimize_options=OPTIMIZE)
    _log().info_once("Strata: captured graphs are fused into super kernels.")


def scope_calls() -> tuple[Callable[[str], None], Callable[[str], None]]:
    """torch_npu's calls that open and close a scope on the current stream; two that do nothing where either
    is missing, since fusion then covers whatever was captured."""
    begin = getattr(torch.npu, "super_kernel_scope_begin", None)
    end = getattr(torch.npu, "super_kernel_scope_end", None)
    if callable(begin) and callable(end):
        return begin, end
    return _nothing, _nothing


def extend(
    options: dict[str, Any], backend_config: Any, process_options: Callable[[Any, dict[str, Any]], None]
) -> None:
    """Give the operator compiler the options that the graph will be fused with, if npugraph_ex takes them.

    options: what super_kernel_option has put together, changed here; backend_config: npugraph_ex's
    configuration, not changed here; process_options: its reader of ``options``.
    """
    if not ENABLED or options.get("super_kernel_optimize") is not True:
        return
    try:
        process_options(type(backend_config)(), {"options": {COMPILE_OPTION: OPTIMIZE}})
    except Exception:  # releases before 2.10.0.post4: ValueError, or KeyError in the nested form
        return
    options[COMPILE_OPTION] = OPTIMIZE


def _call(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    try:
        function(*arguments, **options)
    except Exception as error:
        raise SuperKernelGraphError(
            f"{name} failed while a graph was captured: {error}. Start with "
            "STRATA_SWITCHES=super_kernel_graph=off for static kernels without fusion, or leave "
            "ascend_compilation_config.enable_super_kernel out. torch_npu's own tests of these calls ask for "
            "CANN 9.9.0 or later."
        ) from error


def _nothing(scope: str) -> None:
    pass


def _log() -> Any:
    from vllm.logger import logger

    return logger
