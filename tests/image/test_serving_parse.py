"""Rendered arguments and the start-line rules against the vLLM and vllm-ascend that are installed in the
image.

Everything runs inside the finished image with its own Python (``docker run``); the host needs the engine
only.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from strata.serving import facts, presets, render
from strata.serving.lint import lint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
KNOWN = facts.catalogue("0.23.0")
MODEL = "/tmp/model"

# a configuration that has MTP layers and divides over eight ranks; nothing is loaded from it
CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
}


def image() -> str:
    name = os.environ.get("STRATA_IMAGE", "") or "strata:0.23.0-cpu"
    found = subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False)
    assert found.returncode == 0, f"no image {name}: run make image VERSION=0.23.0 first"
    return name


def inside(script: str, payload: Any = None, *, fails: bool = False) -> Any:
    """Run Python in the image with the base's interpreter and stand-in modules; the last line of stdout is
    its answer.
    """
    command = [
        "docker",
        "run",
        "--rm",
        "-i",
        "--network",
        "none",
        "--entrypoint",
        "/opt/base/venv/bin/python",
        "-e",
        "PYTHONPATH=/opt/strata/lib:/opt/base/stubs",
        "-e",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "-e",
        "HF_HUB_OFFLINE=1",
        "-e",
        "VLLM_LOGGING_LEVEL=ERROR",
        "-e",
        f"PAYLOAD={json.dumps(payload)}",
        image(),
        "-",
    ]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


PARSE = """
import json, os
from strata.serving import parse
answers = {}
for name, arguments in json.loads(os.environ["PAYLOAD"]).items():
    findings, result = parse.check(arguments)
    answers[name] = {"findings": [f.as_dict() for f in findings], "model": result.get("model")}
print(json.dumps(answers))
"""

LINES = {
    "c04": "M --max-num-seqs 6 --spec-method mtp --spec-tokens 3 --max-cudagraph-capture-size 6",
    "c06": "M --disable-log-requests --enable-reasoning --task generate --swap-space 4 --async-scheduling "
    "--compilation-config '{\"full_cuda_graph\":true}'",
    "c07": 'M --additional-config \'{"ascend_scheduler_config":{"enabled":true},'
    '"torchair_graph_config":{"enabled":true,"graph_batch_sizes":[28]}}\'',
    "c08": 'M --additional-config \'{"graph_batch_sizes":[28],"use_cached_graph":true},"multistream":true}\'',
    "c15": 'M --compilation-config \'{"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_size":[25]}\' '
    "--additional-config "
    '\'{"enable_cpu_binding":true,"ascend_scheduler_config":{"enabled":false}}\' --disable-log-requests',
    "inner": 'M --additional-config \'{"ascend_compilation_config":{"enable_static_kernal":true}}\'',
    "typo": "M --max-num-seq 4",
}


@cache
def answers() -> dict[str, Any]:
    """Every preset, every case, and each corrected line, parsed in one container."""
    lines: dict[str, list[str]] = {
        f"preset {n}": render.render(presets.load(n, {}), KNOWN).arguments for n in presets.names()
    }
    for name, line in LINES.items():
        lines[name] = shlex.split(line)
        mended = lint(lines[name], KNOWN).corrected
        if mended is not None:
            lines[f"{name} corrected"] = mended
    result: dict[str, Any] = inside(PARSE, lines)
    return result


@pytest.mark.parametrize("name", presets.names())
def test_the_installed_parser_takes_each_preset(name: str) -> None:
    assert answers()[f"preset {name}"]["findings"] == []
    assert answers()[f"preset {name}"]["model"] == presets.load(name, {}).model


@pytest.mark.parametrize("name", sorted(LINES))
def test_our_errors_agree_with_the_installed_release(name: str) -> None:
    """Each line that the linter calls wrong is refused, or ignored without a word; each corrected one is
    taken.
    """
    ours = lint(shlex.split(LINES[name]), KNOWN)
    assert ours.errors
    theirs = answers()[name]["findings"]
    silent = all("cover" in f.message for f in ours.errors) or name == "c08"
    assert bool(theirs) or silent, (
        "upstream takes c04 and reads c08 as a string: that is why there is a linter"
    )
    if ours.corrected is not None:
        assert answers()[f"{name} corrected"]["findings"] == []


def test_the_catalogue_is_the_installed_release() -> None:
    script = """
