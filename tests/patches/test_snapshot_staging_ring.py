"""Snapshots through the ring: what arrives is what the host held at the call, however late the device is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from host_device import Device
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_ascend.strata import block_table_commit_ring, pinned_ring, snapshot_staging_ring

ROWS = 6


@pytest.fixture(autouse=True)
def switch_on(enable: Callable[..., None]) -> None:
    enable(snapshot_staging_ring)
    enable(block_table_commit_ring)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device().install(monkeypatch)


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every tensor that gets pinned."""
    made: list[tuple[int, ...]] = []

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        made.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return made


def snapshot(buffer: Any) -> Any:
    from vllm_ascend.worker.utils import copy_snapshot_to_gpu

    return copy_snapshot_to_gpu(buffer)


def commit(buffer: Any, rows: int) -> None:
    """The edited method of the block table, on a table of which only the buffer matters."""
    from vllm_ascend.worker.block_table import BlockTable

    table = object.__new__(BlockTable)
    table.block_table = buffer
    table.pcp_world_size = table.dcp_world_size = 1
    table.commit_block_table(rows)


class Checked:
    """Runs copies and compares each, when the device gets to it, with the content at the time of its call."""

    def __init__(self, device: Device, buffer: Any) -> None:
        self.device, self.buffer = device, buffer
        self.arrived = 0

    def issue(self, copy: Callable[[], Any], rows: int) -> None:
        expected = self.buffer.cpu[:rows].clone()
        copy()

        def compare() -> None:
            assert torch.equal(self.buffer.gpu.value[:rows], expected), "a later write of the host was copied"
            self.arrived += 1

        self.device.current.enqueue(compare)


OPERATION = st.one_of(
    st.tuples(st.just("write"), st.integers(-1000, 1000)),
    st.tuples(st.just("snapshot"), st.just(0)),
    st.tuples(st.just("commit"), st.integers(0, ROWS)),
    st.tuples(st.just("run"), st.integers(1, 6)),
)


@settings(max_examples=300)
@given(operations=st.lists(OPERATION, min_size=5, max_size=80))
def test_a_later_write_is_never_copied(operations: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = Device().install(monkeypatch)
        vector, table = device.buffer(ROWS), device.buffer(ROWS, 3)
        vectors, tables = Checked(device, vector), Checked(device, table)
        for operation, number in operations:
            if operation == "write":
                vector.cpu.copy_(torch.arange(ROWS) + number)
                table.cpu.copy_(torch.arange(ROWS * 3).view(ROWS, 3) * 7 + number)
            elif operation == "snapshot":
                vectors.issue(lambda: snapshot(vector), ROWS)
                vector.cpu.fill_(-7)
            elif operation == "commit":
                tables.issue(lambda rows=number: commit(table, rows), number)
                table.cpu.fill_(-7)
            elif operation == "run":
                device.current.run(number)
        device.run()


@settings(max_examples=60)
@given(order=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=2, max_size=60))
def test_a_slot_waits_for_the_stream_of_its_own_copy(order: list[tuple[int, int]]) -> None:
    """One ring, two streams that are late independently of each other, one target for each copy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = Device().install(monkeypatch)
        source = torch.zeros(ROWS, dtype=torch.int64)
        ring = pinned_ring.Ring(source)
        copies = []
        for number, (stream, progress) in enumerate(order):
            device.current = device.streams[stream]
            source.fill_(number)
            target = device.tensor(torch.full((ROWS,), -1), str(number))
            ring.copy(source, target)  # type: ignore[arg-type]
            copies.append(target)
            device.streams[1 - stream].run(progress)
            assert ring.slots <= pinned_ring.MAX_SLOTS
        device.run()
        assert [target.value.tolist() for target in copies] == [[n] * ROWS for n in range(len(order))]


class TestRing:
    def test_one_slot_is_enough_for_a_device_that_keeps_up(self, device: Device, pins: list[Any]) -> None:
        buffer = device.buffer(ROWS)
        for _ in range(50):
            snapshot(buffer)
            device.run()
        assert len(pins) == 1 and device.waits == 0

    def test_allocates_nothing_after_warm_up(self, device: Device, pins: list[Any]) -> None:
        """Two steps in flight, three copies each, as under asynchronous scheduling."""
        buffer, table = device.buffer(ROWS), device.buffer(ROWS, 3)
        after_warm_up = 0
        for step in range(40):
            for _ in range(3):
                snapshot(buffer)
            commit(table, 4)
            device.current.run(max(0, device.current.issued - device.current.finished - 4))
            if step == 3:
                after_warm_up = len(pins)
        assert len(pins) == after_warm_up and device.waits == 0

    def test_a_full_ring_waits_for_its_oldest_copy_only(self, device: Device, pins: list[Any]) -> None:
        buffer = device.buffer(ROWS)
        for _ in range(pinned_ring.MAX_SLOTS):
            snapshot(buffer)
        assert device.waits == 0 and device.current.finished == 0
        snapshot(buffer)
        assert device.waits == 1 and device.current.finished == 1
        assert len(pins) == pinned_ring.MAX_SLOTS

    def test_a_copy_that_failed_keeps_its_slot_busy(self, device: Device) -> None:
        class Broken:
            def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
                device.current.enqueue(lambda: None)
                raise RuntimeError("out of resources")

        ring = pinned_ring.Ring(torch.zeros(ROWS))
        with pytest.raises(RuntimeError, match="out of resources"):
            ring.copy(torch.zeros(ROWS), Broken())  # type: ignore[arg-type]
        ring.copy(torch.ones(ROWS), device.tensor(torch.zeros(ROWS)))  # type: ignore[arg-type]
        assert ring.slots == 2

    def test_each_buffer_has_its_own_ring(self, device: Device, pins: list[Any]) -> None:
        for shape in ((3,), (4,), (3, 2)):
            snapshot(device.buffer(*shape))
        assert pins == [(3,), (4,), (3, 2)]

    def test_a_buffer_with_another_host_tensor_gets_another_ring(self, device: Device) -> None:
        buffer = device.buffer(3)
        snapshot(buffer)
        buffer.cpu = torch.arange(5, dtype=torch.int32)
        buffer.gpu = device.tensor(torch.zeros(5, dtype=torch.int32))
        snapshot(buffer)
        device.run()
        assert buffer.gpu.value.tolist() == [0, 1, 2, 3, 4]

    def test_memory_goes_with_the_buffer(self, device: Device) -> None:
        import gc
        import weakref

        buffer = device.buffer(3)
        snapshot(buffer)
        device.run()
        ring = weakref.ref(pinned_ring.ring_of(buffer, buffer.cpu))
        del buffer
        gc.collect()
        assert ring() is None

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.bfloat16])
    def test_types(self, dtype: torch.dtype, device: Device) -> None:
        source = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32).to(dtype)
        target = device.tensor(torch.zeros(5, dtype=dtype))
        buffer = SimpleNamespace(cpu=source, gpu=target)
        assert snapshot(buffer) is target
        source.zero_()
        device.run()
        assert target.value.to(torch.int32).tolist() == [0, 1, 1, 0, 1]

    def test_the_real_buffer_of_vllm(self) -> None:
        from vllm.v1.utils import CpuGpuBuffer

        buffer = CpuGpuBuffer(4, dtype=torch.int32, device=torch.device("cpu"), pin_memory=False)
        for step in range(3):
            buffer.np[:] = step + 1
            assert snapshot(buffer) is buffer.gpu
            assert buffer.gpu.tolist() == [step + 1] * 4
        assert pinned_ring.ring_of(buffer, buffer.cpu).slots == 1


class TestCommit:
    @pytest.mark.parametrize("rows", [0, 1, 5, ROWS])
    def test_only_the_used_rows(self, rows: int, device: Device) -> None:
        table = device.buffer(ROWS, 4)
        table.cpu.copy_(torch.arange(ROWS * 4).view(ROWS, 4) + 1)
        commit(table, rows)
        device.run()
        assert torch.equal(table.gpu.value[:rows], table.cpu[:rows])
        assert not table.gpu.value[rows:].any()

    def test_every_group_of_the_real_multi_group_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hybrid models: several groups, among them one whose blocks are split."""
        from vllm_ascend.worker import block_table

        one = SimpleNamespace(world_size=1, rank_in_group=0)
        monkeypatch.setattr(block_table, "get_pcp_group", lambda: one)
        monkeypatch.setattr(block_table, "get_dcp_group", lambda: one)
        tables = block_table.MultiGroupBlockTable(
            max_num_reqs=4,
            max_model_len=256,
            max_num_batched_tokens=64,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=[32, 16],
            max_num_blocks=[8, 16],
            kernel_sizes=[[16], [16]],
        )
        tables.add_row(([3, 4], [5, 6, 7]), 0)
        tables.add_row(([9], [1]), 1)
        tables.commit_block_table(2)
        for table in tables.block_tables:
            assert torch.equal(table.block_table.gpu, table.block_table.cpu)
            assert pinned_ring.ring_of(table.block_table, table.block_table.cpu).slots == 1
        assert tables[0].block_table.gpu[0, :4].tolist() == [6, 7, 8, 9]


