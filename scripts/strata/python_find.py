"""Finding an anchor in Python: where an edit may look, and what is said when it is not there."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strata.model import Edit
from strata.python_patterns import Env, Matcher, Pattern, is_placeholder, parse_pattern
from strata.python_symbols import DEFINITIONS, MODULE, Entry, PyModule
from strata.spans import PlaceFault

_SHOWN = 8  # places shown of an anchor that matches too often


@dataclass(frozen=True)
class Match:
    """A place: an expression, or consecutive statements of one block. env: what the captures stand for."""

    nodes: tuple[ast.AST, ...]
    env: Env

    @property
    def is_expression(self) -> bool:
        return isinstance(self.nodes[0], ast.expr)


# --- where to look


@dataclass(frozen=True)
class Block:
    """Statements that stand below one another. owner: the compound statement, or None at top level."""

    statements: Sequence[ast.stmt]
    owner: ast.AST | None
    field: str


class Scope:
    """The nodes in which an edit of one symbol may find its anchor; nested definitions count as one
    statement.

    entry: the symbol, None for the top-level statements.
    """

    def __init__(self, module: PyModule, entry: Entry | None) -> None:
        self.module = module
        self.entry = entry
        self.expressions: list[ast.expr] = []
        self.blocks: list[Block] = []
        self.parent: dict[int, tuple[ast.AST, str]] = {}
        self.place: dict[int, tuple[Block, int]] = {}
        self.in_strings: list[ast.expr] = []
        if entry is None:
            self._block(module.tree.body, None, "body")
        else:
            around = Block(entry.block, entry.owner.node if entry.owner else None, "body")
            self.place[id(entry.node)] = (
                around,
                next(i for i, s in enumerate(entry.block) if s is entry.node),
            )
            self._visit(entry.node, is_root=True)

    def _block(self, statements: list[ast.stmt], owner: ast.AST | None, name: str) -> None:
        block = Block(statements, owner, name)
        self.blocks.append(block)
        for n, statement in enumerate(statements):
            self.place[id(statement)] = (block, n)
            if owner is not None:
                self.parent[id(statement)] = (owner, name)
            self._visit(statement)

    def _visit(self, node: ast.AST, is_root: bool = False) -> None:
        if isinstance(node, ast.expr):
            self.expressions.append(node)
            if isinstance(node, ast.JoinedStr):
                self.in_strings += [n for n in ast.walk(node) if isinstance(n, ast.expr) and n is not node]
                return
        skip_body = isinstance(node, DEFINITIONS) and not is_root
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                if value and isinstance(value[0], ast.stmt):
                    if not skip_body:
                        self._block(value, node, name)
                    continue
                for child in value:
                    if isinstance(child, ast.AST):
                        self.parent[id(child)] = (node, name)
                        self._visit(child)
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                self.parent[id(value)] = (node, name)
                self._visit(value)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Nodes around ``node``, innermost first, up to the symbol's own statement."""
        current = self.parent.get(id(node))
        while current is not None:
            yield current[0]
            current = self.parent.get(id(current[0]))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement of a block that holds ``node``: an ``elif`` counts as its whole ``if``."""
        for candidate in (node, *self.ancestors(node)):
            if isinstance(candidate, ast.stmt) and not self.is_elif(candidate):
                return candidate
        raise AssertionError("an expression without a statement")

    def is_elif(self, node: ast.stmt) -> bool:
        if not isinstance(node, ast.If) or id(node) not in self.parent:
            return False
        return self.parent[id(node)][1] == "orelse" and self.module.source.startswith(
            "elif", self.module.start(node)
        )

    def all_statements(self) -> list[ast.stmt]:
        own = [self.entry.node] if self.entry else []
        return own + [s for b in self.blocks for s in b.statements if not self.is_elif(s)]


def scope_of(module: PyModule, symbol: str | None) -> Scope:
    """The scope of an edit's symbol; None and ``<module>`` mean the top-level statements."""
    return Scope(module, None if symbol in (None, MODULE) else module.find(symbol or ""))


# --- finding


