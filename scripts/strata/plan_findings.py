"""What a plan says when something cannot land."""

from __future__ import annotations

import ast
import difflib
import warnings
from pathlib import PurePosixPath

from strata.errors import Finding
from strata.model import At, Edit
from strata.series import Patch
from strata.spans import PlaceFault
from strata.trees import Trees


def finding_of(fault: PlaceFault, patch: Patch, edit: Edit) -> Finding:
    """A placing fault as a finding: where it is, the nearest candidates, what to type next."""
    at = edit.at
    where = str(at) if at else f"{patch.id}/{edit.diff}"
    if fault.line:
        where += f" (line {fault.line})"
    hints = {
        "E-SYMBOL-GONE": "if it moved, name its new place in 'at'; strata why "
        f"{patch.id} says what the edit is for",
        "E-CONFLICT": "write the anchor anew for this base, after reading the code it stands for",
        "E-AMBIGUOUS": "narrow it with 'in', 'next_to' or 'nth', or say 'count'",
        "E-PARTIAL": "add the clause to the pattern",
        "E-EDIT": f"mend the edit in {patch.yaml_path}",
        "E-PARSE": "take the file from the release again",
    }
    return Finding(
        fault.code, fault.message, where, patch.id, fault.expected, fault.found,
        hints.get(fault.code, ""), tuple(fault.candidates),
    )  # fmt: skip


def similar_files(trees: Trees, at: At) -> list[str]:
    """Up to three files of the tree with the same name elsewhere, or a similar path."""
    suffix = PurePosixPath(at.file).suffix
    files = trees.files(at.tree, (suffix,) if suffix else ("",))
    name = PurePosixPath(at.file).name
    same = [f for f in files if PurePosixPath(f).name == name]
    same.sort(key=lambda f: -difflib.SequenceMatcher(None, f, at.file).ratio())
    here = str(PurePosixPath(at.file).parent)
    siblings = [f for f in files if str(PurePosixPath(f).parent) == here]
    close = difflib.get_close_matches(at.file, siblings or files, n=3, cutoff=0.6)
    return list(dict.fromkeys([*same[:2], *close]))[:3]


def summary(edit: Edit) -> str:
    words = edit.find or edit.import_ or edit.diff or str(edit.at)
    return f"{edit.verb}: {words.strip().splitlines()[0][:60]}"


def compiles(text: str) -> bool:
    return syntax_error(text) is None


def syntax_error(text: str, flags: int = 0) -> SyntaxError | None:
    """What keeps a text from being compiled; flags: as of ``compile``, ``ast.PyCF_ONLY_AST`` to parse it
    only.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text.removeprefix("\ufeff"), "<result>", "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError) as error:
        return SyntaxError(str(error))
    return None


def unparsable(at: At, text: str, what: str) -> Finding:
    error = syntax_error(text)
    assert error is not None
    line = error.lineno or 0
    lines = text.splitlines()
    # "return" outside of a function parses
    parses = syntax_error(text, ast.PyCF_ONLY_AST) is None
    return Finding(
        "E-COMPILE" if parses else "E-RESULT", f"{what} is not valid Python: {error.msg}",
        where=f"{at} (line {line} of the result)" if line else str(at),
        expected="Python that compiles" if parses else "Python that parses",
        found=lines[line - 1].strip()[:120] if 0 < line <= len(lines) else "",
        hint="mend the edits that meet there",
    )  # fmt: skip
