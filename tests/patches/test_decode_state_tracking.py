"""Replay of random scheduler traces on the real runner code: after every step the simulated device must
hold what it holds when everything is copied always, and every attention backend must be given the same.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import host_runner
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from vllm_ascend.strata import (
    block_table_commit_ring,
    cpu_positions,
    decode_state_tracking,
    host_slot_mapping,
    snapshot_staging_ring,
)

PHASES = (Phase.explicit, Phase.generate)  # shrinking a trace takes minutes and says little more
TRACKING = [decode_state_tracking]
ALL = [
    decode_state_tracking,
    snapshot_staging_ring,
    block_table_commit_ring,
    cpu_positions,
    host_slot_mapping,
]


@pytest.fixture(autouse=True)
def fresh_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_state_tracking, "_trusted", False)
    monkeypatch.setattr(decode_state_tracking, "_in_step", False)


@contextmanager
def memory_kept(kept: bool) -> Iterator[None]:
    """Keep the tracker's state over what the runner without tracking does in the same process."""
    names = ("_in_step", "_trusted", "_epoch")
    state = [getattr(decode_state_tracking, name) for name in names]
    yield
    for name, value in zip(names, state, strict=True):
        if kept:
            setattr(decode_state_tracking, name, value)


class Twin:
    """Two runners on the same trace: ``ours`` with the patches on, ``theirs`` with them off."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        modules: list[Any],
        *,
        drafts: int = 0,
        asynchronous: bool = False,
    ) -> None:
        host_runner.interpreted_kernel(monkeypatch)
        self.modules = modules
        made = {"drafts": drafts, "asynchronous": asynchronous}
        self.ours = host_runner.RunnerUnderTest(monkeypatch, **made)
        self.theirs = host_runner.RunnerUnderTest(monkeypatch, **made)
        self.schedulers = (host_runner.Scheduler(asynchronous), host_runner.Scheduler(asynchronous))
        self.asynchronous = asynchronous
        self.steps = 0

    def each(self) -> list[tuple[Any, Any, bool]]:
        return [(self.ours, self.schedulers[0], True), (self.theirs, self.schedulers[1], False)]

    def step(self, event: dict[str, Any]) -> bool:
        """One step on both runners and the comparison; False if nothing was scheduled."""
        ran = False
        for side, scheduler, on in self.each():
            for prompt in event["arrive"]:
                scheduler.arrive(prompt)
            for rank in event["leave"]:
                scheduler.leave(rank)
            if event["preempt"] is not None:
                scheduler.preempt(event["preempt"])
            output = scheduler.step(event["chunk"], event["drafts"], event["pause"])
            if not output.total_num_scheduled_tokens:
                continue
            ran = True
            side.seen.clear()
            with host_runner.switched(self.modules, on), memory_kept(not on):
                side.update(output, event["swap"])
                incident(side, output, event["incident"])
                side.metadata(output, side.inputs(output), event["padded"])
            names = list(side.runner.input_batch.req_ids)
            sampled = scheduler.done(output, lambda name: event["right"][names.index(name)])  # noqa: B023
            side.sampled(sampled)
            if self.asynchronous:
                side.carry_over(sampled)
        if ran:
            self.compare()
        self.steps += ran
        return ran

    def compare(self) -> None:
        ours, theirs = self.ours.device_state(), self.theirs.device_state()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), f"{name}: {ours[name].tolist()} for {value.tolist()}"
        assert len(self.ours.seen) == len(self.theirs.seen) > 0
        for given_ours, given_theirs in zip(self.ours.seen, self.theirs.seen, strict=True):
            for name, value in given_theirs.items():
                assert torch.equal(given_ours[name], value), f"metadata {name}"


def incident(side: Any, output: Any, what: str | None) -> None:
    """Something between two steps that writes to the device behind the tracker's back."""
    runner = side.runner
    if what == "failure":

        def fail(*_: Any) -> None:
            raise RuntimeError("no such device")

        vars(runner)["_prepare_input_ids"] = fail
        with pytest.raises(RuntimeError, match="no such device"):
            side.inputs(output)
        del vars(runner)["_prepare_input_ids"]
    elif what == "lost":  # prepared, and then the step went no further
        side.inputs(output)
    elif what == "dummy":
        with pytest.raises(AttributeError):  # its first statement is ours, the rest wants a model
            type(runner)._dummy_run(runner, 1)
        runner.query_start_loc.np[1:3] = (1, 2)
        from vllm_ascend.worker.utils import copy_snapshot_to_gpu

        copy_snapshot_to_gpu(runner.query_start_loc)
        runner.input_batch.block_table.commit_block_table(host_runner.MAX_REQS)
        decode_state_tracking.finish(runner)  # a dummy run builds attention metadata as well
    elif what == "wake":
        from vllm_ascend.worker.worker import NPUWorker

        with pytest.raises(Exception):  # noqa: B017 - ours comes first, the rest wants an allocator
            NPUWorker.wake_up(object.__new__(NPUWorker))
    if what:
        for table in runner.input_batch.block_table.block_tables:
            table.block_table.gpu.fill_(-77)
        for name in host_runner.BUFFERS:
            getattr(runner, name).gpu.fill_(1)


