"""Finding an anchor in Python: patterns with captures, matched on the syntax tree inside one symbol."""

from __future__ import annotations

import ast
import difflib
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from strata.fingerprint import serialise
from strata.model import Edit
from strata.python_symbols import DEFINITIONS, MODULE, Entry, PyModule
from strata.python_text import dedent
from strata.spans import PlaceFault

ONE = "strata_one__"
MANY = "strata_many__"
_SCAN = re.compile(
    r"""(?P<string>(?:\b[rRbBfFuU]{1,2})?(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"
        |'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))
      |(?P<comment>\#[^\n]*)
      |\$\$\$(?P<many>[A-Z_][A-Z0-9_]*)
      |\$(?P<one>[A-Z_][A-Z0-9_]*)""",
    re.VERBOSE | re.DOTALL,
)
_SHOWN = 8  # places shown of an anchor that matches too often
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_CLAUSES = ("orelse", "handlers", "finalbody", "decorator_list")
_CLAUSE_WORDS = {
    "orelse": "else",
    "handlers": "except",
    "finalbody": "finally",
    "decorator_list": "decorator",
}


@dataclass(frozen=True)
class Pair:
    """A ``key: value`` of a dict display; key None for ``**value``."""

    key: ast.expr | None
    value: ast.expr


@dataclass(frozen=True)
class Param:
    """One parameter with its default; kind: ``/``, ``arg``, ``*args``, ``kw`` or ``**kw``."""

    kind: str
    arg: ast.arg
    default: ast.expr | None


Item = ast.AST | Pair | Param | str | None


@dataclass(frozen=True)
class Capture:
    """What a capture stands for: one node, consecutive nodes, or an identifier."""

    kind: Literal["node", "list", "name"]
    items: tuple[Any, ...]


