"""Finding the place of a token edit: patterns with captures, the region to search, narrowing, counting."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import quote, unquote

from strata.model import Edit
from strata.spans import PlaceFault
from strata.token_symbols import Document
from strata.tokens import Family, tokenize

_CAPTURE = re.compile(r"(\$\$\$|\$)([A-Z_][A-Z0-9_]*)$")
_BETWEEN = re.compile(r"^(?P<symbol>.*)<between:(?P<start>[^:>]*):(?P<stop>[^:>]*)>$")
_OPENS = frozenset("([{")
_CLOSES = frozenset(")]}")
_SEPARATORS = frozenset({"\n", ";"})


@dataclass(frozen=True)
class Capture:
    """``$NAME``: one expression (no comma, no semicolon outside brackets; in CMake and shell one argument);
    ``$$$NAME``: any number of tokens. Both keep brackets whole, stay inside them, and stop where a line's end
    matters. The shortest run that lets the rest match is taken. The name ``_`` binds nothing.
    """

    name: str
    many: bool


Pattern = list["str | Capture"]


@dataclass(frozen=True)
class Match:
    """Tokens ``first``…``last`` (inclusive) and the token ranges [start, stop) that the captures took.

    lists: the names of the ``$$$`` captures, in order of the pattern.
    """

    first: int
    last: int
    captures: dict[str, tuple[int, int]] = field(default_factory=dict)
    lists: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Tokens [start, stop) in which an edit is sought. symbol: its name in locks; empty: the file."""

    start: int
    stop: int
    symbol: str


def dollar_is_literal(family: Family) -> bool:
    """Where ``$NAME`` is the file's own variable syntax; ``$$$NAME`` is the only capture there."""
    return family in ("shell", "hash")


def parse_pattern(text: str, family: Family, what: str) -> Pattern:
    """The elements of a pattern; E-EDIT where it is empty or begins or ends with ``$$$NAME``."""
    pattern: Pattern = []
    for token in tokenize(text, family):
        capture = _CAPTURE.match(token.text)
        if capture and not (capture[1] == "$" and dollar_is_literal(family)):
            pattern.append(Capture(capture[2], capture[1] == "$$$"))
        else:
            pattern.append(token.text)
    if not any(isinstance(e, str) and e != "\n" for e in pattern):
        raise PlaceFault(
            "E-EDIT", f"{what} has no token to look for", expected="at least one token", found=text
        )
    for element in (pattern[0], pattern[-1]):
        if isinstance(element, Capture) and element.many:
            raise PlaceFault(
                "E-EDIT",
                f"{what} begins or ends with $$${element.name}, which could stop anywhere",
                expected="a token on both sides of $$$ captures",
                found=text,
            )
    return pattern


def matches(doc: Document, pattern: Pattern, start: int, stop: int) -> list[Match]:
    """Every match inside tokens [start, stop), by its first token; overlapping ones included."""
    head = pattern[0]
    places = doc.at.get(head, []) if isinstance(head, str) else range(start, stop)
    found = []
    for n in places:
        if start <= n < stop:
            hit = _match(doc, pattern, n, stop)
            if hit is not None:
                found.append(hit)
    return found


def _match(doc: Document, pattern: Pattern, first: int, stop: int) -> Match | None:
    def units(n: int) -> int:
        """Index behind the token or bracketed group at ``n``; 0 where a capture must not go on."""
        if (
            n >= stop
            or doc.tokens[n].kind == "eol"
            or (doc.texts[n] in _CLOSES and doc.tokens[n].kind != "string")
        ):
            return 0
        if doc.texts[n] in _OPENS:
            close = doc.pairs.get(n, -1)
            return close + 1 if n < close < stop else 0
        return n + 1

    def part(n: int) -> int:
        """The same for an expression, which holds no comma and no semicolon outside brackets."""
        return 0 if n < stop and doc.texts[n] in (",", ";") else units(n)

    grows = doc.family not in ("cmake", "shell")  # there a token is a whole argument

    def agrees(bound: dict[str, tuple[int, int]], name: str, begin: int, end: int) -> bool:
        if name not in bound:
            return True
        a, b = bound[name]
        return doc.texts[a:b] == doc.texts[begin:end]

    def rest(
        k: int, n: int, bound: dict[str, tuple[int, int]]
    ) -> tuple[int, dict[str, tuple[int, int]]] | None:
        while k < len(pattern):
            element = pattern[k]
            if isinstance(element, str):
                if n >= stop or doc.texts[n] != element:
                    return None
                n += 1
            else:
                end = n if element.many else part(n)
                while end or element.many:
                    if agrees(bound, element.name, n, end):
                        taken = bound if element.name == "_" else {**bound, element.name: (n, end)}
                        tail = rest(k + 1, end, taken)
                        if tail is not None:
                            return tail
                    end = units(end) if element.many else part(end) if grows else 0
                    if not end:
                        return None
                return None
            k += 1
        return n, bound

    result = rest(0, first, {})
    if result is None:
        return None
    lists = tuple(e.name for e in pattern if isinstance(e, Capture) and e.many and e.name != "_")
    return Match(first, result[0] - 1, result[1], lists)


