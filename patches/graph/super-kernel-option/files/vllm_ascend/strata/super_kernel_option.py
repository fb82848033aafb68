"""``ascend_compilation_config.enable_super_kernel``: static kernels compiled so that SuperKernel can fuse
them.

The option reaches the operator compiler as ``super_kernel_optimize`` of npugraph_ex. Fusion itself is a call
on the captured graph that vllm-ascend 0.23.0 does not make; this module is about compilation.

Checks run twice. :func:`check` and :func:`follow_static_kernel` work on the configuration, before a model is
loaded, and leave either a usable option or False in it; the result is written to ``additional_config`` and
travels to the workers. :func:`extend` and :func:`refuse_torchair` guard the place of use. Only ``True``
counts as asked for there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from vllm_ascend.strata import switches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCH = "super_kernel_option"
OPTION = "ascend_compilation_config.enable_super_kernel"
TORCH_NPU_OPTION = "super_kernel_optimize"

OptionsProcessor = Callable[[Any, dict[str, Any]], None]
"""npugraph_ex's reader of ``{"options": {name: value}}`` into its configuration; ValueError for an unknown
name."""


class CompilationConfig(Protocol):
    """The part of AscendCompilationConfig that this module uses."""

    enable_static_kernel: bool
    enable_super_kernel: bool


class SuperKernelError(ValueError):
    """The option cannot be honoured; the message says why and what to change."""


def check(vllm_config: VllmConfig, config: CompilationConfig) -> None:
    """Leave in ``config.enable_super_kernel`` either False or a request that this installation can honour.

    With the switch off a request is dropped with a warning, as upstream drops a key that it does not know.

    Raises SuperKernelError for a value that is not a boolean, without static kernels, and where torch_npu
    does not know the option.
    """
    asked = config.enable_super_kernel
    if not isinstance(asked, bool):
        raise SuperKernelError(f"{OPTION} is {asked!r}; expected true or false")
    if not asked:
        return
    if not switches.table_of(vllm_config)[SWITCH]:
        config.enable_super_kernel = False
        _log().warning("%s is ignored: the Strata switch %s is off.", OPTION, SWITCH)
        return
    if not config.enable_static_kernel:
        raise SuperKernelError(
            f"{OPTION} needs enable_static_kernel, which is off (310P has no static kernels): "
            "only a static kernel can become part of a super kernel. Set both, or neither"
        )
    reason = unknown_to_torch_npu()
    if reason is not None:
        raise SuperKernelError(
            f"{OPTION} cannot be honoured: {reason}. Leave it out, or use torch_npu 2.10.0 or later"
        )


def follow_static_kernel(vllm_config: VllmConfig, config: CompilationConfig) -> None:
    """Drop the request, with a warning, where the platform has turned static kernels off since :func:`check`.

    It does so for every graph mode that is not a full-graph mode. ``vllm_config.additional_config`` follows,
    from which the workers read.
    """
    if config.enable_super_kernel is True and not config.enable_static_kernel:
        config.enable_super_kernel = False
        vllm_config.additional_config["ascend_compilation_config"]["enable_super_kernel"] = False
        _log().warning(
            "%s is ignored: cudagraph_mode %s is not a full-graph mode, so static kernels are off.",
            OPTION,
            vllm_config.compilation_config.cudagraph_mode,
        )


def extend(
    options: dict[str, Any], backend_config: Any, config: CompilationConfig, process_options: OptionsProcessor
) -> None:
    """Add ``super_kernel_optimize`` to npugraph_ex's ``options`` if it was asked for.

    backend_config: npugraph_ex's configuration object, not changed here; process_options: its reader of
    ``options``.

    Raises SuperKernelError without static kernels, and where npugraph_ex does not know the option.
    """
    if config.enable_super_kernel is not True:
        return
    if options.get("static_kernel_compile") is not True:
        raise SuperKernelError(f"{OPTION} needs enable_static_kernel")
    reason = _refusal(process_options, type(backend_config))
    if reason is not None:
        raise SuperKernelError(f"{OPTION} cannot be honoured: {reason}")
    options[TORCH_NPU_OPTION] = True


def refuse_torchair(config: CompilationConfig) -> None:
    """Raise SuperKernelError if the option was asked for where compilation has fallen back to torchair."""
    if config.enable_super_kernel is True:
        raise SuperKernelError(
            f"{OPTION} cannot be honoured: npugraph_ex is missing and torchair has no such option"
        )


def hash_factors(config: CompilationConfig) -> dict[str, bool]:
    """What the option adds to the factors of AscendCompiler's hash: nothing unless it takes effect.

    So the compile cache of a configuration without the option stays upstream's.
    """
    active = config.enable_super_kernel is True and config.enable_static_kernel is True
    return {"enable_super_kernel": True} if active else {}


def unknown_to_torch_npu() -> str | None:
    """Why the installed torch_npu cannot take ``super_kernel_optimize``, or None if it can. Never raises."""
    import torch_npu

    release = f"torch_npu {torch_npu.__version__}"
    try:
        # npugraph_ex is registered lazily: its submodules work only after an attribute was read
        import npugraph_ex

        config_class = npugraph_ex.CompilerConfig
        config_class()
        try:
            from npugraph_ex.configs.compiler_config import _process_kwargs_options as process_options
        except ImportError:
            from npugraph_ex.configs.npugraphex_config import _process_kwargs_options as process_options
    except Exception as error:  # a broken installation raises anything, and the caller wants a reason
        return f"{release} has no usable npugraph_ex ({type(error).__name__}: {error})"
    reason = _refusal(process_options, config_class)
    return None if reason is None else f"{reason} ({release})"


def _refusal(process_options: OptionsProcessor, config_class: Callable[[], Any]) -> str | None:
    """Try the option on a configuration of its own. None if it is accepted, else the reason."""
    try:
        process_options(config_class(), {"options": {TORCH_NPU_OPTION: True}})
    except Exception as error:  # ValueError in the releases seen; another type is no better an answer
        return f"npugraph_ex does not accept {TORCH_NPU_OPTION} ({type(error).__name__})"
    return None


def _log() -> Any:
    from vllm.logger import logger

    return logger
