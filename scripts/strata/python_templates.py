"""Templates of verbs: captures put in as original source text, with parentheses and indentation as they
need."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from dataclasses import dataclass
from typing import Any

from strata.python_find import Scope
from strata.python_patterns import CAPTURES, MANY, ONE, Capture, Env, Pair, Param, parse_with_captures, scan
from strata.python_text import dedent, ends_in_comment, split_lines, string_rows, tokens
from strata.spans import PlaceFault

_OPERANDS_END = re.compile(r"[\w\"'\])}]$")
_WORDS_BEFORE_PARENTHESES = frozenset({*keyword.kwlist, "match", "case"})
_LOOSE: tuple[type[ast.expr], ...] = (
    ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.Lambda, ast.IfExp, ast.NamedExpr, ast.Await,
    ast.Yield, ast.YieldFrom,
)  # fmt: skip
# where an expression of any precedence stands free, by the type of its parent and its field
_FREE = frozenset({
    (ast.Expr, "value"), (ast.Assign, "value"), (ast.AugAssign, "value"), (ast.AnnAssign, "value"),
    (ast.Return, "value"), (ast.If, "test"), (ast.While, "test"), (ast.Assert, "test"), (ast.Assert, "msg"),
    (ast.For, "iter"), (ast.AsyncFor, "iter"), (ast.Raise, "exc"), (ast.withitem, "context_expr"),
    (ast.Call, "args"), (ast.keyword, "value"), (ast.List, "elts"), (ast.Tuple, "elts"), (ast.Set, "elts"),
    (ast.Dict, "values"), (ast.Subscript, "slice"),
})  # fmt: skip
_FREE_TUPLE = frozenset({
    (ast.Expr, "value"), (ast.Assign, "value"), (ast.AugAssign, "value"), (ast.Return, "value"),
    (ast.For, "iter"), (ast.Subscript, "slice"), (ast.Assign, "targets"), (ast.For, "target"),
})  # fmt: skip
_FREE_WALRUS = frozenset({(ast.If, "test"), (ast.While, "test"), (ast.Call, "args")})
_FREE_YIELD = frozenset({(ast.Expr, "value"), (ast.Assign, "value"), (ast.AugAssign, "value")})
BODY = "strata_body__"


@dataclass(frozen=True)
class Rendered:
    """A template filled in: text at column 0 with ``\\n`` newlines, and its statements."""

    text: str
    body: tuple[ast.stmt, ...]

    @property
    def expression(self) -> ast.expr | None:
        """The expression, where the template is nothing but one."""
        only = self.body[0]
        return only.value if len(self.body) == 1 and isinstance(only, ast.Expr) else None

    @property
    def is_simple_line(self) -> bool:
        """Whether the text can share a line with others: one line without a compound statement."""
        if "\n" in self.text or ends_in_comment(self.text):
            return False
        return not any(hasattr(s, "body") or hasattr(s, "cases") for s in self.body)


def needs_parentheses(node: ast.AST, bare: bool, parent: ast.AST | None, field: str) -> bool:
    """Whether ``node`` needs them to stand as ``field`` of ``parent``. bare: a tuple is written without its
    own."""
    place = (type(parent), field)
    if isinstance(node, ast.Tuple) and bare:
        return place not in _FREE_TUPLE
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and isinstance(parent, ast.Attribute)
    ):
        return True
    if not isinstance(node, _LOOSE):
        return False
    if isinstance(node, ast.NamedExpr):
        return place not in _FREE_WALRUS
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return place not in _FREE_YIELD
    return place not in _FREE


def is_bare_tuple(node: ast.AST, text: str) -> bool:
    """Whether ``text``, the source of ``node``, is a tuple without parentheses of its own."""
    return isinstance(node, ast.Tuple) and not (text.startswith("(") and _parenthesised(node, text))


def _parenthesised(node: ast.Tuple, text: str) -> bool:
    if not node.elts:
        return True
    try:
        return len(ast.parse(text.strip()[1:-1].join(("[", "]")), mode="eval").body.elts) == len(node.elts)  # type: ignore[attr-defined]
    except SyntaxError:
        return False


def stands_alone(text: str) -> bool:
    """Whether ``text`` is one expression without help, so that its line breaks are inside brackets."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr)