def find(scope: Scope, edit: Edit) -> list[Match]:
    """Every place of ``edit.find``, narrowed and counted; PlaceFault E-CONFLICT, E-AMBIGUOUS, E-PARTIAL,
    E-EDIT."""
    assert edit.find is not None
    if edit.between is not None:
        raise PlaceFault(
            "E-EDIT", "'between' is for files without a syntax tree; in Python name the symbol in 'at'"
        )
    if edit.nth is not None and edit.count != 1:
        raise PlaceFault("E-EDIT", "'nth' picks one match; it cannot go with a 'count'")
    pattern = parse_pattern(edit.find, "the pattern of 'find'")
    matcher = Matcher()
    found = candidates(scope, pattern, matcher)
    narrowed = found
    if edit.in_ is not None:
        inner = parse_pattern(edit.in_, "the pattern of 'in'", header=True)
        narrowed = [m for m in (_narrow_in(scope, inner, m) for m in narrowed) if m]
    if edit.next_to is not None:
        beside = parse_pattern(edit.next_to, "the pattern of 'next_to'", header=True)
        narrowed = [m for m in (_narrow_next(scope, beside, m) for m in narrowed) if m]
    if edit.nth is not None:
        if edit.nth > len(narrowed):
            raise _wrong_count(
                scope, edit, narrowed, found, f"at least {edit.nth} matches (nth: {edit.nth})", matcher
            )
        return [narrowed[edit.nth - 1]]
    if len(narrowed) != edit.count:
        want = f"{edit.count} match" + ("es" if edit.count != 1 else "")
        raise _wrong_count(scope, edit, narrowed, found, want, matcher)
    return narrowed


def candidates(scope: Scope, pattern: Pattern, matcher: Matcher) -> list[Match]:
    out: list[Match] = []
    if pattern.expression is not None:
        kind = type(pattern.expression)
        for node in scope.expressions:
            if type(node) is kind:
                env = matcher.expression(pattern.expression, node, {})
                if env is not None:
                    out.append(Match((node,), env))
        return sorted(out, key=lambda m: scope.module.span(m.nodes[0]))
    own = [([scope.entry.node], [0])] if scope.entry else []
    for statements, starts in [*own, *((b.statements, range(len(b.statements))) for b in scope.blocks)]:
        for n in starts:
            if type(statements[n]) is not type(pattern.statements[0]) and not is_placeholder(
                pattern.statements[0]
            ):
                continue
            if scope.is_elif(statements[n]):
                continue
            hit = matcher.prefix(pattern.statements, statements[n:], {})
            if hit is not None:
                out.append(Match(tuple(statements[n : n + hit[1]]), hit[0]))
    return sorted(out, key=lambda m: scope.module.start(m.nodes[0]))


def _narrow_in(scope: Scope, pattern: Pattern, match: Match) -> Match | None:
    for node in scope.ancestors(match.nodes[0]):
        env = _env_of(pattern, node, match.env)
        if env is not None:
            return Match(match.nodes, env)
    return None


def _narrow_next(scope: Scope, pattern: Pattern, match: Match) -> Match | None:
    first = scope.statement_of(match.nodes[0])
    block, n = scope.place[id(first)]
    last = n if match.is_expression else n + len(match.nodes) - 1
    size = len(pattern.statements) or 1
    for begin in (n - size, last + 1):
        beside = list(block.statements[max(begin, 0) : begin + size])
        if begin < 0 or not beside:
            continue
        if pattern.expression is not None:
            for inner in ast.walk(beside[0]):
                env = (
                    Matcher().node(pattern.expression, inner, match.env)
                    if isinstance(inner, ast.expr)
                    else None
                )
                if env is not None:
                    return Match(match.nodes, env)
            continue
        if pattern.header_only:
            env = Matcher().header(pattern.statements[0], beside[0], match.env)
        else:
            hit = Matcher().prefix(pattern.statements, beside, match.env)
            env = hit[0] if hit else None
        if env is not None:
            return Match(match.nodes, env)
    return None


def _env_of(pattern: Pattern, node: ast.AST, env: Env) -> Env | None:
    if pattern.expression is not None:
        if not isinstance(node, ast.expr):
            return None
        return Matcher().expression(pattern.expression, node, env)
    if not isinstance(node, ast.stmt) or len(pattern.statements) != 1:
        return None
    if pattern.header_only:
        return Matcher().header(pattern.statements[0], node, env)
    hit = Matcher().prefix(pattern.statements, [node], env)
    return hit[0] if hit else None


# --- faults


