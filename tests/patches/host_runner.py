"""The real NPUModelRunner as far as a step's inputs go, without a model: upstream's ``_update_states``,
``_prepare_inputs``, ``_pad_query_start_loc_for_fia`` and ``_build_attention_metadata`` on CPU tensors, with
the Triton kernel of the slot mapping in Triton's interpreter.

``RunnerUnderTest`` replays steps of :class:`Scheduler`, a small stand-in for vLLM's scheduler that makes real
SchedulerOutputs: arrivals, exits, preemption and resumption, chunked prefill, drafts, new blocks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

CPU = torch.device("cpu")
MAX_REQS = 6
MAX_TOKENS = 96
MAX_MODEL_LEN = 160
VOCABULARY = 50

# attention group whose blocks are split for the kernels, a plain one, and a mamba group
PHYSICAL_BLOCK_SIZES = (32, 16, 32)
KERNEL_BLOCK_SIZES = ([16], [16], [32])


def make_tables(monkeypatch: pytest.MonkeyPatch, world: int = 1) -> None:
    """Parallel groups of ``world`` context-parallel ranks for tables that are made from now on."""
    from vllm_ascend.worker import block_table

    monkeypatch.setattr(block_table, "get_pcp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
    monkeypatch.setattr(
        block_table, "get_dcp_group", lambda: SimpleNamespace(world_size=world, rank_in_group=0)
    )
    monkeypatch.setattr(block_table, "get_total_cp_world_size", lambda: world)


def interpreted_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's slot mapping kernel, the real one, in Triton's interpreter; vllm-ascend's tables use it from
    now on.

    vLLM decides about Triton when it is first imported. Its file is loaded once more here, with the real
    Triton in place of vLLM's placeholder, so that the order of the tests does not matter.
    """
    from unittest.mock import MagicMock

    import triton
    import triton.language
    import vllm.triton_utils
    import vllm.v1.worker.block_table as origin
    from triton.runtime.driver import driver
    from vllm_ascend.worker import block_table

    device = MagicMock()
    device.get_current_device.return_value = 0
    device.get_device_interface.return_value = torch.cpu
    monkeypatch.setattr(driver, "active", device)
    spec = importlib.util.spec_from_file_location("interpreted_block_table", origin.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as loading:
        loading.setenv("TRITON_INTERPRET", "1")
        loading.setattr(vllm.triton_utils, "triton", triton)
        loading.setattr(vllm.triton_utils, "tl", triton.language)
        spec.loader.exec_module(module)
    kernel = module._compute_slot_mapping_kernel
    assert type(kernel).__name__ == "InterpretedFunction", kernel
    monkeypatch.setattr(block_table, "_compute_slot_mapping_kernel", kernel)
    return kernel


def kv_cache_groups() -> list[Any]:
    """One group for each of PHYSICAL_BLOCK_SIZES; the last one is mamba."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

    full = [
        FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float16)
        for size in PHYSICAL_BLOCK_SIZES[:2]
    ]
    mamba = MambaSpec(block_size=PHYSICAL_BLOCK_SIZES[2], shapes=((2, 2),), dtypes=(torch.float16,))
    return [
        KVCacheGroupSpec(layer_names=[f"layer{number}"], kv_cache_spec=spec)
        for number, spec in enumerate([*full, mamba])
    ]


@dataclass
class Request:
    """What the scheduler knows of a request."""

    name: str
    prompt: list[int]
    blocks: tuple[list[int], ...]
    computed: int = 0
    outputs: list[int] = field(default_factory=list)
    drafts: int = 0
    rejected: int = 0
    running: bool = False
    known: bool = False

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)


class Scheduler:
    """Makes SchedulerOutputs; deterministic for a sequence of calls.

    optimistic: as under asynchronous speculation, a request's computed tokens count its last drafts as
    accepted.
    """

    def __init__(self, optimistic: bool = False) -> None:
        self.optimistic = optimistic
        self.requests: dict[str, Request] = {}
        self.count = 0
        self.next_block = 1
        self.finished: set[str] = set()
        self.free: list[int] = []

    def arrive(self, prompt: int) -> None:
        if len(self.requests) < MAX_REQS:
            name = f"r{self.count:04d}"
            self.count += 1
            tokens = [(7 * self.count + i) % VOCABULARY for i in range(prompt)]
            self.requests[name] = Request(name, tokens, ([], [], []))

    def leave(self, rank: int) -> None:
        if rank < len(self.requests):
            name = sorted(self.requests)[rank]
            gone = self.requests.pop(name)
            for blocks in gone.blocks:
                self.free += blocks  # so that a later request gets the same blocks in another order
            if gone.known:
                self.finished.add(name)

    def preempt(self, rank: int) -> None:
        if rank < len(self.requests):
            request = self.requests[sorted(self.requests)[rank]]
            if request.known:
                request.running = False
                request.computed = request.drafts = request.rejected = 0
                for blocks in request.blocks:
                    self.free += blocks
                request.blocks = ([], [], [])

    def step(self, chunk: int, drafts: int, pause: int | None = None) -> Any:
        """One step's SchedulerOutput, None if nothing is scheduled.

        chunk: prefill tokens per request; drafts: per decoding request; pause: rank of one that sits out.
        """
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        output = SchedulerOutput.make_empty()
        cached = CachedRequestData.make_empty()
        for rank, name in enumerate(sorted(self.requests)):
            request = self.requests[name]
            if rank == pause and request.known:
                request.drafts = request.rejected = 0
                continue
            decoding = request.computed + 1 == request.tokens
            number = min(request.tokens - request.computed, chunk)
            request.drafts = min(drafts, MAX_MODEL_LEN - 2 - request.tokens) if decoding else 0
            request.drafts = max(request.drafts, 0)
            number += request.drafts
            total = sum(output.num_scheduled_tokens.values())
            if number <= 0 or total + number > MAX_TOKENS or request.tokens + number >= MAX_MODEL_LEN:
                request.drafts = request.rejected = 0
                continue
            new = tuple(self._grow(request, group, request.computed + number) for group in range(3))
            if request.drafts:
                output.scheduled_spec_decode_tokens[name] = [1] * request.drafts
            if not request.known:
                output.scheduled_new_reqs.append(
                    NewRequestData(
                        req_id=name,
                        prompt_token_ids=list(request.prompt),
                        mm_features=[],
                        sampling_params=_sampling(),
                        pooling_params=None,
                        block_ids=tuple(list(blocks) for blocks in request.blocks),
                        num_computed_tokens=request.computed,
                        lora_request=None,
                    )
                )
            else:
                cached.all_token_ids[name] = request.prompt + request.outputs
                if not request.running:
                    cached.resumed_req_ids.add(name)
                    blocks: Any = tuple(list(blocks) for blocks in request.blocks)
                else:
                    blocks = new if any(new) else None
                cached.req_ids.append(name)
                cached.new_token_ids.append([])
                cached.new_block_ids.append(blocks)
                ahead = request.rejected if self.optimistic else 0
                cached.num_computed_tokens.append(request.computed + ahead)
                cached.num_output_tokens.append(len(request.outputs))
            request.known = request.running = True
            output.num_scheduled_tokens[name] = number
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.finished_req_ids, self.finished = self.finished, set()
        return output

    def done(self, output: Any, accepted: Callable[[str], int]) -> dict[str, list[int]]:
        """The step ran: its requests advance; ``accepted(name)`` says how many drafts were right."""
        sampled = {}
        for name, number in output.num_scheduled_tokens.items():
            request = self.requests[name]
            right = min(accepted(name), request.drafts)
            request.rejected = request.drafts - right
            end = request.computed + number
            if end >= request.tokens:
                sampled[name] = [(end + i) % VOCABULARY for i in range(1 + right)]
                request.computed = end - (request.drafts - right)
                request.outputs += sampled[name]
            else:
                request.computed = end
        return sampled

    def _grow(self, request: Request, group: int, tokens: int) -> list[int]:
        have = request.blocks[group]
        new: list[int] = []
        while (len(have) + len(new)) * PHYSICAL_BLOCK_SIZES[group] < tokens:
            if self.free and self.count % 2:
                new.append(self.free.pop())
            else:
                new.append(self.next_block)
                self.next_block += 1
        have += new
        return new


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN)


BUFFERS = (
    "query_start_loc", "gdn_query_start_loc", "discard_request_indices", "discard_request_mask",
    "req_indices", "query_pos", "num_scheduled_tokens", "num_decode_draft_tokens", "num_accepted_tokens",
    "prev_positions", "prev_num_draft_tokens", "input_ids",
)  # fmt: skip
TENSORS = ("positions", "seq_lens", "num_computed_tokens")


class RunnerUnderTest:
    """A runner with real methods and buffers; ``runner`` is the NPUModelRunner itself."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, drafts: int = 0, asynchronous: bool = False
    ) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker import gpu_model_runner
        from vllm_ascend.worker import model_runner_v1, npu_input_batch

        alone = SimpleNamespace(is_last_rank=True, is_first_rank=True, world_size=1)
        monkeypatch.setattr(gpu_model_runner, "get_pp_group", lambda: alone)
        monkeypatch.setattr(model_runner_v1, "get_pp_group", lambda: alone)
        monkeypatch.setattr(model_runner_v1, "lmhead_tp_enable", lambda: False)
        make_tables(monkeypatch)
        self.modes = CUDAGraphMode
        runner = self.runner = object.__new__(model_runner_v1.NPUModelRunner)
        speculative = SimpleNamespace(
            method="mtp", num_speculative_tokens=drafts, use_ngram_gpu=lambda: False
        )
        vars(runner).update(
            device=CPU,
            pin_memory=False,
            max_num_reqs=MAX_REQS,
            max_num_tokens=MAX_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            pcp_size=1,
            dcp_size=1,
            pcp_rank=0,
            dcp_rank=0,
            use_async_scheduling=asynchronous,
            num_spec_tokens=drafts,
            use_async_spec_decode=asynchronous and drafts > 0,
            speculative_config=speculative if drafts else None,
            scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=MAX_TOKENS),
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY),
            cache_config=SimpleNamespace(mamba_cache_mode="none", kv_sharing_fast_prefill=False),
            model_config=SimpleNamespace(
                enable_return_routed_experts=False, is_encoder_decoder=False, is_hybrid=True, use_mla=False
            ),
            vllm_config=SimpleNamespace(
                compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
            ),
            requests={},
            num_prompt_logprobs={},
            encoder_cache={},
            late_interaction_runner=SimpleNamespace(
                register_request=lambda *a: None, on_requests_finished=lambda *a: None
            ),
            is_pooling_model=False,
            is_multimodal_model=False,
            is_mm_prefix_lm=False,
            enable_prompt_embeds=False,
            supports_mm_inputs=False,
            uses_mrope=False,
            uses_xdrope_dim=0,
            lora_config=None,
            is_kv_consumer=False,
            reorder_batch_threshold=None,
            num_accepted_tokens_event=None,
            valid_sampled_token_count_gpu=None,
            valid_sampled_token_count_event=None,
            valid_sampled_token_count_cpu=None,
            _needs_seq_lens_cpu_sync=False,
            _draft_token_ids=None,
            _has_gdn=True,
            enable_hamming_sparse=False,
            use_compress=False,
            actual_seq_lengths_q=[],
            decode_token_per_req=1,
            uniform_decode_query_len=1 + drafts,
            drafter=None,
            long_seq_metadata=None,
            kv_cache_config=SimpleNamespace(kv_cache_groups=kv_cache_groups()),
        )
        for name in ("query_start_loc", "gdn_query_start_loc"):
            setattr(runner, name, self.buffer(MAX_REQS + 2, torch.int32))
        for name in ("discard_request_indices", "prev_positions"):
            setattr(runner, name, self.buffer(MAX_REQS, torch.int64))
        runner.discard_request_mask = self.buffer(MAX_REQS, torch.bool)
        for name in (
            "num_scheduled_tokens", "num_decode_draft_tokens", "num_accepted_tokens", "prev_num_draft_tokens"
        ):  # fmt: skip
            setattr(runner, name, self.buffer(MAX_REQS, torch.int32))
        for name in ("req_indices", "query_pos"):
            setattr(runner, name, self.buffer(MAX_TOKENS, torch.int64))
        runner.input_ids = self.buffer(MAX_TOKENS, torch.int32)
        runner.arange_np = np.arange(max(MAX_TOKENS, MAX_REQS + 1), dtype=np.int64)
        runner._arange_scratch = np.empty_like(runner.arange_np)
        runner._positions_cpu_buf = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        runner._positions_np_buf = runner._positions_cpu_buf.numpy()
        runner._dsa_positions_cpu_buf = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        runner.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        runner.seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
        runner.optimistic_seq_lens_cpu = torch.zeros(MAX_REQS, dtype=torch.int32)
        runner.num_computed_tokens = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.seen: list[Any] = []
        runner.attn_groups = [[self._attention_group(number)] for number in range(3)]
        runner.input_batch = npu_input_batch.NPUInputBatch(
            max_num_reqs=MAX_REQS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_TOKENS,
            device=CPU,
            pin_memory=False,
            vocab_size=VOCABULARY,
            block_sizes=list(PHYSICAL_BLOCK_SIZES),
            kernel_block_sizes=[list(sizes) for sizes in KERNEL_BLOCK_SIZES],
            is_spec_decode=drafts > 0,
            num_speculative_tokens=drafts,
            kv_cache_groups=kv_cache_groups(),
        )

    @staticmethod
    def buffer(size: int, dtype: torch.dtype) -> Any:
        from vllm.v1.utils import CpuGpuBuffer

        return CpuGpuBuffer(size, dtype=dtype, device=CPU, pin_memory=False)

    def _attention_group(self, number: int) -> Any:
        """A group whose metadata builder notes what it is given; the mamba group's is a GDN builder."""
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        def build(common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> Any:
            given = common_attn_metadata
            self.seen.append(
                {
                    "query_start_loc": given.query_start_loc.clone(),
                    "seq_lens": given.seq_lens.clone(),
                    "block_table": given.block_table_tensor.clone(),
                    "slot_mapping": given.slot_mapping.clone(),
                }
            )
            return SimpleNamespace(num_prefills=1)

        builder: Any = object.__new__(GDNAttentionMetadataBuilder) if number == 2 else SimpleNamespace()
        builder.build = builder.build_for_cudagraph_capture = build
        return SimpleNamespace(
            get_metadata_builder=lambda _: builder,
            layer_names=[f"layer{number}"],
            kv_cache_spec=kv_cache_groups()[number].kv_cache_spec,
        )

    def update(self, output: Any, swap: tuple[int, int] | None = None) -> None:
        """The scheduler's output enters the persistent batch; a swap as an attention backend's reordering."""
        self.runner._update_states(output)
        batch = self.runner.input_batch
        if swap and swap[0] != swap[1] and max(swap) < batch.num_reqs:
            batch.swap_states(*swap)
            batch.refresh_metadata()

    def inputs(self, output: Any) -> tuple[Any, Any, int]:
        names = self.runner.input_batch.req_ids
        counts = np.array([output.num_scheduled_tokens[name] for name in names], dtype=np.int32)
        return self.runner._prepare_inputs(output, counts)

    def metadata(self, output: Any, result: tuple[Any, Any, int], padded: bool) -> None:
        """The rest of the step's inputs as execute_model continues, for a full graph if ``padded``."""
        runner = self.runner
        tokens = result[2]
        requests = runner.input_batch.num_reqs
        counts = np.array(
            [output.num_scheduled_tokens[n] for n in runner.input_batch.req_ids], dtype=np.int32
        )
        tokens_padded, requests_padded = tokens, requests
        uniform = bool((counts == runner.uniform_decode_query_len).all())
        if padded and uniform:
            requests_padded = min(MAX_REQS, requests + requests % 2 + 1)
            tokens_padded = requests_padded * runner.uniform_decode_query_len
        elif padded:
            tokens_padded = min(MAX_TOKENS, tokens + tokens % 3)
        if padded:
            requests_padded = runner._pad_query_start_loc_for_fia(
                runner.query_start_loc,
                tokens_padded,
                requests_padded,
                requests,
                self.modes.FULL,
                requests_padded if uniform else None,
            )
        runner._build_attention_metadata(
            num_tokens=tokens,
            num_tokens_padded=tokens_padded,
            num_reqs=requests,
            num_reqs_padded=min(requests_padded, MAX_REQS),
            max_query_len=int(counts.max()),
            logits_indices=result[0],
            use_spec_decode=bool(output.scheduled_spec_decode_tokens),
            num_scheduled_tokens=output.num_scheduled_tokens,
            num_scheduled_tokens_np=counts,
        )

    def sampled(self, tokens: dict[str, list[int]]) -> None:
        """Upstream's bookkeeping after sampling, as far as the next inputs depend on it."""
        batch = self.runner.input_batch
        for name, new in tokens.items():
            index = batch.req_id_to_index[name]
            state = self.runner.requests[name]
            start = int(batch.num_tokens_no_spec[index])
            batch.token_ids_cpu[index, start : start + len(new)] = new
            batch.num_tokens_no_spec[index] = start + len(new)
            state.output_token_ids.extend(new)

    def carry_over(self, sampled: dict[str, list[int]]) -> None:
        """What the next step of asynchronous speculation finds on the device: sampled tokens and drafts,
        and how many of the last drafts were right.
        """
        runner, batch = self.runner, self.runner.input_batch
        drafts = max(runner.num_spec_tokens, 1)
        names = batch.req_ids
        batch.prev_req_id_to_index = {name: index for index, name in enumerate(names) if name in sampled}
        batch.prev_sampled_token_ids = torch.tensor(
            [[sampled.get(name, [0])[-1]] for name in names], dtype=torch.int32
        )
        runner._draft_token_ids = torch.ones((len(names), drafts), dtype=torch.int32)
        runner.valid_sampled_token_count_gpu = torch.tensor([len(sampled.get(name, [])) for name in names])

    def device_state(self) -> dict[str, torch.Tensor]:
        """Copies of everything on the (simulated) device that a step writes."""
        runner = self.runner
        state = {name: getattr(runner, name).gpu.clone() for name in BUFFERS}
        state |= {name: getattr(runner, name).clone() for name in TENSORS}
        for number, table in enumerate(runner.input_batch.block_table.block_tables):
            state[f"block_table {number}"] = table.block_table.gpu.clone()
            state[f"slot_mapping {number}"] = table.slot_mapping.gpu.clone()
        return state


@contextmanager
def switched(modules: list[Any], on: bool) -> Any:
    """Set the switch constants of these modules for a while."""
    before = [module.ENABLED for module in modules]
    for module in modules:
        module.ENABLED = on
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.ENABLED = value