Env = Mapping[str, Capture]


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: an expression, or statements. header_only: clauses and bodies are left out of the
    match."""

    text: str
    expression: ast.expr | None
    statements: tuple[ast.stmt, ...]
    header_only: bool = False


@dataclass(frozen=True)
class Match:
    """A place: an expression, or consecutive statements of one block. env: what the captures stand for."""

    nodes: tuple[ast.AST, ...]
    env: Env

    @property
    def is_expression(self) -> bool:
        return isinstance(self.nodes[0], ast.expr)


def scan(text: str) -> Iterator[re.Match[str]]:
    """The captures of a pattern or template, those inside strings and comments left out."""
    return (m for m in _SCAN.finditer(text) if m["many"] or m["one"])


def encode(text: str, many: Mapping[str, str] | None = None) -> str:
    """``text`` with captures as identifiers, so that Python parses it. many: prefix (``*``) per list
    capture."""

    def put(m: re.Match[str]) -> str:
        if m["many"]:
            return (many or {}).get(m["many"], "") + MANY + m["many"]
        return ONE + m["one"] if m["one"] else m.group()

    return _SCAN.sub(put, text)


def parse_with_captures(text: str, what: str) -> list[ast.stmt]:
    """Statements of a pattern or template. PlaceFault E-EDIT where it isn't Python whatever lists stand
    for."""
    names = list(dict.fromkeys(m["many"] for m in scan(text) if m["many"]))
    first: SyntaxError | None = None
    for stars in itertools.product(("", "*", "**"), repeat=len(names)) if len(names) <= 5 else [()]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(encode(text, dict(zip(names, stars, strict=False)))).body
        except (SyntaxError, ValueError) as error:
            first = first or (error if isinstance(error, SyntaxError) else SyntaxError(str(error)))
    assert first is not None
    raise PlaceFault(
        "E-EDIT",
        f"{what} is not Python: {first.msg}",
        expected="one expression, one statement, or consecutive statements, compound ones with their bodies",
        found=text.strip(),
    )


@lru_cache(maxsize=512)
def parse_pattern(text: str, what: str, header: bool = False) -> Pattern:
    """Read a pattern. header: a compound statement may be given by its first line alone (``for x in y:``)."""
    try:
        source = dedent(text)
    except SyntaxError as error:
        raise PlaceFault("E-EDIT", f"{what} has no Python tokens: {error}", found=text.strip()) from error
    header_only = header and source.rstrip().endswith(":") and "\n" not in source
    body = parse_with_captures(source + " pass" if header_only else source, what)
    if not body:
        raise PlaceFault("E-EDIT", f"{what} holds no code", found=text.strip())
    only = body[0]
    if len(body) == 1 and isinstance(only, ast.Expr):
        if _placeholder(only):
            raise PlaceFault(
                "E-EDIT", f"{what} is nothing but a capture: it would match anything", found=text.strip()
            )
        return Pattern(text, only.value, ())
    if len(body) > 1 and (_many_name(body[0]) or _many_name(body[-1])):
        raise PlaceFault(
            "E-EDIT",
            f"{what} starts or ends with a list capture, which matches nothing there",
            found=text.strip(),
        )
    return Pattern(text, None, tuple(body), header_only)


# --- matching


@dataclass
class Matcher:
    """Compares pattern nodes with code nodes. partial: clauses that a compound pattern failed to account
    for."""

    partial: list[tuple[ast.AST, str]] = field(default_factory=list)

    def expression(self, pattern: ast.expr, node: ast.expr, env: Env) -> Env | None:
        return self._node(pattern, node, env)

    def header(self, pattern: ast.stmt, node: ast.stmt, env: Env) -> Env | None:
        """Match the first line of a compound statement alone."""
        if type(pattern) is not type(node):
            return None
        return self._fields(pattern, node, env, skip=("body", *_CLAUSES))

    def prefix(
        self, patterns: Sequence[ast.stmt], nodes: Sequence[ast.stmt], env: Env
    ) -> tuple[Env, int] | None:
        """Match all patterns against the first statements of ``nodes``; how many they took."""
        if not patterns:
            return env, 0
        name = _many_name(patterns[0])
        if name:
            for taken in range(len(nodes) + 1):
                bound = _bind(env, name, Capture("list", tuple(nodes[:taken])))
                rest = self.prefix(patterns[1:], nodes[taken:], bound) if bound is not None else None
                if rest:
                    return rest[0], rest[1] + taken
            return None
        if not nodes:
            return None
        new = self._node(patterns[0], nodes[0], env)
        rest = self.prefix(patterns[1:], nodes[1:], new) if new is not None else None
        return (rest[0], rest[1] + 1) if rest else None

    def _node(self, p: Any, n: Any, env: Env) -> Env | None:
        if isinstance(p, ast.Name) or (isinstance(p, ast.Expr) and isinstance(n, ast.stmt)):
            name = _one_name(p)
            if name:
                return _bind(env, name, Capture("node", (n,))) if isinstance(n, ast.expr | ast.stmt) else None
        if isinstance(p, ast.Name) and p.id.startswith(MANY):
            raise PlaceFault(
                "E-EDIT",
                f"$$${p.id[len(MANY) :]} stands for a list, but is used where one expression belongs",
                expected="arguments, elements, parameters or a block",
            )
        if type(p) is not type(n):
            return None
        if isinstance(p, Pair):
            return self._all(((p.key, n.key), (p.value, n.value)), env)
        if isinstance(p, Param):
            return self._all(((p.arg, n.arg), (p.default, n.default)), env) if p.kind == n.kind else None
        if isinstance(p, ast.Constant):
            return env if type(p.value) is type(n.value) and p.value == n.value else None
        if isinstance(p, ast.JoinedStr):
            return env if serialise(p) == serialise(n) else None
        if isinstance(p, ast.Call | ast.ClassDef):
            front = ("func", "func") if isinstance(p, ast.Call) else ("name", "name")
            new = self._all(((getattr(p, front[0]), getattr(n, front[1])),), env)
            new = self._list(arguments(p), arguments(n), new) if new is not None else None
            if new is None or isinstance(p, ast.Call):
                return new
            return self._fields(p, n, new, skip=("name", "bases", "keywords"))
        if isinstance(p, ast.Dict):
            return self._list(pairs(p), pairs(n), env)
        if isinstance(p, ast.arguments):
            return self._list(params(p), params(n), env)
        return self._fields(p, n, env)

    def _fields(self, p: ast.AST, n: ast.AST, env: Env, skip: Sequence[str] = ()) -> Env | None:
        new: Env | None = env
        names = [f for f in p._fields if f not in _IGNORED and f not in skip]
        clauses = [
            f for f in names if f in _CLAUSES and isinstance(getattr(p, f), list)
        ]  # IfExp has an orelse too
        for name in [f for f in names if f not in clauses]:
            left, right = getattr(p, name, None), getattr(n, name, None)
            new = self._all(((left, right),), new)
            if new is None:
                return None
        for name in clauses:
            left, right = getattr(p, name), getattr(n, name)
            if not left and right:
                word = "elif" if isinstance(right[0], ast.If) and name == "orelse" else _CLAUSE_WORDS[name]
                self.partial.append((n, word))
                return None
            new = self._list(left, right, new)
            if new is None:
                return None
        return new

    def _all(self, couples: Sequence[tuple[Any, Any]], env: Env | None) -> Env | None:
        for left, right in couples:
            if env is None:
                return None
            if isinstance(left, list) and isinstance(right, list):
                env = self._list(left, right, env)
            elif isinstance(left, ast.AST):
                env = self._node(left, right, env)
            elif isinstance(left, str) and isinstance(right, str):
                if left.startswith(ONE):
                    env = _bind(env, left[len(ONE) :], Capture("name", (right,)))
                elif left != right:
                    return None
            elif left != right:
                return None
        return env

    def _list(self, ps: Sequence[Any], ns: Sequence[Any], env: Env | None) -> Env | None:
        if env is None:
            return None
        if not ps:
            return env if not ns else None
        name = _many_name(ps[0])
        if name:
            takes = [len(ns)] if len(ps) == 1 else range(len(ns) + 1)
            for taken in takes:
                bound = _bind(env, name, Capture("list", tuple(ns[:taken])))
                done = self._list(ps[1:], ns[taken:], bound) if bound is not None else None
                if done is not None:
                    return done
            return None
        if not ns:
            return None
        if isinstance(ps[0], Pair | Param):
            new = self._node(ps[0], ns[0], env)
        else:
            new = self._all(((ps[0], ns[0]),), env)
        return self._list(ps[1:], ns[1:], new)


def arguments(node: Any) -> list[ast.AST]:
    """Arguments and keywords of a call, or bases and keywords of a class, in the order in which they are
    written."""
    plain = node.args if isinstance(node, ast.Call) else node.bases
    return sorted([*plain, *node.keywords], key=lambda a: (a.lineno, a.col_offset))


def pairs(node: ast.Dict) -> list[Pair]:
    return [Pair(k, v) for k, v in zip(node.keys, node.values, strict=True)]


def params(node: ast.arguments) -> list[Param]:
    """The parameters in order, each with its default."""
    plain = [*(("/", a) for a in node.posonlyargs), *(("arg", a) for a in node.args)]
    defaults = [None] * (len(plain) - len(node.defaults)) + list(node.defaults)
    out = [Param(kind, arg, default) for (kind, arg), default in zip(plain, defaults, strict=True)]
    if node.vararg:
        out.append(Param("*args", node.vararg, None))
    out += [Param("kw", a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    if node.kwarg:
        out.append(Param("**kw", node.kwarg, None))
    return out


def _bind(env: Env, name: str, capture: Capture) -> Env | None:
    if name.startswith("_"):
        return env
    known = env.get(name)
    if known is None:
        return {**env, name: capture}
    return env if _same(known, capture) else None


def _same(a: Capture, b: Capture) -> bool:
    if a.kind == "name" or b.kind == "name":
        return a.items == b.items
    matcher = Matcher()
    return matcher._list(list(a.items), list(b.items), {}) is not None


def _core(item: Any) -> Any:
    """The name inside whatever syntax a capture needs around itself (``*X``, ``**X``, an expression
    statement)."""
    if isinstance(item, Pair):
        return item.value if item.key is None else None
    if isinstance(item, Param):
        return item.arg.arg if item.arg.annotation is None and item.default is None else None
    if isinstance(item, ast.Expr | ast.Starred):
        return _core(item.value)
    if isinstance(item, ast.keyword):
        return item.value if item.arg is None else None
    if isinstance(item, ast.withitem):
        return item.context_expr if item.optional_vars is None else None
    if isinstance(item, ast.alias):
        return item.name if item.asname is None else None
    return item


def _many_name(item: Any) -> str:
    core = _core(item)
    word = core.id if isinstance(core, ast.Name) else core if isinstance(core, str) else ""
    return word[len(MANY) :] if word.startswith(MANY) else ""


def _one_name(item: Any) -> str:
    core = item.value if isinstance(item, ast.Expr) else item
    return core.id[len(ONE) :] if isinstance(core, ast.Name) and core.id.startswith(ONE) else ""


def _placeholder(item: Any) -> bool:
    return bool(_one_name(item) or _many_name(item))


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
    found = _candidates(scope, pattern, matcher)
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


def _candidates(scope: Scope, pattern: Pattern, matcher: Matcher) -> list[Match]:
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
            if type(statements[n]) is not type(pattern.statements[0]) and not _placeholder(
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
                    Matcher()._node(pattern.expression, inner, match.env)
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
            if _candidates(Scope(scope.module, entry), pattern, Matcher()):
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
