"""fused-mc2-overlap: upstream's exclusion without a request; the exception only where no deadlock can form.

The real AscendConfig, with the switches resolved into the configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_layer import EXPERTS, HIDDEN, Case, environment
from vllm.config import VllmConfig
from vllm_ascend import ascend_config as ascend_config_module
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.strata import fused_mc2_overlap as fused
from vllm_ascend.strata import shared_expert_overlap, switches
from vllm_ascend.strata.fused_mc2_overlap import KEY, OverlapError
from vllm_ascend.utils import clear_enable_sp


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """init_ascend_config and enable_sp keep singletons; leave the process as it was."""
    before = ascend_config_module._ASCEND_CONFIG
    clear_enable_sp()
    yield
    ascend_config_module._ASCEND_CONFIG = before
    clear_enable_sp()


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    logger = SimpleNamespace(warning=lambda message, *values: seen.append(message % values))
    monkeypatch.setattr(fused, "_log", lambda: logger)
    return seen


def build(
    monkeypatch: pytest.MonkeyPatch,
    *,
    on: bool = True,
    side_stream: bool = False,
    shared_expert_dp: bool = True,
    expert_parallel: bool = True,
    tensor_parallel: int = 2,
    **options: Any,
) -> Any:
    """The real AscendConfig of a start with these options of additional_config."""
    words = {True: "on", False: "off"}
    monkeypatch.setenv(
        "STRATA_SWITCHES", f"all=off,fused_mc2_overlap={words[on]},shared_expert_overlap={words[side_stream]}"
    )
    config = VllmConfig(additional_config={"enable_shared_expert_dp": shared_expert_dp, **options})
    config.parallel_config.tensor_parallel_size = tensor_parallel
    config.parallel_config.enable_expert_parallel = expert_parallel
    switches.resolve(config)
    clear_enable_sp()
    return ascend_config_module.AscendConfig(config)


class TestTruthTable:
    @pytest.mark.parametrize("value", [0, 1, 2])
    @pytest.mark.parametrize("overlap", [True, False])
    def test_without_a_request_it_is_upstreams(
        self, monkeypatch: pytest.MonkeyPatch, value: int, overlap: bool
    ) -> None:
        for on, dp, request in itertools.product((True, False), (True, False), ({}, {KEY: False})):
            config = build(
                monkeypatch,
                on=on,
                shared_expert_dp=dp,
                enable_fused_mc2=value,
                multistream_overlap_shared_expert=overlap,
                **request,
            )
            assert config.multistream_overlap_shared_expert is (overlap and value != 1)
            assert config.enable_fused_mc2 == value

    @pytest.mark.parametrize("on", [True, False])
    @pytest.mark.parametrize("dp", [True, False])
    @pytest.mark.parametrize("side_stream", [True, False])
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("value", [0, 1, 2])
    def test_with_a_request(
        self,
        monkeypatch: pytest.MonkeyPatch,
        warnings_of: list[str],
        on: bool,
        dp: bool,
        side_stream: bool,
        overlap: bool,
        value: int,
    ) -> None:
        def start() -> Any:
            return build(
                monkeypatch,
                on=on,
                side_stream=side_stream,
                shared_expert_dp=dp,
                enable_fused_mc2=value,
                multistream_overlap_shared_expert=overlap,
                **{KEY: True},
            )

        if value != 1 or not overlap:  # nothing to allow
            assert start().multistream_overlap_shared_expert is overlap
            assert warnings_of == []
        elif not on:
            assert start().multistream_overlap_shared_expert is False
            assert len(warnings_of) == 1 and "fused_mc2_overlap is off" in warnings_of[0]
        elif not dp or side_stream:
            with pytest.raises(OverlapError) as error:
                start()
            assert ("enable_shared_expert_dp" in str(error.value)) is not dp
            assert dp is ("shared_expert_overlap=off" in str(error.value))
        else:
            assert start().multistream_overlap_shared_expert is True
            assert len(warnings_of) == 1 and "Upstream excludes this" in warnings_of[0]

    @pytest.mark.parametrize("change", [{"expert_parallel": False}, {"tensor_parallel": 1}])
    def test_where_shared_expert_dp_does_not_apply(
        self, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
    ) -> None:
        """Upstream drops enable_shared_expert_dp without expert or tensor parallelism; so the request is
        refused.
        """
        with pytest.raises(OverlapError, match="needs enable_shared_expert_dp"):
            build(
                monkeypatch,
                enable_fused_mc2=1,
                multistream_overlap_shared_expert=True,
                **change,
                **{KEY: True},
            )

    @pytest.mark.parametrize("value", ["true", 1, None, []])
    def test_a_value_that_is_no_boolean(self, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
        with pytest.raises(OverlapError, match="expected true or false"):
            build(monkeypatch, **{KEY: value})

    def test_the_environment_counts_as_well(
        self, monkeypatch: pytest.MonkeyPatch, warnings_of: list[str]
    ) -> None:
        monkeypatch.setenv("VLLM_ASCEND_ENABLE_FUSED_MC2", "1")
        for request in (False, True):
            config = build(monkeypatch, multistream_overlap_shared_expert=True, **{KEY: request})
            assert config.multistream_overlap_shared_expert is request

    def test_it_is_in_the_configuration_hash(
        self, monkeypatch: pytest.MonkeyPatch, warnings_of: list[str]
    ) -> None:
        hashes = {
            build(
                monkeypatch, enable_fused_mc2=1, multistream_overlap_shared_expert=True, **{KEY: request}
            ).vllm_config.compute_hash()
            for request in (False, True)
        }
        assert len(hashes) == 2


class TestNoCollective:
    @pytest.mark.parametrize("on", [[], [shared_expert_overlap]])
    def test_what_is_allowed_issues_none(self, on: list[Any]) -> None:
        """The ground for allowing it: with shared-expert data parallelism the layer sums nothing."""
        case = Case(
            overlap=True,
            quantised=True,
            quantised_shared=True,
            comm=MoECommType.FUSED_MC2,
            shared_expert_dp=True,
        )
        with environment(case, on) as (layer, _, device):
            layer.shared_forward_impl(torch.randn(2, HIDDEN).bfloat16(), torch.randn(2, EXPERTS))
            assert {e.stream for e in device.trace.of("op")} == {0, 1}
            assert "all_reduce" not in {e.what for e in device.trace.of("op")}


def test_names_of_the_other_patch(enable: Callable[..., None]) -> None:
    from vllm_ascend.strata import series

    assert fused.SIDE_STREAM_SWITCH in series.load().defaults
