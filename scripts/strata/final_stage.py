"""The last step of the tuned build: ``python final_stage.py``. Standard library only; runs with the base's
Python.

Proves that the image holds what was planned (hashes, bytecode) and writes ``/etc/strata/image.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import marshal
import sys
from pathlib import Path
from typing import Any

_CHECKED_HASH = 0b11


def static_faults(files: dict[str, dict[str, Any]], root: Path = Path("/")) -> list[str]:
    """What is not as planned: one line for each file that is missing, differs, or whose bytecode is not its
    own.

    files: by absolute path in the image, as edits_stage writes them; root: where the image's ``/`` is.
    """
    faults = []
    for path, entry in sorted(files.items()):
        local = root / path.lstrip("/")
        if not local.is_file():
            faults.append(f"{path}: missing")
            continue
        data = local.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            faults.append(f"{path}: not the planned content")
            continue
        if entry["bytecode"]:
            fault = bytecode_fault(data, root / entry["bytecode"].lstrip("/"), path)
            if fault:
                faults.append(fault)
    return faults


def bytecode_fault(source: bytes, bytecode: Path, path: str) -> str | None:
    """Why this Python would not take ``bytecode`` for ``source``, or None where it does."""
    if not bytecode.is_file():
        return f"{path}: no bytecode at {bytecode}"
    data = bytecode.read_bytes()
    if data[:4] != importlib.util.MAGIC_NUMBER:
        return f"{path}: the bytecode is another Python's"
    if int.from_bytes(data[4:8], "little") != _CHECKED_HASH or data[8:16] != importlib.util.source_hash(
        source
    ):
        return f"{path}: the bytecode is not this source's"
    if marshal.loads(data[16:]).co_filename != path:
        return f"{path}: the bytecode names another file"
    return None


def describe(base: dict[str, Any], plan: dict[str, Any], operators: dict[str, Any]) -> dict[str, Any]:
    """The content of image.json; ``live`` stays pending until `strata verify` has passed."""
    compiler = operators.get("compiler")
    needs_npu = ["acl-graphs", "figures"]
    if compiler != "bisheng":
        needs_npu.append("operators")
    return {
        "strata": base["strata"],
        "base": {k: v for k, v in base.items() if k not in ("strata", "live")}
        | {"python": base.get("python") or sys.executable},
        "series": plan["series"],
        "operators": operators["operators"],
        "operator_package": {k: v for k, v in operators.items() if k != "operators"},
        "proof": {"static": "passed", "live": base["live"], "files": len(plan["files"])},
        "files": {path: entry["sha256"] for path, entry in sorted(plan["files"].items())},
        "needs_npu": sorted(needs_npu),
    }


def main(argv: list[str] | None = None) -> int:
    """Prove, then write. 1 where the image is not as planned."""
    parser = argparse.ArgumentParser(description="Prove the image's content and describe it.")
    for name in ("--base-json", "--plan", "--operators", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args(argv)
    plan = json.loads(arguments.plan.read_text())
    faults = static_faults(plan["files"])
    if faults:
        print(
            "E-PROOF: the image does not hold what was planned",
            *(f"  {f}" for f in faults),
            sep="\n",
            file=sys.stderr,
        )
        return 1
    content = describe(
        json.loads(arguments.base_json.read_text()), plan, json.loads(arguments.operators.read_text())
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"static proof: {len(plan['files'])} files as planned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
