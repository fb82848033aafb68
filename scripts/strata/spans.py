"""What placing an edit yields: spans on the pristine source, symbols, and the fault of what cannot be placed.

All offsets are character offsets into the source text as read (newlines as in the file).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# ranks of insertions that must come before whatever else goes to their point
RANK_BREAK = -(10**6)  # the line break that a one-line suite needs first
RANK_ITEM = -(10**5)  # an item at the end of a list, which ends the statement it belongs to
RANK_START = -(10**4)  # the start of a function: outside of what is done with its first statement

SpanOp = Literal["replace", "insert", "open", "close"]
FaultCode = Literal["E-SYMBOL-GONE", "E-CONFLICT", "E-AMBIGUOUS", "E-PARTIAL", "E-EDIT", "E-PARSE"]


@dataclass(frozen=True)
class Span:
    """One change of the pristine source: the text between ``start`` and ``end`` becomes ``text``.

    op: ``replace`` (start < end; an empty text deletes), ``insert`` (start == end), or the pair
    ``open``/``close`` of a wrap (start == end both) that stand at the start of the first wrapped statement
    and at the end of the last one's line. indent, base: what a wrap puts into each wrapped line after the
    first, behind ``base`` where the line starts so (lines inside string tokens excepted).
    merge: spans of the same place, text and merge key count once (identical imports of two patches).
    rank: order of insertions at one point before series order counts; negative for text that follows a
    statement (minus its depth, so that an inner block's comes first), positive for a decorator.
    joint: text between two neighbouring insertions at one point that carry the same joint (items of an
    empty list).
    """

    start: int
    end: int
    text: str
    op: SpanOp
    indent: str = ""
    base: str = ""
    merge: str = ""
    rank: int = 0
    joint: str = ""


@dataclass(frozen=True)
class Symbol:
    """A named piece of a file. kind: ``function``, ``class``, ``assignment``, ``module``, or a token
    language's.

    start, end: character offsets of the whole definition (decorators included); line: 1-based line of its
    name; condition: the tests it stands under (``if TYPE_CHECKING``), empty where it is unconditional.
    """

    qualname: str
    kind: str
    start: int
    end: int
    line: int
    condition: str = ""


@dataclass(frozen=True)
class Placement:
    """Where one edit lands in one file.

    region: (start, end) of the edited symbol; symbol: its qualified name, ``<module>`` for top-level
    statements, ``""`` for a whole token file; neighbours: fingerprint of the anchor's statement with its
    direct siblings (tells a near change from a far one); line: 1-based line of the anchor.
    """

    spans: tuple[Span, ...]
    region: tuple[int, int]
    symbol: str
    neighbours: str
    line: int


@dataclass(eq=False)
class PlaceFault(Exception):
    """An edit that cannot be placed. Becomes a Finding where patch and file are known; never ends a plan.

    candidates: nearest names or places, as text; line: 1-based line it is about, 0 where there is none.
    """

    code: FaultCode
    message: str
    expected: str = ""
    found: str = ""
    candidates: list[str] = field(default_factory=list)
    line: int = 0

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"