def outer_span(scope: Scope, node: ast.expr) -> tuple[int, int]:
    """The span of an expression with the redundant parentheses around it."""
    module = scope.module
    start, end = module.span(node)
    statement = scope.statement_of(node)
    first, last = module.span(statement)
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body and not isinstance(statement, ast.Match | ast.Try):
        header = module.start(body[0])
        last = header if header >= end else last
    found = list(tokens(module.lines, first, last))
    before = [t for t in found if t.end <= start]
    after = [t for t in found if t.start >= end]
    parent = scope.parent.get(id(node), (None, ""))[0]
    bound = module.span(parent) if isinstance(parent, ast.Tuple | ast.GeneratorExp) else None
    while before and after and before[-1].text == "(" and after[0].text == ")":
        previous = before[-2].text if len(before) > 1 else ""
        if _OPERANDS_END.search(previous) and previous not in _WORDS_BEFORE_PARENTHESES:
            break
        if bound == (before[-1].start, after[0].end):
            break
        start, end = before.pop().start, after.pop(0).end
    return start, end


def own_span(scope: Scope, node: ast.expr) -> tuple[int, int]:
    """The span of an expression alone; that of a generator as the only argument leaves the call's
    parentheses."""
    start, end = scope.module.span(node)
    parent = scope.parent.get(id(node), (None, ""))[0]
    if (
        isinstance(node, ast.GeneratorExp)
        and isinstance(parent, ast.Call)
        and end == scope.module.end(parent)
    ):
        return start + 1, end - 1
    return start, end


def item_span(scope: Scope, item: Any) -> tuple[int, int]:
    """The span of whatever a list capture may hold."""
    module = scope.module
    if isinstance(item, Pair):
        low = outer_span(scope, item.key or item.value)[0]
        return (low if item.key else module.source.rindex("**", 0, low)), outer_span(scope, item.value)[1]
    if isinstance(item, Param):
        low = module.start(item.arg)
        if item.kind in ("*args", "**kw"):
            low = module.source.rindex("**" if item.kind == "**kw" else "*", 0, low)
        return low, outer_span(scope, item.default)[1] if item.default else module.end(item.arg)
    if isinstance(item, ast.withitem):
        low, high = outer_span(scope, item.context_expr)
        return low, outer_span(scope, item.optional_vars)[1] if item.optional_vars else high
    if isinstance(item, ast.expr):
        return outer_span(scope, item)
    return module.span(item)


def render(scope: Scope, template: str, env: Env, what: str, extra: dict[str, str] | None = None) -> Rendered:
    """Fill in a template. extra: captures that are given as identifiers (``$BODY`` of a wrap).

    PlaceFault E-EDIT: unknown captures, a template that isn't Python before or after.
    """
    try:
        source = dedent(template)
    except SyntaxError as error:
        raise PlaceFault("E-EDIT", f"{what} has no Python tokens: {error}", found=template.strip()) from error
    for word, code in (extra or {}).items():
        source = re.sub(rf"\${word}\b", code, source)
    occurrences = list(scan(source))
    for m in occurrences:
        name = m["many"] or m["one"]
        if name not in env:
            raise PlaceFault(
                "E-EDIT",
                f"{what} uses ${name}, which 'find' does not capture",
                expected="captures of 'find': " + (", ".join("$" + n for n in env) or "none"),
                found=m.group(),
            )
    if not occurrences:
        return Rendered(source, _parse(source, what))
    contexts = _contexts(source, what)
    out: list[str] = []
    at = 0
    for k, m in enumerate(occurrences):
        capture = env[m["many"] or m["one"]]
        begin, end = m.span()
        line_start = source.rfind("\n", 0, begin) + 1
        line_end = source.find("\n", end)
        alone = (
            not source[line_start:begin].strip()
            and not source[end : len(source) if line_end < 0 else line_end].strip()
        )
        margin = re.match(r"[ \t]*", source[line_start:]).group()  # type: ignore[union-attr]
        text = _capture_text(scope, capture, contexts.get(k, (None, "")), alone)
        if capture.kind == "list" and not capture.items and not alone:
            begin, end = _without_comma(source, begin, end, at)
        out += [source[at:begin], _shift(text, margin)]
        at = end
    text = "".join([*out, source[at:]])
    return Rendered(text, _parse(text, f"{what}, captures filled in,"))


