"""Rendered arguments held against the installed vLLM itself, in the base's Python with vllm-ascend as the
platform.

``python -m strata.serving.parse`` reads ``{"arguments": […], "engine_config": bool}`` from stdin and writes
``{"findings": […], "result": {…}}`` to stdout. On the cpu base the stand-in modules must be on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.errors import Finding, StrataError


def check(arguments: Sequence[str], *, engine_config: bool = False) -> tuple[list[Finding], dict[str, Any]]:
    """Parse ``arguments`` with the installed parser; with ``engine_config`` also make the engine's
    configuration.

    The latter wants a model directory with a ``config.json``, and runs vLLM's validators and vllm-ascend's
    platform check. Returns findings and what the configuration became (capture sizes, graph mode,
    parallelism).
    """
    from strata.serving import catalogue, keys

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed = catalogue.parser().parse_args(list(arguments))
    except SystemExit:
        message = errors.getvalue().strip().splitlines()[-1:] or ["refused"]
        return [
            Finding(
                "E-PARSER",
                "the installed vLLM refuses these arguments",
                where="vllm serve",
                found=message[0].removeprefix("vllm serve: error: "),
                hint="correct the preset or the value",
            )
        ], {}
    except Exception as error:  # the parser turns some bad values into errors of any kind
        return [
            Finding(
                "E-PARSER",
                "the installed vLLM refuses these arguments",
                where="vllm serve",
                found=f"{type(error).__name__}: {error}"[:600],
            )
        ], {}
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    import vllm_ascend

    known = set(keys.of_package(Path(vllm_ascend.__file__).parent)) | {"strata"}
    given = getattr(parsed, "additional_config", None) or {}
    findings = [
        Finding(
            "E-KEY",
            f"the installed vllm-ascend reads no {key!r}, and would ignore it silently",
            where=f"--additional-config: {key}",
            hint="remove it",
        )
        for key in _flat(given, known)
        if key not in known
    ]
    result: dict[str, Any] = {"model": parsed.model, "additional_config": given}
    if engine_config and not findings:
        try:
            result.update(_engine_config(parsed))
        except Exception as error:
            findings.append(
                Finding(
                    "E-PARSER",
                    "vLLM makes no engine configuration of these arguments",
                    found=f"{type(error).__name__}: {error}"[:1200],
                )
            )
    return findings, result


def _flat(data: Mapping[str, Any], known: set[str]) -> list[str]:
    keys = []
    for key, value in data.items():
        keys.append(key)
        if isinstance(value, dict) and any(k.startswith(key + ".") for k in known):
            keys += [f"{key}.{inner}" for inner in value]
    return keys


def _engine_config(parsed: Any) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import validate_parsed_serve_args

    validate_parsed_serve_args(parsed)
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    compilation = config.compilation_config
    return {
        "capture_sizes": list(compilation.cudagraph_capture_sizes or ()),
        "graph_mode": compilation.cudagraph_mode.name,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "hash": config.compute_hash(),
    }


def in_base(
    python: str, arguments: Sequence[str], environment: Mapping[str, str], *, engine_config: bool = False
) -> subprocess.Popen[str]:
    """Start :func:`check` in the base's interpreter; hand the process to :func:`outcome`."""
    process = subprocess.Popen(
        [python, "-m", "strata.serving.parse"],
        env=dict(environment),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"arguments": list(arguments), "engine_config": engine_config}))
    process.stdin.close()
    process.stdin = None
    return process


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the check; its result. StrataError with its findings, E-PARSER where it did not come to an
    answer.
    """
    out, errors = process.communicate()
    try:
        answer = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise StrataError(
            Finding(
                "E-PARSER",
                "the base's vLLM could not be loaded to check the arguments",
                found=errors.strip()[-600:] or f"exit code {process.returncode}",
                hint="see strata verify",
            )
        ) from error
    if answer["findings"]:
        raise StrataError([Finding(**f) for f in answer["findings"]])
    result: dict[str, Any] = answer["result"]
    return result


def main() -> int:
    """The child process: request on stdin, answer as the last line of stdout (vLLM may print before)."""
    request = json.load(sys.stdin)
    findings, result = check(request["arguments"], engine_config=request.get("engine_config", False))
    print(json.dumps({"findings": [f.as_dict() for f in findings], "result": result}), flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