# --- regions


def region(doc: Document, symbol: str | None, between: tuple[str, str] | None) -> Region:
    """The tokens of a symbol, of what lies between two anchors inside it, or of the whole file."""
    inner = Region(0, len(doc.tokens), "")
    if symbol:
        written = _BETWEEN.match(symbol)
        if written:
            ends = unquote(written["start"]), unquote(written["stop"])
            return region(doc, written["symbol"], ends)
        found = doc.symbol(symbol)
        inner = Region(found.first, found.last + 1, found.qualname)
    if between is None:
        return inner
    first = parse_pattern(between[0], doc.family, "the start of 'between'")
    second = parse_pattern(between[1], doc.family, "the end of 'between'")
    starts = matches(doc, first, inner.start, inner.stop)
    if len(starts) != 1:
        raise wrong_count(doc, first, inner, starts, starts, "1 match of the start of 'between'")
    ends_at = matches(doc, second, starts[0].last + 1, inner.stop)
    if not ends_at:
        after = Region(starts[0].last + 1, inner.stop, inner.symbol)
        raise wrong_count(doc, second, after, [], [], "a match of the end of 'between' after its start")
    name = (
        f"{inner.symbol}<between:{quote(between[0].strip(), safe='')}:{quote(between[1].strip(), safe='')}>"
    )
    return Region(starts[0].last + 1, ends_at[0].first, name)


def find(doc: Document, edit: Edit, where: Region) -> list[Match]:
    """The places of ``edit.find``, narrowed by ``in``, ``next_to`` and ``nth``, then counted.

    PlaceFault E-CONFLICT (none), E-AMBIGUOUS (another number than ``count``), E-EDIT (misused).
    """
    if edit.find is None:
        raise PlaceFault("E-EDIT", f"'{edit.verb}' needs 'find'")
    if edit.nth is not None and edit.count != 1:
        raise PlaceFault("E-EDIT", "'nth' picks one match; it cannot go with a 'count'")
    pattern = parse_pattern(edit.find, doc.family, "'find'")
    everything = matches(doc, pattern, where.start, where.stop)
    left = everything
    if edit.in_ is not None:
        around = [
            _enclosure(doc, m)
            for m in matches(doc, parse_pattern(edit.in_, doc.family, "'in'"), where.start, where.stop)
        ]
        left = [m for m in left if any(a <= m.first and m.last <= b for a, b in around)]
    if edit.next_to is not None:
        beside = matches(doc, parse_pattern(edit.next_to, doc.family, "'next_to'"), where.start, where.stop)
        left = [m for m in left if _is_beside(doc, m, beside)]
    if edit.nth is not None:
        if edit.nth > len(left):
            wanted = f"at least {edit.nth} matches (nth: {edit.nth})"
            raise wrong_count(doc, pattern, where, left, everything, wanted)
        return [left[edit.nth - 1]]
    if len(left) != edit.count:
        wanted = f"{edit.count} match" + ("es" if edit.count != 1 else "")
        raise wrong_count(doc, pattern, where, left, everything, wanted)
    for one, other in pairwise(left):
        if other.first <= one.last:
            raise PlaceFault(
                "E-EDIT",
                "the matches of 'find' overlap",
                expected="separate matches",
                found=_place(doc, other.first),
                line=_line(doc, other.first),
            )
    return left


def _enclosure(doc: Document, match: Match) -> tuple[int, int]:
    """First and last token of what a match of ``in`` heads: its block, or its statement."""
    end = match.last
    for n in range(match.first, match.last + 1):
        end = max(end, doc.pairs.get(n, end))
    if end > match.last:
        return match.first, end
    following = match.last + 1
    if doc.family == "shell":
        head = match.first
        while head > 0 and doc.texts[head - 1] not in _SEPARATORS and head not in doc.pairs:
            head -= 1
        if doc.pairs.get(head, -1) > match.last and doc.texts[head] in ("if", "elif", "case"):
            return head, doc.pairs[head]
        while following < len(doc.texts) and doc.texts[following] in _SEPARATORS:
            following += 1
        if following < len(doc.texts) and doc.texts[following] in ("do", "{"):
            return match.first, doc.pairs.get(following, match.last)
    elif following < len(doc.texts) and doc.texts[following] == "{":
        return match.first, doc.pairs.get(following, match.last)
    return doc.statement(match.first, match.last)


