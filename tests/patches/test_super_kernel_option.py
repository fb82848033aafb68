"""super-kernel-option: asked for, checked, passed on, part of the hash; and nothing else changes.

The real AscendCompilationConfig, AscendConfig, NPUPlatform, _configure_backend, npugraph_ex_compile and
AscendCompiler, with the releases of npugraph_ex in graph_compiler.py.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import graph_compiler
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.config.utils import Range
from vllm_ascend import ascend_config as ascend_config_module
from vllm_ascend.ascend_config import AscendCompilationConfig, init_ascend_config
from vllm_ascend.compilation import compiler_interface
from vllm_ascend.compilation.compiler_interface import AscendCompiler, _configure_backend, npugraph_ex_compile
from vllm_ascend.strata import super_kernel_option, switches
from vllm_ascend.strata.super_kernel_option import SuperKernelError

FULL = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
BOTH = {"enable_static_kernel": True, "enable_super_kernel": True}


def asked() -> dict[str, Any]:
    """A user's additional_config, each time a new one: checking a configuration writes into it."""
    return {"ascend_compilation_config": dict(BOTH)}


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The warnings of this patch so far. Not by caplog: checking a configuration sets up logging anew."""
    seen: list[str] = []
    logger = SimpleNamespace(warning=lambda message, *values: seen.append(message % values))
    monkeypatch.setattr(super_kernel_option, "_log", lambda: logger)
    return lambda: seen


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Turn the patch's switch on or off for configurations that are checked from now on."""
    return lambda on: monkeypatch.setenv("STRATA_SWITCHES", f"super_kernel_option={'on' if on else 'off'}")


def with_table(on: bool) -> SimpleNamespace:
    """A configuration whose switches are resolved, in a process of its own environment."""
    config = SimpleNamespace(additional_config={"strata": {"super_kernel_option": on}})
    switches.resolve(config)
    return config


def compilation(**options: Any) -> Any:
    """An AscendCompilationConfig."""
    return AscendCompilationConfig(**options)


