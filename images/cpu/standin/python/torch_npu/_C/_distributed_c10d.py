"""Stand-in for HCCL's process group: its options can be filled in, the group itself needs NPUs."""

from __future__ import annotations

from typing import Any

from torch_npu._standin import unavailable_class


class Options:
    """Options of an HCCL process group: plain attributes."""

    def __init__(self, **values: Any) -> None:
        self.hccl_config: dict[str, Any] = {}
        self.__dict__.update(values)


ProcessGroupHCCL = unavailable_class("ProcessGroupHCCL", __name__, Options=Options)