def _wrong_count(
    scope: Scope, edit: Edit, narrowed: list[Match], found: list[Match], want: str, matcher: Matcher
) -> PlaceFault:
    module = scope.module
    where = scope.entry.qualname if scope.entry else MODULE
    assert edit.find is not None
    lines = [module.lines.line_of(module.start(m.nodes[0])) for m in narrowed]
    if narrowed:
        return PlaceFault(
            "E-AMBIGUOUS",
            f"the anchor matches {len(narrowed)} times in {where}",
            expected=f"{want} of: {edit.find.strip()}",
            found=_lines(lines),
            candidates=_places(module, lines),
            line=lines[0],
        )
    if found:
        at = [module.lines.line_of(module.start(m.nodes[0])) for m in found]
        narrowing = " and ".join(w for w, v in (("'in'", edit.in_), ("'next_to'", edit.next_to)) if v)
        return PlaceFault(
            "E-CONFLICT",
            f"the anchor is in {where}, but not where {narrowing} asks for it",
            expected=f"{want} of: {edit.find.strip()}",
            found=f"{_lines(at)}, none of them where {narrowing} asks for it",
            candidates=_places(module, at),
            line=at[0],
        )
    if matcher.partial:
        node, word = matcher.partial[0]
        line = module.lines.line_of(module.start(node))
        return PlaceFault(
            "E-PARTIAL",
            f"the pattern leaves out a clause of the statement on line {line}: {word}",
            expected="a pattern with its decorators (@$D stands for any)"
            if word == "decorator"
            else f"a pattern with every clause, {word} included (use $$$REST for its body)",
            found=_first_line(module, node),
            line=line,
        )
    pattern = parse_pattern(edit.find, "the pattern of 'find'")
    if pattern.expression is not None and any(
        type(n) is type(pattern.expression) and Matcher().expression(pattern.expression, n, {}) is not None
        for n in scope.in_strings
    ):
        return PlaceFault(
            "E-EDIT",
            "the anchor is inside an f-string, where Python gives no reliable positions",
            expected="an anchor outside: the whole f-string, or its statement",
            found=edit.find.strip(),
        )
    elsewhere = _elsewhere(scope, pattern)
    return PlaceFault(
        "E-CONFLICT",
        f"the anchor is not in {where}",
        expected=f"{want} of: {edit.find.strip()}",
        found="no match" + (f"; it is in {', '.join(elsewhere)}" if elsewhere else ""),
        candidates=_nearest(scope, edit.find),
    )


def _lines(lines: list[int]) -> str:
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ("lines " if len(lines) > 1 else "line ") + ", ".join(map(str, lines[:_SHOWN])) + more


def _places(module: PyModule, lines: list[int]) -> list[str]:
    starts = [(n, module.lines.starts[n - 1]) for n in dict.fromkeys(lines[:_SHOWN])]
    return [f"line {n}: {module.source[s : module.lines.end_of(s)].strip()[:120]}" for n, s in starts]


def _elsewhere(scope: Scope, pattern: Pattern) -> list[str]:
    """Names of other symbols of the file in which the pattern matches."""
    out = []
    for entry in [None, *scope.module.entries]:
        if entry is not scope.entry and (entry is None or isinstance(entry.node, DEFINITIONS)):
            name = entry.qualname if entry else MODULE
            if candidates(Scope(scope.module, entry), pattern, Matcher()):
                out.append(name)
    return out[:5]


def _nearest(scope: Scope, text: str) -> list[str]:
    """The statements of the scope most like the pattern, as ``line n: first line``."""
    wanted = re.sub(r"\s+", " ", text.strip())
    ranked = []
    for node in scope.all_statements():
        if node is not (scope.entry.node if scope.entry else None):
            code = re.sub(r"\s+", " ", scope.module.text(node)[: max(2 * len(wanted), 80)])
            score = difflib.SequenceMatcher(None, wanted, code, autojunk=False).ratio()
            ranked.append((score, scope.module.lines.line_of(scope.module.start(node)), node))
    ranked.sort(key=lambda r: (-r[0], r[1]))
    return [
        f"line {line}: {_first_line(scope.module, node)}" for score, line, node in ranked[:3] if score > 0.4
    ]


def _first_line(module: PyModule, node: ast.AST) -> str:
    start = module.start(node)
    return module.source[start : module.lines.end_of(start)].strip()[:120]
