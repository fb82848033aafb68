"""``add_item`` for lists of tokens: C++ lists with commas, CMake arguments and shell arrays without."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strata.model import Edit
from strata.spans import PlaceFault, Span
from strata.token_find import Match, Region
from strata.token_symbols import Document, words
from strata.tokens import tokenize

_OPENS = frozenset("([{")
_PLACE = re.compile(r"(before|after)\s+(\S.*)$", re.DOTALL)
# arguments that end a list of values in a CMake command, as far as install(), set() and target_*() know them
_CMAKE_KEYWORDS = words(
    """
    ARCHIVE BUNDLE CACHE COMPONENT CONFIGURATIONS DESTINATION DIRECTORY DIRECTORY_PERMISSIONS
    EXCLUDE_FROM_ALL EXPORT FILES FILES_MATCHING FILE_PERMISSIONS FILE_SET FRAMEWORK INCLUDES
    INTERFACE LIBRARY MESSAGE_NEVER NAMELINK_ONLY OBJECTS OPTIONAL PARENT_SCOPE PATTERN PERMISSIONS
    PRIVATE PRIVATE_HEADER PROGRAMS PROPERTIES PUBLIC PUBLIC_HEADER RENAME RESOURCE RUNTIME TARGETS
    TYPE USE_SOURCE_PERMISSIONS APPEND BEFORE SYSTEM
    """
)
_BARE = re.compile(r"[\w./:@%+-]+$")


@dataclass(frozen=True)
class _Item:
    """Tokens ``first``…``last`` of one item."""

    first: int
    last: int


def add_item(
    doc: Document, edit: Edit, hit: Match | None, where: Region
) -> tuple[list[Span], tuple[int, int]]:
    """The spans that put ``edit.add_item`` into the list that the anchor names, and the list's tokens.

    The list is what the last ``$$$`` capture took; else what follows an opening bracket that the anchor
    leaves open; else the bracketed group that ends the anchor or follows it. Without an anchor: what lies
    between two anchors, or the only bracketed group of the region.
    PlaceFault: E-EDIT where there is no list, E-CONFLICT where it has the item or lacks the one named by
    ``place``, E-AMBIGUOUS where that neighbour stands there more than once.
    """
    assert edit.add_item is not None
    start, stop = _extent(doc, hit, where)
    items = _items(doc, start, stop)
    value = _value(doc, edit.add_item.value, items)
    if doc.family in ("cmake", "shell") and any(_bare(_text(doc, i)) == _bare(value) for i in items):
        same = next(i for i in items if _bare(_text(doc, i)) == _bare(value))
        raise PlaceFault(
            "E-CONFLICT",
            f"the list has {value} already",
            expected="a list without it",
            found=f"line {_line(doc, same.first)}",
            line=_line(doc, same.first),
        )
    anchor = (max(0, start - 1), max(0, start - 1)) if not items else (items[0].first, items[-1].last)
    place = edit.add_item.place.strip()
    if not items:
        if place not in ("first", "last"):
            raise PlaceFault(
                "E-CONFLICT",
                f"the list is empty, so nothing stands {place!r} in it",
                expected="an item of the list",
            )
        return _into_empty(doc, start, stop, value), anchor
    if place == "first":
        return [_ahead(doc, items, 0, value)], anchor
    if place == "last":
        return _behind(doc, items, len(items) - 1, stop, value), anchor
    side = _PLACE.match(place)
    if not side:
        raise PlaceFault(
            "E-EDIT",
            f"unknown place {place!r} for add_item",
            found=place,
            expected="first, last, before <item> or after <item>",
        )
    position = _position(doc, items, side[2].strip())
    if side[1] == "before":
        return [_ahead(doc, items, position, value)], anchor
    return _behind(doc, items, position, stop, value), anchor


def _extent(doc: Document, hit: Match | None, where: Region) -> tuple[int, int]:
    """Tokens [start, stop) of the list's items."""
    if hit is None:
        if "<between:" in where.symbol:
            return where.start, where.stop
        groups, n = [], where.start
        while n < where.stop:
            close = doc.pairs.get(n, -1) if doc.texts[n] in _OPENS else -1
            if close > n:
                groups.append((n + 1, close))
                n = close
            n += 1
        if len(groups) != 1:
            raise PlaceFault(
                "E-EDIT",
                f"{len(groups)} bracketed groups in {where.symbol}: which is the list?",
                expected="'find' that names the list",
            )
        return groups[0]
    if hit.lists:
        begin, end = hit.captures[hit.lists[-1]]
        return begin, _value_end(doc, begin, end)
    for n in range(hit.last, hit.first - 1, -1):
        close = doc.pairs.get(n, -1) if doc.texts[n] in _OPENS else -1
        if close > hit.last:  # the anchor stops inside this group: its items come next
            return hit.last + 1, _value_end(doc, hit.last + 1, close)
    if doc.texts[hit.last] in (")", "]", "}") and doc.pairs.get(hit.last, -1) >= hit.first:
        opener = doc.pairs[hit.last]
        return _skip_head(doc, opener), _value_end(doc, _skip_head(doc, opener), hit.last)
    following = hit.last + 1
    if following < len(doc.texts) and doc.texts[following] in _OPENS and following in doc.pairs:
        begin = _skip_head(doc, following)
        return begin, _value_end(doc, begin, doc.pairs[following])
    raise PlaceFault(
        "E-EDIT",
        "the anchor names no list",
        expected="an anchor that ends with, leaves open, or stands before a bracketed list",
        found=doc.source[doc.tokens[hit.first].start : doc.tokens[hit.last].end][:200],
        line=_line(doc, hit.first),
    )


