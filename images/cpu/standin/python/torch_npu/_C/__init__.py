"""Stand-in for torch_npu's extension module: the names that vllm-ascend reads."""

from torch_npu._C import _distributed_c10d
from torch_npu._standin import Operator, unavailable_class

__all__ = ["_NPUTaskGroupHandle", "_distributed_c10d", "_weak_ref_tensor"]

_NPUTaskGroupHandle = unavailable_class("_NPUTaskGroupHandle", __name__)
_weak_ref_tensor = Operator("torch_npu._C._weak_ref_tensor")
