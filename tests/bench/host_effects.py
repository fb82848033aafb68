"""Host-side effect of the perf patches on this CPU: upstream's path (switch off) against the patched one (switch on).

`make bench` runs it in the tuned image. Both paths are the same real function of vllm-ascend or vLLM in one process,
with the test doubles of tests/patches where it calls an NPU operator. A round times both, one directly after the other,
in turns first. Patches whose effect a CPU cannot show are listed with the reason.

What is timed is Python and PyTorch on this CPU. It says nothing of an NPU: no copy to a device, no pinned memory, no
kernel and no launch is in it. No test depends on it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "patches"))

import conftest  # first: the environment that vLLM is imported in
import pytest

SAMPLE_NS = 1_500_000
"""How long one timing lasts at least where the call can be repeated."""
MOST_CALLS = 2000
RESAMPLES = 1000


class BenchError(RuntimeError):
    """A measurement that would not be what it says."""


@dataclass(frozen=True)
class Case:
    """A function of upstream's that a patch changed.

    module: the patch's, with its ENABLED; what: size of the call; note: how to read the figure; taken: name of a
    function of ``module`` and the test of its result that tells that the patched path ran; round: a context in which
    the switch stands at the given value and the call may be timed; repeatable: whether it may be called more than
    once in it.
    """

    module: ModuleType
    what: str
    note: str
    taken: tuple[str, Callable[[Any], bool]]
    round: Callable[[bool], AbstractContextManager[Callable[[], Any]]]
    repeatable: bool = True


def always(module: ModuleType, call: Callable[[], Any]) -> Callable[[bool], Any]:
    """Rounds of a call that leaves everything as it found it."""
    from host_runner import switched

    @contextmanager
    def round_of(on: bool) -> Iterator[Callable[[], Any]]:
        with switched([module], on):
            yield call

    return round_of


# --- what is timed -----------------------------------------------------------------------------------------------


def min_tokens_mask_cache(patch: pytest.MonkeyPatch) -> Case:
    import torch
    from test_min_tokens_mask_cache import with_state
    from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
    from vllm_ascend.strata import min_tokens_mask_cache as module

    drafts, vocabulary = [4] * 8, 248_320
    processor = with_state({index: (300, [1] * 20, {7, 11}) for index in range(len(drafts))})
    metadata = SimpleNamespace(
        no_penalties=True,
        bad_words_token_ids={},
        output_token_ids=[],
        allowed_token_ids_mask=None,
        logitsprocs=SimpleNamespace(non_argmax_invariant=[processor]),
    )
    sampler, spec = object.__new__(AscendRejectionSampler), SimpleNamespace(num_draft_tokens=drafts)
    logits = torch.randn((sum(drafts), vocabulary))

    def call() -> Any:
        return AscendRejectionSampler.apply_logits_processors(sampler, logits, metadata, spec)

    return Case(
        module,
        "8 requests, 4 drafts, 2 stop tokens each, steady state",
        "upstream builds the mask in every step and copies it to the device; that copy costs nothing here",
        ("masked_entries", lambda result: result is not None),
        always(module, call),
    )


def greedy_fast_path(patch: pytest.MonkeyPatch) -> Case:
    import torch
    from test_greedy_fast_path import metadata
    from vllm_ascend.sample.sampler import AscendSampler
    from vllm_ascend.strata import greedy_fast_path as module

    rows, vocabulary = 8, 248_320
    sampler, plain = AscendSampler(), metadata(rows)
    logits = torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return Case(
        module,
        f"{rows} rows of {vocabulary} bfloat16 logits",
        "nearly all of it is the CPU's argmax of bfloat16 (on), conversion and argmax of float32 (off), which are not "
        "the NPU's",
        ("sample", lambda result: result is not None),
        always(module, lambda: sampler(logits=logits, sampling_metadata=plain)),
    )


def snapshot_staging_ring(patch: pytest.MonkeyPatch) -> Case:
    import torch
    from vllm.v1.utils import CpuGpuBuffer
    from vllm_ascend.strata import snapshot_staging_ring as module
    from vllm_ascend.worker.utils import copy_snapshot_to_gpu

    buffer = CpuGpuBuffer(257, dtype=torch.int32, device=torch.device("cpu"), pin_memory=False)
    return Case(
        module,
        "257 int32 (query_start_loc of 256 requests)",
        "upstream pins a fresh clone, the patch does not; pinning costs nothing here, the ring's bookkeeping does",
        ("handles", bool),
        always(module, lambda: copy_snapshot_to_gpu(buffer)),
    )


def block_table_commit_ring(patch: pytest.MonkeyPatch) -> Case:
    import host_runner
    from vllm_ascend.strata import block_table_commit_ring as module
    from vllm_ascend.worker.block_table import BlockTable

    host_runner.make_tables(patch)
    table = BlockTable(128, 32, 1024, 8192, False, host_runner.CPU, [128])
    for row in range(8):
        table.add_row(list(range(1, 1 + 64)), row)
    return Case(
        module,
        "8 rows of 1024 blocks",
        "as for snapshot-staging-ring",
        ("commit", bool),
        always(module, lambda: table.commit_block_table(8)),
    )


class NoKernel:
    """In place of the slot mapping's Triton kernel, on both sides: a launch that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


