"""Tests of the patches against the real upstream functions, in a patched tree with the base's Python.

In the tuned image: ``PYTHONPATH=/opt/base/stubs python -m pytest /tests/patches``. Elsewhere put a tree that
``strata apply`` has patched first on PYTHONPATH, then the stand-in modules.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.update(
    TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="ascend",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("STRATA_SWITCHES", None)

settings.register_profile(
    "strata",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("strata")

MANIFEST = Path("strata") / "series.json"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test anything but a patched tree: on an unpatched one every equality would hold trivially."""
    spec = importlib.util.find_spec("vllm_ascend")
    if spec is None or not spec.submodule_search_locations:
        raise pytest.UsageError(
            "no vllm_ascend on PYTHONPATH: run these tests with the base's Python in the tuned image"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    if not (package / MANIFEST).is_file():
        raise pytest.UsageError(
            f"{package} is not a patched tree (no {MANIFEST}): "
            "put a tree patched by `strata apply` first on PYTHONPATH"
        )
    if importlib.util.find_spec("torch_npu") is None:
        raise pytest.UsageError(
            "no torch_npu: on a host without NPU add the stand-in modules, PYTHONPATH=/opt/base/stubs"
        )


@pytest.fixture(scope="session", autouse=True)
def upstream() -> None:
    """vllm-ascend as a worker has it: torch_npu loaded and vllm-ascend's own patches of vLLM applied."""
    import torch_npu  # noqa: F401
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)
    adapt_patch()


@pytest.fixture
def enable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``enable(module, on=True)``: set the switch constant of a patch's module for one test."""

    def set_constant(module: ModuleType, on: bool = True) -> None:
        assert isinstance(module.ENABLED, bool)
        monkeypatch.setattr(module, "ENABLED", on)

    return set_constant


@pytest.fixture
def ascend_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real AscendConfig of this process, for a default VllmConfig; a test may set its attributes."""
    import vllm_ascend.ascend_config
    from vllm.config import VllmConfig

    config = vllm_ascend.ascend_config.AscendConfig(VllmConfig())
    monkeypatch.setattr(vllm_ascend.ascend_config, "_ASCEND_CONFIG", config)
    assert config.enable_reduce_sample is False
    return config


@pytest.fixture
def fresh_switches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The switches module as in a process that has resolved and installed nothing; undone afterwards."""
    import sys

    from vllm_ascend.strata import switches

    monkeypatch.setattr(switches, "_installed", None)
    monkeypatch.setattr(switches, "_announced", None)
    monkeypatch.setattr(switches, "_constants", list(switches._constants))
    for _, module, constant in switches._constants:
        monkeypatch.setattr(sys.modules[module], constant, False)
    return switches


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with nothing but a small Qwen3-MoE configuration: enough to build a VllmConfig."""
    directory = tmp_path_factory.mktemp("tiny-qwen3-moe")
    content = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.fixture
def engine_config(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``engine_config(**engine_arguments)``: a VllmConfig as ``vllm serve`` builds it."""
    import vllm_ascend.ascend_config
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(vllm_ascend.ascend_config, "_ASCEND_CONFIG", vllm_ascend.ascend_config._ASCEND_CONFIG)

    def build(**arguments: Any) -> Any:
        return EngineArgs(
            model=str(model_directory), skip_tokenizer_init=True, **arguments
        ).create_engine_config()

    yield build
