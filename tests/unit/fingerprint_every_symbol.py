"""Print one line per Python file below the given roots: path, count of symbols, digest of their fingerprints.

Run by test_fingerprint.py under several interpreters (no dependency but the standard library).
With ``--golden FILE`` print the fingerprints of the samples in FILE as JSON instead.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from strata.fingerprint import python_fingerprint

warnings.simplefilter("ignore")  # old escapes in upstream's strings


def symbols(tree: ast.Module) -> list[ast.AST]:
    """Every definition at any depth, and the assignments of modules and classes."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(node)
        if isinstance(node, (ast.Module, ast.ClassDef)):
            found += [n for n in node.body if isinstance(n, (ast.Assign, ast.AnnAssign))]
    return found


def of_file(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return "0 syntax-error"
    total = hashlib.sha256(python_fingerprint(tree.body).encode())
    nodes = symbols(tree)
    for node in nodes:
        total.update(python_fingerprint(node).encode() + python_fingerprint(node, without_name=True).encode())
    return f"{len(nodes) + 1} {total.hexdigest()[:32]}"


def of_samples(samples: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    known = sys.version_info[:2]
    return {
        name: {
            "fingerprint": python_fingerprint(sample["source"]),
            "body": python_fingerprint(ast.parse(sample["source"]).body, without_name=True),
        }
        for name, sample in samples.items()
        if tuple(int(n) for n in sample.get("since", "3.11").split(".")) <= known
    }


if __name__ == "__main__":
    if sys.argv[1] == "--golden":
        golden = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
        print(json.dumps(of_samples(golden), sort_keys=True))
    else:
        for root in map(Path, sys.argv[1:]):
            for file in sorted(root.rglob("*.py")):
                print(file.relative_to(root).as_posix(), of_file(file))