class Decode:
    """Four requests decoding on the real runner, one for each side of the switch; a step is timed once."""

    REQUESTS = 4

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType, timed: Callable[[Any, Any], Any]) -> None:
        import host_runner
        from vllm_ascend.worker import block_table

        self.host_runner, self.module, self.timed = host_runner, module, timed
        patch.setattr(block_table, "_compute_slot_mapping_kernel", NoKernel())
        self.sides = {on: host_runner.RunnerUnderTest(patch) for on in (False, True)}
        self.schedulers = {on: host_runner.Scheduler() for on in (False, True)}

    @staticmethod
    def whole(side: Any, output: Any) -> None:
        side.metadata(output, side.inputs(output), False)

    @contextmanager
    def step(self, on: bool, work: Callable[[Any, Any], Any]) -> Iterator[Callable[[], Any]]:
        side, scheduler = self.sides[on], self.schedulers[on]
        output = scheduler.step(40, 0)
        side.update(output)
        side.seen.clear()
        yield lambda: work(side, output)
        side.sampled(scheduler.done(output, lambda name: 0))

    def restart_if_due(self, on: bool) -> None:
        """A new batch where requests near their longest, and the two steps that bring it to steady decoding."""
        scheduler = self.schedulers[on]
        longest = max((request.tokens for request in scheduler.requests.values()), default=0)
        if 0 < longest < self.host_runner.MAX_MODEL_LEN - 3:
            return
        for _ in range(len(scheduler.requests)):
            scheduler.leave(0)
        for _ in range(self.REQUESTS):
            scheduler.arrive(4)
        for _ in range(2):
            with self.step(on, self.whole) as work:
                work()

    @contextmanager
    def round(self, on: bool) -> Iterator[Callable[[], Any]]:
        memory: AbstractContextManager[None] = nullcontext()
        if "_trusted" in vars(self.module):  # one tracker for a process that has two runners here
            from test_decode_state_tracking import memory_kept

            memory = memory_kept(not on)
        with self.host_runner.switched([self.module], on), memory:
            self.restart_if_due(on)
            with self.step(on, self.timed) as work:
                yield work


def decode_state_tracking(patch: pytest.MonkeyPatch) -> Case:
    from vllm_ascend.strata import decode_state_tracking as module

    decode = Decode(patch, module, Decode.whole)
    return Case(
        module,
        "inputs and attention metadata of a decode step, 4 requests",
        "what the patch avoids, copies to the device, are copies of a few hundred bytes here, and what it adds, "
        "comparing, is all there; the slot mapping's kernel does nothing and the attention backends are stand-ins, "
        "both on either side",
        ("copy", bool),
        decode.round,
        repeatable=False,
    )


def cpu_positions(patch: pytest.MonkeyPatch) -> Case:
    from vllm_ascend.strata import cpu_positions as module

    decode = Decode(patch, module, lambda side, output: side.inputs(output))
    return Case(
        module,
        "_prepare_inputs of a decode step, 4 requests",
        "four operators on the device become one copy; here they are CPU operators on 4 elements. The slot mapping's "
        "kernel does nothing on either side",
        ("fill", bool),
        decode.round,
        repeatable=False,
    )


def mixed_qkv_views(patch: pytest.MonkeyPatch) -> Case:
    import torch
    from test_mixed_qkv_views import grafted, layer_of
    from vllm_ascend.strata import mixed_qkv_views as module

    layer, row = layer_of(16, 32, 128, 128), torch.randn((1, 8192)).to(torch.bfloat16)
    return Case(
        module,
        "one row of 8192 bfloat16 (16 key heads, 32 value heads of 128)",
        "once per layer of gated delta nets and step; the copies are the CPU's",
        ("split", lambda result: True),
        always(module, lambda: grafted(layer, row)),
    )


