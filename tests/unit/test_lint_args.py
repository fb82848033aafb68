"""The linter for start lines, on lines as people write them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.serving import facts
from strata.serving.keys import additional_keys
from strata.serving.lint import Linted, lint, near_power
from strata.serving.startline import JSON_OPTIONS, integer, read

KNOWN = facts.catalogue("0.23.0")


def run(line: str, **more: object) -> Linted:
    return lint(shlex.split(line), KNOWN, **more)  # type: ignore[arg-type]


def codes(result: Linted) -> list[str]:
    return [f.code for f in result.findings]


def corrected(result: Linted) -> str:
    assert result.corrected is not None
    assert lint(result.corrected, KNOWN).errors == [], "the corrected line must be correct"
    return shlex.join(result.corrected)


def test_a_good_line_has_no_findings() -> None:
    result = run(
        """vllm serve M --max-num-seqs 8 -tp 2 --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}'"""
    )
    assert result.findings == []
    assert corrected(result).startswith("M --max-num-seqs 8 --tensor-parallel-size 2")


def test_c01_json_given_twice() -> None:
    result = run(
        """M --max-num-seqs 128 --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
        --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}'
        --compilation-config '{"cudagraph_capture_sizes":[1,2,4,8,16,32,64]}'"""
    )
    twice, sizes = result.findings
    assert twice.code == "E-TWICE"
    assert "cudagraph_mode would be lost" in twice.message
    assert sizes.code == "E-CAPTURE"
    assert "16 of 128" in sizes.message
    assert "[4, 8, 16, 32, 64]" in sizes.found
    line = corrected(result)
    assert line.count("--compilation-config") == 1
    assert '"cudagraph_mode":"FULL_DECODE_ONLY"' in line
    assert ",512]" in line


@pytest.mark.parametrize(("seqs", "reach"), [(12, 8), (20, 16), (77, 72), (100, 96)])
def test_c02_default_sizes_warn_and_end_exactly(seqs: int, reach: int) -> None:
    result = run(f"M --max-num-seqs {seqs}")
    assert codes(result) == ["W-CAPTURE"]
    assert f"{reach} of {seqs}" in result.findings[0].message
    assert f",{seqs}]" in corrected(result)


def test_c03_refused_before_launch() -> None:
    result = run(
        """M -tp 4 --max-num-seqs 8 --speculative-config '{"method":"mtp","num_speculative_tokens":5}'
        --compilation-config '{"pass_config":{"enable_sp":true}}'"""
    )
    assert codes(result) == ["E-CAPTURE-UNIT"]


@pytest.mark.parametrize(
    ("line", "reach", "ends"),
    [
        ("--max-num-seqs 6 --spec-method mtp --spec-tokens 3 --max-cudagraph-capture-size 6", 1, 24),
        ("--max-num-seqs 14 --spec-method mtp --spec-tokens 2 --max-cudagraph-capture-size 42", 11, 42),
    ],
)
def test_c04_a_maximum_becomes_a_list(line: str, reach: int, ends: int) -> None:
    result = run("M " + line)
    assert codes(result) == ["E-CAPTURE"]
    assert f"cover {reach} of" in result.findings[0].message
    mended = corrected(result)
    assert "--max-cudagraph-capture-size" not in mended
    assert f",{ends}]" in mended


def test_c05_inner_keys_and_what_hangs_together() -> None:
    result = run("""M --additional-config '{"ascend_compilation_config":{"enable_static_kernal":true}}'""")
    assert codes(result) == ["E-KEY", "E-GRAPH"]
    assert "enable_static_kernel" in result.findings[0].hint
    line = corrected(result)
    assert '"enable_static_kernel":true' in line
    assert '"cudagraph_mode":"FULL_DECODE_ONLY"' in line
    alone = """M --additional-config '{"ascend_compilation_config":{"enable_super_kernel":true}}'"""
    without = run(alone)
    assert "super-kernel-option" in without.findings[0].hint
    built_in = lint(shlex.split(alone), KNOWN, patches=["super-kernel-option"])
    assert codes(built_in) == ["E-SUPER", "E-GRAPH"]


def test_keys_that_patches_bring_are_known_where_the_patch_is() -> None:
    for patch, names in facts.facts().patch_keys.items():
        for name in names:
            line = ["M", "--additional-config", json.dumps({name: 1})]
            assert codes(lint(line, KNOWN, patches=[patch])) == []
            without = lint(line, KNOWN)
            assert codes(without) == ["E-KEY"] and patch in without.findings[0].hint


def test_every_top_level_key_that_a_patch_reads_is_listed() -> None:
    root = Path(__file__).resolve().parents[2] / "patches"
    read = {
        path.relative_to(root).parts[1]: additional_keys([path.read_text(encoding="utf-8")])
        for path in root.glob("*/*/files/vllm_ascend/strata/*.py")
        if "runtime-switches" not in path.parts
    }
    new = {patch: {k for k in found if "." not in k} - set(KNOWN.additional) for patch, found in read.items()}
    assert {p: k for p, k in new.items() if k} == {p: set(k) for p, k in facts.facts().patch_keys.items()}