class TestCheck:
    @pytest.mark.parametrize("on", [True, False])
    @pytest.mark.parametrize("asked", [True, False, None])
    @pytest.mark.parametrize("static", [True, False])
    @pytest.mark.parametrize("release", ["knows", "knows, nested", "does not", "does not, nested", "absent"])
    def test_truth_table(
        self,
        monkeypatch: pytest.MonkeyPatch,
        warnings_of: Callable[[], list[str]],
        on: bool,
        asked: bool | None,
        static: bool,
        release: str,
    ) -> None:
        """Either the option is usable afterwards, or False, or the start stops."""
        if release == "absent":
            graph_compiler.remove(monkeypatch)
        else:
            graph_compiler.install(monkeypatch, release.startswith("knows"), nested="nested" in release)
        options = {} if asked is None else {"enable_super_kernel": asked}
        config = compilation(enable_static_kernel=static, **options)
        if asked and on and not (static and release.startswith("knows")):
            with pytest.raises(SuperKernelError) as error:
                super_kernel_option.check(with_table(on), config)
            assert ("needs enable_static_kernel" in str(error.value)) is not static
            assert static is ("torch_npu" in str(error.value))
            return
        super_kernel_option.check(with_table(on), config)
        assert config.enable_super_kernel is bool(asked and on)
        assert len(warnings_of()) == (1 if asked and not on else 0)
        assert all("the Strata switch super_kernel_option is off" in warning for warning in warnings_of())

    @pytest.mark.parametrize("value", ["true", 1, 0, None, [], {}])
    def test_a_value_that_is_no_boolean(self, value: Any) -> None:
        config = compilation(enable_static_kernel=True, enable_super_kernel=value)
        with pytest.raises(SuperKernelError, match="expected true or false"):
            super_kernel_option.check(with_table(True), config)

    def test_the_refusal_names_release_and_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch_npu

        monkeypatch.setattr(torch_npu, "__version__", "2.9.0")
        graph_compiler.install(monkeypatch, knows=False)
        with pytest.raises(
            SuperKernelError, match=r"super_kernel_optimize.*torch_npu 2\.9\.0.*2\.10\.0 or later"
        ):
            super_kernel_option.check(with_table(True), compilation(**BOTH))
        graph_compiler.remove(monkeypatch)
        with pytest.raises(SuperKernelError, match=r"torch_npu 2\.9\.0 has no usable npugraph_ex"):
            super_kernel_option.check(with_table(True), compilation(**BOTH))

    @given(
        st.sampled_from([OSError, ImportError, RuntimeError, ValueError, TypeError, KeyError, AttributeError])
    )
    def test_the_probe_never_raises(self, kind: type[Exception]) -> None:
        """A broken installation gives a reason."""

        def fail(*_: Any) -> None:
            raise kind("broken")

        with pytest.MonkeyPatch.context() as patch:
            import sys

            graph_compiler.install(patch, knows=True)
            assert super_kernel_option.unknown_to_torch_npu() is None
            patch.setattr(sys.modules["npugraph_ex.configs.compiler_config"], "_process_kwargs_options", fail)
            assert kind.__name__ in str(super_kernel_option.unknown_to_torch_npu())
            patch.setattr(sys.modules["npugraph_ex"], "CompilerConfig", fail)
            assert "no usable npugraph_ex" in str(super_kernel_option.unknown_to_torch_npu())

    def test_310p_has_no_static_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_ascend.utils.is_310p", lambda: True)
        graph_compiler.install(monkeypatch, knows=True)
        with pytest.raises(SuperKernelError, match="310P"):
            super_kernel_option.check(with_table(True), compilation(**BOTH))

    def test_the_options_before_it_keep_their_places(self) -> None:
        names = list(inspect.signature(AscendCompilationConfig).parameters)
        assert names[-2:] == ["enable_super_kernel", "kwargs"]
        assert names[0] == "enable_npugraph_ex"


class TestEngineConfiguration:
    def test_accepted_and_carried_to_the_workers(
        self,
        monkeypatch: pytest.MonkeyPatch,
        engine_config: Callable[..., Any],
        switch: Callable[[bool], None],
    ) -> None:
        graph_compiler.install(monkeypatch, knows=True)
        switch(True)
        config = engine_config(additional_config=asked(), compilation_config=FULL)
        assert config.additional_config["ascend_compilation_config"]["enable_super_kernel"] is True
        worker = pickle.loads(pickle.dumps(config))
        assert init_ascend_config(worker).ascend_compilation_config.enable_super_kernel is True

    def test_it_is_in_the_configuration_hash(
        self, monkeypatch: pytest.MonkeyPatch, engine_config: Callable[..., Any]
    ) -> None:
        graph_compiler.install(monkeypatch, knows=True)
        static = {"enable_static_kernel": True}
        hashes = {
            engine_config(
                additional_config={"ascend_compilation_config": dict(options)}, compilation_config=FULL
            ).compute_hash()
            for options in (static, BOTH)
        }
        assert len(hashes) == 2

    @pytest.mark.parametrize("release", ["absent", "does not"])
    def test_refused_before_a_model_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch, engine_config: Callable[..., Any], release: str
    ) -> None:
        if release == "absent":
            graph_compiler.remove(monkeypatch)
        else:
            graph_compiler.install(monkeypatch, knows=False)
        with pytest.raises(ValueError, match="enable_super_kernel cannot be honoured"):
            engine_config(additional_config=asked(), compilation_config=FULL)

    def test_refused_without_static_kernels(
        self, monkeypatch: pytest.MonkeyPatch, engine_config: Callable[..., Any]
    ) -> None:
        graph_compiler.install(monkeypatch, knows=True)
        with pytest.raises(ValueError, match="needs enable_static_kernel"):
            engine_config(
                additional_config={"ascend_compilation_config": {"enable_super_kernel": True}},
                compilation_config=FULL,
            )

    @pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
    def test_dropped_where_the_platform_drops_static_kernels(
        self,
        monkeypatch: pytest.MonkeyPatch,
        engine_config: Callable[..., Any],
        warnings_of: Callable[[], list[str]],
        mode: str,
    ) -> None:
        """And the worker, which sees the option without static kernels, starts."""
        graph_compiler.install(monkeypatch, knows=True)
        config = engine_config(additional_config=asked(), compilation_config={"cudagraph_mode": mode})
        options = config.additional_config["ascend_compilation_config"]
        assert options["enable_static_kernel"] is False
        assert options["enable_super_kernel"] is False
        assert any("is not a full-graph mode" in warning for warning in warnings_of())
        worker = init_ascend_config(pickle.loads(pickle.dumps(config)))
        assert worker.ascend_compilation_config.enable_super_kernel is False

    def test_ignored_with_the_switch_off(
        self,
        monkeypatch: pytest.MonkeyPatch,
        engine_config: Callable[..., Any],
        switch: Callable[[bool], None],
        warnings_of: Callable[[], list[str]],
    ) -> None:
        graph_compiler.remove(monkeypatch)
        switch(False)
        config = engine_config(additional_config=asked(), compilation_config=FULL)
        assert config.additional_config["ascend_compilation_config"]["enable_super_kernel"] is False
        assert len(warnings_of()) == 1


