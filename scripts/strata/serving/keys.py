"""The keys of ``--additional-config`` that a vllm-ascend source tree reads, found in its syntax trees.

vllm-ascend ignores keys that it does not know, so only its source can say which ones have an effect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

_OPTION = "additional_config"
_READERS = ("get", "setdefault", "pop")


def additional_keys(sources: Iterable[str]) -> list[str]:
    """Every key read from the additional configuration by these Python sources, sorted; nested keys as
    ``outer.inner``.

    Found: ``additional_config.get("k")``, ``additional_config["k"]``, ``"k" in additional_config``, helper
    calls that take the configuration and a literal key; for a key whose value is handed to a class, the
    parameters of its constructor, what the constructor reads of them, and a class-level ``_defaults`` table.
    A string constant of the module counts as the literal.
    """
    trees = [_Constants.put_in(ast.parse(text)) for text in sources]
    classes = {n.name: n for t in trees for n in ast.walk(t) if isinstance(n, ast.ClassDef)}
    top: set[str] = set()
    for tree in trees:
        top |= {key for node in ast.walk(tree) for name, key in _reads(node) if name == _OPTION}
    nested: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare):  # "x" in value: as often an item of a list as a key
                nested |= {f"{name}.{key}" for name, key in _reads(node) if name in top}
            if isinstance(node, ast.Call) and _name(node.func) in classes:
                for outer in _handed_over(node):
                    if outer in top:
                        nested |= {f"{outer}.{k}" for k in _constructor_keys(classes[_name(node.func)])}
    return sorted(top | nested)


def of_package(package: Path) -> list[str]:
    """:func:`additional_keys` of every Python file below ``package`` (the ``vllm_ascend`` directory)."""
    return additional_keys(p.read_text(encoding="utf-8") for p in sorted(package.rglob("*.py")))


class _Constants(ast.NodeTransformer):
    """Puts a module's string constants where their names are read: ``KEY = "k"`` makes ``get(KEY)`` a read of k."""

    def __init__(self, values: dict[str, ast.Constant]) -> None:
        self.values = values

    @classmethod
    def put_in(cls, tree: ast.Module) -> ast.Module:
        values = {
            s.targets[0].id: s.value
            for s in tree.body
            if isinstance(s, ast.Assign)
            and len(s.targets) == 1
            and isinstance(s.targets[0], ast.Name)
            and isinstance(s.value, ast.Constant)
            and isinstance(s.value.value, str)
        }
        if values:
            cls(values).visit(tree)
        return tree

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _name(node: ast.AST) -> str:
    """The last name of ``a.b.c``, of ``x or {}``, and of ``x if … else {}``; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.BoolOp):
        return _name(node.values[0])
    if isinstance(node, ast.IfExp):
        return _name(node.body)
    return ""


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _reads(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name of the mapping, literal key) for each read that ``node`` itself is."""
    if isinstance(node, ast.Call):
        literal = [t for t in map(_text, node.args) if t is not None]
        if isinstance(node.func, ast.Attribute) and node.func.attr in _READERS and node.args:
            key = _text(node.args[0])
            if key is not None:
                yield _name(node.func.value), key
        elif node.args and _name(node.args[0]) and literal and _name(node.args[0]) == _OPTION:
            yield _OPTION, literal[0]
    elif isinstance(node, ast.Subscript):
        key = _text(node.slice)
        if key is not None:
            yield _name(node.value), key
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
        key = _text(node.left)
        if key is not None:
            yield _name(node.comparators[0]), key


def _handed_over(call: ast.Call) -> Iterator[str]:
    """Names handed to a constructor as its first argument or as ``**name``."""
    if call.args:
        yield _name(call.args[0])
    yield from (_name(k.value) for k in call.keywords if k.arg is None)


def _constructor_keys(cls: ast.ClassDef) -> set[str]:
    keys: set[str] = set()
    for item in cls.body:
        if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, ast.Dict):
            target = item.targets[0] if isinstance(item, ast.Assign) else item.target
            if _name(target) == "_defaults":
                keys |= {k for k in map(_text, filter(None, item.value.keys)) if k is not None}
        if not isinstance(item, ast.FunctionDef) or item.name != "__init__":
            continue
        arguments = item.args
        takes_mapping = len(arguments.args) > 1 and arguments.args[1].arg.endswith(("config", "_config"))
        if not takes_mapping:
            keys |= {a.arg for a in (*arguments.args[1:], *arguments.kwonlyargs)}
        sources = {arguments.args[1].arg} if takes_mapping else set()
        if arguments.kwarg:
            sources.add(arguments.kwarg.arg)
        keys |= {key for node in ast.walk(item) for name, key in _reads(node) if name in sources}
    return keys
