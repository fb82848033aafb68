"""Stand-in for sharing device tensors between processes."""

from torch_npu._standin import Operator

rebuild_npu_tensor = Operator("torch_npu.multiprocessing.reductions.rebuild_npu_tensor")