import json
from strata.serving import catalogue
print(json.dumps(catalogue.build().model_dump(mode="json")))
"""
    installed = inside(script)
    recorded = KNOWN.model_dump(mode="json")
    extra = set(installed["additional"]) - set(recorded["additional"])
    brought = {key for keys in facts.facts().patch_keys.values() for key in keys}
    other = {k for k in extra - brought if not k.startswith("strata") and "super_kernel" not in k}
    assert (other, brought - extra) == (set(), set()), "only Strata's patches add keys, and they add these"
    assert set(recorded["additional"]) <= set(installed["additional"])
    for part in ("version", "flags", "configs", "graph_modes", "methods", "mtp_aliases", "environment"):
        assert installed[part] == recorded[part], part


ADJUST = """
import json, os, random, types
from strata.serving import capture
from vllm.config.compilation import CompilationConfig
rule = CompilationConfig.adjust_cudagraph_sizes_for_spec_decode
random.seed(7)
different = []
for trial in range(3000):
    n, tp, sp = random.randrange(16), random.choice([1, 2, 3, 4, 6, 8]), random.random() < 0.4
    if random.random() < 0.5:
        sizes = sorted(random.sample(range(1, 600), random.randrange(1, 12)))
    else:
        sizes = capture.default_grid(random.randrange(1, 513))
    upstream = types.SimpleNamespace(
        pass_config=types.SimpleNamespace(enable_sp=sp),
        cudagraph_capture_sizes=list(sizes),
        max_cudagraph_capture_size=sizes[-1],
    )
    try:
        rule(upstream, n + 1, tp)
        theirs = upstream.cudagraph_capture_sizes
    except ValueError:
        theirs = None
    try:
        ours = capture.adjust(sizes, capture.unit(n, tp, sp)) or None
    except Exception:
        ours = None
    if theirs != ours:
        different.append([n, tp, sp, sizes, theirs, ours])
print(json.dumps(different[:3]))
"""


def test_the_capture_rule_is_vllms_own() -> None:
    assert inside(ADJUST) == []


ENGINE = """
import json, os, pathlib
from transformers import AutoConfig
from strata.serving import parse
payload = json.loads(os.environ["PAYLOAD"])
config = AutoConfig.for_model(payload["config"]["model_type"])
config.architectures = payload["config"]["architectures"]
pathlib.Path("/tmp/model").mkdir()
config.save_pretrained("/tmp/model")
from unittest.mock import patch
findings, result = parse.check(payload["arguments"], engine_config=True)
print(json.dumps({"findings": [f.as_dict() for f in findings], "result": {k: result.get(k) for k in
                  ("capture_sizes", "graph_mode", "tensor_parallel")}}))
"""


@pytest.mark.parametrize("name", presets.names())
def test_the_engine_configuration_keeps_what_was_rendered(name: str) -> None:
    """vLLM's validators and vllm-ascend's platform check, on a configuration with MTP layers: nothing is
    adjusted away.
    """
    preset = presets.load(name, {"MODEL": MODEL})
    rendered = render.render(preset, KNOWN).arguments
    answer = inside(ENGINE, {"config": CONFIG, "arguments": [*rendered, "--skip-tokenizer-init"]})
    assert answer["findings"] == []
    compilation = json.loads(rendered[rendered.index("--compilation-config") + 1])
    assert answer["result"]["capture_sizes"] == compilation["cudagraph_capture_sizes"]
    assert answer["result"]["graph_mode"] == "FULL_DECODE_ONLY"
    assert answer["result"]["tensor_parallel"] == preset.tensor_parallel
