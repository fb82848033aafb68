"""The runtime patch: settings, the configuration's hash, workers, module constants, import failures."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_ascend.strata import PatchImportError, series, switch_table, switches
from vllm_ascend.strata.switch_table import SwitchError

SERIES = series.load()


def manifest(*patches: Any, **changes: Any) -> dict[str, Any]:
    """What the patch engine writes for these (id, switch name or None, default)."""
    entries = [
        {"id": i, "group": "g", "kind": "perf", "title": "t", "switch": n and {"name": n, "default": d}}
        for i, n, d in patches
    ]
    return {"format": 1, "base": "0.23.0", "digest": "0123456789abcdef" * 4, "patches": entries, **changes}


EXAMPLE = series.parse(
    manifest(
        ("runtime-switches", None, None), ("first-patch", "first", True), ("second-patch", "second", False)
    )
)


def values(variable: str = "", config: dict[str, Any] | None = None) -> dict[str, bool]:
    return dict(switch_table.resolve(EXAMPLE, variable, config or {}).values)


def opposite(name: str) -> str:
    return "off" if SERIES.defaults[name] else "on"


class TestSettings:
    @pytest.mark.parametrize(
        ("variable", "config", "expected"),
        [
            ("", {}, {"first": True, "second": False}),
            ("second=on", {}, {"first": True, "second": True}),
            (" first = off , ,second=ON ", {}, {"first": False, "second": True}),
            ("all=off", {}, {"first": False, "second": False}),
            ("second=on,all=off", {}, {"first": False, "second": True}),
            ("first=off,first=off", {}, {"first": False, "second": False}),
            ("", {"second": True}, {"first": True, "second": True}),
            ("", {"first": "off"}, {"first": False, "second": False}),
            ("", {"all": "on"}, {"first": True, "second": True}),
            ("all=off", {"first": True}, {"first": True, "second": False}),
            ("first=off", {"all": True}, {"first": False, "second": True}),
            ("first=off", {"first": False}, {"first": False, "second": False}),
        ],
    )
    def test_meaning(self, variable: str, config: dict[str, Any], expected: dict[str, bool]) -> None:
        assert values(variable, config) == expected

    @pytest.mark.parametrize(
        ("variable", "config", "words"),
        [
            ("frist=off", {}, ["STRATA_SWITCHES", "'frist'", "did you mean 'first'", "first, second"]),
            ("", {"secnd": True}, ["additional_config['strata']", "did you mean 'second'", "first, second"]),
            ("zzzzzz=on", {}, ["no switch 'zzzzzz'", "first, second"]),
            ("first", {}, ["'first' has no '='", "first=on"]),
            ("first=maybe", {}, ["'maybe'", "on or off"]),
            ("first=", {}, ["''", "on or off"]),
            ("first=on,first=off", {}, ["'first'", "twice"]),
            ("", {"first": 1}, ["'first'", "1", "on or off"]),
            ("", {"first": None}, ["'first'", "None", "on or off"]),
            ("first=on", {"first": False}, ["'first' is on in STRATA_SWITCHES and off in", "keep one"]),
            ("all=on", {"all": "off"}, ["'all'", "keep one"]),
        ],
    )
    def test_bad_settings_say_what_is_wrong(
        self, variable: str, config: dict[str, Any], words: list[str]
    ) -> None:
        with pytest.raises(SwitchError) as caught:
            values(variable, config)
        for word in words:
            assert word in str(caught.value)

    @given(st.dictionaries(st.sampled_from(["first", "second", "all"]), st.booleans()))
    def test_both_sources_mean_the_same(self, settings: dict[str, bool]) -> None:
        variable = ",".join(f"{name}={'on' if on else 'off'}" for name, on in settings.items())
        assert values(variable) == values(config=settings) == values(variable, settings)

    def test_table_is_immutable(self) -> None:
        table = switch_table.resolve(EXAMPLE, "", {})
        with pytest.raises(TypeError):
            table.values["first"] = False  # type: ignore[index]
        with pytest.raises(dataclasses.FrozenInstanceError):
            table.values = {}  # type: ignore[misc]

    def test_resolved_form_reads_back(self) -> None:
        table = switch_table.resolve(EXAMPLE, "second=on", {})
        config = json.loads(json.dumps(table.as_config()))
        assert switch_table.is_resolved(config)
        assert switch_table.from_resolved(EXAMPLE, config) == table

    @pytest.mark.parametrize(
        ("change", "word"),
        [({"series": "0" * 12}, "same image"), ({"first": None}, "exactly"), ({"third": True}, "exactly")],
    )
    def test_resolved_form_of_another_series_is_refused(self, change: dict[str, Any], word: str) -> None:
        with pytest.raises(SwitchError, match=word):
            switch_table.from_resolved(EXAMPLE, {**switch_table.all_off(EXAMPLE).as_config(), **change})


class TestManifest:
    def test_of_this_tree(self) -> None:
        assert "runtime-switches" in SERIES.patches
        assert SERIES.owners["greedy_fast_path"] == "greedy-fast-path"

    def test_reads_what_the_engine_writes(self) -> None:
        assert EXAMPLE.patches == ("runtime-switches", "first-patch", "second-patch")
        assert EXAMPLE.defaults == {"first": True, "second": False}
        assert EXAMPLE.owners == {"first": "first-patch", "second": "second-patch"}
        assert EXAMPLE.digest == "0123456789ab"

    @pytest.mark.parametrize(
        "content",
        [
            [],
            manifest(format=2),
            manifest(digest=None),
            manifest(digest="not hex"),
            manifest(patches={}),
            manifest(patches=[{"title": "no id"}]),
            manifest(patches=["text"]),
            manifest(patches=[{"id": "a"}]),
            manifest(patches=[{"id": "a", "switch": {"name": "x"}}]),
            manifest(("a", "x", "on")),
            manifest(("a", "x", True), ("b", "x", True)),
        ],
    )
    def test_bad_manifest(self, content: Any) -> None:
        with pytest.raises(series.SeriesError, match=r"series\.json"):
            series.parse(content)

    @pytest.mark.parametrize("content", [None, "{", "{}"])
    def test_missing_or_broken_file(
        self, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "series.json"
        if content is not None:
            path.write_text(content)
        monkeypatch.setattr(series, "MANIFEST", path)
        with pytest.raises(series.SeriesError, match=r"series\.json"):
            series.load.__wrapped__()


@pytest.mark.usefixtures("fresh_switches")
class TestConfiguration:
    """On the real VllmConfig, checked by the real NPUPlatform."""

    def test_every_switch_changes_the_hash(self, engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        default = engine_config()
        assert default.additional_config["strata"] == {"series": SERIES.digest, **SERIES.defaults}
        hashes = {"": default.compute_hash()}
        assert engine_config().compute_hash() == hashes[""]
        for name in SERIES.defaults:
            monkeypatch.setenv("STRATA_SWITCHES", f"{name}={opposite(name)}")
            from_variable = engine_config()
            monkeypatch.delenv("STRATA_SWITCHES")
            from_config = engine_config(additional_config={"strata": {name: opposite(name)}})
            assert from_variable.additional_config["strata"][name] is not SERIES.defaults[name]
            assert from_variable.compute_hash() == from_config.compute_hash()
            hashes[name] = from_variable.compute_hash()
        assert len(set(hashes.values())) == len(SERIES.defaults) + 1

    def test_the_series_is_part_of_the_hash(
        self, engine_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = engine_config().compute_hash()
        monkeypatch.setattr(series, "load", lambda: dataclasses.replace(SERIES, digest="f" * 12))
        assert engine_config().compute_hash() != before

    def test_users_dict_stays_and_its_other_keys_arrive(self, engine_config: Any) -> None:
        given = {"enable_cpu_binding": False, "strata": {"all": "off"}}
        original = copy.deepcopy(given)
        config = engine_config(additional_config=given)
        assert given["strata"] == original["strata"]
        assert config.additional_config["enable_cpu_binding"] is False
        assert not any(config.additional_config["strata"][name] for name in SERIES.defaults)

    def test_later_checks_keep_the_first_outcome(
        self, engine_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.platforms import current_platform

        config = engine_config()
        before = copy.deepcopy(config.additional_config["strata"])
        monkeypatch.setenv("STRATA_SWITCHES", "all=off")
        current_platform.check_and_update_config(config)
        assert config.additional_config["strata"] == before
        assert dataclasses.replace(config).additional_config["strata"] == before

    @pytest.mark.parametrize(
        "variable", ["greedy_fastpath=off", "greedy_fast_path=perhaps", "greedy_fast_path"]
    )
    def test_bad_variable_stops_the_start(
        self, variable: str, engine_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STRATA_SWITCHES", variable)
        with pytest.raises(SwitchError, match="STRATA_SWITCHES"):
            engine_config()

    @pytest.mark.parametrize("section", [{"greedy_fastpath": False}, {"greedy_fast_path": 3}, "off", ["all"]])
    def test_bad_config_stops_the_start(self, section: Any, engine_config: Any) -> None:
        with pytest.raises(SwitchError, match="strata"):
            engine_config(additional_config={"strata": section})

    @pytest.mark.parametrize("value", [None, {}])
    def test_absent_config_gets_a_section(self, value: Any) -> None:
        config = types.SimpleNamespace(additional_config=value)
        switches.resolve(config)
        assert config.additional_config == {"strata": {"series": SERIES.digest, **SERIES.defaults}}

    def test_config_that_is_no_dict_is_refused(self) -> None:
        hashed = types.SimpleNamespace(compute_hash=lambda: "x")
        with pytest.raises(SwitchError, match="dict"):
            switches.resolve(types.SimpleNamespace(additional_config=hashed))

    def test_config_without_a_model_is_resolved_too(self) -> None:
        from vllm.config import VllmConfig

        assert VllmConfig().additional_config["strata"]["series"] == SERIES.digest

    def test_one_line_says_what_is_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines: list[str] = []
        log = types.SimpleNamespace(info=lambda text, *arguments: lines.append(text % arguments))
        monkeypatch.setattr(switches, "_log", lambda: log)
        monkeypatch.setenv("STRATA_SWITCHES", "all=on,greedy_fast_path=off")
        for _ in range(3):
            switches.resolve(types.SimpleNamespace(additional_config={}))
        assert len(lines) == 1
        on, off = lines[0].split("Off:")
        assert "min_tokens_mask_cache" in on and "greedy_fast_path" in off and SERIES.digest in on

    def test_table_of_a_configuration(self, engine_config: Any) -> None:
        config = engine_config(additional_config={"strata": {"greedy_fast_path": "off"}})
        assert switches.table_of(config)["greedy_fast_path"] is False
        with pytest.raises(SwitchError, match="no resolved switches"):
            switches.table_of(types.SimpleNamespace(additional_config={}))


def resolved(**changes: bool) -> Any:
    section = {**switch_table.resolve(SERIES, "", {}).as_config(), **changes}
    return types.SimpleNamespace(additional_config={"strata": section})


class TestInstallation:
    def test_constants_follow_the_table(
        self, fresh_switches: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = types.ModuleType("strata_test_module")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.ENABLED = fresh_switches.bind("greedy_fast_path", module.__name__)
        module.OTHER = fresh_switches.bind("min_tokens_mask_cache", module.__name__, "OTHER")
        assert (module.ENABLED, module.OTHER) == (False, False)
        table = fresh_switches.install(resolved(greedy_fast_path=True, min_tokens_mask_cache=False))
        assert (module.ENABLED, module.OTHER) == (True, False)
        assert fresh_switches.installed() is table
        assert fresh_switches.bind("greedy_fast_path", "bound_afterwards") is True

    def test_same_table_again_is_fine_and_another_is_refused(self, fresh_switches: ModuleType) -> None:
        first = fresh_switches.install(resolved(greedy_fast_path=True))
        assert fresh_switches.install(resolved(greedy_fast_path=True)) is first
        with pytest.raises(SwitchError, match="different: greedy_fast_path"):
            fresh_switches.install(resolved(greedy_fast_path=False))
        assert fresh_switches.installed() is first

    @pytest.mark.parametrize("additional", [None, {}, {"enable_cpu_binding": True}])
    def test_unresolved_configuration_gets_upstream_behaviour(
        self, additional: Any, fresh_switches: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STRATA_SWITCHES", "all=on")
        table = fresh_switches.install(types.SimpleNamespace(additional_config=additional))
        assert not any(table.values.values())

    def test_configuration_of_another_image_is_refused(self, fresh_switches: ModuleType) -> None:
        with pytest.raises(SwitchError, match="same image"):
            fresh_switches.install(resolved(series="0" * 12))
        assert fresh_switches.installed() is None

    def test_unknown_switch_cannot_be_bound(self, fresh_switches: ModuleType) -> None:
        with pytest.raises(SwitchError, match="greedy_fast_path"):
            fresh_switches.bind("greedy_fast_pth", "module")

    def test_worker_installs_before_anything_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import vllm_ascend.utils
        from vllm_ascend.worker.worker import NPUWorker

        class Installed(Exception):
            pass

        def install(config: Any) -> None:
            raise Installed(config)

        monkeypatch.setattr(switches, "install", install)
        monkeypatch.setattr(vllm_ascend.utils, "adapt_patch", lambda *_: pytest.fail("something ran before"))
        with pytest.raises(Installed, match="the config"):
            NPUWorker("the config", 0, 0, "tcp://127.0.0.1:1")

    def test_another_process_gets_the_configurations_switches(
        self, engine_config: Any, tmp_path: Path
    ) -> None:
        """What a worker under multiprocessing or Ray sees: the pickled config, an environment of its own."""
        name = "greedy_fast_path"
        config = engine_config(additional_config={"strata": {name: opposite(name)}})
        payload = tmp_path / "config.pickle"
        payload.write_bytes(pickle.dumps(config))
        program = (
            "import pickle, sys, torch_npu\n"
            "config = pickle.load(open(sys.argv[1], 'rb'))\n"
            "from vllm_ascend.strata import greedy_fast_path, switches\n"
            "before = greedy_fast_path.ENABLED\n"
            "switches.install(config)\n"
            "print('RESULT', before, greedy_fast_path.ENABLED, config.compute_hash())\n"
        )
        for variable in ("", "all=on", "all=off"):
            run = subprocess.run(
                [sys.executable, "-c", program, str(payload)],
                env={**os.environ, "STRATA_SWITCHES": variable},
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, run.stderr[-2000:]
            line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT"))
            assert line == f"RESULT False {not SERIES.defaults[name]} {config.compute_hash()}"


class TestImportFailure:
    @pytest.fixture
    def broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        import vllm_ascend.strata

        monkeypatch.setattr(vllm_ascend.strata, "__path__", [*vllm_ascend.strata.__path__, str(tmp_path)])
        return tmp_path / "some_patch.py"

    @pytest.mark.parametrize(
        "content",
        [
            "import no_such_module_of_ours",
            "from vllm_ascend.utils import no_such_name",
            "raise ValueError(1)",
        ],
    )
    def test_names_the_patch(self, content: str, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        broken.write_text(content)
        monkeypatch.setattr(series, "load", lambda: dataclasses.replace(SERIES, patches=("some-patch",)))
        with pytest.raises(PatchImportError, match=r"patch 'some-patch'.*some_patch\.py"):
            from vllm_ascend.strata import some_patch  # noqa: F401

    def test_names_this_patch_if_the_series_is_unreadable(
        self, broken: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken.write_text("raise ValueError(1)")

        def load() -> None:
            raise series.SeriesError("gone")

        monkeypatch.setattr(series, "load", load)
        with pytest.raises(PatchImportError, match="patch 'runtime-switches'"):
            from vllm_ascend.strata import some_patch  # noqa: F401

    def test_absent_module_is_an_ordinary_import_error(self) -> None:
        with pytest.raises(ImportError):
            from vllm_ascend.strata import no_such_patch  # noqa: F401