configurations = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True),
        "max_num_seqs": st.integers(1, 32),
        "speculative": st.none() | st.integers(1, 5),
        "static": st.booleans(),
    }
)


def vllm_config_of(given: dict[str, Any]) -> SimpleNamespace:
    speculative = given["speculative"]
    return SimpleNamespace(
        speculative_config=speculative and SimpleNamespace(num_speculative_tokens=speculative),
        scheduler_config=SimpleNamespace(max_num_seqs=given["max_num_seqs"]),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sorted(given["sizes"])),
        parallel_config=SimpleNamespace(local_world_size=2, data_parallel_size_local=1),
    )


class Recording:
    """A reader of options that knows (or not) the option and keeps what it was given."""

    def __init__(self, knows: bool) -> None:
        self.config = graph_compiler.flat_config(
            (*graph_compiler.BASIC, *graph_compiler.STATIC, *((graph_compiler.OPTION,) if knows else ()))
        )()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __call__(self, config: Any, arguments: dict[str, Any]) -> None:
        self.calls.append((config, dict(arguments["options"])))
        graph_compiler.read_flat(config, arguments)

    def options_of_the_backend(self) -> list[dict[str, Any]]:
        return [options for config, options in self.calls if config is self.config]


@pytest.fixture
def local_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """_configure_backend sets it in the environment; take it back after the test."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


@pytest.mark.usefixtures("local_world_size")
class TestBackend:
    @settings(max_examples=100)
    @given(configurations, st.booleans())
    def test_the_option_adds_one_key_and_nothing_else(self, given_: dict[str, Any], knows: bool) -> None:
        """Against the same configuration without it."""
        plain, asked = Recording(knows), Recording(knows)
        config = compilation(enable_static_kernel=given_["static"])
        _configure_backend(plain.config, config, vllm_config_of(given_), plain)
        (without,) = plain.options_of_the_backend()
        assert graph_compiler.OPTION not in without
        assert len(plain.calls) == 1
        config.enable_super_kernel = True
        if not (given_["static"] and knows):
            with pytest.raises(SuperKernelError):
                _configure_backend(asked.config, config, vllm_config_of(given_), asked)
            assert asked.options_of_the_backend() == []
            return
        _configure_backend(asked.config, config, vllm_config_of(given_), asked)
        assert asked.options_of_the_backend() == [without | {graph_compiler.OPTION: True}]
        assert asked.config.super_kernel_optimize is True

    @given(configurations)
    def test_torchair(self, given_: dict[str, Any]) -> None:
        """The fallback is as before without the option, and refuses it before it changes anything."""
        config = compilation(enable_static_kernel=given_["static"])
        backend = SimpleNamespace(
            mode=None,
            debug=SimpleNamespace(run_eagerly=False, aclgraph=SimpleNamespace()),
            experimental_config=SimpleNamespace(aclgraph=SimpleNamespace()),
        )
        config.enable_super_kernel = True
        with pytest.raises(SuperKernelError, match="torchair"):
            _configure_backend(backend, config, vllm_config_of(given_))
        assert backend.mode is None
        config.enable_super_kernel = False
        _configure_backend(backend, config, vllm_config_of(given_))
        assert backend.mode == "reduce-overhead"

    @pytest.mark.parametrize("asked", [True, False])
    @pytest.mark.parametrize("nested", [True, False])
    def test_it_reaches_the_graph_compiler(
        self, monkeypatch: pytest.MonkeyPatch, asked: bool, nested: bool
    ) -> None:
        """Through the real npugraph_ex_compile."""
        compiled = graph_compiler.install(monkeypatch, knows=True, nested=nested)
        config = compilation(enable_static_kernel=True, enable_super_kernel=asked)
        given_ = {"sizes": [1, 2], "max_num_seqs": 2, "speculative": None}
        graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
        npugraph_ex_compile(graph, [torch.ones(1)], {}, vllm_config_of(given_), config, Range(1, 2))
        (one,) = compiled
        values = vars(one.config.aclgraph) if nested else vars(one.config)
        assert values.get("_super_kernel_optimize" if nested else "super_kernel_optimize") is (
            True if asked else None
        )


class TestCompilerHash:
    @staticmethod
    def hash_of(monkeypatch: pytest.MonkeyPatch, config: Any) -> str:
        monkeypatch.setattr(
            compiler_interface, "get_ascend_config", lambda: SimpleNamespace(ascend_compilation_config=config)
        )
        return AscendCompiler().compute_hash(SimpleNamespace())

    @pytest.mark.parametrize(("static", "npugraph"), [(True, True), (False, True), (False, False)])
    def test_without_the_option_it_is_upstreams(
        self, monkeypatch: pytest.MonkeyPatch, static: bool, npugraph: bool
    ) -> None:
        """The first ten hex digits of the sha256 of upstream's three factors: no compile cache is lost."""
        import torch_npu

        factors = {
            "torch_npu_version": torch_npu.__version__,
            "enable_npugraph_ex": npugraph,
            "enable_static_kernel": static,
        }
        config = compilation(enable_npugraph_ex=npugraph, enable_static_kernel=static)
        assert self.hash_of(monkeypatch, config) == hashlib.sha256(str(factors).encode()).hexdigest()[:10]

    def test_with_the_option_it_differs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        static = self.hash_of(monkeypatch, compilation(enable_static_kernel=True))
        both = self.hash_of(monkeypatch, compilation(**BOTH))
        neither = self.hash_of(monkeypatch, compilation())
        assert len({static, both, neither}) == 3

    def test_a_request_without_effect_is_no_factor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = compilation(enable_super_kernel=True)
        assert self.hash_of(monkeypatch, config) == self.hash_of(monkeypatch, compilation())


@pytest.fixture(autouse=True)
def restore_ascend_config() -> Iterator[None]:
    """init_ascend_config keeps a singleton; leave the process as it was."""
    before = ascend_config_module._ASCEND_CONFIG
    yield
    ascend_config_module._ASCEND_CONFIG = before


def test_full_graph_modes_are_what_this_file_thinks() -> None:
    assert CUDAGraphMode.FULL_DECODE_ONLY.has_full_cudagraphs()
    assert not CUDAGraphMode.FULL_DECODE_ONLY.requires_piecewise_compilation()