def gemma_weight_plus_one(patch: pytest.MonkeyPatch) -> Case:
    import torch
    from test_gemma_weight_plus_one import build, norm_of
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_ascend.ops import layernorm
    from vllm_ascend.strata import gemma_weight_plus_one as module
    from vllm_ascend.strata import weight_caches

    patch.setattr(weight_caches, "_arenas", [])
    patch.setattr(module, "ENABLED", True)
    patch.setattr(torch.ops.vllm, "maybe_chunk_residual", lambda x, residual: residual, raising=False)
    patch.setattr(layernorm, "enable_custom_op", lambda: True)
    patch.setattr(
        torch.ops._C_ascend,
        "npu_add_rms_norm_bias",
        lambda x, residual, weight, bias, eps: (x, None, residual),
        raising=False,
    )
    with set_current_vllm_config(VllmConfig()):
        norm = norm_of(torch.randn(4096).to(torch.bfloat16))
    build(norm)
    x, residual = (torch.randn((1, 4096)).to(torch.bfloat16) for _ in range(2))
    return Case(
        module,
        "one call, hidden size 4096, bfloat16",
        "the norm's operator returns at once on both sides, so a real call's ratio is nearer to 1",
        ("of", lambda result: result is getattr(norm, module.ATTRIBUTE)),
        always(module, lambda: norm.forward_oot(x, residual)),
    )


def merged_cos_sin(patch: pytest.MonkeyPatch) -> Case:
    import torch
    from test_merged_cos_sin import STATE, prepare
    from vllm_ascend.ops import rotary_embedding
    from vllm_ascend.strata import merged_cos_sin as module

    for name in STATE:
        patch.setattr(rotary_embedding, name, None)
    prepare(64, torch.randn((32_768, 128)).to(torch.bfloat16), torch.bfloat16)
    positions = torch.arange(8) * 1000
    return Case(
        module,
        "8 positions of a [32768, 128] bfloat16 table",
        "once per step; gathers and copies are the CPU's",
        ("update", bool),
        always(module, lambda: rotary_embedding.update_cos_sin(positions)),
    )


TIMED: dict[str, Callable[[pytest.MonkeyPatch], Case]] = {
    "snapshot-staging-ring": snapshot_staging_ring,
    "decode-state-tracking": decode_state_tracking,
    "block-table-commit-ring": block_table_commit_ring,
    "cpu-positions": cpu_positions,
    "mixed-qkv-views": mixed_qkv_views,
    "min-tokens-mask-cache": min_tokens_mask_cache,
    "greedy-fast-path": greedy_fast_path,
    "gemma-weight-plus-one": gemma_weight_plus_one,
    "merged-cos-sin": merged_cos_sin,
}

# --- what is counted ---------------------------------------------------------------------------------------------

Counts = dict[str, tuple[int, int]]
"""What is counted -> (off, on)."""


def skip_dispatch_combine_events() -> Counts:
    from moe_layer import Case as Layer
    from test_skip_events import shared_forward, step

    counts = {}
    for name, quantised in (("bfloat16", False), ("W8A8", True)):
        case = Layer(quantised=quantised, quantised_shared=quantised)
        off, on = (len(step(case, value, shared_forward).trace.of("record")) for value in (False, True))
        counts[f"events recorded per call of a {name} layer, shared experts without overlap"] = off, on
    return counts


def cumulative_group_list() -> Counts:
    from moe_layer import Case as Layer
    from test_cumulative_group_list import cumulative, step

    case = Layer(quantised=True, quantised_shared=True, fusion=True)
    off, on = (step(case, switched).calls["cumsum"] for switched in ((), (cumulative,)))
    return {"cumsum operators per call of a W8A8 layer, fused matmul": (off, on)}


COUNTED: dict[str, Callable[[], Counts]] = {
    "skip-dispatch-combine-events": skip_dispatch_combine_events,
    "cumulative-group-list": cumulative_group_list,
}