def _skip_head(doc: Document, opener: int) -> int:
    """First token of the values in a CMake command: behind ``list(APPEND NAME`` or ``set(NAME``."""
    start = opener + 1
    if doc.family != "cmake" or opener == 0:
        return start
    command = doc.texts[opener - 1].lower()
    if command == "list" and doc.texts[start] in ("APPEND", "PREPEND", "REMOVE_ITEM"):
        return start + 2
    if command == "set":
        return start + 1
    while start in range(len(doc.texts)) and doc.texts[start] in _CMAKE_KEYWORDS:
        start += 1
    return start


def _value_end(doc: Document, start: int, stop: int) -> int:
    if doc.family != "cmake":
        return stop
    return next((n for n in range(start, stop) if doc.texts[n] in _CMAKE_KEYWORDS), stop)


def _items(doc: Document, start: int, stop: int) -> list[_Item]:
    items: list[_Item] = []
    separated = doc.family in ("cmake", "shell")
    n = start
    first = -1
    while n < stop:
        text = doc.texts[n]
        last = doc.pairs.get(n, n) if text in _OPENS else n
        last = last if n <= last < stop else n
        if doc.tokens[n].kind == "eol":
            n += 1
            continue
        if separated:
            items.append(_Item(n, last))
        elif text == "," and doc.tokens[n].kind == "punct":
            if first >= 0:
                items.append(_Item(first, _last_code(doc, n - 1)))
            first = -1
        elif not doc.tokens[n].directive and first < 0:
            first = n
        n = last + 1
    if first >= 0:
        items.append(_Item(first, _last_code(doc, stop - 1)))
    return items


def _last_code(doc: Document, n: int) -> int:
    """The last token at or before ``n`` that belongs to no preprocessor line."""
    while doc.tokens[n].directive and n > 0 and not doc.tokens[0].directive:
        n -= 1
    return n


def _text(doc: Document, item: _Item) -> list[str]:
    return doc.texts[item.first : item.last + 1]


def _bare(value: str | list[str]) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    return [t[1:-1] if len(t) > 1 and t[0] == t[-1] and t[0] in "\"'" else t for t in texts]


def _value(doc: Document, value: str, items: list[_Item]) -> str:
    value = value.strip()
    if "\n" in value and doc.family != "cpp":
        raise PlaceFault("E-EDIT", "an item of this list stands on one line", found=value)
    if doc.family == "shell" and items and _BARE.match(value):
        quotes = {doc.texts[i.first][:1] for i in items}
        if quotes == {'"'}:
            return f'"{value}"'
    return value.rstrip(",").rstrip() if doc.family not in ("cmake", "shell") else value


def _position(doc: Document, items: list[_Item], neighbour: str) -> int:
    wanted = _bare([t.text for t in tokenize(neighbour, doc.family)])
    hits = [k for k, item in enumerate(items) if _bare(_text(doc, item)) == wanted]
    if len(hits) == 1:
        return hits[0]
    shown = [
        f"line {_line(doc, i.first)}: {_source(doc, i)}" for i in ([items[k] for k in hits] or items)[:8]
    ]
    raise PlaceFault(
        "E-AMBIGUOUS" if hits else "E-CONFLICT",
        f"the list has the item {neighbour} {len(hits)} times",
        expected="the item once",
        found=f"{len(items)} items",
        candidates=shown,
        line=_line(doc, items[0].first),
    )