def test_c06_everything_in_one_run() -> None:
    result = run(
        """M --disable-log-requests --enable-reasoning --task generate --swap-space 4 --async-scheduling
        --compilation-config '{"full_cuda_graph":true}'""",
        environment={"VLLM_TORCH_PROFILER_DIR": "/profiles", "HOME": "/root"},
    )
    by_place = {f.where: f for f in result.findings}
    assert "now the default" in by_place["--disable-log-requests"].message
    assert "dropped" in by_place["--enable-reasoning"].message
    assert by_place["--task"].hint == "write --runner generate"
    assert "dropped" in by_place["--swap-space"].message
    assert by_place["--async-scheduling"].code == "W-DEFAULT"
    assert "cudagraph_mode" in by_place["--compilation-config: full_cuda_graph"].hint
    assert "--profiler-config" in by_place["environment: VLLM_TORCH_PROFILER_DIR"].hint
    assert len(result.findings) == 7
    assert all(f.details or f.hint for f in result.findings)
    assert (
        corrected(result)
        == """M --runner generate --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}'"""
    )


def test_c07_keys_that_are_ignored_silently() -> None:
    result = run(
        """M --additional-config '{"ascend_scheduler_config":{"enabled":true},
        "torchair_graph_config":{"enabled":true,"graph_batch_sizes":[28]}}'"""
    )
    scheduler, torchair = result.findings
    assert scheduler.code == torchair.code == "E-STALE-KEY"
    assert "no successor, delete it" in scheduler.hint
    assert "cudagraph_mode" in torchair.hint
    assert "dropped with it: torchair_graph_config.graph_batch_sizes" in torchair.details
    assert corrected(result) == "M"


def test_c08_the_column_of_bad_json() -> None:
    text = (
        '{"graph_batch_sizes":[28],"use_cached_graph":true,"enable_super_kernel":false},'
        '"multistream_overlap_shared_expert":true}'
    )
    result = lint(["M", "--additional-config", text], KNOWN)
    assert codes(result) == ["E-JSON"]
    column = text.index("},") + 2
    assert f"column {column}" in result.findings[0].where
    shown, caret = result.findings[0].details
    assert shown[len(caret) - 1] == ","
    assert result.corrected is None


def test_c14_methods() -> None:
    old = run("""M --speculative-config '{"method":"qwen3_5_mtp","num_speculative_tokens":4}'""")
    assert codes(old) == ["W-METHOD"]
    assert '"method":"mtp"' in corrected(old)
    typo = run("""M --speculative-config '{"method":"qwen35_mtp","num_speculative_tokens":16}'""")
    assert codes(typo) == ["E-METHOD", "E-SPEC"]
    assert "qwen3_5_mtp" in typo.findings[0].hint


def test_c15_the_published_line() -> None:
    result = run(
        """Qwen/Qwen3-235B-A22B
        --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_size":[25]}'
        --additional-config '{"enable_cpu_binding":true,"ascend_scheduler_config":{"enabled":false}}'
        --disable-log-requests"""
    )
    assert sorted(f.where for f in result.errors) == [
        "--additional-config: ascend_scheduler_config",
        "--compilation-config: cudagraph_capture_size",
        "--disable-log-requests",
    ]
    assert corrected(result) == (
        "Qwen/Qwen3-235B-A22B "
        """--compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[25]}' """
        """--additional-config '{"enable_cpu_binding":true}'"""
    )


def test_c16_a_slip_for_a_power_of_two() -> None:
    result = run("M --max-num-batched-tokens 8096")
    assert codes(result) == ["W-SLIP"]
    assert "8192" in result.findings[0].message
    assert result.errors == []


@pytest.mark.parametrize(
    ("value", "power"),
    [
        (8096, 8192),
        (8192, None),
        (8000, None),
        (4906, None),
        (16348, 16384),
        (32000, None),
        (1000, None),
        (512, None),
        (32786, 32768),
    ],
)
def test_near_powers(value: int, power: int | None) -> None:
    assert near_power(value) == power


