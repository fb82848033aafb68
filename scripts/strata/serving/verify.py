"""The live proof: in the running base, is every edited function ours, and does it call our code?

Reads ``/opt/strata/proof.json`` (written at build, see scripts/strata/proof.py and docs/serving.md), loads
vllm-ascend's own patches as platform and as worker, then holds each edited symbol against the file on disk.
Runs in the base's Python; on the cpu base with the stand-in modules on PYTHONPATH. Never looks at
``__module__``: assignments keep it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from strata.config import Strict
from strata.errors import Finding, StrataError

PROOF_JSON = Path("/opt/strata/proof.json")
State = Literal["proved", "failed", "deferred"]


class ProofFile(Strict):
    """A changed or new file. sha256: of its final bytes; module: dotted name, None for what is not importable
    Python.
    """

    patches: tuple[str, ...]
    tree: str
    file: str
    sha256: str
    new: bool
    module: str | None = None


class ProofEdit(Strict):
    """An edited symbol. symbol: qualified name, ``<module>`` for top-level statements; lines: its first and
    last line in the final file; names: what the edits of these patches newly mention in it, to be found in
    the loaded code.
    """

    patches: tuple[str, ...]
    tree: str
    file: str
    module: str
    symbol: str
    lines: tuple[int, int] | None = None
    names: tuple[str, ...] = ()


class Proof(Strict):
    """The content of proof.json. roots: where the trees lie in the image."""

    proof: Literal[1]
    roots: dict[str, str]
    files: tuple[ProofFile, ...]
    edits: tuple[ProofEdit, ...]


@dataclass(frozen=True)
class Result:
    """One checked thing. state: ``deferred`` where it cannot be told here; reason: why not proved."""

    patches: tuple[str, ...]
    where: str
    state: State
    reason: str = ""


def load(path: Path | None = None) -> Proof:
    """Read proof.json; E-PROOF where it is missing or of another shape."""
    path = path or Path(os.environ.get("STRATA_PROOF_JSON") or PROOF_JSON)
    try:
        return Proof.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StrataError(
            Finding(
                "E-PROOF",
                "the build's proof cannot be read",
                where=str(path),
                found=str(error).splitlines()[0],
                hint="rebuild the image",
            )
        ) from error


def check_files(proof: Proof) -> list[Result]:
    """Static half: every changed file is on disk as built."""
    results = []
    for entry in proof.files:
        path = Path(proof.roots[entry.tree]) / entry.file
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            results.append(Result(entry.patches, str(path), "failed", error.strerror or str(error)))
            continue
        state: State = "proved" if found == entry.sha256 else "failed"
        reason = "" if state == "proved" else f"sha256 {found[:12]}…, built as {entry.sha256[:12]}…"
        results.append(Result(entry.patches, str(path), state, reason))
    return results


def load_platform() -> None:
    """Load vLLM with vllm-ascend as its platform, and apply vllm-ascend's own patches both ways.

    ImportError or OSError where the base cannot load here (no driver for torch_npu).
    """
    import torch_npu  # noqa: F401
    import vllm.platforms
    import vllm_ascend.ops  # noqa: F401  (device.device_op needs it loaded first)
    from vllm_ascend.utils import adapt_patch

    assert vllm.platforms.current_platform is not None
    adapt_patch(is_global_patch=True)
    adapt_patch(is_global_patch=False)


def check_edits(proof: Proof, *, strict: bool) -> list[Result]:
    """Live half. strict: a module that does not import is a failure; otherwise (stand-in modules) it is
    deferred.
    """
    results = []
    for entry in proof.edits:
        path = Path(proof.roots[entry.tree]) / entry.file
        where = f"{entry.file}::{entry.symbol}"
        try:
            module = importlib.import_module(entry.module)
        except Exception as error:
            reason = f"{entry.module} does not import: {type(error).__name__}: {error}"
            results.append(Result(entry.patches, where, "failed" if strict else "deferred", reason[:300]))
            continue
        reason = _fault(entry, path, module)
        results.append(Result(entry.patches, where, "failed" if reason else "proved", reason))
    for file in proof.files:
        if file.new and file.module:
            where = f"{file.file} (new)"
            try:
                module = importlib.import_module(file.module)
            except Exception as error:
                reason = f"does not import: {type(error).__name__}: {error}"
                results.append(Result(file.patches, where, "failed" if strict else "deferred", reason[:300]))
                continue
            reason = _file_fault(module, Path(proof.roots[file.tree]) / file.file)
            results.append(Result(file.patches, where, "failed" if reason else "proved", reason))
    return results


def _file_fault(module: ModuleType, path: Path) -> str:
    loaded = getattr(module, "__file__", None)
    if loaded is None or Path(loaded).resolve() != path.resolve():
        return f"the module loads from {loaded}, not from {path}"
    return ""


def _fault(entry: ProofEdit, path: Path, module: ModuleType) -> str:
    """Why the edit is not proved; empty where it is."""
    fault = _file_fault(module, path)
    if fault:
        return fault
    if entry.symbol == "<module>":
        missing = [n for n in entry.names if not hasattr(module, n)]
        return f"the module lacks {', '.join(missing)}" if missing else ""
    try:
        holder, value = resolve(module, entry.symbol)
    except AttributeError as error:
        return f"does not resolve: {error}"
    function = innermost(value, entry.symbol)
    code = getattr(function, "__code__", None)
    if isinstance(function, type):
        return _class_fault(function, path, entry)
    if code is None:  # an assignment leaves no code behind; file and name are what can be shown
        return ""
    if holder == "nested":
        code = nested_code(code, entry.symbol.rpartition(".")[2], entry.lines) or code
    fault = code_fault(code, path, entry.lines, entry.names)
    return fault or _graft_fault(module, path, entry.symbol, function)


def _class_fault(cls: type, path: Path, entry: ProofEdit) -> str:
    """A class's own body leaves no code behind: hold each method that the edits brought or now mention
    against it.
    """
    for name in entry.names:
        method = innermost(cls.__dict__.get(name), name)
        if inspect.isfunction(method):
            fault = code_fault(method.__code__, path, entry.lines, ())
            if fault:
                return f"{name}: {fault}"
    return ""


def code_fault(code: CodeType, path: Path, lines: tuple[int, int] | None, names: Sequence[str]) -> str:
    """Why a loaded code object is not the one that lies in ``path`` between ``lines`` and mentions
    ``names``.
    """
    if Path(code.co_filename).resolve() != path.resolve():
        return f"shadowed: the loaded function comes from {code.co_filename}:{code.co_firstlineno}"
    if lines and not lines[0] <= code.co_firstlineno <= lines[1]:
        first, (low, high) = code.co_firstlineno, lines
        return f"the loaded function starts at line {first}, the edited one lies in {low}-{high}"
    on_disk = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    if not any(c == code for c in _codes(on_disk) if c.co_name == code.co_name):
        return "the loaded code differs from the file on disk (stale bytecode?)"
    missing = sorted(set(names) - mentioned(code))
    return f"the loaded function does not mention {', '.join(missing)}" if missing else ""


def mentioned(code: CodeType) -> set[str]:
    """Every name that a code object and those inside it use: globals, attributes, locals, closures, keyword
    names.
    """
    names: set[str] = set()
    for inner in _codes(code):
        names |= {*inner.co_names, *inner.co_varnames, *inner.co_freevars, *inner.co_cellvars}
        for constant in inner.co_consts:
            if isinstance(constant, str):
                names.add(constant)
            elif isinstance(constant, tuple):
                names |= {c for c in constant if isinstance(c, str)}
    return names


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def nested_code(code: CodeType, name: str, lines: tuple[int, int] | None) -> CodeType | None:
    """The code of a function defined inside another."""
    return next(
        (
            c
            for c in _codes(code)
            if c.co_name == name and (not lines or lines[0] <= c.co_firstlineno <= lines[1])
        ),
        None,
    )


def resolve(module: ModuleType, symbol: str) -> tuple[str, Any]:
    """(``attribute`` or ``nested``, object): the attribute, not its value; for a nested function the
    outermost function.

    AttributeError where a part does not exist. ``#n`` is left out: the definition in force is what is asked
    for.
    """
    parts = [p.partition("#")[0] for p in symbol.replace(".<locals>", "").split(".")]
    if parts[-1] in ("setter", "getter", "deleter"):
        parts.pop()
    current: Any = module
    for part in parts:
        if not isinstance(current, type | ModuleType) and callable(innermost(current, "")):
            return "nested", current
        try:
            current = inspect.getattr_static(current, part)
        except AttributeError:
            current = getattr(current, part)  # lazy module attributes
    return "attribute", current


def innermost(value: Any, symbol: str) -> Any:
    """The plain function inside properties, static and class methods, partials, JIT wrappers and
    decorators.
    """
    for _ in range(20):
        if isinstance(value, property):
            value = (
                value.fset
                if symbol.endswith(".setter")
                else value.fdel
                if symbol.endswith(".deleter")
                else value.fget
            )
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, functools.cached_property | functools.partial):
            value = value.func
        elif (
            not inspect.isfunction(value)
            and not isinstance(value, type)
            and inspect.isfunction(getattr(value, "fn", None))
        ):
            value = value.fn
        elif getattr(value, "__wrapped__", None) is not None and not isinstance(value, type):
            value = inspect.unwrap(value)
        else:
            return value
    return value


def _graft_fault(module: ModuleType, path: Path, symbol: str, function: Any) -> str:
    """For a function in one of vllm-ascend's patch modules: is it what its assignment put in place?"""
    if "/patch/" not in path.as_posix():
        return ""
    top = symbol.partition(".")[0]
    for node in ast.parse(path.read_bytes()).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute)):
            continue
        written = ast.unparse(node.value)
        if written.partition("#")[0] not in (symbol, top):
            continue
        for target in node.targets:
            if not isinstance(target, ast.Attribute):
                continue
            owner = eval(
                compile(ast.Expression(target.value), str(path), "eval"), vars(module)
            )  # the module's own expression
            now = innermost(inspect.getattr_static(owner, target.attr), symbol)
            if written == symbol and getattr(now, "__code__", None) is not getattr(
                function, "__code__", None
            ):
                return f"{ast.unparse(target)} is not this function any more"
            if written == top != symbol and now is not getattr(module, top):
                return f"{ast.unparse(target)} is not this class any more"
    return ""


