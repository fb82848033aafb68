"""A device that works late: copies and fills are queued per stream and read their host source only when run.

That is what a real device does with pinned memory, and what shows a staging buffer that is overwritten too
early. Only what the host patches use is there: ``copy_``, ``fill_``, slices, events, streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch


class Stream:
    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.issued = 0
        self.finished = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.issued += 1

    def run(self, number: int | None = None) -> None:
        """Let the device do its next ``number`` pieces of work (all without a number)."""
        while self.queue and number != 0:
            self.queue.popleft()()
            self.finished += 1
            number = None if number is None else number - 1


class Device:
    """Streams, the current one, and the log of what was issued: ("copy" | "fill", name of the tensor)."""

    def __init__(self) -> None:
        self.streams = [Stream(), Stream()]
        self.current = self.streams[0]
        self.log: list[tuple[str, str]] = []
        self.waits = 0
        device = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.stream: Stream | None = None
                self.position = 0

            def record(self, stream: Stream | None = None) -> None:
                self.stream = stream or device.current
                self.position = self.stream.issued

            def query(self) -> bool:
                return self.stream is None or self.stream.finished >= self.position

            def synchronize(self) -> None:
                if self.stream is not None and not self.query():
                    device.waits += 1
                    self.stream.run(self.position - self.stream.finished)

        self.Event = Event

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        monkeypatch.setattr(torch.npu, "Event", self.Event)
        return self

    def run(self) -> None:
        for stream in self.streams:
            stream.run()

    def tensor(self, value: torch.Tensor, name: str = "") -> DeviceTensor:
        return DeviceTensor(self, value, name)

    def buffer(self, *size: int, dtype: torch.dtype = torch.int32, name: str = "") -> LateBuffer:
        """Like vLLM's CpuGpuBuffer: cpu, np, gpu, copy_to_gpu."""
        return LateBuffer(self, torch.zeros(*size, dtype=dtype), name)


class DeviceTensor:
    def __init__(self, device: Device, value: torch.Tensor, name: str) -> None:
        self.device_, self.value, self.name = device, value, name

    def __getitem__(self, index: Any) -> DeviceTensor:
        return DeviceTensor(self.device_, self.value[index], self.name)

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> DeviceTensor:
        assert source.shape == self.value.shape
        assert non_blocking, "a copy that waits for the device"
        self.device_.log.append(("copy", self.name))
        self.device_.current.enqueue(lambda: self.value.copy_(source))
        return self

    def fill_(self, number: float) -> DeviceTensor:
        self.device_.log.append(("fill", self.name))
        self.device_.current.enqueue(lambda: self.value.fill_(number))
        return self


class LateBuffer:
    def __init__(self, device: Device, cpu: torch.Tensor, name: str = "") -> None:
        self.cpu = cpu
        self.np = cpu.numpy()
        self.gpu = device.tensor(torch.zeros_like(cpu), name)

    def copy_to_gpu(self, n: int | None = None) -> DeviceTensor:
        """The copy of a step as upstream makes it, its content taken at once: upstream's own event keeps the
        host from overwriting it.
        """
        content = self.cpu.clone() if n is None else self.cpu[:n].clone()
        return (
            self.gpu.copy_(content, non_blocking=True)
            if n is None
            else self.gpu[:n].copy_(content, non_blocking=True)
        )
