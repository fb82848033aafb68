"""Presets as argument lists: one wish, one spelling for each release, and what a CPU engine makes of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.errors import StrataError
from strata.serving import facts, presets, render
from strata.serving.lint import lint
from strata.serving.startline import read

KNOWN = facts.catalogue("0.23.0")
SUPER = ("super-kernel-option",)


def option(rendered: render.Rendered, name: str) -> dict[str, object]:
    arguments = rendered.arguments
    value: dict[str, object] = json.loads(arguments[arguments.index(name) + 1])
    return value


@pytest.mark.parametrize("name", presets.names())
def test_each_preset_is_what_the_base_takes(name: str) -> None:
    preset = presets.load(name, {})
    rendered = render.render(preset, KNOWN)
    linted = lint(rendered.arguments, KNOWN)
    assert linted.findings == []
    assert linted.corrected is not None
    assert read(linted.corrected, KNOWN)[0].arguments() == linted.corrected
    sizes = option(rendered, "--compilation-config")["cudagraph_capture_sizes"]
    assert isinstance(sizes, list)
    assert sizes[-1] == preset.max_num_seqs * (preset.speculative_tokens + 1)


@given(
    st.integers(1, 300),
    st.integers(0, 15),
    st.sampled_from(["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    st.booleans(),
    st.booleans(),
)
def test_whatever_is_overridden_the_line_has_no_errors(
    seqs: int, n: int, mode: str, static: bool, caching: bool
) -> None:
    environment = {
        "MAX_NUM_SEQS": str(seqs),
        "SPECULATIVE_TOKENS": str(n),
        "GRAPH_MODE": mode,
        "STATIC_KERNEL": str(static),
        "PREFIX_CACHING": str(caching),
    }
    rendered = render.render(presets.load("mtp", environment), KNOWN)
    assert lint(rendered.arguments, KNOWN).errors == []
    compilation = option(rendered, "--compilation-config")
    assert static <= (compilation["cudagraph_mode"] in ("FULL", "FULL_DECODE_ONLY"))


def test_c05_one_wish_four_spellings() -> None:
    preset = presets.load("c1", {})
    with pytest.raises(StrataError) as caught:
        render.render(preset, KNOWN, version="0.13.0")
    assert "static_kernel" in caught.value.findings[0].message
    at_15 = option(render.render(preset, KNOWN, version="0.15.0"), "--additional-config")
    assert at_15["npugraph_ex_config"] == {"enable": True, "enable_static_kernel": True}
    assert "ascend_compilation_config" not in at_15
    at_23 = option(render.render(preset, KNOWN, version="0.23.0"), "--additional-config")
    assert at_23["ascend_compilation_config"] == {"enable_npugraph_ex": True, "enable_static_kernel": True}
    with_super = presets.load("c1", {"SUPER_KERNEL": "on"})
    at_26 = option(render.render(with_super, KNOWN, version="0.26.0rc1"), "--additional-config")
    assert at_26["ascend_compilation_config"] == {
        "enable_npugraph_ex": True,
        "enable_static_kernel": True,
        "enable_super_kernel": True,
    }


def test_super_kernel_on_this_base_needs_the_patch() -> None:
    preset = presets.load("c1", {"SUPER_KERNEL": "on"})
    with pytest.raises(StrataError) as caught:
        render.render(preset, KNOWN)
    assert "super-kernel-option" in caught.value.findings[0].message
    rendered = render.render(preset, KNOWN, patches=SUPER)
    assert option(rendered, "--additional-config")["ascend_compilation_config"] == {
        "enable_npugraph_ex": True,
        "enable_static_kernel": True,
        "enable_super_kernel": True,
    }


def test_super_without_static_is_refused() -> None:
    with pytest.raises(StrataError) as caught:
        render.render(
            presets.load("c1", {"SUPER_KERNEL": "on", "STATIC_KERNEL": "off"}), KNOWN, patches=SUPER
        )
    assert [f.code for f in caught.value.findings] == ["E-SUPER"]


def test_static_kernel_sets_the_graph_mode_and_says_so() -> None:
    rendered = render.render(presets.load("c1", {"GRAPH_MODE": "PIECEWISE"}), KNOWN)
    assert option(rendered, "--compilation-config")["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert any("PIECEWISE becomes FULL_DECODE_ONLY" in n for n in rendered.notes)
    with pytest.raises(StrataError):
        render.render(presets.load("c1", {"GRAPH_MODE": "NONE"}), KNOWN)


@pytest.mark.parametrize("alias", ["qwen3_5_mtp", "qwen3_next_mtp", "deepseek_mtp"])
def test_c14_aliases_become_the_name_of_this_version(alias: str) -> None:
    rendered = render.render(presets.load("mtp", {"SPECULATIVE_METHOD": alias}), KNOWN)
    assert option(rendered, "--speculative-config") == {"method": "mtp", "num_speculative_tokens": 4}
    assert any(alias in n for n in rendered.notes)


def test_c14_a_typo_is_refused_with_the_near_match() -> None:
    with pytest.raises(StrataError) as caught:
        render.render(presets.load("mtp", {"SPECULATIVE_METHOD": "qwen35_mtp"}), KNOWN)
    assert caught.value.findings[0].code == "E-METHOD"
    assert "qwen3_5_mtp" in caught.value.findings[0].hint


def test_faults_of_different_parts_come_together() -> None:
    preset = presets.load("mtp", {"SUPER_KERNEL": "on", "SPECULATIVE_METHOD": "mpt", "MAX_NUM_SEQS": "5000"})
    with pytest.raises(StrataError) as caught:
        render.render(preset, KNOWN)
    assert {f.code for f in caught.value.findings} == {"E-SPELLING", "E-METHOD", "E-CAPTURE"}


def test_cpu_engine_tells_each_difference() -> None:
    rendered = render.render(presets.load("mtp", {}), KNOWN)
    here = render.for_cpu_engine(rendered, KNOWN, model="/models/tiny", limit=4096)
    assert here.arguments[0] == "/models/tiny"
    assert "--enforce-eager" in here.arguments
    assert not {"--additional-config", "--compilation-config", "--tensor-parallel-size"} & set(here.arguments)
    speculative = option(here, "--speculative-config")
    assert speculative["method"] == "ngram"
    assert speculative["num_speculative_tokens"] == 4
    told = "\n".join(here.notes)
    for name in (
        "--tensor-parallel-size 2",
        "enable_cpu_binding",
        "enable_static_kernel",
        "cudagraph_mode",
        "--max-model-len",
    ):
        assert name in told
    assert "mtp with 4 tokens: n-grams" in told


def test_cpu_engine_keeps_a_model_of_the_users_own() -> None:
    rendered = render.render(presets.load("c1", {"MODEL": "/models/mine", "MAX_MODEL_LEN": "9000"}), KNOWN)
    here = render.for_cpu_engine(rendered, KNOWN)
    assert here.arguments[0] == "/models/mine"
    assert here.arguments[here.arguments.index("--max-model-len") + 1] == "9000"


def test_every_changed_option_of_the_cpu_line_is_in_a_note() -> None:
    for name in presets.names():
        rendered = render.render(presets.load(name, {}), KNOWN)
        here = render.for_cpu_engine(rendered, KNOWN)
        before, _ = read(rendered.arguments, KNOWN)
        after, _ = read(here.arguments, KNOWN)
        for gone in {o.name for o in before.options} - {o.name for o in after.options}:
            assert any(gone in note for note in here.notes), gone


def test_unknown_version_of_the_catalogue() -> None:
    with pytest.raises(StrataError) as caught:
        facts.catalogue("0.32.0")
    assert caught.value.findings[0].code == "E-CATALOGUE"
    assert "0.23.0" in caught.value.findings[0].expected
