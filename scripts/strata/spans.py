"""What placing an edit yields: spans on the pristine source, symbols, and the fault of an edit that cannot be placed.

All offsets are character offsets into the source text as read (newlines as in the file).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SpanOp = Literal["replace", "insert", "open", "close"]
FaultCode = Literal["E-SYMBOL-GONE", "E-CONFLICT", "E-AMBIGUOUS", "E-PARTIAL", "E-EDIT", "E-PARSE"]


@dataclass(frozen=True)
class Span:
    """One change of the pristine source: the text between ``start`` and ``end`` becomes ``text``.

    op: ``replace`` (start < end; an empty text deletes), ``insert`` (start == end), or the pair ``open``/``close`` of
    a wrap, both empty, that stand at the start and the end of the wrapped lines. indent: what a wrap puts before each
    wrapped line (lines inside string tokens excepted). merge: two insertions at one point with the same merge key are
    one insertion (identical imports of two patches); the texts are equal then.
    """

    start: int
    end: int
    text: str
    op: SpanOp
    indent: str = ""
    merge: str = ""


@dataclass(frozen=True)
class Symbol:
    """A named piece of a file. kind: ``function``, ``class``, ``assignment``, ``module``, or a token language's own.

    start, end: character offsets of the whole definition (decorators included); line: 1-based line of its name.
    """

    qualname: str
    kind: str
    start: int
    end: int
    line: int


@dataclass(frozen=True)
class Placement:
    """Where one edit lands in one file.

    region: (start, end) of the edited symbol; symbol: its qualified name, ``<module>`` for top-level statements, ``""``
    for a whole token file; neighbours: fingerprint of the anchor's statement with its direct siblings (tells a near
    change from a far one); line: 1-based line of the anchor.
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