def _source(doc: Document, item: _Item) -> str:
    return doc.source[doc.tokens[item.first].start : doc.tokens[item.last].end]


def _line(doc: Document, token: int) -> int:
    return doc.line(doc.tokens[token].start)


# --- text


def _starts_line(doc: Document, token: int) -> str | None:
    """The indentation of a token that is the first of its line, else None."""
    start = doc.tokens[token].start
    line = doc.source.rfind("\n", 0, start) + 1
    indent = doc.source[line:start]
    return indent if not indent.strip(" \t") else None


def _newline(doc: Document, near: int) -> str:
    end = doc.source.find("\n", near)
    end = doc.source.rfind("\n", 0, near) if end < 0 else end
    return "\r\n" if end > 0 and doc.source[end - 1] == "\r" else "\n"


def _commas(doc: Document) -> bool:
    return doc.family not in ("cmake", "shell")


def _ahead(doc: Document, items: list[_Item], position: int, value: str) -> Span:
    here = doc.tokens[items[position].first].start
    comma = "," if _commas(doc) else ""
    indent = _starts_line(doc, items[position].first)
    splice = ""
    if indent is not None:
        line = doc.source.rfind("\n", 0, here) + 1
        splice = " \\" if doc.source[:line].endswith(("\\\n", "\\\r\n")) else ""
        return Span(here, here, value + comma + splice + _newline(doc, here) + indent, "insert")
    return Span(here, here, f"{value}{comma} ", "insert")


def _behind(doc: Document, items: list[_Item], position: int, stop: int, value: str) -> list[Span]:
    item = items[position]
    end = doc.tokens[item.last].end
    indent = _starts_line(doc, item.first)
    if not _commas(doc):
        if indent is None:
            return [Span(end, end, " " + value, "insert")]
        line_end = _code_line_end(doc, item.last, stop)
        if line_end is None:
            return [Span(end, end, " " + value, "insert")]
        splice = " \\" if doc.source[:line_end].endswith("\\") else ""
        if splice:
            line_end = end
        return [Span(line_end, line_end, splice + _newline(doc, end) + indent + value, "insert")]
    comma = next((n for n in range(item.last + 1, stop) if doc.texts[n] == ","), None)
    own_comma = comma is not None
    after = doc.tokens[comma].end if comma is not None else end
    trailing = "," if own_comma else ""
    line_end = (
        _code_line_end(doc, comma if comma is not None else item.last, stop) if indent is not None else None
    )
    if line_end is None:
        lead = " " if own_comma else ", "
        return [Span(after, after, f"{lead}{value}{trailing}", "insert")]
    if doc.source[:line_end].endswith("\\"):  # a list in the body of a macro
        return [
            Span(
                after,
                after,
                f"{'' if own_comma else ','} \\{_newline(doc, after)}{indent}{value}{trailing}",
                "insert",
            )
        ]
    text = _newline(doc, after) + (indent or "") + value + trailing
    if own_comma or line_end == after:
        return [
            Span(
                line_end if own_comma else after,
                line_end if own_comma else after,
                text if own_comma else "," + text,
                "insert",
            )
        ]
    # two patches share the comma behind the last item, and get one between theirs
    comma_once = Span(after, after, ",", "insert", merge="comma")
    return [comma_once, Span(line_end, line_end, text, "insert", joint=",")]


def _code_line_end(doc: Document, token: int, stop: int) -> int | None:
    """End of the line of a token (behind a comment); None where code follows on the line."""
    end = doc.tokens[token].end
    line_end = doc.source.find("\n", end)
    line_end = len(doc.source) if line_end < 0 else line_end
    following = token + 1
    if following < len(doc.tokens) and doc.tokens[following].start < line_end:
        return end if following >= stop else None
    if doc.source[line_end - 1 : line_end] == "\r":
        line_end -= 1
    gap = doc.source[end:line_end]
    if "/*" in gap and "*/" not in gap:
        return end
    return line_end if gap.strip() else end


def _into_empty(doc: Document, start: int, stop: int, value: str) -> list[Span]:
    here = doc.tokens[start - 1].end if start else 0
    opened = start > 0 and doc.texts[start - 1] in _OPENS
    joint = ", " if _commas(doc) else " "
    return [Span(here, here, value if opened else " " + value, "insert", joint=joint if opened else "")]
