"""Stand-in for profiling that is switched on in a running process."""

from torch_npu._standin import Operator

init = Operator("torch_npu.profiler.dynamic_profile.init")
step = Operator("torch_npu.profiler.dynamic_profile.step")
