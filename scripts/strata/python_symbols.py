"""The symbols of a Python file and their fingerprints."""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from strata.fingerprint import python_fingerprint
from strata.python_text import Lines
from strata.spans import PlaceFault, Symbol

MODULE = "<module>"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TYPE_ALIAS = getattr(ast, "TypeAlias", ())
_ACCESSORS = ("setter", "deleter", "getter")


@dataclass(frozen=True)
class Entry:
    """A symbol with its node. block: the statement list that holds it; owner: the entry around it, if any.

    condition: the tests of the ``if``/``try`` around it inside its owner, outermost first.
    """

    qualname: str
    kind: str
    node: ast.stmt
    block: list[ast.stmt]
    owner: Entry | None
    condition: tuple[str, ...]
    tests: tuple[ast.AST, ...]


class PyModule:
    """One parsed Python file. Positions are character offsets into ``source``."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = Lines(source)
        bom = 1 if source.startswith("\ufeff") else 0
        self.lines.starts[0] = bom
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(source[bom:])
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None) or 0
            raise PlaceFault(
                "E-PARSE",
                "the file is not valid Python" + (f" (line {line})" if line else ""),
                expected="a file that parses",
                found=str(getattr(error, "msg", None) or error),
                line=line,
            ) from error

    def start(self, node: ast.AST) -> int:
        """Start of a node; for a decorated definition that of its first decorator's ``@``."""
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            return self.source.rindex("@", 0, self.start(decorators[0]))
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def keyword_start(self, node: ast.stmt) -> int:
        """Start of a definition's own ``def``/``class``/``async`` line, without its decorators."""
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.start(node), self.end(node)

    def text(self, node: ast.AST) -> str:
        return self.source[self.start(node) : self.end(node)]

    def _offset(self, line: int, column: int) -> int:
        return self.lines.offset(line, column)

    @cached_property
    def entries(self) -> list[Entry]:
        """Every symbol in order of appearance, with its canonical name."""
        return _number(list(_walk(self.tree.body, None, "", (), ())))

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {e.qualname: e for e in self.entries}

    def symbols(self) -> list[Symbol]:
        """Every symbol, ``<module>`` first."""
        found = [Symbol(MODULE, "module", 0, len(self.source), 1)]
        for e in self.entries:
            found.append(
                Symbol(e.qualname, e.kind, *self.span(e.node), e.node.lineno, " and ".join(e.condition))
            )
        return found

    def find(self, symbol: str) -> Entry:
        """The entry of a name as written in ``at``; E-SYMBOL-GONE or E-AMBIGUOUS with the names to choose
        from."""
        wanted = _plain(symbol)
        exact = self.by_name.get(wanted)
        if exact is not None:
            return exact
        loose = [e for e in self.entries if _agrees(wanted, e.qualname)]
        definitions = [e for e in loose if isinstance(e.node, DEFINITIONS)]
        if len(loose) == 1 or len(definitions) == 1:
            return definitions[0] if len(definitions) == 1 else loose[0]
        if loose:
            raise PlaceFault(
                "E-AMBIGUOUS",
                f"{symbol} is defined {len(loose)} times",
                expected="one definition; choose it with #n",
                found=", ".join(f"{e.qualname} (line {e.node.lineno})" for e in loose),
                candidates=[_describe(e) for e in loose],
                line=loose[0].node.lineno,
            )
        raise PlaceFault(
            "E-SYMBOL-GONE",
            f"no symbol {symbol} in this file",
            expected=symbol,
            found="no such definition or assignment",
            candidates=self.near(symbol),
        )

    def near(self, symbol: str) -> list[str]:
        """Up to five symbols with a similar name: the same last name elsewhere first."""
        last = re.split(r"\.", symbol)[-1].partition("#")[0]
        same = [
            e.qualname
            for e in self.entries
            if _plain(e.qualname).rpartition(".")[2].partition("#")[0] == last
        ]
        close = difflib.get_close_matches(symbol, [e.qualname for e in self.entries], n=5, cutoff=0.6)
        return list(dict.fromkeys([*same, *close]))[:5]

    def top_level(self) -> list[ast.stmt]:
        """Top-level statements outside definitions, in order."""
        return [s for s in self.tree.body if not isinstance(s, DEFINITIONS)]


@lru_cache(maxsize=64)
def module_of(source: str) -> PyModule:
    """The parsed file; parsed once per text. PlaceFault E-PARSE where it is not Python."""
    return PyModule(source)


def fingerprint(source: str, symbol: str | None) -> str:
    """``py1:`` fingerprint of one symbol with the conditions it stands under; of the whole file for None.

    ``<module>`` is the top-level statements outside definitions.
    """
    module = module_of(source)
    if symbol is None:
        return python_fingerprint(module.tree.body)
    if symbol == MODULE:
        return python_fingerprint(module.top_level())
    entry = module.find(symbol)
    if not entry.tests:
        return python_fingerprint(entry.node)
    return python_fingerprint([*(_as_statement(t) for t in entry.tests), entry.node])


