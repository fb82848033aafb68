"""One operator in a process of its own: import its wrapper, call it for each descriptor, say what happened.

Reads ``{"wrapper": path, "output": directory, "descriptors": [...]}`` on stdin and writes one JSON line for
each descriptor on stdout: ``{"name", "ok", "error", "headers"}``. Runs in the toolkit's environment; imports
nothing else of Strata.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any


def run(wrapper: Path, output: Path, descriptors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Call the wrapper's operator for each descriptor; a fault of one doesn't stop the others."""
    # the toolkit's modules, known only in its environment
    from tbe.common import register  # type: ignore[import-not-found]
    from tbe.common.buildcfg import set_build_config  # type: ignore[import-not-found]

    set_build_config(kernel_meta_parent_dir=str(output))
    spec = importlib.util.spec_from_file_location(f"wrapper_{wrapper.stem}", wrapper)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = []
    for descriptor in descriptors:
        result: dict[str, Any] = {"name": descriptor["name"], "ok": False, "error": "", "headers": []}
        try:
            build = register.OPERATORS[descriptor["op_type"]]
            extra = (
                {"impl_mode": descriptor["impl_mode"]}
                if "impl_mode" in inspect.signature(build).parameters
                else {}
            )
            build(
                *descriptor["inputs"],
                *descriptor["outputs"],
                *descriptor["attributes"],
                kernel_name=descriptor["name"],
                **extra,
            )
            report = output / "kernel_meta" / f"{descriptor['name']}.standin.json"
            result["headers"] = json.loads(report.read_text(encoding="utf-8"))["headers"]
            result["ok"] = True
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        shutil.rmtree(output / "kernel_meta", ignore_errors=True)
        results.append(result)
    return results


def main() -> int:
    job = json.load(sys.stdin)
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise):
        results = run(Path(job["wrapper"]), Path(job["output"]), job["descriptors"])
    for result in results:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
