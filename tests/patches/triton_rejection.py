"""Rejection from token ids through upstream's Triton kernels, in Triton's interpreter; run as a script.

The interpreter has to be chosen before Triton is imported, so this is a process of its own. Stand-ins: a
driver without devices (vLLM takes Triton for usable if no device is visible), launch options of triton-ascend
that its interpreter would take for arguments of the kernels, and the three slicing built-ins of the device's
compiler.
"""

from __future__ import annotations

import os

os.environ.update(
    TRITON_INTERPRET="1",
    CUDA_VISIBLE_DEVICES="",
    TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="ascend",
    HF_HUB_OFFLINE="1",
)

import sys
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch_npu  # noqa: F401

OPTIONS = [
    "multibuffer",
    "unit_flag",
    "limit_auto_multi_buffer_only_for_local_buffer",
    "set_workspace_multibuffer",
    "tile_mix_vector_loop",
    "tile_mix_cube_loop",
    "enable_hivm_auto_cv_balance",
    "inject_barrier_all",
]


def scalar(value: Any) -> int:
    value = getattr(value, "value", value)
    return int(value.handle.data.reshape(-1)[0]) if hasattr(value, "handle") else int(value)


def interpret() -> None:
    """Have Triton's kernels run in its interpreter on CPU tensors."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.driver import driver

    reserved = getattr(interpreter, "RESERVED_KWS", None)
    if reserved is not None:
        reserved += OPTIONS
    stand_in = MagicMock()
    stand_in.get_current_device.return_value = 0
    stand_in.get_current_target.return_value.backend = "cpu"
    stand_in.get_device_interface.return_value = torch.cpu
    driver.set_active(stand_in)

    def get_element(source: Any, place: Any, **_: Any) -> Any:
        value = source.handle.data[tuple(scalar(index) for index in place)]
        data = np.array([value], dtype=source.handle.data.dtype)
        return tl.core.tensor(interpreter.TensorHandle(data, source.dtype.scalar), source.dtype.scalar)

    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        sys.exit("vLLM does not take Triton for usable: is triton-ascend installed?")
    from vllm_ascend.ops.triton import triton_utils

    triton_utils.get_element = get_element
    triton_utils._NUM_AICORE, triton_utils._NUM_VECTORCORE = 4, 8


def main() -> None:
    interpret()
    import vllm_ascend.ascend_config
    from vllm.config import VllmConfig
    from vllm_ascend.sample import rejection_sampler as upstream

    vllm_ascend.ascend_config._ASCEND_CONFIG = vllm_ascend.ascend_config.AscendConfig(VllmConfig())
    assert upstream.HAS_TRITON is True
    for name in ("rejection_greedy_sample_pytorch", "rejection_greedy_sample_spec_len_1_pytorch"):
        setattr(upstream, name, lambda *_: sys.exit("a PyTorch function ran"))
    from test_presampled_rejection import compare

    random = np.random.default_rng(5)
    singles = 0
    for number in range(40):
        requests = int(random.integers(1, 12))
        single = number % 4 == 0
        singles += single
        limit = 1 if single else int(random.integers(2, 5))
        drafts: list[list[int]] = []
        target: list[int] = []
        for _ in range(requests):
            right = random.integers(
                0, 12, limit if number % 4 < 2 else int(random.integers(0, limit + 1))
            ).tolist()
            drafts.append(
                [
                    token if random.random() < 0.7 else int(random.choice([-1, (token + 1) % 12]))
                    for token in right
                ]
            )
            target += right
        if not target:
            drafts[0], target = [3] * limit, [3] * limit
        compare(drafts, target, random.integers(0, 12, requests).tolist(), torch.float32)
    print(f"40 batches equal, {singles} of them with one draft per request")


if __name__ == "__main__":
    main()
