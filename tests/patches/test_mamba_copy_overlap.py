"""The early state copy against upstream's place for it, on streams that run in any order they may.

Real code: ``preprocess_mamba``, the collection and ``do_mamba_copy_block``, on real state tensors; the
batched copy kernel is a memmove on the simulated stream.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import random
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from vllm_ascend.strata import mamba_copy_overlap

BLOCK = 4
BLOCKS = 24
LAYERS = 2


class Streams:
    """Queues of work that a seeded device serves in any order that waits and events allow."""

    class Stream:
        def __init__(self, device: Streams) -> None:
            self.device = device
            self.queue: deque[tuple[str, Any]] = deque()
            self.issued = self.finished = 0
            device.streams.append(self)

        def put(self, kind: str, what: Any) -> None:
            self.queue.append((kind, what))
            self.issued += 1

        def wait_event(self, event: Any) -> None:
            self.put("wait", (event.stream, event.position))

        def wait_stream(self, other: Any) -> None:
            self.put("wait", (other, other.issued))

        def step(self) -> bool:
            """Do the next piece of work if it may be done."""
            if not self.queue:
                return False
            kind, what = self.queue[0]
            if kind == "wait":
                stream, position = what
                if stream is not None and stream.finished < position:
                    return False
            else:
                what()
            self.queue.popleft()
            self.finished += 1
            return True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Any] = []
        self.current = Streams.Stream(self)
        self.side_runs_first = False
        device = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.stream: Any = None
                self.position = 0

            def record(self, stream: Any = None) -> None:
                self.stream = stream or device.current
                self.position = self.stream.issued

            def synchronize(self) -> None:
                while self.stream is not None and self.stream.finished < self.position:
                    assert device.any_step(), "the host waits for what never comes"

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            before, device.current = device.current, chosen
            yield
            device.current = before

        monkeypatch.setattr(torch.npu, "Event", Event)
        monkeypatch.setattr(torch.npu, "Stream", lambda: Streams.Stream(device))
        monkeypatch.setattr(torch.npu, "stream", stream)
        monkeypatch.setattr(torch.npu, "current_stream", lambda: device.current)

    def any_step(self) -> bool:
        return any(stream.step() for stream in self.random.sample(self.streams, len(self.streams)))

    def some(self) -> None:
        """The device gets on by a random amount."""
        for _ in range(self.random.randint(0, 6)):
            self.random.choice(self.streams).step()

    def drain(self) -> None:
        while self.any_step():
            pass
        assert not any(stream.queue for stream in self.streams), "work that waits for ever"


class LateBuffer:
    """A pointer list: its copy to the device reads the host when the stream gets to it."""

    def __init__(self, device: Streams, size: int, dtype: torch.dtype) -> None:
        self.device, self.cpu = device, torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()
        self.gpu = torch.zeros(size, dtype=dtype)

    def copy_to_gpu(self, n: int) -> torch.Tensor:
        self.device.current.put("work", lambda: self.gpu[:n].copy_(self.cpu[:n]))
        return self.gpu[:n]


class Model:
    """States of a few mamba layers, requests that advance over block boundaries, and a forward pass."""

    def __init__(self, device: Streams, early: bool, connector: bool) -> None:
        from vllm.v1.worker.mamba_utils import MambaCopyBuffers

        self.device, self.early, self.connector = device, early, connector
        states = torch.zeros((LAYERS, BLOCKS, 6), dtype=torch.float32)
        self.states = [states[layer] for layer in range(LAYERS)]
        spec = SimpleNamespace(block_size=BLOCK, num_speculative_blocks=0)
        self.config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=[f"layer{n}" for n in range(LAYERS)])]
        )
        self.context = {f"layer{n}": SimpleNamespace(kv_cache=[self.states[n]]) for n in range(LAYERS)}
        self.buffers = MambaCopyBuffers(
            LateBuffer(device, 64, torch.int64),  # type: ignore[arg-type]
            LateBuffer(device, 64, torch.int64),  # type: ignore[arg-type]
            LateBuffer(device, 64, torch.int32),  # type: ignore[arg-type]
            [0],
            spec,  # type: ignore[arg-type]
        )
        self.index: dict[str, int] = {}
        self.requests = {
            f"r{n}": SimpleNamespace(num_computed_tokens=0, block_ids=([*range(n * 6, n * 6 + 6)],))
            for n in range(4)
        }
        self.steps = 0

    def step(self, scheduled: dict[str, int], fails: bool = False) -> None:
        from vllm.v1.worker import mamba_utils

        self.steps += 1
        names = [name for name in self.requests if scheduled.get(name)]
        batch = SimpleNamespace(req_ids=names, num_accepted_tokens_cpu=[1] * len(names))
        output = SimpleNamespace(
            finished_req_ids=set(),
            preempted_req_ids=set(),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_scheduled_tokens=scheduled,
        )
        if not self.early or self.connector:
            # upstream's copy in its best case: its pointer lists are never rewritten too early
            self.device.drain()
        if self.early:
            mamba_copy_overlap.settle(self.buffers)
        mamba_utils.preprocess_mamba(
            output, self.config, None, self.index, batch, self.requests, self.context, (copy_spec,),
            self.buffers
        )  # fmt: skip
        if self.early:
            mamba_copy_overlap.start(self.buffers)
        self.device.some()
        if fails:
            return
        if self.connector:  # loads a state that the copy has to see
            loaded, number = self.states[0][: BLOCKS // 2], self.steps
            self.device.current.put("work", lambda: loaded.add_(number))
        if not self.early or not mamba_copy_overlap.finish(self.buffers):
            mamba_utils.do_mamba_copy_block(self.buffers)
        for name in names:
            request = self.requests[name]
            block = request.block_ids[0][self.index[name]]
            self.device.current.put("work", self.forward(block, self.steps))
            request.num_computed_tokens += scheduled[name]
        self.device.some()

    def forward(self, block: int, number: int) -> Callable[[], None]:
        def run() -> None:
            for layer, state in enumerate(self.states):
                state[block] = state[block] * 0.5 + number + layer

        return run


def copy_spec(state: torch.Tensor, blocks: list[int], source: int, _: int) -> Any:
    return SimpleNamespace(start_addr=state[blocks[source]].data_ptr(), num_elements=state[0].numel())


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, enable: Callable[..., None]) -> Callable[[int], Streams]:
    enable(mamba_copy_overlap)
    return lambda seed: simulate(monkeypatch, seed)


def simulate(monkeypatch: pytest.MonkeyPatch, seed: int) -> Streams:
    from vllm.v1.worker import mamba_utils

    device = Streams(monkeypatch, seed)

    def memcpy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        def run() -> None:
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(target, source, size)

        device.current.put("work", run)

    monkeypatch.setattr(mamba_utils, "batch_memcpy", memcpy)
    return device


STEPS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(["r0", "r1", "r2", "r3"]), st.integers(1, 3)), st.booleans()),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize("connector", [False, True])
def test_states_as_in_upstreams_order(connector: bool) -> None:
    """Whatever the order in which the streams get on, and also with a connector that loads before the
    copy.
    """
    early_copies = 0

    @settings(max_examples=150, phases=(Phase.explicit, Phase.generate))
    @given(steps=STEPS, seed=st.integers(0, 2**32))
    def check(steps: list[tuple[dict[str, int], bool]], seed: int) -> None:
        nonlocal early_copies
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(mamba_copy_overlap, "ENABLED", True)
            monkeypatch.setattr(mamba_copy_overlap, "has_kv_transfer_group", lambda: connector)
            results = []
            for early in (True, False):
                device = simulate(monkeypatch, seed)
                model = Model(device, early, connector)
                for scheduled, _ in steps:
                    model.step(scheduled)
                    early_copies += early and len(device.streams) > 1
                device.drain()
                results.append(torch.stack(model.states))
            assert torch.equal(*results)

    check()
    assert (early_copies > 0) is not connector


def test_a_step_that_fails_before_its_forward_pass(simulated: Callable[[int], Streams]) -> None:
    """The next step makes its own copies and waits for them only."""
    device = simulated(1)
    model = Model(device, True, False)
    model.step({"r0": 3})
    model.step({"r0": 2}, fails=True)
    assert model.buffers.offset == LAYERS
    model.step({"r1": 1})
    assert model.buffers.offset == 0
    assert not mamba_copy_overlap.finish(model.buffers)
    device.drain()


class TestGate:
    @pytest.fixture
    def buffers(self, simulated: Callable[[int], Streams], monkeypatch: pytest.MonkeyPatch) -> Any:
        device = simulated(0)
        model = Model(device, True, False)
        model.buffers.offset = 1
        monkeypatch.setattr(mamba_copy_overlap, "has_kv_transfer_group", lambda: False)
        return model.buffers

    def started(self, buffers: Any) -> bool:
        mamba_copy_overlap.settle(buffers)
        mamba_copy_overlap.start(buffers)
        return mamba_copy_overlap.finish(buffers)

    def test_not_without_reason(self, buffers: Any) -> None:
        assert self.started(buffers)
        assert not mamba_copy_overlap.finish(buffers), "waited for twice"

    def test_switch_off(self, buffers: Any, enable: Callable[..., None]) -> None:
        enable(mamba_copy_overlap, False)
        assert not self.started(buffers)

    def test_nothing_to_copy(self, buffers: Any) -> None:
        buffers.offset = 0
        assert not self.started(buffers)

    def test_kv_connector(self, buffers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mamba_copy_overlap, "has_kv_transfer_group", lambda: True)
        assert not self.started(buffers)

    def test_310p(self, buffers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mamba_copy_overlap, "is_310p", lambda: True)
        assert not self.started(buffers)

    def test_switch_constant_is_bound(self) -> None:
        from vllm_ascend.strata import switches

        assert ("mamba_copy_overlap", mamba_copy_overlap.__name__, "ENABLED") in switches._constants


def test_place_of_the_hooks_in_the_step() -> None:
    """``execute_model`` needs an NPU; the order of the calls in its source is what the tests above replay."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    source = textwrap.dedent(inspect.getsource(inspect.unwrap(NPUModelRunner.execute_model)))
    calls = [
        (node.lineno, ast.unparse(node.func))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
    ]
    order = [name for _, name in sorted(calls)]
    wanted = [
        "mamba_copy_overlap.settle",
        "mamba_utils.preprocess_mamba",
        "mamba_copy_overlap.start",
        "self._build_attention_metadata",
        "update_cos_sin",
        "self.maybe_get_kv_connector_output",
        "mamba_copy_overlap.finish",
        "mamba_utils.do_mamba_copy_block",
        "self._model_forward",
    ]
    assert [name for name in order if name in wanted] == [
        *wanted[:5],
        # the encoder's early return and the step's own
        *[name for name in order if name == wanted[5]],
        *wanted[6:],
    ]