def _parse(text: str, what: str) -> tuple[ast.stmt, ...]:
    body = tuple(parse_with_captures(text, what))
    if not body:
        raise PlaceFault("E-EDIT", f"{what} holds no code", found=text)
    return body


def _contexts(source: str, what: str) -> dict[int, tuple[ast.AST | None, str]]:
    """Occurrence of a capture in the template -> its parent and field there."""
    count = -1
    parse_with_captures(source, what)

    def number(m: re.Match[str]) -> str:
        nonlocal count
        if not (m["many"] or m["one"]):
            return m.group()
        count += 1
        return f"$$${m['many']}_{count}" if m["many"] else f"$ONE_{count}"

    body = parse_with_captures(CAPTURES.sub(number, source), what)
    found: dict[int, tuple[ast.AST | None, str]] = {}
    for parent in ast.walk(ast.Module(body, [])):
        for name, value in ast.iter_fields(parent):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.Name) and child.id.startswith((ONE, MANY)):
                    found[int(child.id.rpartition("_")[2])] = (parent, name)
    return found


def _capture_text(scope: Scope, capture: Capture, context: tuple[ast.AST | None, str], alone: bool) -> str:
    """The source text of a capture at column 0."""
    source = scope.module.source
    if capture.kind == "name":
        return str(capture.items[0])
    if not capture.items:
        return "pass" if alone and (context[0] is None or isinstance(context[0], ast.Expr)) else ""
    first, last = capture.items[0], capture.items[-1]
    if isinstance(first, ast.stmt):
        return _block_text(scope, first, last)
    if capture.kind == "list":
        start, end = item_span(scope, first)[0], item_span(scope, last)[1]
        return _flush(source[start:end], _statement_indent(scope, first))
    start, end = scope.module.span(first)
    text = source[start:end]
    bare = is_bare_tuple(first, text)
    if needs_parentheses(first, bare, *context) or ("\n" in text and not stands_alone(text)):
        text = f"({text})"
    return _flush(text, _statement_indent(scope, first))


def _statement_indent(scope: Scope, item: Any) -> str:
    """The indentation of the statement that holds a captured item: what its further lines are moved by."""
    node = item.value if isinstance(item, Pair) else item.arg if isinstance(item, Param) else item
    return scope.module.lines.indent_of(scope.module.start(scope.statement_of(node)))


def _block_text(scope: Scope, first: ast.stmt, last: ast.stmt) -> str:
    module = scope.module
    start = module.start(first)
    base = module.lines.indent_of(start)
    text = module.source[start : module.end(last)]
    if scope.is_elif(first):
        text = text[2:]
    return _flush(text, base, whole=True)


def _flush(text: str, base: str, whole: bool = False) -> str:
    """``text`` with ``base`` taken from the start of its further lines, those inside string tokens left
    alone."""
    lines = split_lines(text)
    if len(lines) == 1:
        return text
    try:
        kept = string_rows(base + text if whole else f"({text})")
    except SyntaxError:
        kept = string_rows(base + text)
    return "\n".join(
        [lines[0], *(s if n in kept else s.removeprefix(base) for n, s in enumerate(lines[1:], 1))]
    )


def _shift(text: str, margin: str) -> str:
    if not margin or "\n" not in text:
        return text
    try:
        kept = string_rows(f"({text})")
    except SyntaxError:
        kept = string_rows(text)
    lines = text.split("\n")
    return "\n".join(
        [lines[0], *(s if n in kept or not s else margin + s for n, s in enumerate(lines[1:], 1))]
    )


def _without_comma(source: str, begin: int, end: int, floor: int) -> tuple[int, int]:
    """Widen the place of an empty list capture by the comma that parted it from its neighbours."""
    before = re.search(r",\s*$", source[floor:begin])
    if before:
        return floor + before.start(), end
    after = re.match(r"\s*,\s*", source[end:])
    return begin, end + after.end() if after else end