def body_fingerprint(source: str, symbol: str) -> str:
    """``py1:`` fingerprint of a symbol without its own name and without the conditions around it."""
    module = module_of(source)
    if symbol == MODULE:
        return python_fingerprint(module.top_level())
    return python_fingerprint(module.find(symbol).node, without_name=True)


def _as_statement(node: ast.AST) -> ast.stmt:
    return node if isinstance(node, ast.stmt) else ast.Expr(node)  # type: ignore[arg-type]


def _plain(symbol: str) -> str:
    return symbol.replace(".<locals>.", ".")


def _agrees(written: str, canonical: str) -> bool:
    """Whether a name without some of its ``#n`` means a canonical one."""
    left, right = written.split("."), canonical.split(".")
    return len(left) == len(right) and all(
        a == b or ("#" not in a and a == b.partition("#")[0]) for a, b in zip(left, right, strict=True)
    )


def _describe(entry: Entry) -> str:
    under = f", under {' and '.join(entry.condition)}" if entry.condition else ""
    return f"{entry.qualname} ({entry.kind}, line {entry.node.lineno}{under})"


def _walk(
    body: Sequence[ast.stmt],
    owner: Entry | None,
    prefix: str,
    condition: tuple[str, ...],
    tests: tuple[ast.AST, ...],
) -> Iterator[Entry]:
    """Entries with names not yet numbered, depth first. Assignments only outside functions."""
    block = body if isinstance(body, list) else list(body)
    in_function = owner is not None and isinstance(owner.node, FUNCTIONS)
    for node in block:
        if isinstance(node, DEFINITIONS):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            entry = Entry(prefix + node.name + _accessor(node), kind, node, block, owner, condition, tests)
            yield entry
            yield from _walk(node.body, entry, entry.qualname + ".", (), ())
            continue
        if not in_function:
            for name in _assigned(node):
                yield Entry(prefix + name, "assignment", node, block, owner, condition, tests)
        for inner, text, test in _branches(node):
            yield from _walk(inner, owner, prefix, (*condition, *text), (*tests, *test))


def _accessor(node: Definition) -> str:
    for decorator in node.decorator_list:
        if (
            isinstance(decorator, ast.Attribute)
            and decorator.attr in _ACCESSORS
            and isinstance(decorator.value, ast.Name)
            and decorator.value.id == node.name
        ):
            return "." + decorator.attr
    return ""


def _assigned(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        names: list[str] = []
        for target in node.targets:
            items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            names += [t.id for t in items if isinstance(t, ast.Name)]
        return list(dict.fromkeys(names))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if _TYPE_ALIAS and isinstance(node, _TYPE_ALIAS):
        return [node.name.id]
    return []


_Branch = tuple[list[ast.stmt], tuple[str, ...], tuple[ast.AST, ...]]


def _branches(node: ast.stmt) -> Iterator[_Branch]:
    """The blocks of a compound statement, each with the condition under which it runs, as text and as
    nodes."""
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        yield node.body, (f"if {test}",), (node.test,)
        if node.orelse:
            yield node.orelse, (f"if not ({test})",), (ast.UnaryOp(ast.Not(), node.test),)
    elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
        yield node.body, ("try",), (ast.Name("try", ast.Load()),)  # type: ignore[attr-defined]
        for handler in node.handlers:  # type: ignore[attr-defined]
            text = f"except {ast.unparse(handler.type)}" if handler.type else "except"
            yield handler.body, (text,), (handler.type or ast.Name("except", ast.Load()),)
        for name, block in (("else", node.orelse), ("finally", node.finalbody)):  # type: ignore[attr-defined]
            if block:
                yield block, (f"{name} of try",), (ast.Name(name, ast.Load()),)
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield node.body, (), ()
    elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
        word = "while" if isinstance(node, ast.While) else "for"
        yield node.body, (word,), (ast.Name(word, ast.Load()),)
        if node.orelse:
            yield node.orelse, (f"else of {word}",), (ast.Name("else", ast.Load()),)
    elif isinstance(node, ast.Match):
        for case in node.cases:
            yield (
                case.body,
                (f"case {ast.unparse(case.pattern)}",),
                (ast.Name("case", ast.Load()), case.pattern),
            )


def _number(entries: list[Entry]) -> list[Entry]:
    """Give every name used more than once in its owner ``#1``, ``#2``, … in order, and its children that
    prefix."""
    total: dict[tuple[int, str], int] = {}
    for entry in entries:
        key = (id(entry.owner), entry.qualname)
        total[key] = total.get(key, 0) + 1
    seen: dict[tuple[int, str], int] = {}
    renamed: dict[int, Entry] = {}
    out: list[Entry] = []
    for entry in entries:
        key = (id(entry.owner), entry.qualname)
        name, owner = entry.qualname, entry.owner
        if owner is not None:
            new_owner = renamed[id(owner)]
            name = new_owner.qualname + name[len(owner.qualname) :]
        else:
            new_owner = None
        if total[key] > 1:
            seen[key] = seen.get(key, 0) + 1
            name = f"{name}#{seen[key]}"
        new = Entry(name, entry.kind, entry.node, entry.block, new_owner, entry.condition, entry.tests)
        renamed[id(entry)] = new
        out.append(new)
    return out