class TestFallback:
    """Each condition alone leaves the copy to upstream: a fresh pinned clone every time."""

    def test_not_without_reason(self, device: Device, pins: list[Any]) -> None:
        buffer, table = device.buffer(ROWS), device.buffer(ROWS, 3)
        for _ in range(3):
            snapshot(buffer)
            commit(table, 2)
            device.run()
        assert pins == [(ROWS,), (ROWS, 3)]

    def test_switches_off(self, device: Device, pins: list[Any], enable: Callable[..., None]) -> None:
        enable(snapshot_staging_ring, False)
        enable(block_table_commit_ring, False)
        buffer, table = device.buffer(ROWS), device.buffer(ROWS, 3)
        for _ in range(3):
            snapshot(buffer)
            commit(table, 2)
            device.run()
        assert pins == [(ROWS,), (2, 3)] * 3
        assert "_strata_ring" not in vars(buffer) and "_strata_ring" not in vars(table)

    def test_while_a_graph_is_captured(
        self, device: Device, pins: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
        buffer, table = device.buffer(ROWS), device.buffer(ROWS, 3)
        for _ in range(2):
            snapshot(buffer)
            commit(table, 2)
            device.run()
        assert pins == [(ROWS,), (2, 3)] * 2

    def test_something_else_than_a_host_tensor(self) -> None:
        buffer = SimpleNamespace(cpu=MagicMock(), gpu=MagicMock())
        snapshot(buffer)
        buffer.cpu.clone().pin_memory.assert_called_once_with()

    def test_a_tensor_without_rows(self, device: Device, pins: list[Any]) -> None:
        buffer = SimpleNamespace(cpu=torch.tensor(3), gpu=device.tensor(torch.tensor(0)))
        snapshot(buffer)
        device.run()
        assert pins == [()] and int(buffer.gpu.value) == 3

    def test_switch_constants_are_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("snapshot_staging_ring", snapshot_staging_ring.__name__, "ENABLED") in switches._constants
        assert ("block_table_commit_ring", block_table_commit_ring.__name__, "ENABLED") in switches._constants
