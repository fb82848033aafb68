"""Positions from the host against upstream's computation on the device, in the real ``_prepare_inputs``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import host_runner
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from vllm_ascend.strata import cpu_positions, exact_host_counts

MODULES = [cpu_positions]


class Side:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, on: bool, drafts: int, asynchronous: bool) -> None:
        self.on, self.asynchronous = on, asynchronous
        self.side = host_runner.RunnerUnderTest(monkeypatch, drafts=drafts, asynchronous=asynchronous)
        self.scheduler = host_runner.Scheduler(asynchronous)

    def step(self, event: dict[str, Any]) -> torch.Tensor | None:
        """The positions that the step computes, on the device; None if nothing is scheduled."""
        for prompt in event["arrive"]:
            self.scheduler.arrive(prompt)
        if event["leave"] is not None:
            self.scheduler.leave(event["leave"])
        output = self.scheduler.step(event["chunk"], event["drafts"])
        if not output.total_num_scheduled_tokens:
            return None
        self.side.runner.positions.fill_(-5)
        with host_runner.switched(MODULES, self.on):
            self.side.update(output, event["swap"])
            tokens = self.side.inputs(output)[2]
        positions = self.side.runner.positions.clone()
        assert (positions[tokens:] == -5).all()
        names = list(self.side.runner.input_batch.req_ids)
        sampled = self.scheduler.done(output, lambda name: event["right"][names.index(name)])
        self.side.sampled(sampled)
        if self.asynchronous:
            self.side.carry_over(sampled)
        return positions


RANK = st.integers(0, host_runner.MAX_REQS - 1)
EVENT = st.fixed_dictionaries(
    {
        "arrive": st.lists(st.integers(1, 40), max_size=2),
        "leave": st.none() | RANK,
        "swap": st.none() | st.tuples(RANK, RANK),
        "chunk": st.integers(3, 40),
        "drafts": st.integers(0, 2),
        "right": st.lists(st.integers(0, 2), min_size=host_runner.MAX_REQS, max_size=host_runner.MAX_REQS),
    }
)


@settings(max_examples=25, phases=(Phase.explicit, Phase.generate))
@given(events=st.lists(EVENT, min_size=3, max_size=10), speculative=st.booleans(), asynchronous=st.booleans())
def test_equal_to_the_device(events: list[dict[str, Any]], speculative: bool, asynchronous: bool) -> None:
    """Bit equality over the whole buffer, with and without speculation, scheduled either way."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        host_runner.interpreted_kernel(monkeypatch)
        drafts = 2 if speculative else 0
        ours, theirs = (Side(monkeypatch, on, drafts, asynchronous) for on in (True, False))
        for event in events:
            event = event | {"drafts": min(event["drafts"], drafts)}
            found, expected = ours.step(event), theirs.step(event)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert torch.equal(found, expected)


START = {
    "arrive": [5],
    "leave": None,
    "swap": None,
    "chunk": 40,
    "drafts": 0,
    "right": [0] * host_runner.MAX_REQS,
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    host_runner.interpreted_kernel(monkeypatch)


def test_a_rejected_draft_under_asynchronous_scheduling(
    kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the published form gets wrong: the host is ahead of the device by the rejected drafts."""
    side = Side(monkeypatch, True, drafts=2, asynchronous=True)
    steady = START | {"arrive": [], "drafts": 2}
    side.step(START)
    assert side.step(steady)[:3].tolist() == [5, 6, 7]  # type: ignore[index]
    positions = side.step(steady)
    assert positions is not None and positions[:3].tolist() == [6, 7, 8]
    assert side.side.runner._positions_cpu_buf[:3].tolist() == [8, 9, 10]


def test_the_device_computes_nothing(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators between the counts and the positions: four become one copy."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    counted = {}
    for on in (True, False):
        side = Side(monkeypatch, on, 0, False)
        side.step(START)
        with Count() as count:
            side.step(START | {"arrive": []})
        counted[on] = count.names
    for name, number in {"index": 1, "_to_copy": 1, "add": 1}.items():
        assert counted[False].count(name) - counted[True].count(name) == number
    # the slice assignment becomes the copy to the device; the other one fills the staging memory on the host
    assert counted[True].count("copy_") - counted[False].count("copy_") == 1


class TestGate:
    def filled(self, **changed: Any) -> bool:
        host = torch.arange(8)
        attributes = {
            "use_async_spec_decode": False,
            "use_cp": False,
            "_positions_cpu_buf": host,
            "positions": torch.zeros_like(host),
        }
        runner: Any = SimpleNamespace(**(attributes | changed))
        done = cpu_positions.fill(runner, 5)
        if type(runner.positions) is torch.Tensor:
            assert runner.positions.tolist() == ([0, 1, 2, 3, 4, 0, 0, 0] if done else [0] * 8)
        return done

    @pytest.fixture(autouse=True)
    def switch_on(self, enable: Callable[..., None]) -> None:
        enable(cpu_positions)

    @pytest.mark.parametrize("switch", [False, True])
    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("capturing", [False, True])
    def test_truth_table(
        self, switch: bool, asynchronous: bool, parallel: bool, capturing: bool, enable: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        enable(cpu_positions, switch)
        monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: capturing)
        expected = switch and not asynchronous and not parallel and not capturing
        assert self.filled(use_async_spec_decode=asynchronous, use_cp=parallel) is expected

    @pytest.mark.parametrize("name", ["use_async_spec_decode", "use_cp"])
    def test_a_mock_is_not_an_answer(self, name: str) -> None:
        assert not self.filled(**{name: MagicMock()})

    def test_the_real_properties_of_a_runner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for drafts, asynchronous, ranks, expected in (
            (0, False, 1, True), (0, True, 1, True), (2, False, 1, True), (2, True, 1, False),
            (0, False, 2, False),
        ):  # fmt: skip
            runner = host_runner.RunnerUnderTest(monkeypatch, drafts=drafts, asynchronous=asynchronous).runner
            runner.dcp_size = ranks
            assert exact_host_counts.hold(runner) is expected

    def test_the_host_may_write_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from host_device import Device

        device = Device().install(monkeypatch)
        host, late = torch.arange(8), device.tensor(torch.zeros(8, dtype=torch.int64))
        assert self.filled(_positions_cpu_buf=host, positions=late)
        host.fill_(99)
        device.run()
        assert late.value.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]

    def test_switch_constant_is_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("cpu_positions", cpu_positions.__name__, "ENABLED") in switches._constants
