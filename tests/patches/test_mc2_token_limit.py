"""mc2-token-limit: upstream's capacity without the setting, a lower one with it, never more than the operator
takes, and no rank that skips the agreement on token counts while a step of its own can leave MC2.

The real AscendConfig, set_mc2_tokens_capacity, _compute_potential_max_tokens, select_moe_comm_method and
should_skip_allreduce_across_dp_group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm_ascend import ascend_config as ascend_config_module
from vllm_ascend import ascend_forward_context, utils
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.strata import mc2_token_limit as limits
from vllm_ascend.strata import switches
from vllm_ascend.strata.mc2_token_limit import KEY, LimitError
from vllm_ascend.utils import AscendDeviceType

shapes = st.fixed_dictionaries(
    {
        "requests": st.integers(1, 3000),
        "query_len": st.integers(1, 5),
        "tp": st.sampled_from([1, 2, 4, 6, 8, 16]),
        "batched": st.integers(1, 20000),
        "capture": st.none() | st.integers(1, 4096),
        "prefill_mc2": st.booleans(),
    }
)
given_limits = st.none() | st.integers(1, 512)


def config_of(shape: dict[str, Any], limit: Any = None) -> SimpleNamespace:
    """A VllmConfig as far as the real functions read it, of a rank that only decodes."""
    capture = shape["capture"]
    return SimpleNamespace(
        additional_config={} if limit is None else {KEY: limit},
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=shape["batched"], max_num_seqs=shape["requests"]
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[capture] if capture else [], max_cudagraph_capture_size=capture
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=shape["query_len"] - 1),
        parallel_config=SimpleNamespace(tensor_parallel_size=shape["tp"], enable_expert_parallel=True),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
    )


@contextmanager
def worker(shape: dict[str, Any], on: bool = True) -> Iterator[None]:
    """A process of an A3 rank with 16 expert-parallel ranks that has set no capacity."""
    with pytest.MonkeyPatch.context() as patch:
        ascend = SimpleNamespace(
            enable_prefill_mc2=shape["prefill_mc2"], enable_fused_mc2=0, recompute_scheduler_enable=True
        )
        patch.setattr(limits, "ENABLED", on)
        patch.setattr(ascend_forward_context, "_mc2_tokens_capacity", None)
        patch.setattr(ascend_forward_context, "get_ep_group", lambda: SimpleNamespace(world_size=16))
        patch.setattr(ascend_forward_context, "get_ascend_device_type", lambda: AscendDeviceType.A3)
        patch.setattr(utils, "_potential_max_tokens", None)
        patch.setattr(utils, "is_hierarchical_communication_enabled", lambda: False)
        for module in (ascend_forward_context, utils):
            patch.setattr(module, "get_ascend_config", lambda: ascend)
            patch.setattr(module, "is_moe_model", lambda _: True)
        yield


def capacity(shape: dict[str, Any], config: Any) -> int:
    ascend_forward_context.set_mc2_tokens_capacity(config, shape["requests"], shape["query_len"])
    return ascend_forward_context.get_mc2_tokens_capacity()


def planned_per_rank(shape: dict[str, Any]) -> int:
    """Tokens per rank before the limit, as upstream's three cases say."""
    tokens = shape["batched"] if shape["prefill_mc2"] else shape["capture"]
    return math.ceil((tokens or shape["requests"] * shape["query_len"]) / shape["tp"])


class TestCapacity:
    @settings(max_examples=200)
    @given(shapes, given_limits)
    def test_the_limit_is_the_limit(self, shape: dict[str, Any], limit: int | None) -> None:
        with worker(shape):
            value = capacity(shape, config_of(shape, limit))
        assert value == min(planned_per_rank(shape), limit or 512) * shape["tp"]

    @settings(max_examples=100)
    @given(shapes, given_limits)
    def test_switch_off(self, shape: dict[str, Any], limit: int | None) -> None:
        with worker(shape, on=False):
            config = config_of(shape, limit)
            assert capacity(shape, config) == min(planned_per_rank(shape), 512) * shape["tp"]
            assert utils._compute_potential_max_tokens(config) == potential_upstream(shape)

    @pytest.mark.parametrize("additional", [None, {}, {KEY: 512}, {"other": 1}, MagicMock()])
    def test_without_a_lower_limit_it_is_upstreams(
        self, enable: Callable[..., None], additional: Any
    ) -> None:
        enable(limits)
        config = SimpleNamespace(additional_config=additional)
        assert limits.tokens_per_rank(config) == 512
        assert limits.tokens_per_rank(SimpleNamespace()) == 512
        assert [limits.decode_tokens(n, config) for n in (1, 511, 512, 513, 4000)] == [1, 511, 512, 512, 512]

    @pytest.mark.parametrize(("requests", "tp", "expected"), [(600, 6, 600), (1, 8, 8), (10000, 2, 1024)])
    def test_known_values(self, requests: int, tp: int, expected: int) -> None:
        shape = {
            "requests": requests,
            "query_len": 1,
            "tp": tp,
            "batched": 1,
            "capture": None,
            "prefill_mc2": False,
        }
        with worker(shape):
            assert capacity(shape, config_of(shape)) == expected


