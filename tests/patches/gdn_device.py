"""A device for the core of one gated delta net layer on CPU tensors: stand-ins that note what they get.

The operators compute something simple that depends on every argument of theirs that holds values, so that two
runs can be compared argument by argument and in the output. They do not claim the NPU's results. Like the
real ones they insist on contiguous q, k and v.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

PREFIX = "layer"
WIDTH = 4


@dataclass(frozen=True)
class Batch:
    """What a step holds. spec: requests with drafts, each of ``drafts + 1`` rows; decodes: requests with one
    row; prefills: rows of each prompt; ranks: of prefill context parallelism.
    """

    spec: int = 0
    drafts: int = 1
    decodes: int = 0
    prefills: tuple[int, ...] = ()
    ranks: int = 1

    @property
    def spec_rows(self) -> int:
        return self.spec * (self.drafts + 1)

    @property
    def rows(self) -> int:
        return self.spec_rows + self.decodes + sum(self.prefills)


@dataclass
class Call:
    """One operator call: its name and tensors, values copied."""

    name: str
    tensors: dict[str, torch.Tensor]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


@dataclass
class Device:
    """calls: every operator call, in order; weights: the convolution weights as they were passed."""

    calls: list[Call] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    conv_outputs: list[torch.Tensor] = field(default_factory=list)

    def note(self, name: str, **arguments: Any) -> None:
        tensors = {key: it.clone() for key, it in arguments.items() if isinstance(it, torch.Tensor)}
        self.calls.append(Call(name, tensors))

    def conv1d(
        self, output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, **rest: Any
    ) -> torch.Tensor:
        assert weight.shape == (WIDTH, rows.shape[1])
        self.weights.append(weight)
        self.conv_outputs.append(output)
        self.note(
            f"conv1d{rest['run_mode']}",
            rows=rows,
            weight=weight,
            **{k: v for k, v in rest.items() if v is not None},
        )
        padded = torch.cat([torch.zeros((WIDTH - 1, rows.shape[1])), rows.float()])
        total = sum(padded[k : k + len(rows)] * weight[k].float() for k in range(WIDTH))
        output.copy_(nn.functional.silu(total))  # type: ignore[arg-type]
        return output

    def recurrent(self, *, query: Any, key: Any, value: Any, **rest: Any) -> torch.Tensor:
        assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        self.values.append(value)
        self.note("recurrent", query=query, key=key, value=value, **rest)
        factor = (query.float() * key.float()).sum(-1).mean(-1)[:, None, None] * rest["scale"]
        return (value.float() * factor + rest["g"][..., None].float()).to(value.dtype)

    def chunked(self, *, q: Any, k: Any, v: Any, initial_state: Any, **rest: Any) -> Any:
        self.note("chunked", q=q, k=k, v=v, initial_state=initial_state, **rest)
        factor = (q.float() * k.float()).sum(-1).mean(-1)[..., None, None]
        return (v.float() * factor).to(v.dtype), initial_state * 0.5

    def l2norm(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])  # as vLLM's, which needs it contiguous
        self.note("l2norm", x=x)
        return (
            (flat.float() / (flat.float().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt())
            .to(x.dtype)
            .view(x.shape)
        )


class Layer:
    """The layer's core with a batch's metadata, ready to run: the real ``_forward_core``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        batch: Batch,
        dtype: torch.dtype,
        key_heads: int,
        heads: int,
        size: int,
    ) -> None:
        from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
        from vllm_ascend.ops import gdn

        self.batch, self.dtype = batch, dtype
        layer: Any = object.__new__(QwenGatedDeltaNetAttention)
        nn.Module.__init__(layer)
        self.module = layer
        layer.prefix, layer.activation, layer.tp_size = PREFIX, "silu", 1
        layer.head_k_dim = layer.head_v_dim = size
        layer.key_dim, layer.value_dim = key_heads * size, heads * size
        self.channels = 2 * layer.key_dim + layer.value_dim
        generator = torch.Generator().manual_seed(batch.rows)
        self.random = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
        layer.conv1d = nn.Module()
        layer.conv1d.weight = nn.Parameter(self.random(self.channels, 1, WIDTH), requires_grad=False)
        layer.conv1d.bias = None
        layer.A_log, layer.dt_bias = torch.zeros(heads), torch.zeros(heads)
        blocks = 16
        self.state = (self.random(blocks, WIDTH - 1, self.channels), self.random(blocks, heads, size, size))
        self.rows = self.random(batch.rows, self.channels)
        self.gates = self.random(batch.rows, heads), self.random(batch.rows, heads)
        self.heads, self.size = heads, size

        metadata = {PREFIX: self.metadata()}
        monkeypatch.setattr(gdn, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
        group = SimpleNamespace(
            world_size=batch.ranks, rank_in_group=batch.ranks - 1, all_gather=self.all_gather
        )
        monkeypatch.setattr(gdn, "get_pcp_group", lambda: group)
        monkeypatch.setattr(
            gdn,
            "extract_last_width",
            lambda x, starts, width: torch.stack(
                [
                    nn.functional.pad(x[:, s:e], (width, 0))[:, -width:]
                    for s, e in itertools.pairwise(starts.tolist())
                ]
            ),
        )
        monkeypatch.setattr(
            gdn, "clear_ssm_states", lambda state, keep: state.mul_(keep[:, None, None, None])
        )
        monkeypatch.setattr(
            gdn.DeviceOperator,
            "fused_gdn_gating",
            staticmethod(lambda A, a, b, bias: (a[None] * 2, b[None] * 3)),
        )
        self.monkeypatch = monkeypatch

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor * (rank + 1) for rank in range(self.batch.ranks)], dim)

    def metadata(self) -> Any:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

        batch = self.batch
        spec, others = batch.spec_rows, batch.decodes + len(batch.prefills)
        lengths = [1] * batch.decodes + list(batch.prefills)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        slots = torch.arange(others, dtype=torch.int32)
        spec_slots = torch.arange(spec, dtype=torch.int32) + others
        conv = {"query_start_loc": starts, "cache_indices": slots}
        it = GDNAttentionMetadata(
            num_prefills=len(batch.prefills),
            num_prefill_tokens=sum(batch.prefills),
            num_decodes=batch.decodes,
            num_decode_tokens=batch.decodes,
            num_spec_decodes=batch.spec,
            num_spec_decode_tokens=spec,
            num_actual_tokens=batch.rows,
        )
        if batch.spec:
            it.spec_sequence_masks = torch.ones(1, dtype=torch.bool)
            it.spec_token_indx, it.non_spec_token_indx = torch.arange(spec), torch.arange(spec, batch.rows)
            it.spec_state_indices_tensor = spec_slots.view(batch.spec, -1)
        it.non_spec_query_start_loc, it.non_spec_state_indices_tensor = starts, slots
        it.prefill_query_start_loc = starts[batch.decodes :] - starts[batch.decodes]
        it.prefill_state_indices = slots[batch.decodes :].long()
        it.prefill_has_initial_state = torch.arange(len(batch.prefills)) % 2 == 0
        extra: Any = it
        accepted = torch.ones(batch.spec)
        spec_conv = SimpleNamespace(
            query_start_loc=torch.arange(batch.spec + 1) * (batch.drafts + 1),
            cache_indices=spec_slots,
            num_accepted_tokens=accepted,
        )
        lengths_of = torch.ones(others, dtype=torch.int32)
        extra.spec_decode_metadata = SimpleNamespace(
            spec_causal_conv1d=spec_conv, actual_seq_lengths=torch.ones(batch.spec, dtype=torch.int32)
        )
        extra.non_spec_prefill_metadata = SimpleNamespace(
            causal_conv1d=SimpleNamespace(**conv, initial_state_mode=torch.zeros(others)), chunk=None
        )
        extra.non_spec_decode_metadata = SimpleNamespace(
            causal_conv1d=SimpleNamespace(**conv), actual_seq_lengths=lengths_of
        )
        return it

    def run(self) -> tuple[Device, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """One pass: the device with its calls, the output, and the states that it left."""
        from vllm_ascend.ops import gdn

        device = Device()
        operators = torch.ops._C_ascend
        for name, operator in (
            ("npu_causal_conv1d_custom", device.conv1d),
            ("npu_recurrent_gated_delta_rule", device.recurrent),
        ):
            self.monkeypatch.setattr(operators, name, operator, raising=False)
        self.monkeypatch.setattr(gdn, "chunk_gated_delta_rule", device.chunked)
        self.monkeypatch.setattr(gdn, "l2norm_fwd", device.l2norm)
        self.module.kv_cache = tuple(state.clone() for state in self.state)
        out = torch.zeros((self.batch.rows, self.heads, self.size), dtype=self.dtype)
        rows = self.rows.clone()
        self.module._forward_core(rows, *(gate.clone() for gate in self.gates), out)
        assert bits(rows) == bits(self.rows)
        return device, out, self.module.kv_cache


def assert_same(one: Any, two: Any) -> None:
    """Two results of :meth:`Layer.run` agree in every argument of every call, in output and states."""
    (device, out, states), (other_device, other_out, other_states) = one, two
    assert [call.name for call in device.calls] == [call.name for call in other_device.calls]
    for call, other in zip(device.calls, other_device.calls, strict=True):
        assert call.tensors.keys() == other.tensors.keys()
        for name, tensor in call.tensors.items():
            theirs = other.tensors[name]
            assert tensor.shape == theirs.shape and tensor.dtype == theirs.dtype, (call.name, name)
            assert bits(tensor) == bits(theirs), (call.name, name)
    assert bits(out) == bits(other_out)
    for state, theirs in zip(states, other_states, strict=True):
        assert bits(state) == bits(theirs)
