"""Putting the spans of many edits together on one text, with a record of where each piece of the result is
from."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from strata.python_text import Lines, string_rows
from strata.spans import Span

Key = tuple[int, str, int]  # position of the patch in the series, its id, number of the edit


@dataclass(frozen=True)
class Piece:
    """Text with its origin; equal (origin, offset) in two compositions mean the same characters."""

    text: str
    origin: tuple[object, ...]
    offset: int = 0


@dataclass(frozen=True)
class Keyed:
    """A span with the edit that it belongs to; index: its number among the edit's spans in this file."""

    span: Span
    key: Key
    index: int = 0


@dataclass(frozen=True)
class Overlap:
    """Two edits that want the same characters; at: offset where they meet."""

    first: Key
    second: Key
    at: int


@dataclass
class _Unit:
    """A span, or a wrap with what lies inside."""

    start: int
    end: int
    item: Keyed
    close: Keyed | None = None
    inner: list[_Unit] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int, int, Key]:
        insert = self.start == self.end and self.close is None
        return self.start, 0 if insert else 1, self.item.span.rank if insert else -self.end, self.item.key


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(p.text for p in pieces)


def compose(pieces: Sequence[Piece], spans: Sequence[Keyed]) -> tuple[list[Piece], list[Overlap]]:
    """Apply spans, given in offsets of the joined pieces. The pieces of the result, and every overlap found.

    Disjoint spans commute; insertions at one point go by rank, then by series order; a wrap may hold other
    spans. The result is meaningless where there are overlaps.
    """
    overlaps: list[Overlap] = []
    units = _nest(_units(_merged(spans)), overlaps)
    return _emit(_Source(pieces), 0, sum(len(p.text) for p in pieces), units, overlaps), overlaps


def locate(pieces: Sequence[Piece], target: Sequence[Piece], offset: int) -> int | None:
    """Where the character at ``offset`` of one composition is in another one; None where it is gone."""
    at = 0
    for piece in pieces:
        if at <= offset < at + len(piece.text):
            inside = piece.offset + offset - at
            place = 0
            for other in target:
                if other.origin == piece.origin and other.offset <= inside < other.offset + len(other.text):
                    return place + inside - other.offset
                place += len(other.text)
            return None
        at += len(piece.text)
    return None


def _overlap(one: Key, other: Key, at: int) -> Overlap:
    return Overlap(min(one, other), max(one, other), at)


def _merged(spans: Sequence[Keyed]) -> list[Keyed]:
    seen: set[tuple[object, ...]] = set()
    out = []
    for item in sorted(spans, key=lambda k: (k.key, k.index)):
        span = item.span
        if span.merge:
            mark = (span.start, span.end, span.text, span.op, span.merge)
            if mark in seen:
                continue
            seen.add(mark)
        out.append(item)
    return out


def _units(spans: Sequence[Keyed]) -> list[_Unit]:
    """Pair the opens with their closes: of one edit they come in turn."""
    units: list[_Unit] = []
    opened: dict[Key, Keyed] = {}
    for item in spans:
        if item.span.op == "open":
            opened[item.key] = item
        elif item.span.op == "close":
            start = opened.pop(item.key)
            units.append(_Unit(start.span.start, item.span.end, start, close=item))
        else:
            units.append(_Unit(item.span.start, item.span.end, item))
    return units


def _nest(units: list[_Unit], overlaps: list[Overlap]) -> list[_Unit]:
    """Put what lies inside a wrap into it; the wider of two wraps is the outer one, of equal ones the
    earlier."""
    wraps = sorted((u for u in units if u.close), key=lambda u: (u.start, -u.end, u.item.key))
    rest = [u for u in units if not u.close]
    top: list[_Unit] = []
    for n, wrap in enumerate(wraps):
        holder = next((w for w in reversed(top) if w.start <= wrap.start and wrap.end <= w.end), None)
        if holder is not None:
            holder.inner.append(wrap)
            continue
        for other in wraps[:n]:
            if other.start < wrap.start < other.end < wrap.end:
                overlaps.append(_overlap(other.item.key, wrap.item.key, wrap.start))
        top.append(wrap)
    outside: list[_Unit] = []
    for unit in rest:
        holder = next((w for w in top if _inside(unit, w)), None)
        (holder.inner if holder else outside).append(unit)
    for wrap in top:
        wrap.inner = _nest(wrap.inner, overlaps)
    return outside + top


def _inside(unit: _Unit, wrap: _Unit) -> bool:
    assert wrap.close is not None
    if unit.start < unit.end:
        return wrap.start <= unit.start and unit.end <= wrap.end
    rank = unit.item.span.rank
    if unit.start == wrap.start:
        return rank >= 0
    if unit.start == wrap.end:
        return rank < 0 and rank <= wrap.close.span.rank
    return wrap.start < unit.start < wrap.end


class _Source:
    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = [p for p in pieces if p.text]
        self.starts = [0]
        for piece in self.pieces:
            self.starts.append(self.starts[-1] + len(piece.text))

    def cut(self, low: int, high: int) -> list[Piece]:
        out: list[Piece] = []
        n = max(bisect.bisect_right(self.starts, low) - 1, 0)
        while low < high:
            piece, at = self.pieces[n], self.starts[n]
            stop = min(high, self.starts[n + 1])
            out.append(Piece(piece.text[low - at : stop - at], piece.origin, piece.offset + low - at))
            low, n = stop, n + 1
        return out


def _emit(source: _Source, low: int, high: int, units: list[_Unit], overlaps: list[Overlap]) -> list[Piece]:
    out: list[Piece] = []
    at, last = low, None
    for unit in sorted(units, key=lambda u: u.order):
        if unit.start < at:
            assert last is not None
            if last.item.key != unit.item.key or last.item.span != unit.item.span:
                overlaps.append(_overlap(last.item.key, unit.item.key, unit.start))
            continue
        out += source.cut(at, unit.start)
        span = unit.item.span
        if unit.close:
            inner = _emit(source, unit.start, unit.end, unit.inner, overlaps)
            out.append(Piece(span.text, _origin(unit.item)))
            out += _indented(inner, unit.item)
            out.append(Piece(unit.close.span.text, _origin(unit.close)))
        else:
            joint = span.joint
            if (
                joint
                and last
                and last.item.span.joint == joint
                and (last.start, last.end) == (unit.start, unit.end)
            ):
                out.append(Piece(joint, ("joint", *_origin(unit.item))))
            out.append(Piece(span.text, _origin(unit.item)))
        at, last = unit.end, unit
    return [*out, *source.cut(at, high)]


def _origin(item: Keyed) -> tuple[object, ...]:
    if item.span.merge:  # the same text whichever patch brings it
        return ("merge", item.span.merge)
    return (*item.key, item.index)


def _indented(pieces: list[Piece], item: Keyed) -> list[Piece]:
    """Put the wrap's indent into every line but the first; lines inside string tokens and blank ones stay."""
    span, text = item.span, text_of(pieces)
    try:
        kept = string_rows(span.base + text)
    except SyntaxError:
        kept = set()  # broken by another edit: the check of the result says so
    lines = Lines(text)
    source, at = _Source(pieces), 0
    out: list[Piece] = []
    for row, start in enumerate(lines.starts):
        line = text[start : lines.end_of(start)]
        if row == 0 or row in kept or not line.strip():
            continue
        point = start + (len(span.base) if line.startswith(span.base) else 0)
        out += source.cut(at, point)
        out.append(Piece(span.indent, ("indent", *_origin(item), row)))
        at = point
    return [*out, *source.cut(at, len(text))]