def potential_upstream(shape: dict[str, Any]) -> int:
    decode = shape["requests"] * shape["query_len"]
    if shape["capture"]:
        return max(shape["capture"], min(shape["batched"], decode))
    return min(decode, 512)


class TestSecondPlace:
    @settings(max_examples=150)
    @given(shapes, given_limits)
    def test_most_tokens_of_a_decode_step(self, shape: dict[str, Any], limit: int | None) -> None:
        """Upstream's number, but the true one where the capacity was lowered and no graph sizes are given."""
        with worker(shape):
            value = utils._compute_potential_max_tokens(config_of(shape, limit))
        if limit is not None and limit < 512 and not shape["capture"]:
            assert value == shape["requests"] * shape["query_len"]
        else:
            assert value == potential_upstream(shape)

    @settings(max_examples=150)
    @given(shapes, st.integers(1, 511))
    def test_no_agreement_is_skipped_that_is_needed(self, shape: dict[str, Any], limit: int) -> None:
        """If the ranks don't agree on their token counts, every decode step of theirs goes through MC2."""
        config = config_of(shape | {"capture": None, "prefill_mc2": False}, limit)
        shape = shape | {"capture": None, "prefill_mc2": False}
        with worker(shape):
            capacity(shape, config)
            utils.set_potential_max_tokens(config)
            most = shape["requests"] * shape["query_len"]
            if utils.should_skip_allreduce_across_dp_group(config):
                chosen = {ascend_forward_context.select_moe_comm_method(n, config) for n in (1, most)}
                assert chosen == {MoECommType.MC2}

    def test_lowering_only_the_capacity_would_skip_it(self) -> None:
        """The hazard itself: 1024 decode tokens, capacity 512, and an answer cut at 512."""
        shape = {
            "requests": 1024, "query_len": 1, "tp": 2, "batched": 8192, "capture": None, "prefill_mc2": False,
        }  # fmt: skip
        config = config_of(shape, 256)
        with worker(shape):
            assert capacity(shape, config) == 512
            utils.set_potential_max_tokens(config)
            assert utils.should_skip_allreduce_across_dp_group(config) is False
            utils._potential_max_tokens = potential_upstream(shape)
            assert utils.should_skip_allreduce_across_dp_group(config) is True
            assert ascend_forward_context.select_moe_comm_method(1024, config) is MoECommType.ALLTOALL


@pytest.fixture(autouse=True)
def restore_ascend_config() -> Iterator[None]:
    """init_ascend_config keeps a singleton; leave the process as it was."""
    before = ascend_config_module._ASCEND_CONFIG
    yield
    ascend_config_module._ASCEND_CONFIG = before


class TestCheck:
    @staticmethod
    def build(monkeypatch: pytest.MonkeyPatch, device: AscendDeviceType, limit: Any, on: bool = True) -> Any:
        """A configuration whose switches are resolved, seen by the real AscendConfig."""
        monkeypatch.setattr(utils, "_ascend_device_type", device)
        monkeypatch.setenv("STRATA_SWITCHES", f"mc2_token_limit={'on' if on else 'off'}")
        config = VllmConfig(additional_config={KEY: limit})
        switches.resolve(config)
        ascend_config_module.AscendConfig(config)
        return config

    def test_refused_before_a_model_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch, engine_config: Callable[..., Any]
    ) -> None:
        monkeypatch.setattr(utils, "_ascend_device_type", AscendDeviceType.A3)
        with pytest.raises(ValueError, match="at most 512 tokens per rank"):
            engine_config(additional_config={KEY: 1024})

    @pytest.mark.parametrize(
        ("device", "most"),
        [(AscendDeviceType.A3, 512), (AscendDeviceType.A2, 256), (AscendDeviceType.A5, 512)],
    )
    def test_above_the_operators_limit_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, device: AscendDeviceType, most: int
    ) -> None:
        self.build(monkeypatch, device, most)
        with pytest.raises(LimitError, match=rf"at most {most} tokens per rank: set {most} or less"):
            self.build(monkeypatch, device, most + 1)

    @pytest.mark.parametrize("value", [0, -1, True, False, None, "256", 256.0, [256]])
    def test_no_number_of_tokens(self, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
        with pytest.raises(LimitError, match="at least 1"):
            self.build(monkeypatch, AscendDeviceType.A3, value)

    def test_the_switch_off_ignores_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str] = []
        logger = SimpleNamespace(warning=lambda message, *values: seen.append(message % values))
        monkeypatch.setattr(limits, "_log", lambda: logger)
        self.build(monkeypatch, AscendDeviceType.A3, 4096, on=False)
        assert len(seen) == 1
        assert KEY in seen[0] and "mc2_token_limit is off" in seen[0]

    def test_the_limit_is_in_the_configuration_hash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hashes = {
            self.build(monkeypatch, AscendDeviceType.A3, limit).compute_hash() for limit in (128, 256, 512)
        }
        assert len(hashes) == 3

    def test_operator_limits(self) -> None:
        assert {d.name: limits.operator_limit(d) for d in AscendDeviceType} == {
            "A2": 256, "A3": 512, "_310P": 512, "A5": 512,
        }  # fmt: skip
