"""Stand-in for ``torch.npu``: a device that answers questions and orders no work.

Work on CPU tensors is finished when a call returns, so a stream needs no queue and an event is complete once
recorded: recording, waiting and synchronising are correct as no-ops. ``Stream.record_event`` and
``Stream.wait_event`` are ordinary methods, so that tests can count them.
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any, Self

import torch

from torch_npu._standin import Operator, unavailable_class
from torch_npu.npu import memory

DEVICE_NAME = "Ascend stand-in (no NPU)"
_state = threading.local()


def device_count() -> int:
    """Number of devices reported: STRATA_STANDIN_DEVICES, default 16 (a 910C node)."""
    return int(os.environ.get("STRATA_STANDIN_DEVICES", "16"))


def is_available() -> bool:
    """True: configuration checks shall take the same way as on a device host. Using the device raises."""
    return True


is_initialized = is_available


def _bytes() -> int:
    return int(float(os.environ.get("STRATA_STANDIN_MEMORY_GB", "64")) * 2**30)


class Event:
    """An event on a synchronous device: complete as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        return None

    def reset(self, stream: Stream | None = None) -> None:
        self._time = None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time between two recorded events."""
        if self._time is None or end_event._time is None:
            raise RuntimeError("both events must be recorded before elapsed_time is called")
        return (end_event._time - self._time) * 1e3


class ExternalEvent(Event):
    """An event shared with captured graphs."""


class Stream:
    """A stream on a synchronous device. Equal only to itself."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority
        self.npu_stream = id(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def __enter__(self) -> Self:
        self._context = stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


_default = Stream()


def default_stream(device: Any = None) -> Stream:
    return _default


def current_stream(device: Any = None) -> Stream:
    """The stream of this thread: the default one, or that of the innermost ``stream`` context."""
    return getattr(_state, "stream", _default)


def set_stream(stream: Stream) -> None:
    _state.stream = stream


class stream:
    """Context manager that makes a stream current in this thread; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = current_stream()
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        set_stream(self._before)


StreamContext = stream


class device:
    """Context manager that makes a device current in this thread."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self.index)

    def __exit__(self, *error: Any) -> None:
        set_device(self._before)


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def current_device() -> int:
    return getattr(_state, "device", 0)


def set_device(device: Any) -> None:
    index = _index(device)
    if not 0 <= index < device_count():
        raise RuntimeError(f"no device {index}: STRATA_STANDIN_DEVICES says {device_count()}")
    _state.device = index


def get_device_name(device: Any = None) -> str:
    return DEVICE_NAME


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=DEVICE_NAME, total_memory=_bytes(), cube_core_num=24, vector_core_num=48)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) in bytes."""
    return _bytes(), _bytes()


def synchronize(device: Any = None) -> None:
    return None


def empty_cache() -> None:
    return None


def is_current_stream_capturing() -> bool:
    return False


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def _is_in_bad_fork() -> bool:
    """PyTorch asks before it seeds a device: no device was initialised before a fork."""
    return False


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def set_compile_mode(jit_compile: bool = False) -> None:
    return None


def is_bf16_supported() -> bool:
    return True


memory_allocated = memory.memory_allocated
max_memory_allocated = memory.max_memory_allocated
memory_reserved = memory.memory_reserved
max_memory_reserved = memory.max_memory_reserved
memory_stats = memory.memory_stats
reset_peak_memory_stats = memory.reset_peak_memory_stats

config = SimpleNamespace(allow_internal_format=True)
NPUGraph = unavailable_class("NPUGraph", __name__)
graph = unavailable_class("graph", __name__)
_OPERATORS = (
    "get_soc_version",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "set_stream_limit",
    "get_stream_limit",
    "reset_stream_limit",
)
for _name in _OPERATORS:
    globals()[_name] = Operator(f"torch.npu.{_name}")
