"""The stand-in modules: vllm-ascend imports with them, and nothing that needs an NPU pretends to work."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch
import torch_npu

pytestmark = pytest.mark.skipif(
    not getattr(torch_npu, "__strata_stand_in__", False), reason="this host has the real torch_npu"
)

IMPORT_ALL = """
import importlib, json, pkgutil
import torch_npu, vllm_ascend
from vllm_ascend.utils import adapt_patch
adapt_patch(True); adapt_patch()
import vllm_ascend.ops
failed, number = {}, 0
for module in pkgutil.walk_packages(vllm_ascend.__path__, "vllm_ascend.", onerror=lambda name: None):
    number += 1
    try:
        importlib.import_module(module.name)
    except BaseException as error:
        failed[module.name] = [type(error).__name__, getattr(error, "name", None) or str(error)]
print(json.dumps({"number": number, "failed": failed}))
"""
# no stand-in is made for these packages; the last are vLLM modules that the release does not have
ABSENT = ("torchair", "flash_attn_npu_v3", "lmcache_ascend", "ucm", "ray", "xlite", "vllm.v1.kv_offload")
NEEDS_EXTENSION = {"vllm_ascend.meta_registration"}


def test_every_module_of_vllm_ascend_imports() -> None:
    """Except where something else is missing, which is named above."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["number"] > 400
    unexplained = {
        name: error
        for name, error in result["failed"].items()
        if name not in NEEDS_EXTENSION
        and not (error[0] == "ModuleNotFoundError" and error[1].startswith(ABSENT))
    }
    assert unexplained == {}


@pytest.mark.parametrize("name", ["npu_swiglu", "_npu_flash_attention", "npu_fused_infer_attention_score"])
def test_operators_exist_and_refuse(name: str) -> None:
    operator = getattr(torch_npu, name)
    assert operator is getattr(torch_npu, name)
    with pytest.raises(torch_npu.StandInError, match=rf"torch_npu\.{name} needs an NPU"):
        operator(torch.ones(1))
    with pytest.raises(torch_npu.StandInError, match=r"\.out needs an NPU"):
        operator.out(torch.ones(1))


def test_unknown_names_are_absent() -> None:
    assert not hasattr(torch_npu, "hifloat8")
    assert not hasattr(torch.npu, "no_such_thing")


def test_graphs_and_pools_refuse() -> None:
    for refused in (
        torch.npu.NPUGraph,
        torch.npu.graph,
        torch.npu.memory.MemPool,
        torch.npu.graph_pool_handle,
    ):
        with pytest.raises(torch_npu.StandInError):
            refused()


def test_layout_casts_keep_the_tensor() -> None:
    tensor = torch.randn(3, 4)
    assert torch_npu.npu_format_cast(tensor, torch_npu.Format.FRACTAL_NZ) is tensor
    assert torch_npu.get_npu_format(tensor) == torch_npu.Format.ND


def test_streams_are_per_thread_and_nest() -> None:
    one, two = torch.npu.Stream(), torch.npu.Stream()
    seen = []
    with torch.npu.stream(one):
        with torch.npu.stream(two):
            assert torch.npu.current_stream() is two
        assert torch.npu.current_stream() is one
        thread = threading.Thread(target=lambda: seen.append(torch.npu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.npu.default_stream()]
    assert torch.npu.current_stream() is torch.npu.default_stream()


def test_events_complete_when_recorded() -> None:
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    assert end.query()
    assert start.elapsed_time(end) >= 0


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_STANDIN_DEVICES", "2")
    assert torch.npu.device_count() == 2
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1
    with pytest.raises(RuntimeError, match="STRATA_STANDIN_DEVICES"):
        torch.npu.set_device(2)


def test_pytorch_stays_usable_on_the_cpu() -> None:
    """Pinning is dropped, seeds work, and Dynamo traces."""
    assert torch.device("npu:1").type == "npu"
    assert not torch.zeros(2, pin_memory=True).is_pinned()
    assert torch.ones(2).pin_memory().sum() == 2
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(2))
    doubled = torch.compile(lambda x: torch.zeros(2) + 2 * x, backend="eager", fullgraph=True)
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
