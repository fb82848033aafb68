"""What the live proof needs to know of a plan: ``proof.json``, read in the image by strata.serving.verify.

For every edited symbol of a Python file: module, qualified name, its lines in the final file, and the names
that the series newly mentions in it; for every changed or new file its sha256.
"""

from __future__ import annotations

import dis
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any

from strata.errors import Finding, StrataError
from strata.languages import language_of
from strata.plan import Plan
from strata.python_symbols import module_of
from strata.series import Series
from strata.serving.verify import Proof, ProofEdit, ProofFile, mentioned
from strata.spans import PlaceFault

ROOTS = {"vllm-ascend": "/vllm-workspace/vllm-ascend", "vllm": "/vllm-workspace/vllm"}
_PACKAGES = ("vllm_ascend", "vllm")


def build(plan: Plan, series: Series, roots: dict[str, str] | None = None) -> dict[str, Any]:
    """The content of ``proof.json`` for a plan without faults. roots: where the trees lie in the image, by
    name.
    """
    touched: dict[tuple[str, str], dict[str, set[str]]] = {}
    for placed in plan.placed:
        symbol = placed.placement.symbol or "<module>"
        touched.setdefault(placed.at.path, {}).setdefault(symbol, set()).add(placed.patch)
    brought = {key: {p.id} for p in series.patches for key in p.files}
    files, edits = [], []
    for (tree, file), text in sorted(plan.files.items()):
        by_symbol = touched.get((tree, file), {})
        patches = set().union(*by_symbol.values(), brought.get((tree, file), set()))
        module = module_name(file)
        files.append(
            ProofFile(
                patches=_ordered(patches, plan),
                tree=tree,
                file=file,
                sha256=hashlib.sha256(text.encode("utf-8")).hexdigest(),
                new=plan.original.get((tree, file)) is None,
                module=module,
            )
        )
        if module is None or not by_symbol:
            continue
        for symbol, ids in sorted(by_symbol.items()):
            edits.append(
                _edit(tree, file, module, symbol, _ordered(ids, plan), plan.original[tree, file] or "", text)
            )
    return Proof(proof=1, roots=roots or ROOTS, files=tuple(files), edits=tuple(edits)).model_dump(
        mode="json"
    )


def write(path: Path, plan: Plan, series: Series) -> None:
    """Write ``proof.json`` for the image build. E-WRITE where that fails."""
    try:
        path.write_text(json.dumps(build(plan, series), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StrataError(
            Finding(
                "E-WRITE",
                "the proof cannot be written",
                where=str(path),
                found=error.strerror or str(error),
                hint="make room or mend the permissions, then run it again",
            )
        ) from error


def module_name(file: str) -> str | None:
    """The dotted name under which a tree's file is imported, None for what is no module of the two
    packages.
    """
    path = PurePosixPath(file)
    if path.suffix != ".py" or path.parts[0] not in _PACKAGES:
        return None
    parts = path.with_suffix("").parts
    if not all(p.isidentifier() for p in parts):
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _ordered(ids: set[str], plan: Plan) -> tuple[str, ...]:
    return tuple(i for i in plan.patches if i in ids) or tuple(sorted(ids))


def _edit(
    tree: str, file: str, module: str, symbol: str, patches: tuple[str, ...], before: str, after: str
) -> ProofEdit:
    lines = _lines(file, after, symbol)
    if symbol == "<module>":
        names = _top_level(after) - _top_level(before)
    else:
        old = _lines(file, before, symbol)
        names = _names(after, symbol, lines) - _names(before, symbol, old)
    return ProofEdit(
        patches=patches,
        tree=tree,
        file=file,
        module=module,
        symbol=symbol,
        lines=lines,
        names=tuple(sorted(names)),
    )


def _lines(file: str, text: str, symbol: str) -> tuple[int, int] | None:
    """First and last line of a symbol, decorators included."""
    if symbol == "<module>":
        return None
    try:
        entry = module_of(text).find(symbol)
    except PlaceFault:
        return None
    found = {s.qualname: s for s in language_of(file).symbols(text)}[entry.qualname]
    return text.count("\n", 0, found.start) + 1, text.count("\n", 0, found.end) + 1


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _names(text: str, symbol: str, lines: tuple[int, int] | None) -> set[str]:
    """What the compiled function mentions (identifiers only). Empty for classes and assignments: no code is
    kept.
    """
    if lines is None:
        return set()
    name = symbol.removesuffix(".setter").removesuffix(".getter").removesuffix(".deleter")
    name = name.rpartition(".")[2].partition("#")[0]
    whole = compile(text.removeprefix("\ufeff"), "<proof>", "exec", dont_inherit=True)
    for code in _codes(whole):
        if code.co_name == name and lines[0] <= code.co_firstlineno <= lines[1]:
            return {n for n in mentioned(code) if n.isidentifier()}
    return set()


def _top_level(text: str) -> set[str]:
    """Names bound at the top of a file, whatever binds them outside of functions and classes."""
    whole = compile(text.removeprefix("\ufeff"), "<proof>", "exec", dont_inherit=True)
    return {
        i.argval
        for i in dis.get_instructions(whole)
        if i.opname in ("STORE_NAME", "STORE_GLOBAL") and not i.argval.startswith("__")
    }