LEFT_OUT: dict[str, str] = {
    "host-slot-mapping": "upstream's path is a Triton kernel; without a device there is only Triton's interpreter, "
    "whose time says nothing of a launch",
    "mamba-copy-overlap": "moves a copy to another stream; the host does the same work",
    "transposed-conv-weights": "upstream copies nothing in Python; the copy is inside the operator's interface",
    "presampled-rejection": "a method beside upstream's, called by presampled-tokens only",
    "draft-shard-argmax": "saves a gather of logits over several ranks, which one CPU process does not have",
    "presampled-tokens": "saves a gather of logits over several ranks, which one CPU process does not have",
    "dsv4-rope-no-copy": "nothing in this release calls the module that it changes",
    "shared-expert-overlap": "moves a sum over ranks to another stream; the host does the same work",
    "mc2-token-limit": "a setting that chooses the communication between ranks",
    "fused-mc2-overlap": "moves the shared experts to another stream; the host does the same work",
    "shared-expert-weight-prefetch": "prefetches into the NPU's cache",
    "attention-weight-prefetch": "prefetches into the NPU's cache",
    "super-kernel-option": "compiles kernels for the NPU",
    "super-kernel-graph": "fuses kernels in captured graphs of the NPU",
    "fused-ar-norm": "needs an operator of the NPU",
}

# --- measuring ---------------------------------------------------------------------------------------------------


def prove(case: Case) -> None:
    """With the switch on a call takes the patched path, with it off it does not. BenchError otherwise."""
    name, test = case.taken
    function = getattr(case.module, name)
    for on in (False, True):
        results: list[Any] = []

        def record(*given: Any, **named: Any) -> Any:
            results.append(function(*given, **named))  # noqa: B023
            return results[-1]  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            for number in range(2):  # the second one is steady
                with case.round(on) as call:
                    if number:
                        patch.setattr(case.module, name, record)
                    call()
        if any(map(test, results)) is not on:
            raise BenchError(
                f"{case.module.__name__}.{name} with the switch {'on' if on else 'off'}: "
                f"the patched path {'did not run' if on else 'ran'}, so the times would not be what they say"
            )


