"""Derived tensors through the real ways in which weights change, on a real Qwen3.5 model.

What the forward would read is compared with what upstream would compute from the weights as they are, after
every change, and the addresses with those at the start, which captured graphs would hold.
"""

from __future__ import annotations

import gc
import pickle
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import qwen_model
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm_ascend.strata import (
    gemma_weight_plus_one,
    transposed_conv_weights,
    weight_caches,
    weight_changes,
)

NAN = float("nan")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with qwen_model.world(tmp_path_factory.mktemp("tiny-qwen3-5")) as config:
        yield config


@pytest.fixture(autouse=True)
def fresh(enable: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    enable(gemma_weight_plus_one)
    enable(transposed_conv_weights)
    monkeypatch.setattr(weight_caches, "_arenas", [])
    monkeypatch.setattr(weight_changes, "pending", False)
    monkeypatch.setattr(weight_changes, "every_step", False)
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def kept(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    return {(module, name): tensor for module, name, tensor in weight_caches.tensors(model)}


def upstream(module: nn.Module) -> torch.Tensor:
    """What vllm-ascend 0.23.0 computes in the forward."""
    if isinstance(module, GemmaRMSNorm):
        return 1.0 + module.weight.detach()
    weight = module.conv1d.weight.detach()
    return weight.view(weight.size(0), weight.size(2)).transpose(0, 1)


def read(module: nn.Module) -> torch.Tensor:
    """What the patched forward reads."""
    if isinstance(module, GemmaRMSNorm):
        return gemma_weight_plus_one.of(module).detach()
    weight = module.conv1d.weight.detach()
    return transposed_conv_weights.of(module, weight.view(weight.size(0), weight.size(2)))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, NaN included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().view(torch.uint8).flatten(), other.contiguous().view(torch.uint8).flatten()
        )
    )


class Memory:
    """The device allocator of sleep mode, for the tensors that load_model made: keeps their contents at
    level 1, leaves NaN at level 2.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.saved: dict[torch.Tensor, torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        model = self.worker.model_runner.model
        owned = [parameter.detach() for parameter in model.parameters()]
        return owned + [arena.storage for arena in weight_caches._arenas]

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.saved = {}
        for tensor in self.tensors():
            if "weights" in offload_tags:
                self.saved[tensor] = tensor.clone()
            tensor.fill_(NAN)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            for tensor, content in (self.saved or {}).items():
                tensor.copy_(content)
            self.saved = None


class Engine:
    """A weight transfer engine that received ``weights`` in one piece."""

    def __init__(self) -> None:
        self.weights: list[tuple[str, torch.Tensor]] = []

    def parse_update_info(self, info: dict[str, Any]) -> dict[str, Any]:
        return info

    def receive_weights(self, info: dict[str, Any], load_weights: Callable[..., Any]) -> None:
        load_weights(self.weights)


class Runner:
    """What a worker needs of its model runner; ``load_model`` is a loader's: initialise, load, process."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model: Any = None
        self.drafter = None

    def get_model(self) -> nn.Module:
        return self.model

    def load_model(self) -> None:
        from vllm.model_executor.model_loader import base_loader

        self.model = qwen_model.build(self.config)
        self.model.load_weights(qwen_model.checkpoint(0))
        with qwen_model.on_cpu():
            base_loader.process_weights_after_loading(
                self.model, self.config.model_config, torch.device("cpu")
            )


