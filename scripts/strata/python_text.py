"""Python source as text: offsets, tokens, and re-indentation that leaves string tokens alone."""

from __future__ import annotations

import bisect
import io
import re
import token as token_types
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

_NEWLINE = re.compile(r"\r\n|\r|\n")
_QUIET = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_FSTRING_START = getattr(token_types, "FSTRING_START", -1)
_FSTRING_END = getattr(token_types, "FSTRING_END", -1)


@dataclass(frozen=True)
class Token:
    """A token of the source: type as in ``tokenize``, text, and character offsets."""

    type: int
    text: str
    start: int
    end: int


class Lines:
    """The lines of a text as Python counts them (``\\n``, ``\\r\\n`` and ``\\r`` end one; form feeds
    don't)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(m.end() for m in _NEWLINE.finditer(text))]

    def offset(self, line: int, byte_column: int) -> int:
        """Character offset of a 1-based line and a UTF-8 byte column (the way ``ast`` gives positions)."""
        start = self.starts[line - 1]
        piece = self.text[start : start + byte_column]
        if piece.isascii():
            return start + byte_column
        return start + len(piece.encode()[:byte_column].decode("utf-8", "ignore"))

    def line_of(self, offset: int) -> int:
        """1-based line of an offset."""
        return bisect.bisect_right(self.starts, offset)

    def start_of(self, offset: int) -> int:
        """Offset of the start of the line that holds ``offset``."""
        return self.starts[self.line_of(offset) - 1]

    def end_of(self, offset: int) -> int:
        """Offset just before the newline of the line that holds ``offset``."""
        line = self.line_of(offset)
        if line == len(self.starts):
            return len(self.text)
        end = self.starts[line]
        return end - (2 if self.text[end - 2 : end] == "\r\n" else 1)

    def next_start(self, offset: int) -> int:
        """Offset of the start of the next line, or of the end of the text."""
        line = self.line_of(offset)
        return self.starts[line] if line < len(self.starts) else len(self.text)

    def indent_of(self, offset: int) -> str:
        """The white space that starts the line of ``offset``."""
        start = self.start_of(offset)
        match = re.compile(r"[ \t\f]*").match(self.text, start)
        return match.group() if match else ""


def newline_of(text: str) -> str:
    """The newline that the text uses: that of its first line, ``\\n`` where it has none."""
    match = _NEWLINE.search(text)
    return match.group() if match else "\n"


def tokens(lines: Lines, start: int, end: int) -> Iterator[Token]:
    """Tokens between two offsets that start and end whole tokens; comments and line ends are left out.

    ``start`` must stand on the line where a logical line starts. Raises SyntaxError where the text has no
    tokens.
    """
    first = lines.line_of(start)
    base = lines.starts[first - 1]
    text = lines.text[base:]
    pending = iter(_NEWLINE.split(text))

    def readline() -> str:
        part = next(pending, None)
        return "" if part is None else part + "\n"

    try:
        for item in tokenize.generate_tokens(readline):
            begin = lines.starts[first + item.start[0] - 2] + item.start[1]
            if begin >= end:
                return
            stop = lines.starts[min(first + item.end[0] - 2, len(lines.starts) - 1)] + item.end[1]
            if begin >= start and item.type not in _QUIET:
                yield Token(item.type, item.string, begin, stop)
    except (tokenize.TokenError, IndentationError) as error:
        raise SyntaxError(str(error)) from error


def string_rows(text: str) -> set[int]:
    """0-based rows of ``text`` that start inside a string token. SyntaxError where it has no tokens.

    The text may be a fragment: indented as a whole, or with blocks left open.
    """
    rows: set[int] = set()
    if not any(mark in text for mark in ('"""', "'''", "\\")):
        return rows
    shift = 0
    if text[:1] in (" ", "\t"):
        text = "if 1:\n" + text
        shift = 1
    opened: list[int] = []
    try:
        for item in tokenize.generate_tokens(io.StringIO(_NEWLINE.sub("\n", text)).readline):
            if item.type == tokenize.STRING:
                rows.update(range(item.start[0] + 1, item.end[0] + 1))
            elif item.type == _FSTRING_START:
                opened.append(item.start[0])
            elif item.type == _FSTRING_END:
                rows.update(range(opened.pop() + 1, item.end[0] + 1))
    except (tokenize.TokenError, IndentationError) as error:
        raise SyntaxError(str(error)) from error
    return {row - 1 - shift for row in rows}


def ends_in_comment(text: str) -> bool:
    """Whether what is put behind ``text`` on its line would become part of a comment."""
    if "#" not in text.rpartition("\n")[2]:
        return False
    try:
        found = list(tokenize.generate_tokens(io.StringIO(_NEWLINE.sub("\n", f"({text}\n)")).readline))
    except (tokenize.TokenError, IndentationError):
        found = list(tokenize.generate_tokens(io.StringIO(_NEWLINE.sub("\n", text)).readline))
    last = text.count("\n") + 1
    return any(t.type == tokenize.COMMENT and t.start[0] == last for t in found)


def split_lines(text: str) -> list[str]:
    """The lines without their newlines."""
    return _NEWLINE.split(text)


def dedent(text: str) -> str:
    """``text`` with common leading white space, blank first and last lines removed; string tokens kept;
    ``\\n`` ends.

    Raises SyntaxError where the text has no tokens.
    """
    lines = split_lines(text)
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        return ""
    margin = lines[0][: len(lines[0]) - len(lines[0].lstrip(" \t"))]
    if not margin:
        return "\n".join(lines)
    kept = string_rows("\n".join(lines))
    return "\n".join(
        line if row in kept else line[len(margin) :] if line.startswith(margin) else line.lstrip(" \t")
        for row, line in enumerate(lines)
    )


def indent_after_first(text: str, indent: str, newline: str = "\n") -> str:
    """Put ``indent`` before every line but the first; not before blank lines nor lines inside string
    tokens."""
    kept = string_rows(text)
    lines = split_lines(text)
    out = [lines[0]]
    out += [
        line if row in kept or not line.strip() else indent + line for row, line in enumerate(lines[1:], 1)
    ]
    return newline.join(out)
