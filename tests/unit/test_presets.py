"""Presets as data, and what the environment may change of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.errors import StrataError
from strata.serving import facts, presets

ALL = presets.names()


def codes(error: pytest.ExceptionInfo[StrataError]) -> list[str]:
    return [f.code for f in error.value.findings]


def test_the_three_presets() -> None:
    assert ALL == ["c1", "mtp", "throughput"]
    c1, mtp, throughput = (presets.load(n, {}) for n in ALL)
    assert c1.max_num_seqs == 1
    assert mtp.speculative_tokens == 4
    assert mtp.speculation is not None
    assert mtp.speculation.method == "mtp"
    assert throughput.max_num_seqs > mtp.max_num_seqs
    assert all(p.needs_npu for p in (c1, mtp, throughput))
    assert not any(e.verified_here for p in (c1, mtp, throughput) for e in p.evidence)


def test_unknown_preset_lists_those_known_and_the_near_one() -> None:
    with pytest.raises(StrataError) as caught:
        presets.load("througput", {})
    finding = caught.value.findings[0]
    assert finding.code == "E-PRESET"
    assert finding.expected == "one of c1, mtp, throughput"
    assert "throughput" in finding.hint


@given(st.integers(1, 10**6))
def test_numbers_arrive(value: int) -> None:
    assert presets.load("c1", {"MAX_NUM_SEQS": str(value)}).max_num_seqs == value
    assert presets.load("c1", {"STRATA_MAX_NUM_SEQS": str(value), "MAX_NUM_SEQS": "x"}).max_num_seqs == value


@given(st.text(alphabet="abcx.-_ ", min_size=1).filter(lambda t: t.strip()))
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(StrataError) as caught:
        presets.load("c1", {"TENSOR_PARALLEL": text})
    assert codes(caught) == ["E-ENV"]
    assert caught.value.findings[0].expected == "a whole number"


@pytest.mark.parametrize("variable", sorted(presets.OVERRIDES))
def test_empty_is_not_given(variable: str) -> None:
    assert presets.load("mtp", {variable: "  ", "STRATA_" + variable: ""}) == presets.load("mtp", {})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("MAX_NUM_SEQS", "0"),
        ("SPECULATIVE_TOKENS", "16"),
        ("GRAPH_MODE", "FUL"),
        ("MEMORY_UTILIZATION", "1.5"),
        ("MAX_MODEL_LEN", "-3"),
        ("CAPTURE", "0,2"),
    ],
)
def test_values_out_of_range_name_the_variable(variable: str, text: str) -> None:
    with pytest.raises(StrataError) as caught:
        presets.load("mtp", {variable: text})
    assert codes(caught) == ["E-CONFIG"]
    assert variable in caught.value.findings[0].where


def test_all_faults_at_once() -> None:
    with pytest.raises(StrataError) as caught:
        presets.load(
            "mtp",
            {"MAX_NUM_SEQS": "many", "STATIC_KERNEL": "perhaps", "STRATA_PRESSET": "c1", "CAPTURE": "1;2"},
        )
    assert codes(caught) == ["E-ENV"] * 4


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("STRATA_MAX_NUM_SEQ", "STRATA_MAX_NUM_SEQS"),
        ("MAX_NUM_SEQ", "MAX_NUM_SEQS"),
        ("TENSOR_PARALEL", "TENSOR_PARALLEL"),
        ("STRATA_PRESETS", "STRATA_PRESET"),
    ],
)
def test_a_misspelt_variable_is_an_error_with_the_near_one(variable: str, near: str) -> None:
    with pytest.raises(StrataError) as caught:
        presets.load("c1", {variable: "1"})
    assert codes(caught) == ["E-ENV"]
    assert near in caught.value.findings[0].hint


@pytest.mark.parametrize(
    "variable", ["MAX_JOBS", "MODELS_DIR", "PATH", "PORT", "COMPOSE_FILE", "VLLM_USE_MODELSCOPE", "HOME"]
)
def test_variables_of_others_are_left_alone(variable: str) -> None:
    assert presets.load("c1", {variable: "x"}) == presets.load("c1", {})


def test_speculation_can_be_turned_off_and_on() -> None:
    assert presets.load("mtp", {"SPECULATIVE_TOKENS": "0"}).speculation is None
    turned_on = presets.load("c1", {"SPECULATIVE_TOKENS": "2"})
    assert turned_on.speculation is not None
    assert (turned_on.speculation.method, turned_on.speculation.tokens) == ("mtp", 2)


def test_booleans_and_lists() -> None:
    preset = presets.load("mtp", {"STATIC_KERNEL": "off", "CAPTURE": "1, 4,8"})
    assert preset.features["static_kernel"] is False
    assert preset.capture == (1, 4, 8)


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = facts.directory()
    target = tmp_path / "serving"
    shutil.copytree(source, target)
    monkeypatch.setenv("STRATA_SERVING_DIR", str(target))
    return target


def test_unknown_keys_and_features_are_refused(own_data: Path) -> None:
    path = own_data / "presets" / "c1.yaml"
    text = path.read_text()
    path.write_text(text.replace("max_num_seqs:", "max_num_seq:"))
    with pytest.raises(StrataError) as caught:
        presets.load("c1", {})
    assert any("max_num_seqs" in f.hint for f in caught.value.findings)
    path.write_text(text.replace("static_kernel:", "static_kernal:"))
    with pytest.raises(StrataError) as caught:
        presets.load("c1", {})
    assert "did you mean 'static_kernel'" in caught.value.findings[0].expected


def test_missing_data_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_SERVING_DIR", str(tmp_path))
    with pytest.raises(StrataError) as caught:
        presets.load("c1", {})
    assert codes(caught) == ["E-SERVING"]