@pytest.fixture
def worker(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An NPUWorker that has loaded the model; its methods are vllm-ascend's own."""
    return new_worker(config, monkeypatch)


def new_worker(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm_ascend.worker import worker as module

    worker = object.__new__(module.NPUWorker)
    worker.vllm_config = config
    worker.model_config = config.model_config
    worker.device = torch.device("cpu")
    worker.model_runner = Runner(config)
    worker.weight_transfer_engine = None
    worker._weight_update_active = False
    worker._is_checkpoint_format = True
    worker._sleep_saved_buffers = {}
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", False)
    worker.load_model()
    worker.weight_transfer_engine = Engine()
    memory = Memory(worker)
    monkeypatch.setattr(
        module, "CaMemAllocator", types.SimpleNamespace(get_instance=lambda: memory), raising=True
    )
    monkeypatch.setattr(torch.npu, "mem_get_info", lambda: (0, 1))
    monkeypatch.setattr(torch.npu, "synchronize", lambda: None)
    monkeypatch.setattr(module.get_ascend_config(), "weight_nz_mode", 0)
    return worker


def forward(config: Any) -> None:
    """The entry of every forward, vllm-ascend's own."""
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context

    with qwen_model.on_cpu(), set_ascend_forward_context(None, config, num_tokens=1):
        pass


def step(continued: list[str]) -> None:
    """A step's entry: the real execute_model of a runner that has nothing, so that it fails behind it."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    output = types.SimpleNamespace(scheduled_cached_reqs=types.SimpleNamespace(req_ids=continued))
    with pytest.raises(AttributeError, match="has no attribute"):
        NPUModelRunner.execute_model(object.__new__(NPUModelRunner), output)


class Watched:
    """A worker's kept tensors with the addresses that they had when the model was loaded."""

    def __init__(self, worker: Any, config: Any) -> None:
        self.worker, self.config = worker, config
        self.kept = kept(worker.model_runner.model)
        self.addresses = {key: tensor.data_ptr() for key, tensor in self.kept.items()}
        assert len(self.kept) == 9 + 2 + 3  # norms of the layers and the last one, q and k, convolutions

    def check(self) -> None:
        """At a forward: values of the present weights, at the old addresses, in the old attribute."""
        forward(self.config)
        assert not weight_changes.pending
        for (module, name), tensor in self.kept.items():
            assert getattr(module, name) is tensor and read(module).data_ptr() == tensor.data_ptr()
            assert tensor.data_ptr() == self.addresses[module, name]
            assert tensor.is_contiguous()
            assert same(tensor, upstream(module))


# what changes weights ------------------------------------------------------------------------------------


def direct_load(worker: Any, seed: int) -> None:
    """RL frameworks of today: the model's own load_weights, without any call of the worker."""
    worker.model_runner.model.load_weights(qwen_model.checkpoint(seed))


def partial_load(worker: Any, seed: int) -> None:
    weights = qwen_model.checkpoint(seed)
    norm = next(it for it in weights if it[0] == "model.norm.weight")
    worker.model_runner.model.load_weights([norm, *random.Random(seed).sample(weights, 7)])


def checkpoint_update(worker: Any, seed: int) -> None:
    """start, update in pieces, finish: vLLM's layerwise reload."""
    weights = qwen_model.checkpoint(seed)
    cut = random.Random(seed).randrange(1, len(weights))
    with qwen_model.on_cpu():
        worker.start_weight_update()
        for part in (weights[:cut], weights[cut:]):
            worker.weight_transfer_engine.weights = part
            worker.update_weights({})
        worker.finish_weight_update()


def kernel_update(worker: Any, seed: int) -> None:
    """The same calls with weights in kernel format, copied into the parameters."""
    generator = torch.Generator().manual_seed(seed)
    worker.start_weight_update(is_checkpoint_format=False)
    worker.weight_transfer_engine.weights = [
        (name, torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        for name, parameter in worker.model_runner.model.named_parameters()
    ]
    worker.update_weights({})
    worker.finish_weight_update()


def write_data(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def data_between_generations(worker: Any, seed: int) -> None:
    """Code of this process writes to param.data; then new requests come."""
    write_data(worker.model_runner.model, seed)
    step(continued=[])


def data_by_call(worker: Any, seed: int) -> None:
    """A function sent to the worker (collective_rpc) writes to param.data while requests run."""
    from vllm.v1.serial_utils import run_method

    run_method(worker, lambda it: write_data(it.model_runner.model, seed), (), {})
    step(continued=["a"])


def data_by_pickled_call(worker: Any, seed: int) -> None:
    from vllm.v1.serial_utils import run_method

    def change(it: Any) -> None:
        write_data(it.model_runner.model, seed)

    cloudpickle.register_pickle_by_value(__import__(__name__))
    try:
        run_method(worker, cloudpickle.dumps(change), (), {})
    finally:
        cloudpickle.unregister_pickle_by_value(__import__(__name__))
    step(continued=["a"])


def data_by_busy_loop(worker: Any, seed: int) -> None:
    """The same through the worker process's own loop, by the name of a method that an extension brought."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    class End(BaseException):
        pass

    calls = iter([("extension", (seed,), {}, 0)])

    def dequeue(indefinite: bool) -> Any:
        try:
            return next(calls)
        except StopIteration:
            raise End from None

    proc = object.__new__(WorkerProc)
    proc.worker = types.SimpleNamespace(extension=lambda seed: write_data(worker.model_runner.model, seed))
    proc.rpc_broadcast_mq = types.SimpleNamespace(dequeue=dequeue)
    proc.rank = 1
    with pytest.raises(End):
        proc.worker_busy_loop()
    step(continued=["a"])


def sleep_and_wake(worker: Any, seed: int) -> None:
    worker.sleep(level=1)
    worker.wake_up()


def deep_sleep_and_load(worker: Any, seed: int) -> None:
    """Level 2 drops the weights; they come back by load_weights, between two tagged wake-ups."""
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    direct_load(worker, seed)
    worker.wake_up(tags=["kv_cache"])


def deep_sleep_and_update(worker: Any, seed: int) -> None:
    worker.sleep(level=2)
    worker.wake_up()
    checkpoint_update(worker, seed)


def nothing(worker: Any, seed: int) -> None:
    step(continued=["a"])


CHANGES = [
    direct_load,
    partial_load,
    checkpoint_update,
    kernel_update,
    data_between_generations,
    data_by_call,
    data_by_pickled_call,
    data_by_busy_loop,
    sleep_and_wake,
    deep_sleep_and_load,
    deep_sleep_and_update,
    nothing,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_follows_each_change(change: Callable[..., None], worker: Any, config: Any) -> None:
    watched = Watched(worker, config)
    watched.check()
    before = [tensor.clone() for tensor in watched.kept.values()]
    change(worker, 7)
    watched.check()
    changed = any(not same(old, new) for old, new in zip(before, watched.kept.values(), strict=True))
    assert changed is (change not in (nothing, sleep_and_wake))


@settings(max_examples=12)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(CHANGES), st.integers(1, 1000), st.booleans()), min_size=2, max_size=6
    )
)
def test_follows_any_sequence(changes: list[Any], config: Any) -> None:
    """Random sequences; some changes are followed at once by the next, without a forward between them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(weight_caches, "_arenas", [])
        worker = new_worker(config, monkeypatch)
        watched = Watched(worker, config)
        for change, seed, look in changes:
            change(worker, seed)
            if look:
                watched.check()
        watched.check()


def test_a_steady_step_refreshes_nothing(worker: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.serial_utils import run_method

    forward(config)
    monkeypatch.setattr(weight_caches, "refresh", lambda: pytest.fail("refreshed"))
    for name in sorted(weight_changes.STEP_CALLS):
        run_method(types.SimpleNamespace(**{name: lambda: None}), name, (), {})
    step(continued=["a", "b"])
    forward(config)


def test_in_the_users_process_every_step_looks(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the same process writes to param.data while requests run, without any call."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    worker = new_worker(config, monkeypatch)
    watched = Watched(worker, config)
    for seed in range(3):
        write_data(worker.model_runner.model, seed)
        step(continued=["a"])
        watched.check()


def test_calls_mark_on_both_sides() -> None:
    """A call may run forwards itself, before it writes and after."""
    with weight_changes.call("reload_weights"):
        assert weight_changes.pending
        weight_changes.pending = False
    assert weight_changes.pending
    weight_changes.pending = False
    with pytest.raises(KeyError), weight_changes.call(b"pickled"):
        weight_changes.pending = False
        raise KeyError
    assert weight_changes.pending


def test_steps_of_serving_are_calls_of_the_worker() -> None:
    """Each name is a method that executors call, so that no other call hides behind a stale name."""
    from vllm.v1.executor.abstract import Executor
    from vllm_ascend.worker.worker import NPUWorker

    for name in weight_changes.STEP_CALLS:
        assert callable(getattr(NPUWorker, name)) and callable(getattr(Executor, name))


def test_wake_up_marks_before_graphs_are_captured_again(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With enable_sleep_mode_extra_cleanup wake_up itself runs the model."""
    from vllm_ascend.worker import worker as module

    seen: list[bool] = []
    worker.sleep_wakeup_manager = types.SimpleNamespace(
        sleep=lambda: None, wakeup=lambda tags: seen.append(weight_changes.pending)
    )
    monkeypatch.setattr(module.get_ascend_config(), "enable_sleep_mode_extra_cleanup", True, raising=False)
    worker.sleep(level=1)
    weight_changes.pending = False
    worker.wake_up()
    assert seen == [True]


def test_in_the_middle_of_a_reload_nothing_old_can_be_read(worker: Any, config: Any) -> None:
    watched = Watched(worker, config)
    with qwen_model.on_cpu():
        worker.start_weight_update()
        weight_changes.mark()
        assert weight_caches.refresh() is False
        for module, name in watched.kept:
            assert getattr(module, name) is None
            assert read(module).is_meta  # upstream's own computation
        weight_caches.settle()
        assert weight_changes.pending  # until the weights are there again
        worker.weight_transfer_engine.weights = qwen_model.checkpoint(3)
        worker.update_weights({})
        worker.finish_weight_update()
    watched.check()


@pytest.mark.parametrize("how", ["type", "shape", "host"])
def test_a_weight_of_another_kind_is_not_followed(
    how: str, worker: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(worker, config)
    norm = worker.model_runner.model.model.norm
    original = norm.weight.data
    other = {
        "type": original.float(),
        "shape": torch.ones(3, dtype=original.dtype),
        "host": original.to("meta"),  # any other device
    }[how]
    norm.weight = nn.Parameter(other)
    weight_changes.mark()
    forward(config)
    assert getattr(norm, gemma_weight_plus_one.ATTRIBUTE) is None
    assert read(norm).shape == other.shape and read(norm).dtype == other.dtype
    for module, name in watched.kept:
        assert module is norm or same(getattr(module, name), upstream(module))
    norm.weight = nn.Parameter(original.mul(2))
    watched.check()
    norm.weight.weight_loader(norm.weight, original)  # the new parameter is watched as well
    watched.check()
    assert same(read(norm), 1.0 + original)


def test_a_refresh_that_fails_is_done_again(
    worker: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(worker, config)
    direct_load(worker, 5)

    def fail() -> bool:
        raise RuntimeError("device")

    with monkeypatch.context() as broken:
        broken.setattr(weight_caches, "refresh", fail)
        with pytest.raises(RuntimeError, match="device"):
            weight_caches.settle()
    watched.check()


def test_drafter_has_its_own(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(config)
    runner.load_model()
    target, draft = runner.model, nn.ModuleList([runner.model.model.norm, new_norm()])
    runner.drafter = types.SimpleNamespace(model=draft)  # type: ignore[assignment]
    weight_caches.build(runner)
    assert len(kept(target)) == 14 and len(kept(draft)) == 2
    assert (
        kept(draft)[draft[0], gemma_weight_plus_one.ATTRIBUTE]
        is kept(target)[draft[0], gemma_weight_plus_one.ATTRIBUTE]
    )


def new_norm(size: int = 16) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_ascend.ops.layernorm import AscendGemmaRMSNorm

    with set_current_vllm_config(VllmConfig()):
        return AscendGemmaRMSNorm(size)


def runner_of(*modules: nn.Module) -> Any:
    model = nn.ModuleList(modules)
    return types.SimpleNamespace(get_model=lambda: model)


def test_building_again_keeps_what_is_there(worker: Any, config: Any) -> None:
    watched = Watched(worker, config)
    weight_caches.build(worker.model_runner)
    assert all(tensor is watched.kept[key] for key, tensor in kept(worker.model_runner.model).items())
    watched.check()


def test_slots_are_aligned_as_separate_tensors_are(worker: Any) -> None:
    """Slots share a storage only where each begins at a multiple of what the allocator gives."""
    shared = [arena for arena in weight_caches._arenas if len(arena.slots) > 1]
    assert len(shared) == 2
    for arena in shared:
        for slot in arena.slots:
            offset = slot.tensor.storage_offset() * slot.tensor.element_size()
            assert offset % weight_caches.ALIGNMENT == 0
    assert sum(len(arena.slots) for arena in weight_caches._arenas) == 14


def test_nothing_is_built_with_offloaded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.offloader import base

    class Offloader(base.NoopOffloader):
        pass

    norm = new_norm()
    monkeypatch.setattr(base, "_instance", Offloader())
    weight_caches.build(runner_of(norm))
    assert not hasattr(norm, gemma_weight_plus_one.ATTRIBUTE)
    monkeypatch.setattr(base, "_instance", base.NoopOffloader())
    weight_caches.build(runner_of(norm))
    assert getattr(norm, gemma_weight_plus_one.ATTRIBUTE) is not None


def test_nothing_is_built_for_a_switch_that_is_off(enable: Callable[..., None]) -> None:
    norm = new_norm()
    enable(gemma_weight_plus_one, False)
    weight_caches.build(runner_of(norm))
    assert not hasattr(norm, gemma_weight_plus_one.ATTRIBUTE)
    assert not hasattr(norm.weight, "weight_loader")


def test_neither_state_nor_buffers_of_the_model_change(config: Any) -> None:
    """Saving, transferring and sleep mode's saved buffers see the model as it was."""
    model = qwen_model.build(config)
    before = (list(model.state_dict()), [name for name, _ in model.named_buffers()])
    weight_caches.build(types.SimpleNamespace(get_model=lambda: model))
    assert before == (list(model.state_dict()), [name for name, _ in model.named_buffers()])
    checkpoint_update(new_update_worker(model, config), 2)
    assert before == (list(model.state_dict()), [name for name, _ in model.named_buffers()])


def new_update_worker(model: nn.Module, config: Any) -> Any:
    from vllm_ascend.worker.worker import NPUWorker

    worker = object.__new__(NPUWorker)
    worker.model_config, worker.device = config.model_config, torch.device("cpu")
    worker.model_runner = types.SimpleNamespace(model=model)
    worker.weight_transfer_engine = Engine()
    worker._weight_update_active, worker._is_checkpoint_format = False, True
    return worker


def test_models_are_not_kept_alive(config: Any) -> None:
    norms = [new_norm(256), new_norm(256)]
    runner = runner_of(*norms)
    weight_caches.build(runner)
    (arena,) = weight_caches._arenas
    first = norms[0]
    del norms[1], runner
    gc.collect()
    assert arena.slots[1].module() is None
    first.weight.data.fill_(3.0)
    assert weight_caches.refresh() is True
    assert same(getattr(first, gemma_weight_plus_one.ATTRIBUTE), upstream(first))
    del first, norms[0]
    gc.collect()
    weight_caches.build(runner_of(new_norm()))
    assert arena not in weight_caches._arenas


def test_loaders_load_as_before(worker: Any) -> None:
    """The watched loader of a parameter is the one that it had, called once, with its result."""
    gdn = next(it for it in worker.model_runner.model.modules() if isinstance(it, GatedDeltaNetAttention))
    loader = gdn.conv1d.weight.weight_loader
    assert loader.strata_marks and not hasattr(loader.__wrapped__, "strata_marks")
    weight_caches._watch(gdn.conv1d.weight)
    assert gdn.conv1d.weight.weight_loader is loader
    other = torch.randn(256, 1, 4).to(torch.bfloat16)
    weight_changes.pending = False
    loader(gdn.conv1d.weight, other)
    assert weight_changes.pending and torch.equal(gdn.conv1d.weight.data, other)
    weight_changes.pending = False
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        worker.model_runner.model.model.norm.weight.weight_loader(
            worker.model_runner.model.model.norm.weight, torch.ones(3)
        )
    assert weight_changes.pending


def test_vllm_can_import_the_marks_alone() -> None:
    """vLLM's executors import this module in processes that have no model."""
    source = Path(weight_changes.__file__).read_text()
    assert "import torch" not in source
    assert pickle.loads(pickle.dumps(weight_changes.STEP_CALLS)) == weight_changes.STEP_CALLS
