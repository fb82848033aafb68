"""Two real processes as one tensor-parallel group: gloo, vLLM's own GroupCoordinator, CPU tensors.

``run(task, *arguments)`` calls the module-level function ``task(rank, *arguments)`` in both processes at
once and returns what they returned. The processes are started once per session and take one task after the
other.

What stands in: the group's device communicator is vLLM's base class instead of the NPU's, and the group's
custom operators, which are registered for the NPU only, are bypassed. Both call torch.distributed as is.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

RANKS = 2
STARTS_WITHIN = 240.0
ANSWERS_WITHIN = 120.0

_members: list[tuple[BaseProcess, Connection]] = []


def run(task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``task(rank, *arguments)``, by rank. A failure in a process fails here, with its
    traceback.
    """
    first = not _members
    if first:
        _start()
    for _, pipe in _members:
        pipe.send((task, arguments))
    results = []
    for rank, (process, pipe) in enumerate(_members):
        if not pipe.poll(STARTS_WITHIN if first else ANSWERS_WITHIN):
            stop()
            raise TimeoutError(f"rank {rank} did not answer: do both ranks reach the same collectives?")
        try:
            failed, result = pipe.recv()
        except EOFError as gone:
            stop()
            raise RuntimeError(f"rank {rank} ended with code {process.exitcode}") from gone
        if failed:
            stop()
            raise AssertionError(f"rank {rank}:\n{result}")
        results.append(result)
    return results


def stop() -> None:
    """End both processes."""
    for process, pipe in _members:
        pipe.close()
        process.terminate()
        process.join(10)
    _members.clear()


def _start() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    for rank in range(RANKS):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, port, there), daemon=True)
        process.start()
        there.close()
        _members.append((process, here))
    atexit.register(stop)


def _serve(rank: int, port: int, pipe: Connection) -> None:
    try:
        _join(rank, port)
        fault = None
    except Exception:
        fault = traceback.format_exc()
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        if fault is None:
            try:
                answer = (False, task(rank, *arguments))
                pickle.dumps(answer)
            except Exception:
                answer = (True, traceback.format_exc())
        else:
            answer = (True, fault)
        pipe.send(answer)


def _join(rank: int, port: int) -> None:
    from unittest.mock import patch

    import torch
    import torch_npu  # noqa: F401
    from vllm_ascend.utils import adapt_patch

    # a container without network has no other interface, and its name leads nowhere
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    adapt_patch(is_global_patch=True)
    adapt_patch()
    torch.set_num_threads(1)
    import vllm_ascend.ascend_config
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    vllm_ascend.ascend_config._ASCEND_CONFIG = vllm_ascend.ascend_config.AscendConfig(VllmConfig())
    communicator = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    platform = type(current_platform)
    with (
        set_current_vllm_config(VllmConfig()),
        patch.object(platform, "device_type", "cpu"),
        patch.object(platform, "get_device_communicator_cls", classmethod(lambda _: communicator)),
    ):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(RANKS, rank, address, rank, backend="gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS, backend="gloo")
    parallel_state.get_tp_group().use_custom_op_call = False


def group() -> Any:
    """The tensor-parallel group of the process that a task runs in."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()
