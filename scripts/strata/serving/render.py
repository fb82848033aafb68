"""Preset to arguments: for the base's own vLLM, and from that for the CPU engine with every difference
told.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from strata.errors import Finding, StrataError
from strata.serving import capture
from strata.serving.facts import Catalogue, Spelling, Wish, facts, spelling
from strata.serving.lint import lint, speculative_method
from strata.serving.presets import Preset
from strata.serving.startline import dumps, read

PORT = 8000
_FULL_BY_DEFAULT = "FULL_DECODE_ONLY"


@dataclass(frozen=True)
class Rendered:
    """arguments: what follows ``vllm serve``, the model first; notes: what a reader of the log should
    know.
    """

    arguments: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass
class _Parts:
    arguments: list[str] = field(default_factory=list)
    compilation: dict[str, Any] = field(default_factory=dict)
    additional: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)

    def take(self, chosen: Spelling) -> None:
        self.arguments += chosen.arguments
        _merge(self.compilation, chosen.compilation_config)
        _merge(self.additional, chosen.additional_config)
        _merge(self.speculative, chosen.speculative_config)


def render(
    preset: Preset,
    catalogue: Catalogue,
    *,
    version: str | None = None,
    patches: Collection[str] = (),
    additional: Collection[str] | None = None,
    host: str = "0.0.0.0",
    port: int = PORT,
) -> Rendered:
    """The preset as the arguments of this base's ``vllm serve``.

    version: the release whose spellings are wanted (None: the catalogue's). patches, additional: see lint.
    The result is held against the catalogue before it is returned; every fault of preset and result is raised
    at once.
    """
    version = version or catalogue.version
    parts = _Parts()
    notes: list[str] = []
    faults: list[Finding] = []
    mode = _features(preset, version, patches, parts, notes, faults)
    if preset.speculation:
        _speculation(preset, catalogue, version, parts, notes, faults)
    sequence_parallel = bool(parts.compilation.get("pass_config", {}).get("enable_sp"))
    parts.compilation = {"cudagraph_mode": mode, **parts.compilation}
    if mode == "NONE":
        notes.append("graph mode NONE: nothing is captured")
    else:
        try:
            parts.compilation["cudagraph_capture_sizes"] = capture.capture_sizes(
                preset.max_num_seqs,
                preset.speculative_tokens,
                preset.capture,
                tp=preset.tensor_parallel,
                sequence_parallel=sequence_parallel,
                max_num_tokens=preset.max_num_batched_tokens,
            )
        except StrataError as error:
            faults += error.findings
    _merge(parts.additional, preset.additional_config)
    if faults:
        raise StrataError(faults)
    arguments = [
        preset.model,
        *("--served-model-name", preset.served_model_name),
        *("--host", host, "--port", str(port)),
        *("--tensor-parallel-size", str(preset.tensor_parallel)),
        *_unless(1, "--pipeline-parallel-size", preset.pipeline_parallel),
        *_unless(1, "--data-parallel-size", preset.data_parallel),
        *("--max-num-seqs", str(preset.max_num_seqs)),
        *("--max-model-len", str(preset.max_model_len)),
        *("--max-num-batched-tokens", str(preset.max_num_batched_tokens)),
        *("--gpu-memory-utilization", f"{preset.memory_utilization:g}"),
        *parts.arguments,
        *preset.arguments,
        *_json("--compilation-config", parts.compilation),
        *_json("--speculative-config", parts.speculative),
        *_json("--additional-config", parts.additional),
    ]
    if version == catalogue.version:
        linted = lint(arguments, catalogue, patches=patches, additional=additional)
        if linted.errors:
            raise StrataError(linted.errors)
        notes += [f"{f.code} {f.message}" + (f" ({f.hint})" if f.hint else "") for f in linted.findings]
    return Rendered(arguments, notes)


def _features(
    preset: Preset,
    version: str,
    patches: Collection[str],
    parts: _Parts,
    notes: list[str],
    faults: list[Finding],
) -> str:
    """Merges the spelling of each wish; returns the graph mode, which some wishes decide."""
    wishes = facts().wishes
    mode: str = preset.graph_mode
    for name, on in preset.features.items():
        wish = wishes[name]
        try:
            chosen = spelling(wish, name, version, on=on)
        except StrataError as error:
            faults += error.findings
            continue
        if on and (problem := _missing(name, wish, chosen, preset, patches)):
            faults.append(problem)
            continue
        if on and wish.graph_modes and mode not in wish.graph_modes:
            if mode == "NONE":
                faults.append(
                    Finding(
                        "E-GRAPH",
                        f"{name} needs a full-graph mode",
                        where="graph_mode",
                        found=mode,
                        expected=" or ".join(wish.graph_modes),
                        hint=f"set {name}: false, or a graph mode",
                    )
                )
                continue
            notes.append(
                f"graph mode {mode} becomes {_FULL_BY_DEFAULT}: {name} has no effect without a full graph"
            )
            mode = _FULL_BY_DEFAULT
        parts.take(chosen)
    return mode


def _missing(
    name: str, wish: Wish, chosen: Spelling, preset: Preset, patches: Collection[str]
) -> Finding | None:
    lacking = [r for r in wish.requires if not preset.features.get(r)]
    if lacking:
        code = "E-SUPER" if name == "super_kernel" else "E-FEATURE"
        return Finding(
            code,
            f"{name} without {', '.join(lacking)}",
            where=f"features: {name}",
            expected="both, or neither",
            found=f"{name} alone",
            hint=f"add {lacking[0]}: true, or take {name} out",
        )
    if chosen.patch and chosen.patch not in patches:
        return Finding(
            "E-SPELLING",
            f"{name}: this base knows the option through the patch {chosen.patch} only",
            where=f"features: {name}",
            expected=f"{chosen.patch} in the image",
            found="an image without it",
            hint=f"build it in (no WITHOUT={chosen.patch}), or take {name} out",
        )
    return None


def _speculation(
    preset: Preset, catalogue: Catalogue, version: str, parts: _Parts, notes: list[str], faults: list[Finding]
) -> None:
    assert preset.speculation is not None
    method = preset.speculation.method
    wish = facts().speculation.get(method)
    try:
        if wish is not None:
            parts.take(spelling(wish, method, version))
        else:
            name, finding = speculative_method(method, catalogue)
            if finding and finding.code.startswith("E-"):
                faults.append(finding)
            elif finding:
                notes.append(f"{finding.code} {finding.message}; {name} is given")
            parts.speculative["method"] = name
    except StrataError as error:
        faults += error.findings
        return
    parts.speculative["num_speculative_tokens"] = preset.speculation.tokens
    if preset.speculation.model:
        parts.speculative["model"] = preset.speculation.model


def _unless(usual: int, option: str, value: int) -> tuple[str, ...]:
    return () if value == usual else (option, str(value))


def _json(option: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    return (option, dumps(dict(data))) if data else ()


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


_ALONE = "the CPU engine here runs as one rank"
_DROPPED_ON_CPU = {
    "--tensor-parallel-size": _ALONE,
    "--pipeline-parallel-size": _ALONE,
    "--data-parallel-size": _ALONE,
    "--enable-expert-parallel": _ALONE,
    "--gpu-memory-utilization": "device memory; the CPU engine's KV cache is set by VLLM_CPU_KVCACHE_SPACE",
}


def for_cpu_engine(
    rendered: Rendered, catalogue: Catalogue, *, model: str | None = None, limit: int | None = None
) -> Rendered:
    """The same line for the CPU engine; the notes say what was taken away or changed, one line each, and why.

    model: serve this instead (the tiny model); limit: the most positions that it has.
    """
    line, faults = read(rendered.arguments, catalogue)
    if faults:
        raise StrataError(faults)
    notes: list[str] = []
    if model is not None:
        notes.append(
            f"model {line.model}: replaced by {model}, a tiny model with random weights (its text is noise)"
        )
        line.model = model
    for option in list(line.options):
        if option.name in _DROPPED_ON_CPU:
            if option.values != ["1"]:
                notes.append(
                    f"{' '.join([option.name, *option.values])}: dropped, {_DROPPED_ON_CPU[option.name]}"
                )
            line.options.remove(option)
    additional = line.data("--additional-config")
    notes += [
        f"--additional-config {key}={dumps(value)}: dropped, an NPU option"
        for key, value in additional.items()
    ]
    line.remove("--additional-config")
    compilation = line.data("--compilation-config")
    if compilation.get("cudagraph_mode") != "NONE":
        notes += [
            f"--compilation-config {key}={dumps(value)}: dropped, graphs are captured on an NPU only"
            for key, value in compilation.items()
        ]
    line.remove("--compilation-config")
    speculative = line.data("--speculative-config")
    if speculative and speculative.get("method") != "ngram":
        tokens = speculative["num_speculative_tokens"]
        notes.append(
            f"speculation {speculative['method']} with {tokens} tokens: n-grams, {tokens} tokens, instead; "
            "the CPU engine and the tiny model have no draft layers"
        )
        entry = facts().speculation["ngram"]
        chosen = dict(spelling(entry, "ngram", catalogue.version).speculative_config)
        speculative.clear()
        speculative.update(chosen, num_speculative_tokens=tokens)
    length = line.get("--max-model-len")
    if limit is not None and length is not None and int(length.values[0]) > limit:
        notes.append(f"--max-model-len {length.values[0]}: {limit}, the tiny model has no more positions")
        length.values = [str(limit)]
    return Rendered([*line.arguments(), "--enforce-eager"], notes)
