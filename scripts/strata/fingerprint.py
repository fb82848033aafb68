"""Fingerprints of code and identities of trees: what a lock stores and a verdict compares.

``fp: 1`` is Strata's own serialisation, so that every supported CPython gives the same digest for the same
code. It leaves out what cannot change behaviour (positions, comments, bare strings used as documentation,
contexts, empty fields) and levels what the interpreters' parsers do differently (how literal parts of an
f-string are split, fields added by later grammars). Standard library only, so any Python can run it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from strata.errors import Finding, StrataError

FP_VERSION = 1
DIGEST_HEX = 32

_DROPPED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_OWN_NAME = {
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.Assign: "targets",
    ast.AnnAssign: "target",
}
_FIELDS: dict[type[ast.AST], tuple[tuple[str, bytes], ...]] = {}


def python_fingerprint(code: str | ast.AST | Sequence[ast.stmt], *, without_name: bool = False) -> str:
    """``py1:<32 hex digits>`` of source text, of a node, or of consecutive statements.

    without_name: leave out the name that a definition, or the plain names that an assignment, at the root
    binds, so that a moved and renamed twin has an equal digest (names inside the body stay).
    Raises SyntaxError for source text that this interpreter cannot parse.
    """
    if isinstance(code, str):
        code = ast.parse(code).body
    return f"py{FP_VERSION}:" + _digest(serialise(code, without_name=without_name))


def token_fingerprint(tokens: Iterable[str]) -> str:
    """``tok1:<32 hex digits>`` of a sequence of token texts (already rid of comments and white space)."""
    parts = (_text("", token) for token in tokens)
    return f"tok{FP_VERSION}:" + _digest(b"".join(parts))


def serialise(code: ast.AST | Sequence[ast.stmt], *, without_name: bool = False) -> bytes:
    """The ``fp: 1`` bytes of a node or of statements; equal bytes run alike, whichever CPython parsed.

    A node is ``(Class field=value …)``, a list ``[…]``, text is length-prefixed, so no two trees share bytes.
    Iterative: the depth of a tree is not limited by the interpreter's recursion limit.
    """
    out: list[bytes] = []
    todo: list[object] = []
    if isinstance(code, ast.AST):
        todo += reversed(list(_node(code, _own_name(code) if without_name else "")))
    else:
        statements = list(code)
        if without_name and len(statements) == 1:
            return serialise(statements[0], without_name=True)
        todo.append(statements)
    while todo:
        item = todo.pop()
        if type(item) is bytes:
            out.append(item)
        elif isinstance(item, ast.AST):
            todo += reversed(list(_node(item, "")))
        elif isinstance(item, list):
            out.append(b"[")
            todo.append(b"]")
            todo += reversed([child for child in item if not _is_bare_string(child)])
        else:
            out.append(_constant(item))
    return b"".join(out)


def tree_hash(root: Path) -> str:
    """sha256 (64 hex digits) over the paths and contents of all source files below ``root``, sorted.

    Left out is what a build or an installation makes: ``_build_info.py``, ``_version.py``, compiled files,
    caches, metadata directories, ``.git``, build and output directories and the installed operator package.
    File modes and times do not count; a symbolic link counts as its target's text and is not followed.
    Raises StrataError: E-TREE where ``root`` is no directory, E-READ for what cannot be read.
    """
    if not root.is_dir():
        raise StrataError(
            Finding("E-TREE", "no such source tree", where=str(root), expected="a directory of sources",
                    found="no directory", hint="check the path, or unpack the sources first")
        )  # fmt: skip
    total = hashlib.sha256(b"strata tree 1\n")
    for name, path in sorted(_sources(root, "")):
        total.update(f"{name}\0{_content_hash(path)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


# --- trees

_SKIP_FILES = frozenset({"_build_info.py", "_version.py", ".DS_Store", ".git"})
_SKIP_SUFFIXES = (".so", ".pyc", ".pyo", ".o")
_SKIP_DIRS = frozenset({
    ".git", ".strata", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".eggs",
    ".deps", "_cann_ops_custom",
})  # fmt: skip
_SKIP_DIR_SUFFIXES = (".egg-info", ".dist-info")
_BUILD_OUTPUTS = frozenset({"build", "dist", "csrc/build", "csrc/output", "csrc/build_out"})


def is_tree_source(name: str) -> bool:
    """Whether a file, by its path relative to the tree's root (with ``/``), counts for :func:`tree_hash`."""
    *directories, last = name.split("/")
    if any(_skips_directory("/".join(directories[: n + 1])) for n in range(len(directories))):
        return False
    return last not in _SKIP_FILES and not last.endswith(_SKIP_SUFFIXES)


