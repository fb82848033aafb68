"""Slots from the host against vLLM's real kernel in Triton's interpreter, and the gate's truth table."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import host_runner
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from vllm_ascend.strata import exact_host_counts, host_slot_mapping
from vllm_ascend.worker.block_table import BlockTable, MultiGroupBlockTable

UNTOUCHED = 7
BATCHED = 128
REQS = 20


@pytest.fixture(autouse=True)
def switch_on(enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    enable(host_slot_mapping)
    host_runner.interpreted_kernel(monkeypatch)
    host_runner.make_tables(monkeypatch)


def tables_of(
    block_sizes: list[int], kernel_sizes: list[list[int]], groups: Any = None
) -> MultiGroupBlockTable:
    return MultiGroupBlockTable(
        max_num_reqs=REQS,
        max_model_len=512,
        max_num_batched_tokens=BATCHED,
        pin_memory=False,
        device=host_runner.CPU,
        block_sizes=block_sizes,
        num_speculative_tokens=3,
        kernel_sizes=kernel_sizes,
        kv_cache_groups=groups,
    )


def runner_of(tables: Any, **changed: Any) -> Any:
    attributes = {
        "use_async_spec_decode": False,
        "use_cp": False,
        "input_batch": SimpleNamespace(block_table=tables),
    }
    return SimpleNamespace(**(attributes | changed))


class Batch:
    """computed: tokens of each request before the step; scheduled: tokens of each in the step."""

    def __init__(self, computed: list[int], scheduled: list[int]) -> None:
        self.requests = len(computed)
        self.req_indices = np.repeat(np.arange(self.requests), scheduled)
        starts = np.concatenate([[0], np.cumsum(scheduled)])
        offsets = np.arange(starts[-1]) - starts[:-1][self.req_indices]
        self.positions = np.asarray(computed, dtype=np.int64)[self.req_indices] + offsets
        self.starts = torch.from_numpy(starts.astype(np.int32))

    def fill(self, tables: MultiGroupBlockTable, seed: int) -> None:
        """Random blocks enough for every position, on host and device; known content in the slots."""
        random = np.random.default_rng(seed)
        ends = [
            int(self.positions[self.req_indices == row].max(initial=0)) + 1 for row in range(self.requests)
        ]
        for row, end in enumerate(ends):
            tables.add_row(
                tuple(
                    random.integers(1, 10_000, -(-end // table.physical_block_size)).tolist()
                    for table in tables.block_tables
                ),
                row,
            )
        tables.commit_block_table(self.requests)
        for table in tables.block_tables:
            table.slot_mapping.gpu.fill_(UNTOUCHED)

    def by_kernel(self, tables: MultiGroupBlockTable) -> list[torch.Tensor]:
        tables.compute_slot_mapping(self.requests, self.starts, torch.from_numpy(self.positions))
        return self.taken(tables)

    def by_host(self, tables: MultiGroupBlockTable) -> list[torch.Tensor] | None:
        done = host_slot_mapping.compute(runner_of(tables), self.req_indices, self.positions)
        return self.taken(tables) if done else None

    @staticmethod
    def taken(tables: MultiGroupBlockTable) -> list[torch.Tensor]:
        taken = [table.slot_mapping.gpu.clone() for table in tables.block_tables]
        for table in tables.block_tables:
            table.slot_mapping.gpu.fill_(UNTOUCHED)
        return taken


SHAPES = [
    ([16], [[0]]),
    ([128], [[128]]),
    ([32, 16], [[16], [16]]),
    ([48, 128, 16], [[16], [64], [8]]),
]


@settings(max_examples=80, phases=(Phase.explicit, Phase.generate))
@given(
    shape=st.sampled_from(SHAPES),
    batch=st.lists(st.tuples(st.integers(0, 480), st.integers(0, 9)), min_size=1, max_size=REQS).filter(
        lambda requests: 0 < sum(count for _, count in requests) <= host_slot_mapping.MAX_TOKENS
    ),
    seed=st.integers(0, 2**16),
)
def test_equal_to_the_kernel(shape: Any, batch: list[tuple[int, int]], seed: int) -> None:
    """Bit equality over the whole buffer: slots, padding up to the last batched token, and what lies
    behind.
    """
    tables = tables_of(*shape)
    step = Batch([computed for computed, _ in batch], [count for _, count in batch])
    step.fill(tables, seed)
    theirs, ours = step.by_kernel(tables), step.by_host(tables)
    assert ours is not None
    for expected, found in zip(theirs, ours, strict=True):
        assert torch.equal(expected, found)
        assert (expected[BATCHED:] == UNTOUCHED).all() and expected.shape[0] > BATCHED


@pytest.mark.parametrize("scheduled", [[1], [5] * 16, [80], [79], [1] * 20, [0, 3, 0, 2]])
def test_sizes_up_to_the_limit(scheduled: list[int]) -> None:
    tables = tables_of([32, 16], [[16], [16]])
    step = Batch([17 * row for row in range(len(scheduled))], scheduled)
    step.fill(tables, 1)
    theirs, ours = step.by_kernel(tables), step.by_host(tables)
    assert ours is not None and all(map(torch.equal, theirs, ours))


@pytest.mark.parametrize("scheduled", [[81], [5] * 16 + [1], [100]])
def test_larger_batches_are_the_kernels(scheduled: list[int]) -> None:
    tables = tables_of([32], [[16]])
    step = Batch([0] * len(scheduled), scheduled)
    step.fill(tables, 1)
    assert step.by_host(tables) is None
    assert (tables[0].slot_mapping.gpu == UNTOUCHED).all()


def test_every_token_at_a_block_boundary() -> None:
    tables = tables_of([16, 32], [[16], [16]])
    step = Batch([0, 14, 15, 16, 31, 32], [17, 3, 2, 1, 2, 16])
    step.fill(tables, 3)
    theirs, ours = step.by_kernel(tables), step.by_host(tables)
    assert ours is not None and all(map(torch.equal, theirs, ours))


def test_mamba_groups_have_no_slots() -> None:
    tables = tables_of(
        list(host_runner.PHYSICAL_BLOCK_SIZES), host_runner.KERNEL_BLOCK_SIZES, host_runner.kv_cache_groups()
    )
    step = Batch([3, 40], [4, 4])
    step.fill(tables, 5)
    theirs, ours = step.by_kernel(tables), step.by_host(tables)
    assert ours is not None and all(map(torch.equal, theirs, ours))
    assert (ours[2] == UNTOUCHED).all() and tables[2].is_mamba_group


def test_a_large_block_number_overflows_as_in_the_kernel() -> None:
    tables = tables_of([128], [[128]])
    step = Batch([200], [3])
    step.fill(tables, 0)
    tables[0].block_table.np[0, 1] = 2**31 // 128 + 5
    tables.commit_block_table(1)
    theirs, ours = step.by_kernel(tables), step.by_host(tables)
    assert ours is not None and torch.equal(theirs[0], ours[0]) and (theirs[0][:3] < 0).all()


def test_the_host_may_change_the_table_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from host_device import Device

    device = Device().install(monkeypatch)
    tables = tables_of([16], [[16]])
    step = Batch([3], [4])
    step.fill(tables, 5)
    expected = step.by_kernel(tables)[0]
    late = device.tensor(tables[0].slot_mapping.gpu)
    tables[0].slot_mapping.gpu = late  # type: ignore[assignment]
    assert host_slot_mapping.compute(runner_of(tables), step.req_indices, step.positions)
    tables[0].block_table.np.fill(0)
    tables[0].slot_mapping.np.fill(0)
    step.positions.fill(0)
    device.run()
    assert torch.equal(late.value, expected)


class TestGate:
    """Each condition alone hands the batch to the kernel, with nothing written."""

    def computed(self, tables: Any = None, **changed: Any) -> bool:
        tables = tables_of([32, 16], [[16], [16]]) if tables is None else tables
        step = Batch([3, 7], [2, 2])
        if type(tables) is MultiGroupBlockTable:
            step.fill(tables, 2)
        done = host_slot_mapping.compute(runner_of(tables, **changed), step.req_indices, step.positions)
        if not done and type(tables) is MultiGroupBlockTable:
            assert all((table.slot_mapping.gpu == UNTOUCHED).all() for table in tables.block_tables)
        return done

    def test_not_without_reason(self) -> None:
        assert self.computed()

    def test_switch_off(self, enable: Callable[..., None]) -> None:
        enable(host_slot_mapping, False)
        assert not self.computed()

    def test_asynchronous_speculation(self) -> None:
        assert not self.computed(use_async_spec_decode=True)

    def test_context_parallelism_of_the_runner(self) -> None:
        assert not self.computed(use_cp=True)

    def test_context_parallelism_of_the_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host_runner.make_tables(monkeypatch, world=2)
        assert not self.computed(tables_of([16], [[16]]))

    def test_mocks(self) -> None:
        assert not self.computed(use_async_spec_decode=MagicMock())
        assert not self.computed(use_cp=MagicMock())
        assert not self.computed(MagicMock())

    def test_another_class_of_tables(self) -> None:
        """As on 310P, whose tables have their own computation."""

        class Own(MultiGroupBlockTable):
            pass

        class OwnTable(BlockTable):
            pass

        tables = tables_of([16], [[16]])
        tables.__class__ = Own
        assert not self.computed(tables)
        tables = tables_of([32, 16], [[16], [16]])
        tables.block_tables[1].__class__ = OwnTable
        assert not self.computed(tables)

    def test_during_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
        assert not self.computed()

    @pytest.mark.parametrize("position", [32 * 16, 10_000, -1])
    def test_a_position_outside_of_the_table(self, position: int) -> None:
        tables = tables_of([16, 32], [[16], [16]])
        rows, positions = np.array([0, 0]), np.array([3, position])
        for table in tables.block_tables:
            table.slot_mapping.gpu.fill_(UNTOUCHED)
        assert not host_slot_mapping.compute(runner_of(tables), rows, positions)
        assert (tables[0].slot_mapping.gpu == UNTOUCHED).all()

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("parallel", [False, True])
    def test_truth_table_of_the_counts(self, asynchronous: bool, parallel: bool) -> None:
        runner = runner_of(None, use_async_spec_decode=asynchronous, use_cp=parallel)
        assert exact_host_counts.hold(runner) is (not asynchronous and not parallel)

    def test_switch_constant_is_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("host_slot_mapping", host_slot_mapping.__name__, "ENABLED") in switches._constants


def test_host_time_of_a_batch_of_80() -> None:
    """At most 60 microseconds a group were asked for; the bound here leaves room for a loaded machine."""
    import time

    tables = tables_of([128], [[128]])
    step = Batch([17 * row for row in range(16)], [5] * 16)
    step.fill(tables, 1)
    best = min(_seconds(time.perf_counter, tables[0], step) for _ in range(200))
    assert best < 200e-6, f"{best * 1e6:.0f} us"


def _seconds(clock: Callable[[], float], table: BlockTable, step: Batch) -> float:
    start = clock()
    host_slot_mapping.slots_of(table, step.req_indices, step.positions)
    return clock() - start
