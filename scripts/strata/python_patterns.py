"""Patterns with captures, and how they match syntax trees."""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from strata.fingerprint import serialise
from strata.python_text import dedent
from strata.spans import PlaceFault

ONE = "strata_one__"
MANY = "strata_many__"
CAPTURES = re.compile(
    r"""(?P<string>(?:\b[rRbBfFuU]{1,2})?(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"
        |'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))
      |(?P<comment>\#[^\n]*)
      |\$\$\$(?P<many>[A-Z_][A-Z0-9_]*)
      |\$(?P<one>[A-Z_][A-Z0-9_]*)""",
    re.VERBOSE | re.DOTALL,
)
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


def scan(text: str) -> Iterator[re.Match[str]]:
    """The captures of a pattern or template, those inside strings and comments left out."""
    return (m for m in CAPTURES.finditer(text) if m["many"] or m["one"])


def encode(text: str, many: Mapping[str, str] | None = None) -> str:
    """``text`` with captures as identifiers, so that Python parses it. many: prefix (``*``) per list
    capture."""

    def put(m: re.Match[str]) -> str:
        if m["many"]:
            return (many or {}).get(m["many"], "") + MANY + m["many"]
        return ONE + m["one"] if m["one"] else m.group()

    return CAPTURES.sub(put, text)


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
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
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
        if is_placeholder(only):
            raise PlaceFault(
                "E-EDIT", f"{what} is nothing but a capture: it would match anything", found=text.strip()
            )
        return Pattern(text, only.value, ())
    if len(body) > 1 and (many_name(body[0]) or many_name(body[-1])):
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
        return self.node(pattern, node, env)

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
        name = many_name(patterns[0])
        if name:
            for taken in range(len(nodes) + 1):
                bound = _bind(env, name, Capture("list", tuple(nodes[:taken])))
                rest = self.prefix(patterns[1:], nodes[taken:], bound) if bound is not None else None
                if rest:
                    return rest[0], rest[1] + taken
            return None
        if not nodes:
            return None
        new = self.node(patterns[0], nodes[0], env)
        rest = self.prefix(patterns[1:], nodes[1:], new) if new is not None else None
        return (rest[0], rest[1] + 1) if rest else None

    def node(self, p: Any, n: Any, env: Env) -> Env | None:
        if isinstance(p, ast.Name) or (isinstance(p, ast.Expr) and isinstance(n, ast.stmt)):
            name = one_name(p)
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
                env = self.node(left, right, env)
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
        name = many_name(ps[0])
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
            new = self.node(ps[0], ns[0], env)
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


def many_name(item: Any) -> str:
    core = _core(item)
    word = core.id if isinstance(core, ast.Name) else core if isinstance(core, str) else ""
    return word[len(MANY) :] if word.startswith(MANY) else ""


def one_name(item: Any) -> str:
    core = item.value if isinstance(item, ast.Expr) else item
    return core.id[len(ONE) :] if isinstance(core, ast.Name) and core.id.startswith(ONE) else ""


def is_placeholder(item: Any) -> bool:
    return bool(one_name(item) or many_name(item))
