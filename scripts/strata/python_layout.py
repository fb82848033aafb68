"""How statements stand on lines, and how text is put beside them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from strata.model import Edit
from strata.python_find import Scope
from strata.python_symbols import PyModule
from strata.python_text import indent_after_first, newline_of
from strata.spans import RANK_BREAK, Span

_SEPARATOR = re.compile(r"[ \t\f]*;(?:[ \t\f]|\\(?:\r\n|\r|\n))*")
_BLANK = re.compile(r"(?:[ \t\f;]|\\(?:\r\n|\r|\n))\Z")


@dataclass
class Work:
    """One edit being placed: its scope, the spans so far, and the statements that its anchors stand in."""

    scope: Scope
    edit: Edit
    spans: list[Span] = field(default_factory=list)
    anchors: list[ast.stmt] = field(default_factory=list)

    @property
    def module(self) -> PyModule:
        return self.scope.module

    @property
    def newline(self) -> str:
        return newline_of(self.module.source)

    def add(self, span: Span) -> None:
        if span not in self.spans:
            self.spans.append(span)


def where(scope: Scope, node: ast.stmt) -> tuple[list[ast.stmt], int]:
    block, n = scope.place[id(node)]
    return list(block.statements), n


def _joined(scope: Scope, block: list[ast.stmt], n: int) -> bool:
    """Whether statement ``n`` of a block stands behind a ``;`` on the logical line of the one before it."""
    if n < 1 or n >= len(block):
        return False
    module = scope.module
    between = module.source[module.end(block[n - 1]) : module.start(block[n])]
    return _SEPARATOR.fullmatch(between) is not None


def _line_mates(scope: Scope, node: ast.stmt) -> tuple[ast.stmt, bool]:
    """The first statement of the block on the logical line of ``node``, and whether it starts that line."""
    block, n = where(scope, node)
    while _joined(scope, block, n):
        n -= 1
    return block[n], n > 0 or not _behind_colon(scope.module, scope.module.start(block[n]))


def _behind_colon(module: PyModule, start: int) -> bool:
    """Whether what starts there stands on the logical line of the header that it belongs to."""
    low = _before_blanks(module.source, start)
    if module.source[low - 1 : low] != ":":
        return False
    line = module.source[module.lines.start_of(low) : low]
    return module.lines.line_of(low) == module.lines.line_of(start) or "#" not in line


def _before_blanks(source: str, offset: int) -> int:
    """Where the white space, ``;`` and joined line ends in front of ``offset`` begin."""
    while (blank := _BLANK.search(source, max(offset - 3, 0), offset)) is not None:
        offset = blank.start()
    return offset


def block_indent(scope: Scope, node: ast.stmt) -> str:
    """The indentation of the block of ``node``; what it will be for a suite on its header's line."""
    first, starts_line = _line_mates(scope, node)
    module, start = scope.module, scope.module.start(first)
    if starts_line:
        return module.lines.indent_of(start)
    indent = module.lines.indent_of(_before_blanks(module.source, start))
    return indent + ("\t" if indent.startswith("\t") else "    ")


def break_suite(work: Work, node: ast.stmt) -> None:
    """Put a suite that stands on its header's line (``if x: y``) on lines of its own."""
    first, starts_line = _line_mates(work.scope, node)
    if not starts_line:
        break_at(work, work.module.start(first), block_indent(work.scope, node))


def break_at(work: Work, start: int, indent: str) -> None:
    """Put what starts at ``start`` on a line of its own, in place of the white space and ``;`` before it."""
    low = _before_blanks(work.module.source, start)
    text = work.newline + indent
    if low == start:
        work.add(Span(start, start, text, "insert", merge="break", rank=RANK_BREAK))
    else:
        work.add(Span(low, start, text, "replace", merge="break"))


def previous_on_line(scope: Scope, node: ast.stmt) -> bool:
    return _joined(scope, *where(scope, node))


def next_on_line(scope: Scope, node: ast.stmt) -> ast.stmt | None:
    block, n = where(scope, node)
    return block[n + 1] if _joined(scope, block, n + 1) else None


def insert_before(work: Work, node: ast.stmt, text: str) -> None:
    indent = block_indent(work.scope, node)
    break_suite(work, node)
    start = work.module.start(node)
    if previous_on_line(work.scope, node):
        break_at(work, start, indent)
    body = indent_after_first(text, indent, work.newline)
    work.add(Span(start, start, body + work.newline + indent, "insert"))
    work.anchors.append(node)


def insert_after(work: Work, node: ast.stmt, text: str, merge: str = "") -> None:
    indent = block_indent(work.scope, node)
    break_suite(work, node)
    blank = (2 if not indent else 1) if text.startswith(("def ", "async def ", "class ", "@")) else 0
    body = work.newline * (1 + blank) + indent + indent_after_first(text, indent, work.newline)
    at = after_point(work, node, indent)
    work.add(Span(at, at, body, "insert", rank=-1 - len(indent), merge=merge))
    work.anchors.append(node)


def after_point(work: Work, node: ast.stmt, indent: str) -> int:
    """Where text that follows ``node`` goes: the end of its line, behind a comment; parts it from a ``;``
    mate."""
    mate = next_on_line(work.scope, node)
    end = work.module.end(node)
    if mate is None:
        return work.module.lines.end_of(end)
    break_at(work, work.module.start(mate), indent)
    return end