def kernels_of(case: Case, on: bool) -> int:
    """PyTorch operators of one call, views not among them: what would be launches on a device, and host copies."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += not func.is_view
            return func(*args, **(kwargs or {}))

    with case.round(on) as call, Count() as count:
        call()
    return count.number


def nanoseconds(call: Callable[[], Any], calls: int) -> float:
    """CPU time of one of ``calls`` calls: of this process, so that a busy machine counts as little as it can."""
    start = time.process_time_ns()
    for _ in range(calls):
        call()
    return (time.process_time_ns() - start) / calls


def calls_per_sample(case: Case) -> int:
    if not case.repeatable:
        return 1
    with case.round(False) as call:
        once = min(nanoseconds(call, 1) for _ in range(5))
    return max(1, min(MOST_CALLS, int(SAMPLE_NS / once)))


def timings(case: Case, rounds: int) -> tuple[dict[bool, list[float]], int]:
    """Microseconds of a call in each round, off and on; and the calls that were timed together."""
    calls = calls_per_sample(case)
    taken: dict[bool, list[float]] = {False: [], True: []}
    gc.collect()
    gc.disable()
    try:
        for number in range(-5, rounds):  # the first five warm up
            for on in (False, True) if number % 2 else (True, False):
                with case.round(on) as call:
                    spent = nanoseconds(call, calls)
                if number >= 0:
                    taken[on].append(spent / 1000)
    finally:
        gc.enable()
    return taken, calls


@dataclass(frozen=True)
class Result:
    """Microseconds per call. saved: median of off - on; ratio, low, high: median of on / off over the rounds and the
    bounds of 95% of its bootstrap resamples; kernels: operators (off, on).
    """

    off: float
    on: float
    saved: float
    ratio: float
    low: float
    high: float
    rounds: int
    calls: int
    kernels: tuple[int, int]


def measure(case: Case, rounds: int) -> Result:
    """Prove and count the case, then time it in ``rounds`` rounds. BenchError if a path is not the one asked for."""
    import torch

    with torch.no_grad():  # inference mode would hide conversions from the count
        prove(case)
        kernels = kernels_of(case, False), kernels_of(case, True)
    with torch.inference_mode():
        taken, calls = timings(case, rounds)
    pairs = list(zip(taken[False], taken[True], strict=True))
    ratios = [on / off for off, on in pairs]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=rounds)) for _ in range(RESAMPLES))
    return Result(
        off=statistics.median(taken[False]),
        on=statistics.median(taken[True]),
        saved=statistics.median(off - on for off, on in pairs),
        ratio=statistics.median(ratios),
        low=medians[int(0.025 * RESAMPLES)],
        high=medians[int(0.975 * RESAMPLES) - 1],
        rounds=rounds,
        calls=calls,
        kernels=kernels,
    )


@contextmanager
def worker() -> Iterator[None]:
    """The process as vLLM's worker has it: vllm-ascend's patches of vLLM, its configuration, inference mode."""
    import torch
    import torch_npu  # noqa: F401
    import vllm_ascend.ascend_config
    from vllm.config import VllmConfig
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)
    adapt_patch()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        config = vllm_ascend.ascend_config.AscendConfig(VllmConfig())
        patch.setattr(vllm_ascend.ascend_config, "_ASCEND_CONFIG", config)
        yield


def machine() -> str:
    import torch

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} CPUs, load {load} (1, 5, 15 min); Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} torch thread(s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=101, help="timings of each side (%(default)s)")
    parser.add_argument("patches", nargs="*", help="ids of patches to time or count (all)")
    given = parser.parse_args()
    if given.rounds < 3:
        parser.error("--rounds: at least 3")
    unknown = set(given.patches) - {*TIMED, *COUNTED}
    if unknown:
        parser.error(f"neither timed nor counted: {', '.join(sorted(unknown))}")
    try:
        conftest.pytest_configure(None)  # type: ignore[arg-type]
    except pytest.UsageError as error:
        raise SystemExit(f"host_effects: {error}") from None

    from vllm_ascend.strata import series

    owners = list(series.load().owners.values())
    with worker():
        print(f"Host side of the patches, series {series.load().digest}.")
        print("Times of Python and PyTorch on this CPU; they say nothing of an NPU.")
        print(f"{machine()}\n", flush=True)
        try:
            left = timed([name for name in TIMED if name in (given.patches or owners)], given.rounds)
            left |= counted([name for name in COUNTED if name in (given.patches or owners)])
        except BenchError as error:
            raise SystemExit(f"host_effects: {error}") from None
    for name in () if given.patches else owners:
        if name not in {*TIMED, *COUNTED}:
            left[name] = LEFT_OUT.get(name, "no measurement and no reason in tests/bench/host_effects.py")
    if left:
        print("\nNot measured, and why:")
    for name, reason in left.items():
        print(f"  {name:<31}{reason}")
    print(f"\nload afterwards: {os.getloadavg()[0]:.1f}")


def timed(names: list[str], rounds: int) -> dict[str, str]:
    """Time these patches and print a line for each. Returns those that this tree cannot time, with the reason."""
    left: dict[str, str] = {}
    notes: list[str] = []
    head = f"{'patch':<26}{'off µs':>10}{'on µs':>10}{'off - on':>11}{'on / off':>10}  {'95% interval':<15}"
    print(f"{head}{'operators':>10}  rounds x calls")
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            try:
                case = TIMED[name](patch)
            except ImportError as error:
                left[name] = f"the test doubles do not fit a tree with this choice of patches: {error}"
                continue
            it = measure(case, rounds)
        print(
            f"{name:<26}{it.off:>10.1f}{it.on:>10.1f}{it.saved:>11.1f}{it.ratio:>10.3f}  "
            f"{f'{it.low:.3f} - {it.high:.3f}':<15}{f'{it.kernels[0]} > {it.kernels[1]}':>10}  "
            f"{it.rounds} x {it.calls}",
            flush=True,
        )
        notes += wrapped(f"  {name:<26}", f"{case.what}: {case.note}.")
    print("\nCPU time of one call, medians; on / off: median of the rounds' ratios, above 1 where the patch is slower")
    print("here; operators: PyTorch operators of one call, off > on, without views and tensors made from Python lists.")
    print("\n".join(notes))
    return left


def counted(names: list[str]) -> dict[str, str]:
    """Print the counts of these patches. Returns those that this tree cannot count, with the reason."""
    left: dict[str, str] = {}
    if names:
        print("\nCounted, not timed (the stand-in operators would be most of the time), off > on:")
    for name in names:
        try:
            counts = COUNTED[name]()
        except ImportError as error:
            left[name] = f"the test doubles do not fit a tree with this choice of patches: {error}"
            continue
        for what, (off, on) in counts.items():
            print(f"  {name:<31}{off} > {on}  {what}")
    return left


def wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=label, subsequent_indent=" " * len(label))


if __name__ == "__main__":
    main()
