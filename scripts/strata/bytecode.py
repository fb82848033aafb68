"""Bytecode for what ``strata apply --out`` wrote, and the plan that the finished image is held to.

``python -m strata.bytecode OUT`` runs in the edits stage with the base's Python and the standard library. It
adds a
``.pyc`` beside every Python file below ``OUT/source`` and writes ``OUT/plan.json``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import py_compile
import sys
from pathlib import Path
from typing import Any

WORKSPACE = "/vllm-workspace"
PARTS = ("source", "csrc")


def compile_file(path: Path, final: str) -> str:
    """Compile ``path``, which the image will have at ``final``; the path of the bytecode in the image.

    The bytecode is bound to a hash of its source, not to times: a layer's times are not reliable, the same
    source gives the same bytes (so that the build's cache holds), and an edit in a running container still
    counts. Code objects carry
    ``final`` as their file. Raises py_compile.PyCompileError.
    """
    py_compile.compile(
        str(path),
        cfile=importlib.util.cache_from_source(str(path)),
        dfile=final,
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
    )
    return importlib.util.cache_from_source(final)


def make_plan(out: Path) -> dict[str, Any]:
    """Add bytecode and describe every file by its path in the image: sha256, and its bytecode's path or None.
    """
    files: dict[str, dict[str, str | None]] = {}
    for part in PARTS:
        root = out / part
        for path in sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc"):
            final = f"{WORKSPACE}/{path.relative_to(root).as_posix()}"
            python = part == "source" and path.suffix == ".py"
            files[final] = {
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "bytecode": compile_file(path, final) if python else None,
            }
    return {"files": files, "series": json.loads((out / "series.json").read_text(encoding="utf-8"))}


def main(argv: list[str] | None = None) -> int:
    """The command; 2 with E-COMPILE where a file does not compile with this Python."""
    out = Path((sys.argv[1:] if argv is None else argv)[0])
    try:
        plan = make_plan(out)
    except py_compile.PyCompileError as error:
        print(
            f"E-COMPILE: a patched file does not compile with this base's Python\n  {error.msg}",
            file=sys.stderr,
        )
        return 2
    (out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    (out / "csrc" / "vllm-ascend").mkdir(exist_ok=True)
    compiled = sum(bool(f["bytecode"]) for f in plan["files"].values())
    print(f"{len(plan['files'])} files, {compiled} with bytecode")
    return 0


if __name__ == "__main__":
    sys.exit(main())
