"""Stand-in for ``torch_npu.profiler``: enumerations by attribute, profiling itself needs an NPU."""

from torch_npu._standin import Namespace, Operator, unavailable_class
from torch_npu.profiler import dynamic_profile

__all__ = ["dynamic_profile"]

profile = unavailable_class("profile", __name__)
_ExperimentalConfig = unavailable_class("_ExperimentalConfig", __name__)
tensorboard_trace_handler = Operator("torch_npu.profiler.tensorboard_trace_handler")
ProfilerActivity = Namespace("ProfilerActivity", CPU="CPU", NPU="NPU")
ProfilerLevel = Namespace("ProfilerLevel", Level0="Level0", Level1="Level1", Level2="Level2")
AiCMetrics = Namespace("AiCMetrics", AiCoreNone="AiCoreNone", PipeUtilization="PipeUtilization")
ExportType = Namespace("ExportType", Text="Text", Db="Db")