INCIDENTS = st.sampled_from([None] * 12 + ["failure", "lost", "dummy", "wake"])
RANK = st.integers(0, host_runner.MAX_REQS - 1)
EVENT = st.fixed_dictionaries(
    {
        "arrive": st.lists(st.integers(1, 40), max_size=2),
        "leave": st.lists(RANK, max_size=1),
        "preempt": st.none() | st.none() | RANK,
        "pause": st.none() | st.none() | RANK,
        "swap": st.none() | st.tuples(RANK, RANK),
        "chunk": st.integers(3, 40),
        "drafts": st.integers(0, 2),
        "right": st.lists(st.integers(0, 2), min_size=host_runner.MAX_REQS, max_size=host_runner.MAX_REQS),
        "padded": st.booleans(),
        "incident": INCIDENTS,
    }
)
QUIET = st.fixed_dictionaries(
    {
        "arrive": st.just([]),
        "leave": st.just([]),
        "preempt": st.none(),
        "pause": st.none(),
        "swap": st.none(),
        "chunk": st.just(40),
        "drafts": st.just(2),
        "right": st.just([1] * host_runner.MAX_REQS),
        "padded": st.booleans(),
        "incident": st.none(),
    }
)


def replay(events: list[dict[str, Any]], modules: list[Any], **kind: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(decode_state_tracking, "_trusted", False)
        twin = Twin(monkeypatch, modules, **kind)
        for event in events:
            if not kind.get("drafts"):
                event = event | {"drafts": 0}
            twin.step(event)


def trace(size: int) -> Any:
    return st.lists(EVENT | QUIET | QUIET, min_size=3, max_size=size)


@settings(max_examples=30, phases=PHASES)
@given(events=trace(14))
def test_device_is_as_if_always_copied(events: list[dict[str, Any]]) -> None:
    replay(events, TRACKING)


@settings(max_examples=30, phases=PHASES)
@given(events=trace(14))
def test_device_is_as_if_always_copied_with_drafts(events: list[dict[str, Any]]) -> None:
    replay(events, TRACKING, drafts=2)


@settings(max_examples=30, phases=PHASES)
@given(events=trace(14))
def test_all_host_patches_together(events: list[dict[str, Any]]) -> None:
    replay(events, ALL, drafts=2)


@settings(max_examples=30, phases=PHASES)
@given(events=trace(14))
def test_asynchronous_speculation_with_all_host_patches(events: list[dict[str, Any]]) -> None:
    """The device corrects the host's counts here; the gates of the positions and the slots must be shut."""
    replay(events, ALL, drafts=2, asynchronous=True)


STEADY: dict[str, Any] = {
    "arrive": [], "leave": [], "preempt": None, "pause": None, "swap": None, "chunk": 40, "drafts": 0,
    "right": [0] * host_runner.MAX_REQS, "padded": False, "incident": None,
}  # fmt: skip


class TestSaved:
    """What is gone in the steady state, counted on the real functions."""

    @pytest.fixture
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Every copy from a host buffer, snapshot or block table to its device side, by kind."""
        from vllm.v1.utils import CpuGpuBuffer
        from vllm_ascend.strata import pinned_ring
        from vllm_ascend.worker import model_runner_v1

        calls: list[str] = []
        self.count(monkeypatch, CpuGpuBuffer, "copy_to_gpu", calls)
        self.count(monkeypatch, model_runner_v1, "copy_snapshot_to_gpu", calls)
        self.count(monkeypatch, pinned_ring.Ring, "copy", calls)
        self.count(monkeypatch, torch.Tensor, "pin_memory", calls)
        return calls

    @staticmethod
    def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: list[str]) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    @pytest.mark.parametrize("requests", [1, 4])
    @pytest.mark.parametrize("padded", [False, True])
    def test_steady_decode_copies_only_what_changes(
        self, requests: int, padded: bool, counted: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        twin = Twin(monkeypatch, ALL)
        twin.step(STEADY | {"arrive": [4] * requests, "padded": padded})
        twin.step(STEADY | {"padded": padded})
        scheduler = twin.schedulers[0]
        output = scheduler.step(40, 0)
        assert list(output.num_scheduled_tokens.values()) == [1] * requests
        counted.clear()
        with host_runner.switched(ALL, True):
            twin.ours.update(output)
            twin.ours.metadata(output, twin.ours.inputs(output), padded)
        # input ids, and through the ring: positions, the slots of two attention groups
        assert sorted(counted) == ["copy"] * 3 + ["copy_to_gpu"]

    def test_tracking_alone_leaves_the_input_ids(
        self, counted: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        twin = Twin(monkeypatch, TRACKING)
        twin.step(STEADY | {"arrive": [4], "padded": True})
        twin.step(STEADY | {"padded": True})
        output = twin.schedulers[0].step(40, 0)
        counted.clear()
        with host_runner.switched(TRACKING, True):
            twin.ours.update(output)
            twin.ours.metadata(output, twin.ours.inputs(output), True)
        assert counted == ["copy_to_gpu"]

    def test_upstream_copies_them_all(self, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """The count of the test before, without the patches: the saving is real."""
        twin = Twin(monkeypatch, ALL)
        twin.step(STEADY | {"arrive": [4], "padded": True})
        output = twin.schedulers[1].step(40, 0)
        counted.clear()
        with host_runner.switched(ALL, False):
            twin.theirs.update(output)
            twin.theirs.metadata(output, twin.theirs.inputs(output), True)
        assert counted.count("copy_to_gpu") == 6 and counted.count("copy_snapshot_to_gpu") == 3
        assert counted.count("pin_memory") == 6  # three snapshots, three block tables

    def test_a_full_step_after_each_incident(
        self, counted: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        twin = Twin(monkeypatch, TRACKING)
        twin.step(STEADY | {"arrive": [4, 4]})
        twin.step(STEADY)
        counted.clear()
        twin.step(STEADY)
        quiet = counted.count("copy")
        for what in ("dummy", "wake"):
            counted.clear()
            twin.step(STEADY | {"incident": what})
            assert counted.count("copy") > quiet + 3


class TestHazards:
    """The published form's faults, each on the real table and buffers."""

    def table(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from vllm_ascend.worker.block_table import BlockTable

        host_runner.make_tables(monkeypatch)
        return BlockTable(16, 4, 8, 64, False, host_runner.CPU, [16])

    @pytest.fixture(autouse=True)
    def in_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decode_state_tracking, "_in_step", True)

    def test_same_sum_of_other_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = self.table(monkeypatch)
        table.add_row([5, 6], 0)
        table.commit_block_table(1)
        table.add_row([4, 7], 0)
        table.commit_block_table(1)
        assert table.block_table.gpu[0, :2].tolist() == [4, 7]

    @pytest.mark.parametrize(
        "write",
        [
            lambda table: table.append_row([9], 0),
            lambda table: table.add_row([9], 0),
            lambda table: table.clear_row(0),
            lambda table: table.move_row(1, 0),
            lambda table: table.swap_row(0, 1),
        ],
        ids=["append", "add", "clear", "move", "swap"],
    )
    def test_every_writer_is_seen(self, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        table = self.table(monkeypatch)
        table.add_row([5, 6], 0)
        table.add_row([7, 8], 1)
        table.commit_block_table(2)
        write(table)
        table.commit_block_table(2)
        assert torch.equal(table.block_table.gpu[:2], table.block_table.cpu[:2])

    def test_clear_is_seen_though_upstreams_own_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = self.table(monkeypatch)
        table.commit_block_table(2)
        assert decode_state_tracking.committed(table, 2)
        with pytest.raises(AttributeError):  # CpuGpuBuffer has no fill_
            table.clear()
        assert not decode_state_tracking.committed(table, 2)

    def test_there_is_no_other_writer_in_the_class(self) -> None:
        """A release that brings one must bring a hook: this fails first."""
        from vllm_ascend.worker.block_table import BlockTable

        writers = set()
        for name, method in inspect.getmembers(BlockTable, inspect.isfunction):
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
            for node in ast.walk(tree):
                targets = node.targets if isinstance(node, ast.Assign) else []
                if isinstance(node, ast.AugAssign):
                    targets = [node.target]
                text = " ".join(ast.unparse(target) for target in targets)
                calls = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if "self.block_table.np[" in text or calls in (
                    "self.block_table.fill_", "self.block_table.cpu.fill_"
                ):  # fmt: skip
                    writers.add(name)
        assert writers == {"append_row", "clear_row", "move_row", "swap_row", "clear"}

    def test_nothing_to_append_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hybrid models append empty lists to most of their groups."""
        table = self.table(monkeypatch)
        table.add_row([5, 6], 0)
        table.commit_block_table(1)
        table.append_row([], 0)
        assert decode_state_tracking.committed(table, 1)

    def test_rows_that_the_metadata_clears_are_copied_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = self.table(monkeypatch)
        for row in range(3):
            table.add_row([row + 1], row)
        table.commit_block_table(3)
        table.commit_block_table(2)
        table.block_table.gpu[2:].fill_(0)
        table.commit_block_table(3)
        assert table.block_table.gpu[:3, 0].tolist() == [1, 2, 3]

    def test_same_counts_of_other_vectors(self) -> None:
        buffer = host_runner.RunnerUnderTest.buffer(6, torch.int64)
        for content in ([1, 2, 1], [2, 1, 1], [1, 1, 2]):
            buffer.np[:3] = content
            assert decode_state_tracking.copy(buffer, 3)
            assert buffer.gpu[:3].tolist() == content

    def test_a_longer_copy_after_a_shorter_one(self) -> None:
        buffer = host_runner.RunnerUnderTest.buffer(6, torch.int64)
        buffer.np[:] = (1, 2, 3, 4, 5, 6)
        for count in (2, 4, 3, 6, 1):
            assert decode_state_tracking.copy(buffer, count)
            assert buffer.gpu[:count].tolist() == [1, 2, 3, 4, 5, 6][:count]
        buffer.np[4] = 0
        assert decode_state_tracking.copy(buffer, 2) and buffer.gpu[4] == 5
        assert decode_state_tracking.copy(buffer) and buffer.gpu[4] == 0

    def test_the_host_may_write_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from host_device import Device

        device = Device().install(monkeypatch)
        buffer = device.buffer(4)
        buffer.np[:] = (1, 2, 3, 4)
        assert decode_state_tracking.copy(buffer)  # type: ignore[arg-type]
        buffer.np[:] = 9
        device.run()
        assert buffer.gpu.value.tolist() == [1, 2, 3, 4]


class TestFallback:
    """Each condition alone leaves every copy to upstream."""

    def runner(self, **changed: Any) -> Any:
        from types import SimpleNamespace

        starts = host_runner.RunnerUnderTest.buffer(6, torch.int32)
        return SimpleNamespace(**({"use_cp": False, "query_start_loc": starts} | changed))

    def tracked(self, runner: Any) -> tuple[bool, bool]:
        buffer = host_runner.RunnerUnderTest.buffer(4, torch.int32)
        decode_state_tracking.begin(runner)
        result = decode_state_tracking.copy(buffer, 2), decode_state_tracking.copy_starts(runner, 2)
        decode_state_tracking.invalidate()
        return result

    @pytest.fixture(autouse=True)
    def switch_on(self, enable: Any) -> None:
        enable(decode_state_tracking)

    def test_not_without_reason(self) -> None:
        assert self.tracked(self.runner()) == (True, True)

    def test_switch_off(self, enable: Any) -> None:
        enable(decode_state_tracking, False)
        assert self.tracked(self.runner()) == (False, False)

    def test_context_parallelism(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_ascend.worker.block_table import BlockTable

        assert self.tracked(self.runner(use_cp=True)) == (False, False)
        host_runner.make_tables(monkeypatch, world=2)
        table = BlockTable(16, 4, 8, 64, False, host_runner.CPU, [16])
        monkeypatch.setattr(decode_state_tracking, "_in_step", True)
        assert not decode_state_tracking.committed(table, 1)
        assert not decode_state_tracking.committed(table, 1)

    def test_a_mock_is_not_a_runner(self) -> None:
        from unittest.mock import MagicMock

        assert self.tracked(MagicMock(query_start_loc=self.runner().query_start_loc)) == (False, False)

    def test_outside_a_step(self) -> None:
        runner = self.runner()
        assert not decode_state_tracking.copy_starts(runner, 2)
        decode_state_tracking.begin(runner)
        assert decode_state_tracking.copy_starts(runner, 2)
        decode_state_tracking.finish(runner)
        assert not decode_state_tracking.copy_starts(runner, 2)

    def test_long_vectors(self) -> None:
        size = decode_state_tracking.MAX_COMPARED
        buffer = host_runner.RunnerUnderTest.buffer(size + 1, torch.int32)
        long = self.runner(query_start_loc=buffer)
        decode_state_tracking.begin(long)
        assert decode_state_tracking.copy(buffer, size)
        assert not decode_state_tracking.copy(buffer, size + 1)
        assert not decode_state_tracking.copy_starts(long, 2)
        assert not decode_state_tracking.tail_is_due(long)

    def test_a_drafters_own_starts(self) -> None:
        """Its device side is written by the drafter, so it is never compared."""
        runner, other = self.runner(), host_runner.RunnerUnderTest.buffer(6, torch.int32)
        decode_state_tracking.begin(runner)
        assert not decode_state_tracking.copy_padded_starts(runner, other)
        assert decode_state_tracking.copy_padded_starts(runner, runner.query_start_loc)

    def test_during_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: True)
        assert self.tracked(self.runner()) == (False, False)

    def test_switch_constant_is_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("decode_state_tracking", decode_state_tracking.__name__, "ENABLED") in switches._constants


def test_entries_behind_the_requests() -> None:
    """query_start_loc without padding: -1 behind the last request, however the tail got its content
    before.
    """
    runner = TestFallback().runner()
    starts = runner.query_start_loc
    with host_runner.switched(TRACKING, True):
        for used, padded in (([0, 1, 2], None), ([0, 1, 2], [3, 9]), ([0, 1, 2], None), ([0, 4], None)):
            decode_state_tracking.begin(runner)
            starts.np[: len(used)] = used
            assert decode_state_tracking.copy_starts(runner, len(used) - 1)
            assert decode_state_tracking.tail_is_due(runner)
            assert np.array_equal(starts.gpu[: len(used)], used)
            if padded:
                starts.np[len(used) : len(used) + 2] = padded
                assert decode_state_tracking.copy_padded_starts(runner, starts)
            decode_state_tracking.finish(runner)
            expected = starts.np.tolist() if padded else used + [-1] * (6 - len(used))
            assert starts.gpu.tolist() == expected