def siblings(doc: Document, first: int, last: int) -> list[tuple[int, int]]:
    """The statement around tokens ``first``…``last`` and its direct neighbours in the same block."""
    begin, end = doc.statement(first, last)
    found = [(begin, end)]
    before = begin - 1
    while before >= 0 and doc.texts[before] in _SEPARATORS and doc.family == "shell":
        before -= 1
    if before >= 0 and doc.texts[before] not in _OPENS:
        opener = doc.pairs.get(before, before) if doc.texts[before] in _CLOSES else before
        found.insert(0, (doc.statement(min(opener, before), before)[0], before))
    after = end + 1
    while after < len(doc.texts) and doc.texts[after] in _SEPARATORS and doc.family == "shell":
        after += 1
    if after < len(doc.texts) and doc.texts[after] not in _CLOSES:
        found.append((after, max(after, doc.statement(after, after)[1])))
    return found


def _is_beside(doc: Document, match: Match, beside: list[Match]) -> bool:
    own = doc.statement(match.first, match.last)
    around = [s for s in siblings(doc, match.first, match.last) if s != own]
    return any(a <= b.first and b.last <= z for a, z in around for b in beside)


# --- faults


def wrong_count(
    doc: Document, pattern: Pattern, where: Region, left: list[Match], everything: list[Match], wanted: str
) -> PlaceFault:
    """The fault for another number of matches than wanted, with the places that a person would look at."""
    lost = len(everything) - len(left)
    note = f" ({lost} more before narrowing)" if lost else ""
    scope = where.symbol if where.symbol and "<between:" not in where.symbol else ""
    inside = (
        "between the two anchors"
        if "<between:" in where.symbol
        else f"in {scope}"
        if scope
        else "in the file"
    )
    if left:
        return PlaceFault(
            "E-AMBIGUOUS",
            f"the anchor matches {len(left)} times {inside}",
            expected=wanted,
            found=f"{len(left)} matches{note}",
            candidates=[_place(doc, m.first) for m in left[:8]],
            line=_line(doc, left[0].first),
        )
    shown = [_place(doc, m.first) for m in everything[:5]] or list(_nearest(doc, pattern, where))
    line = _line(doc, everything[0].first) if everything else 0
    return PlaceFault(
        "E-CONFLICT",
        f"the anchor matches nowhere {inside}",
        expected=wanted,
        found=f"0 matches{note}",
        candidates=shown,
        line=line,
    )


def _line(doc: Document, token: int) -> int:
    return doc.line(doc.tokens[token].start) if token < len(doc.tokens) else 0


def _place(doc: Document, token: int) -> str:
    line = _line(doc, token)
    return f"line {line}: {doc.source.splitlines()[line - 1].strip()[:160]}"


def _nearest(doc: Document, pattern: Pattern, where: Region) -> Iterator[str]:
    """Up to three lines whose tokens share most with the pattern's, rare tokens counting more."""
    literals = [e for e in pattern if isinstance(e, str) and e != "\n"]
    frequency = Counter(doc.texts[where.start : where.stop])
    wanted = Counter(literals)
    weights = {t: 1 / frequency[t] for t in wanted if frequency[t]}
    scores: dict[int, tuple[float, int]] = {}
    width = len(pattern) + 2
    for text in sorted(weights, key=lambda t: frequency[t])[:6]:
        for n in doc.at[text][:200]:
            if not where.start <= n < where.stop:
                continue
            begin = max(where.start, n - literals.index(text))
            window = Counter(doc.texts[begin : min(begin + width, where.stop)])
            shared = window & wanted
            score = sum(shared.values()) / len(literals) + sum(weights.get(t, 0) for t in shared)
            line = _line(doc, n)
            if score > scores.get(line, (0.0, 0))[0]:
                scores[line] = (score, n)
    best = sorted(scores.items(), key=lambda s: (-s[1][0], s[0]))[:3]
    for _, (score, n) in sorted(best, key=lambda s: -s[1][0]):
        if score >= 0.34:
            yield _place(doc, n)
    if not best:
        folded = {t.lower(): t for t in frequency}
        for text in literals:
            if len(text) > 2 and text.lower() in folded:
                yield _place(doc, doc.at[folded[text.lower()]][0])
                return
