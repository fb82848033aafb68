"""A real, tiny Qwen3.5 model of vLLM with vllm-ascend's layers, on CPU tensors, and checkpoints for it.

Three gated delta net layers and one full attention layer, bfloat16, one rank. Nothing of it is replaced; only
the platform says that its device is the CPU while the model is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

HIDDEN = 256
HEAD = 32
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


@contextmanager
def on_cpu() -> Iterator[None]:
    """The NPU platform with the CPU as its device."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    communicator = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    with (
        patch.object(platform, "device_type", "cpu"),
        patch.object(platform, "current_device", staticmethod(lambda: torch.device("cpu")), create=True),
        patch.object(platform, "get_device_communicator_cls", classmethod(lambda cls: communicator)),
    ):
        yield


@contextmanager
def world(directory: Path) -> Iterator[Any]:
    """One process of one rank with vLLM's groups, vllm-ascend's layers registered: the VllmConfig."""
    import vllm.distributed.parallel_state as groups
    import vllm_ascend.ascend_config
    import vllm_ascend.utils
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor import custom_op

    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = EngineArgs(
        model=str(directory), skip_tokenizer_init=True, max_model_len=256
    ).create_engine_config()
    before = vllm_ascend.ascend_config._ASCEND_CONFIG
    registered = dict(custom_op.op_registry_oot)
    flag = vllm_ascend.utils._ASCEND_CUSTOMOP_IS_REIGISTERED
    with set_current_vllm_config(config), on_cpu():
        groups.init_distributed_environment(1, 0, f"file://{directory}/store", 0, backend="gloo")
        groups.initialize_model_parallel(1, backend="gloo")
        vllm_ascend.ascend_config.init_ascend_config(config)
        vllm_ascend.utils.register_ascend_customop(config)
    try:
        yield config
    finally:
        groups.destroy_model_parallel()
        groups.destroy_distributed_environment()
        vllm_ascend.ascend_config._ASCEND_CONFIG = before
        vllm_ascend.utils._ASCEND_CUSTOMOP_IS_REIGISTERED = flag
        custom_op.op_registry_oot.clear()
        custom_op.op_registry_oot.update(registered)


def build(config: Any) -> nn.Module:
    """The model as a loader makes it, before any weights are loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), on_cpu(), set_default_torch_dtype(torch.bfloat16):
        return initialize_model(config, model_class=Qwen3_5ForCausalLM)


def checkpoint(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Random weights under the names and in the shapes of a published checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (256, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (256, HIDDEN),
    }
    linear = {
        "dt_bias": (4,),
        "A_log": (4,),
        "conv1d.weight": (256, 1, 4),
        "in_proj_qkv.weight": (256, HIDDEN),
        "in_proj_z.weight": (128, HIDDEN),
        "in_proj_b.weight": (4, HIDDEN),
        "in_proj_a.weight": (4, HIDDEN),
        "norm.weight": (HEAD,),
        "out_proj.weight": (HIDDEN, 128),
    }
    full = {
        "q_proj.weight": (256, HIDDEN),
        "k_proj.weight": (HEAD, HIDDEN),
        "v_proj.weight": (HEAD, HIDDEN),
        "o_proj.weight": (HIDDEN, 128),
        "q_norm.weight": (HEAD,),
        "k_norm.weight": (HEAD,),
    }
    for layer in range(4):
        name, parts = ("self_attn", full) if layer == 3 else ("linear_attn", linear)
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.{part}": shape for part, shape in parts.items()}
        shapes |= {
            f"{prefix}.mlp.gate_proj.weight": (128, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (128, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, 128),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return [
        (name, torch.randn(shape, generator=generator).to(torch.bfloat16)) for name, shape in shapes.items()
    ]
