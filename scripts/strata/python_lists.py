"""Adding an item to what stands between brackets: arguments, elements, parameters."""

from __future__ import annotations

from dataclasses import dataclass

from strata.python_symbols import PyModule
from strata.python_text import newline_of, tokens
from strata.spans import RANK_ITEM, Span

_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Items:
    """The comma-separated items between two brackets.

    items: (start, end) of each; comma: end of the comma after the last one, or None; low, high: offsets
    just inside the brackets; closed: False for a tuple without parentheses, whose end is its last item's.
    """

    items: tuple[tuple[int, int], ...]
    comma: int | None
    low: int
    high: int
    closed: bool = True


def items_between(module: PyModule, statement_start: int, low: int, high: int, closed: bool = True) -> Items:
    """Split at the commas of the outermost level. ``statement_start`` stands on the statement's first
    line."""
    found: list[tuple[int, int]] = []
    depth = lambdas = 0
    begin = end = comma = -1
    for token in tokens(module.lines, statement_start, high):
        if token.start < low:
            continue
        if token.text in _OPEN and token.text:
            depth += 1
        elif token.text in _CLOSE and token.text:
            depth -= 1
        elif depth == 0 and token.text == "lambda":
            lambdas += 1
        elif depth == 0 and token.text == ":" and lambdas:
            lambdas -= 1
        elif depth == 0 and token.text == "," and not lambdas:
            found.append((begin, end))
            begin, comma = -1, token.end
            continue
        if begin < 0:
            begin = token.start
        end = token.end
    if begin >= 0:
        found.append((begin, end))
        comma = -1
    return Items(tuple(found), comma if comma >= 0 else None, low, high, closed)


def insert_item(module: PyModule, group: Items, index: int, text: str) -> list[Span]:
    """Spans that make ``text`` the item number ``index`` (0 … len), laid out like its neighbours."""
    lines = module.lines
    newline = newline_of(module.source)
    if not group.items:
        return [Span(group.low, group.low, text, "insert", joint=", ")]
    if index < len(group.items):
        start = group.items[index][0]
        if _starts_line(module, start):
            return [Span(start, start, f"{text},{newline}{lines.indent_of(start)}", "insert")]
        return [Span(start, start, f"{text}, ", "insert")]
    start, end = group.items[-1]
    own_line = group.closed and _starts_line(module, start) and lines.line_of(group.high) > lines.line_of(end)
    if not own_line:
        if group.comma is None:
            return [Span(end, end, f", {text}", "insert", rank=RANK_ITEM)]
        return [Span(group.comma, group.comma, f" {text},", "insert", rank=RANK_ITEM)]
    fresh = newline + lines.indent_of(start) + text + ","
    at = lines.end_of(group.comma or end)
    if group.comma is not None:
        return [Span(at, at, fresh, "insert", rank=RANK_ITEM)]
    # a comment may stand behind the last item: the comma goes before it, the new line after it
    return [
        Span(end, end, ",", "insert", merge="comma", rank=RANK_ITEM - 1),
        Span(at, at, fresh, "insert", rank=RANK_ITEM),
    ]


def _starts_line(module: PyModule, offset: int) -> bool:
    return not module.source[module.lines.start_of(offset) : offset].strip()
