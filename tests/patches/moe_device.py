"""A device for one MoE layer on CPU tensors: the operators that it calls, and a trace of its streams.

The operators compute what their names say, in float32 (int8 symmetric per row or column where quantised);
they stand in for the NPU's, they do not claim its rounding. Each notes itself in the trace with the stream
that it was issued on, as do recording and waiting, so that two runs can be compared event by event.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Entry:
    """kind: ``record``, ``wait`` or ``op``; stream: its number in order of appearance; what: event number or
    operator name."""

    kind: str
    stream: int
    what: int | str


@dataclass
class Trace:
    """What was issued, in order."""

    entries: list[Entry] = field(default_factory=list)
    _streams: dict[int, int] = field(default_factory=dict)
    _events: dict[int, int] = field(default_factory=dict)
    _keep: list[Any] = field(default_factory=list)

    def _number(self, numbers: dict[int, int], thing: Any) -> int:
        self._keep.append(thing)  # so that no id comes twice
        return numbers.setdefault(id(thing), len(numbers))

    def record(self, stream: Any, event: Any) -> None:
        self.entries.append(
            Entry("record", self._number(self._streams, stream), self._number(self._events, event))
        )

    def wait(self, stream: Any, event: Any) -> None:
        self.entries.append(
            Entry("wait", self._number(self._streams, stream), self._number(self._events, event))
        )

    def op(self, name: str) -> None:
        self.entries.append(Entry("op", self._number(self._streams, torch.npu.current_stream()), name))

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    def recorded_on(self, event: int | str) -> int:
        """The stream on which the event was recorded."""
        (stream,) = {entry.stream for entry in self.of("record") if entry.what == event}
        return stream


def rows_of(group_list: torch.Tensor, group_list_type: int) -> list[int]:
    """Rows of each expert, from counts (type 1) or cumulative sums (type 0)."""
    if group_list_type == 1:
        return [int(n) for n in group_list]
    assert group_list_type == 0
    return [int(n) for n in torch.diff(group_list, prepend=group_list.new_zeros(1))]


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and float32 scales of each row."""
    scale = x.float().abs().amax(-1).clamp_min(1e-8) / 127
    return (x.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def stacked(weight: Any) -> torch.Tensor:
    """The weight of all experts as one tensor [experts, in, out], from a tensor or a list with one."""
    return weight[0] if isinstance(weight, list) else weight


class Device:
    """The operators; ``install`` puts them in place for one test."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.prefetched: list[torch.Tensor] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch_npu
        from vllm_ascend.device.device_op import DeviceOperator
        from vllm_ascend.ops.fused_moe import moe_mlp

        stream_class = torch.npu.Stream
        record, wait = stream_class.record_event, stream_class.wait_event

        def traced_record(stream: Any, event: Any = None) -> Any:
            event = record(stream, event)
            self.trace.record(stream, event)
            return event

        def traced_wait(stream: Any, event: Any) -> None:
            self.trace.wait(stream, event)
            wait(stream, event)

        monkeypatch.setattr(stream_class, "record_event", traced_record)
        monkeypatch.setattr(stream_class, "wait_event", traced_wait)
        monkeypatch.setattr(moe_mlp, "HAS_TRITON", False)
        monkeypatch.setattr(torch_npu, "npu_grouped_matmul", self.grouped_matmul)
        monkeypatch.setattr(torch_npu, "npu_swiglu", self.swiglu)
        monkeypatch.setattr(torch_npu, "npu_dynamic_quant", self.dynamic_quant)
        monkeypatch.setattr(torch_npu, "npu_prefetch", self.prefetch, raising=False)
        monkeypatch.setattr(torch_npu, "npu_quant_matmul", self.quant_matmul)
        monkeypatch.setattr(DeviceOperator, "npu_moe_init_routing", staticmethod(self.init_routing))
        monkeypatch.setattr(DeviceOperator, "npu_moe_token_unpermute", staticmethod(self.unpermute))
        monkeypatch.setattr(
            torch.ops._C_ascend, "npu_dequant_swiglu_quant", self.dequant_swiglu_quant, raising=False
        )
        fused = self.grouped_matmul_swiglu_quant
        monkeypatch.setattr(
            torch.ops._C_ascend, "grouped_matmul_swiglu_quant_weight_nz", fused, raising=False
        )

    def grouped_matmul(
        self, x: list[torch.Tensor], weight: Any, group_list: torch.Tensor, **options: Any
    ) -> list[torch.Tensor]:
        """x[0] [rows, in] times the weight of each row's expert, rows sorted by expert."""
        self.trace.op("grouped_matmul")
        weights, rows = stacked(weight), x[0].float()
        assert not options.get("bias")
        scale = options.get("scale")
        if options.get("antiquant_scale"):
            weights = (weights.float() + options["antiquant_offset"][0]) * options["antiquant_scale"][0]
        out = torch.zeros(rows.shape[0], weights.shape[-1])
        start = 0
        for expert, count in enumerate(rows_of(group_list, options["group_list_type"])):
            out[start : start + count] = rows[start : start + count] @ weights[expert].float()
            if scale is not None:
                out[start : start + count] *= stacked(scale)[expert].float()
            start += count
        if options.get("per_token_scale"):
            out *= options["per_token_scale"][0][:, None]
        dtype = options.get("output_dtype") or x[0].dtype
        return [out.to(dtype)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over two ranks that hold the same part, out of place as vLLM's contract is."""
        self.trace.op("all_reduce")
        return x * 2

    def prefetch(self, weight: torch.Tensor, start: torch.Tensor, size: int, offset: int) -> None:
        """Notes itself with the bytes asked for."""
        assert isinstance(start, torch.Tensor) and offset == 0
        assert 0 < size <= weight.numel() * weight.element_size()
        self.prefetched.append(weight)
        self.trace.op(f"prefetch {size}")

    def swiglu(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.trace.op("swiglu")
        gate, up = x.float().chunk(2, dim)
        return (F.silu(gate) * up).to(x.dtype)

    def dynamic_quant(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.trace.op("dynamic_quant")
        return quantise(x)

    def quant_matmul(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        self.trace.op("quant_matmul")
        out = x.float() @ weight.float()
        if options["output_dtype"] is torch.int32:
            return out.to(torch.int32)
        return (out * scale.float() * options["pertoken_scale"][:, None]).to(options["output_dtype"])

    def dequant_swiglu_quant(
        self,
        x: torch.Tensor,
        weight_scale: torch.Tensor,
        activation_scale: torch.Tensor,
        group_index: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """weight_scale [out], or [experts, out] with the rows of each expert in group_index."""
        self.trace.op("dequant_swiglu_quant")
        scale = weight_scale.float()
        if scale.dim() == 2:
            scale = torch.repeat_interleave(scale, group_index, dim=0)
            scale = F.pad(scale, (0, 0, 0, x.shape[0] - scale.shape[0]))  # rows of no local expert
        gate, up = (x.float() * scale * activation_scale[:, None]).chunk(2, -1)
        return quantise(F.silu(gate) * up)

    def grouped_matmul_swiglu_quant(
        self,
        x: torch.Tensor,
        weight: Any,
        weight_scale: Any,
        x_scale: torch.Tensor,
        group_list: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        self.trace.op("grouped_matmul_swiglu_quant")
        options = {"scale": weight_scale, "per_token_scale": [x_scale], "output_dtype": torch.float32}
        (out,) = self.grouped_matmul([x], weight, group_list, group_list_type=0, **options)
        gate, up = out.chunk(2, -1)
        return (*quantise(F.silu(gate) * up), None)

    def init_routing(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        active_expert_range: list[int],
        quant_mode: int,
        expert_tokens_num_type: int,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Rows of the local experts first, sorted by expert; where each (token, choice) went; rows of each
        expert as counts (type 1) or cumulative sums (type 0)."""
        self.trace.op("init_routing")
        first, last = active_expert_range
        flat = topk_ids.reshape(-1).long()
        local = (flat >= first) & (flat < last)
        order = torch.argsort(torch.where(local, flat, last), stable=True)
        place = torch.empty_like(flat)
        place[order] = torch.arange(flat.numel())
        rows = x[order // topk_ids.shape[1]].clone()
        rows[int(local.sum()) :] = 0
        counts = torch.bincount(flat[local] - first, minlength=last - first)
        scale = None
        if quant_mode == 1:
            rows, scale = quantise(rows)
        assert expert_tokens_num_type in (0, 1)
        if expert_tokens_num_type == 0:
            counts = torch.tensor(list(itertools.accumulate(counts.tolist())))
        return rows, place.to(torch.int32), counts, scale

    def unpermute(
        self, permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        self.trace.op("unpermute")
        chosen = permuted_tokens.float()[sorted_indices.long()].view(*probs.shape, -1)
        return (chosen * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)
