"""Stand-in for ``torch.npu.memory``: nothing is ever allocated on the device."""

from __future__ import annotations

from typing import Any

from torch_npu._standin import Operator, unavailable_class

NPUPluggableAllocator = unavailable_class("NPUPluggableAllocator", __name__)
MemPool = unavailable_class("MemPool", __name__)
use_mem_pool = Operator("torch.npu.memory.use_mem_pool")
memory_snapshot = Operator("torch.npu.memory.memory_snapshot")


def memory_allocated(device: Any = None) -> int:
    """Bytes allocated on the device: 0."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    """Allocator counters that vllm-ascend reads, all 0."""
    return {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0, "num_alloc_retries": 0}


def reset_peak_memory_stats(device: Any = None) -> None:
    return None