@pytest.mark.parametrize(
    ("line", "code", "hint"),
    [
        ("M --max-num-seq 4", "E-FLAG", "--max-num-seqs"),
        ("M --max_num_sequences 4", "E-FLAG", "--max-num-seqs"),
        ("M --frobnicate", "E-FLAG", "remove it"),
        ("M --tensor-parallel-size four", "E-VALUE", ""),
        ("M --runner generat", "E-VALUE", "generate"),
        ("M --tensor-parallel-size 2 -tp 4", "E-TWICE", ""),
        ("""M --compilation-config '{"cudagraph_mode":"FULL_DECODE"}'""", "E-VALUE", "FULL_DECODE_ONLY"),
        ("""M --compilation-config '{"cudagraph_modes":"FULL"}'""", "E-KEY", "cudagraph_mode"),
        ("""M --compilation-config '{"enable_sp":true}'""", "E-KEY", "pass_config"),
        ("""M --additional-config '{"enable_static_kernel":true}'""", "E-KEY", "ascend_compilation_config"),
        ("""M --additional-config '[1]'""", "E-JSON", ""),
        ("""M --additional-config '{"enable_cpu_bindings":true}'""", "E-KEY", "enable_cpu_binding"),
        (
            """M --additional-config '{"npugraph_ex_config":{"enable":true}}'""",
            "E-STALE-KEY",
            "ascend_compilation_config",
        ),
    ],
)
def test_one_fault_each(line: str, code: str, hint: str) -> None:
    result = run(line)
    assert code in codes(result)
    assert any(hint in f.hint for f in result.findings)


def test_dotted_options_are_read_as_vllm_reads_them() -> None:
    result = run(
        "M -cc.cudagraph_mode=FULL --compilation-config.cudagraph_capture_sizes '[1,2]' --max-num-seqs 2"
    )
    assert result.findings == []
    assert '{"cudagraph_mode":"FULL","cudagraph_capture_sizes":[1,2]}' in corrected(result)


def test_strata_switches_are_a_known_key() -> None:
    assert run("""M --additional-config '{"strata":{"min_tokens_mask_cache":false}}'""").findings == []


def test_the_stale_tables_agree_with_the_catalogue() -> None:
    """What 0.23.0's own parser and sources know is not called stale, unless it is known and without
    effect.
    """
    known = facts.facts()
    for stale in known.stale_flags:
        assert (KNOWN.flag(stale.name) is not None) == stale.silent, stale.name
    for stale in known.stale_keys["compilation-config"]:
        assert stale.name not in KNOWN.configs["compilation-config"]
        assert stale.becomes in KNOWN.configs["compilation-config"]
    for stale in known.stale_keys["additional-config"]:
        assert stale.name not in KNOWN.additional
        assert stale.silent
    for stale in known.stale_environment:
        assert stale.name not in KNOWN.environment
    for wish in known.wishes.values():
        for spelling in wish.wanted:
            if spelling.holds("0.23.0") and not spelling.patch:
                for key, value in spelling.additional_config.items():
                    assert key in KNOWN.additional
                    assert all(
                        f"{key}.{inner}" in KNOWN.additional
                        for inner in (value if isinstance(value, dict) else ())
                    )


PLAIN = st.sampled_from(
    [
        n
        for f in KNOWN.flags
        if f.takes == "nothing"
        for n in f.names[:1]
        if n.startswith("--") and n != "--help"
    ]
)
WORD = st.text(alphabet="abcdefgh_-0123", min_size=1, max_size=12)
SETTINGS = st.dictionaries(
    st.one_of(st.sampled_from([k for k in KNOWN.additional if "." not in k]), WORD),
    st.one_of(st.booleans(), st.integers(0, 9)),
    max_size=4,
)


@given(
    st.lists(PLAIN, max_size=3),
    st.lists(SETTINGS, max_size=2),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(0, 15),
    st.one_of(st.none(), st.lists(st.integers(1, 300), min_size=1, max_size=5)),
    st.lists(WORD, max_size=2),
)
def test_a_corrected_line_needs_no_correction(
    plain: list[str],
    settings: list[dict[str, object]],
    seqs: int | None,
    n: int,
    sizes: list[int] | None,
    words: list[str],
) -> None:
    arguments = ["M", *plain, *(f"--{w}" for w in words)]
    for data in settings:
        arguments += ["--additional-config", json.dumps(data)]
    if seqs is not None:
        arguments += ["--max-num-seqs", str(seqs)]
    if n:
        arguments += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": n})]
    if sizes is not None:
        arguments += ["--compilation-config", json.dumps({"cudagraph_capture_sizes": sizes})]
    result = lint(arguments, KNOWN)
    assert result.corrected is not None
    again = lint(result.corrected, KNOWN)
    assert [f for f in again.errors if f.code != "E-VALUE"] == []
    line, findings = read(result.corrected, KNOWN)
    assert findings == []
    assert line.arguments() == result.corrected


@given(st.text(max_size=60))
def test_any_text_as_json_is_told_or_read(text: str) -> None:
    for name in JSON_OPTIONS[:2]:
        result = lint(["M", name, text], KNOWN)
        try:
            readable = isinstance(json.loads(text), dict)
        except ValueError:
            readable = False
        assert ("E-JSON" in codes(result)) != readable


@pytest.mark.parametrize(
    ("text", "value"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("12", 12), ("x", None), ("", None), (None, None)],
)
def test_counts_as_vllm_writes_them(text: str | None, value: int | None) -> None:
    assert integer(text) == value
