"""A process that has the third-party packages loaded and forks for each pytest run.

A short run spends most of its time on importing torch, transformers and the like. This process imports
once what the base's packages import of others, and nothing of vLLM, vllm-ascend, the stand-ins and Triton:
those come fresh in every fork, from the path that the run is given (Triton decides at import whether it
interprets). So a run differs from one in a new process only in what third-party packages do at import.

Usage: ``preloaded.py DIR…`` with the directories of PYTHONPATH that a run on the unchanged code has. One
JSON request a line on stdin: ``{args, path, env, cwd, output, timeout}``; one reply a line on stdout: the
exit code of pytest, or null if it had to be killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FRESH = ("vllm", "vllm_ascend", "torch_npu", "acl", "mooncake", "triton", "__main__")


class _Fresh(BaseException):
    """Something tried to import what must stay unimported. Not an Exception: no guard may swallow it."""


class _Guard:
    """First on sys.meta_path while preloading."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in FRESH:
            raise _Fresh(name)


def third_party(path: list[str]) -> list[str]:
    """The modules that a run has loaded besides FRESH, in their order; found out in a fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.dup2(2, 1)
            sys.path[:0] = path
            import pytest  # noqa: F401
            import torch_npu  # noqa: F401
            from vllm_ascend.utils import adapt_patch

            adapt_patch(is_global_patch=True)
            adapt_patch()
            modules = [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]
            with os.fdopen(writer, "w") as out:
                json.dump([name for name in modules if name.partition(".")[0] not in FRESH], out)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as into:
        text = into.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else []


def preload(names: list[str]) -> int:
    """Import what of ``names`` imports without FRESH; returns how many modules that brought."""
    before = len(sys.modules)
    sys.meta_path.insert(0, _Guard)  # type: ignore[arg-type]
    try:
        for name in names:
            if name not in sys.modules and not name.startswith("torch."):
                with suppress(Exception, _Fresh):  # it is imported when a run wants it
                    importlib.import_module(name)
    finally:
        sys.meta_path.remove(_Guard)  # type: ignore[arg-type]
    return len(sys.modules) - before


def serve(request: dict[str, Any]) -> int | None:
    """Run pytest in a fork with a process group of its own; None if it took longer than its timeout."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setsid()
            output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            sys.path[:0] = request["path"]
            importlib.invalidate_caches()
            import pytest

            code = int(pytest.main(request["args"]))
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + request["timeout"]
    done, status = 0, 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    """Preload, then serve until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a package prints while it loads is no reply
    path = sys.argv[1:]
    sys.path.remove(str(Path(__file__).resolve().parent))
    names = third_party(path)
    sys.path[:0] = path
    count = preload(names)
    sys.path[: len(path)] = []
    gc.collect()
    gc.freeze()
    replies.write(json.dumps(count) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(serve(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