def _skips_directory(name: str) -> bool:
    last = name.rsplit("/", 1)[-1]
    return last in _SKIP_DIRS or last.endswith(_SKIP_DIR_SUFFIXES) or name in _BUILD_OUTPUTS


def _sources(root: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        raise _unreadable(root, error) from error
    for entry in entries:
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            if not _skips_directory(name):
                yield from _sources(Path(entry.path), name + "/")
        elif entry.name not in _SKIP_FILES and not entry.name.endswith(_SKIP_SUFFIXES):
            yield name, Path(entry.path)


def _content_hash(path: Path) -> str:
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return "link:" + str(path.readlink())
        if not stat.S_ISREG(mode):
            return "special"
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StrataError:
    return StrataError(
        Finding("E-READ", "cannot be read", where=str(path), found=error.strerror or str(error),
                hint="check its permissions")
    )  # fmt: skip


# --- Python


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_HEX]


def _own_name(node: ast.AST) -> str:
    field = _OWN_NAME.get(type(node), "")
    if field in ("targets", "target"):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, field)]
        return field if all(isinstance(t, ast.Name) for t in targets) else ""
    if not field and type(node).__name__ == "TypeAlias":  # unknown to ast before 3.12
        return "name"
    return field


def _node(node: ast.AST, skip: str) -> Iterator[object]:
    """The parts of one node: bytes to write, and children (nodes, lists, plain values) still to serialise."""
    kind = type(node)
    if isinstance(node, ast.Constant):  # its None is a value, not an empty field
        yield b"(Constant "
        yield _constant(node.value)
        yield b")"
        return
    yield b"(" + kind.__name__.encode()
    if isinstance(node, ast.MatchSingleton):
        yield b" value="
        yield _constant(node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = _literal_parts(node)
        if parts:
            yield b" values="
            yield parts
    else:
        for name, label in _fields(kind):
            value = getattr(node, name, None)
            if value is None or value == [] or name == skip:
                continue
            if name == "format_spec" and isinstance(value, ast.JoinedStr) and not _literal_parts(value):
                continue  # "{x:}" is "{x}"
            yield label
            yield value
    yield b")"


def _fields(kind: type[ast.AST]) -> tuple[tuple[str, bytes], ...]:
    known = _FIELDS.get(kind)
    if known is None:
        # sorted: the order of fields is the grammar's, and may change between versions
        known = tuple((n, f" {n}=".encode()) for n in sorted(kind._fields) if n not in _DROPPED)
        _FIELDS[kind] = known
    return known


def _literal_parts(node: ast.JoinedStr) -> list[ast.expr]:
    """The parts of an f-string with neighbouring literal parts joined and empty ones dropped."""
    parts: list[ast.expr] = []
    for value in _flat_parts(node):
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            before = parts[-1] if parts else None
            if isinstance(before, ast.Constant) and isinstance(before.value, str):
                parts[-1] = ast.Constant(before.value + value.value)
            elif value.value:
                parts.append(value)
        else:
            parts.append(value)
    return parts


def _flat_parts(node: ast.JoinedStr) -> Iterator[ast.expr]:
    for value in node.values:
        if isinstance(value, ast.JoinedStr):  # some 3.12 releases nest implicitly joined ones
            yield from _flat_parts(value)
        else:
            yield value


def _is_bare_string(node: object) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _constant(value: object) -> bytes:
    if value is None or isinstance(value, bool) or value is Ellipsis:
        return repr(value).encode()
    if isinstance(value, str):
        return _text("s", value)
    if isinstance(value, bytes):
        return b"b" + value.hex().encode()
    if isinstance(value, int):
        return b"i" + hex(value).encode()  # str() refuses integers of more than 4300 digits
    if isinstance(value, float):
        return b"f" + value.hex().encode()
    if isinstance(value, complex):
        return b"c" + value.real.hex().encode() + b"," + value.imag.hex().encode()
    raise TypeError(f"no fp: {FP_VERSION} form for a {type(value).__name__} in a syntax tree")


def _text(tag: str, value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return f"{tag}{len(data)}:".encode() + data