def run(
    proof: Proof, *, standin: bool, platform: Callable[[], None] = load_platform
) -> tuple[State, list[Result]]:
    """The whole proof. standin: stand-in modules are loaded in place of torch_npu.

    Overall ``failed`` where anything failed, ``deferred`` where the platform does not load here (a device
    base without a driver), ``proved`` otherwise, even where single modules were deferred: those are listed.
    """
    results = check_files(proof)
    if any(r.state == "failed" for r in results):
        return "failed", results
    try:
        platform()
    except Exception as error:
        # no driver for torch_npu shows as one of these two; whatever else goes wrong is a fault of the image
        driver = isinstance(error, ImportError | OSError) and not standin
        state: State = "deferred" if driver else "failed"
        reason = f"the platform does not load: {type(error).__name__}: {error}"[:600]
        results += [Result(e.patches, f"{e.file}::{e.symbol}", state, reason) for e in proof.edits]
        return state, results
    results += check_edits(proof, strict=not standin)
    return ("failed" if any(r.state == "failed" for r in results) else "proved"), results


def main(arguments: Sequence[str]) -> int:
    """``python -m strata.serving.verify [--json]`` in the base's Python: exit 0 proved, 3 deferred, 1
    failed.
    """
    try:
        state, results = run(load(), standin="--standin" in arguments)
    except StrataError as error:
        print("\n".join(f.render() for f in error.findings), file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    if "--json" in arguments:
        print(
            json.dumps(
                {"live": "passed" if state == "proved" else state, "results": [asdict(r) for r in results]}
            )
        )
    else:
        print(report(state, results))
    return {"proved": 0, "deferred": 3, "failed": 1}[state]


def report(state: State, results: Sequence[Result]) -> str:
    """One line a patch, one more for each thing that is not proved."""
    lines = []
    for patch in sorted({p for r in results for p in r.patches}):
        mine = [r for r in results if patch in r.patches]
        counts = {s: sum(r.state == s for r in mine) for s in ("proved", "deferred", "failed")}
        told = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        lines.append(f"{patch}: {told}")
        lines += [f"  {r.state}: {r.where}: {r.reason}" for r in mine if r.state != "proved"]
    word = {"proved": "passed", "deferred": "deferred", "failed": "FAILED"}[state]
    return "\n".join([*lines, f"live-proof: {word}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
