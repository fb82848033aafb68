"""Ordinary unified diffs (``diff -u``, ``git diff``, ``git format-patch``) placed at fuzz 0.

A hunk lands where its whole old block (context and removed lines) occurs once in the file, at any offset;
where it occurs several times only its stated line decides. Then it is reduced to its changed lines, so that
hunks merge with other patches' edits like any other edit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from posixpath import normpath

from strata.fingerprint import token_fingerprint
from strata.languages import language_of
from strata.spans import PlaceFault, Placement, Span, Symbol
from strata.tokens import family_of, tokenize

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline"
_AROUND = 3  # lines beyond a hunk's context whose change counts as near
# extended headers of git that change more than lines
_REFUSED = {
    "rename from ": "renames a file",
    "rename to ": "renames a file",
    "copy from ": "copies a file",
    "copy to ": "copies a file",
    "deleted file mode ": "deletes a file",
    "old mode ": "changes a file's mode",
    "GIT binary patch": "changes a binary file",
    "Binary files ": "changes a binary file",
    "@@@ ": "is a combined diff of a merge",
}
_INSTEAD = {
    "renames a file": "a diff of the old file's lines, and a new file below files/",
    "copies a file": "a new file below files/",
    "deletes a file": "edits of whatever uses the file",
    "changes a file's mode": "a diff that changes lines only",
    "changes a binary file": "a diff of text files only",
    "is a combined diff of a merge": "a diff against one parent (git diff A B)",
}


@dataclass(frozen=True)
class Change:
    """Neighbouring changed lines: ``removed``, ``added``, at line ``at`` (0-based) of the old block."""

    at: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass
class Hunk:
    """One hunk. start: stated line (1-based) of its old block; old: that block, with its line breaks.

    line: 1-based line of its header in the patch file.
    """

    start: int
    line: int
    old: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


@dataclass
class FileDiff:
    """The hunks of one file, by its path in the tree. crlf: the patch file itself has CRLF line breaks."""

    file: str
    crlf: bool
    hunks: list[Hunk] = field(default_factory=list)


def place_diff(text: str, read: Callable[[str], str | None]) -> list[tuple[str, Placement]]:
    """Where every hunk of a unified diff lands: one placement per hunk and symbol, in order of the diff.

    text: the ``.patch`` file; read: gives a file of the tree by its path, None where there is none.
    PlaceFault: E-EDIT for what is no plain text diff, E-CONFLICT where a hunk's old block is nowhere (with
    the nearest place), E-AMBIGUOUS where it occurs several times and not at its stated line.
    """
    placed: list[tuple[str, Placement]] = []
    for part in parse_diff(text):
        source = read(part.file)
        if source is None:
            raise PlaceFault(
                "E-CONFLICT",
                f"the diff changes {part.file}, which is not in the base",
                expected=part.file,
                found="no such file",
            )
        placed += [(part.file, placement) for placement in _place_file(part, source)]
    return placed


def diff_files(text: str) -> list[str]:
    """The paths that a diff changes, in order; PlaceFault E-EDIT as :func:`place_diff`."""
    return [part.file for part in parse_diff(text)]


# --- reading


def parse_diff(text: str) -> list[FileDiff]:
    """The files and hunks of a diff; mail headers, signatures and other text are passed over."""
    reader = _Reader(text)
    files: list[FileDiff] = []
    while reader.more():
        line = reader.peek()
        for start, what in _REFUSED.items():
            if line.startswith(start) and (reader.in_git_header or _stands_alone(line)):
                raise _refused(what, line, reader.number)
        if line.startswith("diff --git "):
            reader.in_git_header = True
        if line.startswith("--- ") and reader.peek(1).startswith("+++ "):
            files.append(_read_file(reader))
            reader.in_git_header = False
            continue
        if _HUNK.match(line):
            raise _malformed("a hunk without its '---' and '+++' lines", line, reader.number)
        reader.skip()
    if not files:
        raise PlaceFault(
            "E-EDIT",
            "the patch file holds no diff",
            expected="'---', '+++' and '@@' lines (diff -u)",
            found=text[:120].strip() or "an empty file",
        )
    names = [f.file for f in files]
    for name in names:
        if names.count(name) > 1:
            raise PlaceFault(
                "E-EDIT",
                f"the diff changes {name} in two parts",
                expected="one part per file",
                found=f"{names.count(name)} parts (join the commits: git diff FIRST^ LAST)",
            )
    return files


def _stands_alone(line: str) -> bool:
    """What is refused outside git's headers too (elsewhere such words may be prose of a mail)."""
    return line.startswith("@@@ ") or line == "GIT binary patch" or line.rstrip("\r").endswith(" differ")


class _Reader:
    def __init__(self, text: str) -> None:
        # not splitlines(): form feeds and the like are ordinary characters of a line
        self.lines = text.split("\n")
        if self.lines[-1] == "":
            self.lines.pop()
        self.position = 0
        self.in_git_header = False

    @property
    def number(self) -> int:
        return self.position + 1

    def more(self) -> bool:
        return self.position < len(self.lines)

    def peek(self, ahead: int = 0) -> str:
        n = self.position + ahead
        return self.lines[n] if n < len(self.lines) else ""

    def skip(self) -> None:
        self.position += 1


def _read_file(reader: _Reader) -> FileDiff:
    number = reader.number
    crlf = reader.peek().endswith("\r") and reader.peek(1).endswith("\r")
    old, new = _path(reader.peek()[4:]), _path(reader.peek(1)[4:])
    if old == "/dev/null":
        raise PlaceFault(
            "E-EDIT",
            f"the diff adds the file {_strip(new, new)}",
            line=number,
            expected=f"the file below files/ of the patch: files/{_strip(new, new)}",
            found="a part that makes a new file",
        )
    if new == "/dev/null":
        raise _refused("deletes a file", _strip(old, old), number)
    # "diff -u ./a ./b" names a file in another way than an edit does: one file has one name
    before, after = normpath(_strip(old, new)), normpath(_strip(new, old))
    if before != after:
        raise _refused("renames a file", f"{before} to {after}", number)
    if after.startswith("/") or ".." in after.split("/"):
        raise PlaceFault(
            "E-EDIT", "the diff leaves the tree", expected="a path inside the tree", found=after, line=number
        )
    part = FileDiff(after, crlf)
    reader.skip()
    reader.skip()
    while reader.more() and _HUNK.match(reader.peek()):
        part.hunks.append(_read_hunk(reader, crlf))
    if not part.hunks:
        raise _malformed(f"no hunk for {after}", reader.peek(), reader.number)
    return part


def _read_hunk(reader: _Reader, crlf: bool) -> Hunk:
    header = _HUNK.match(reader.peek())
    assert header is not None
    hunk = Hunk(int(header[1]), reader.number)
    counts = [int(header[2] or "1"), int(header[4] or "1")]
    reader.skip()
    removed: list[str] = []
    added: list[str] = []

    def close() -> None:
        if removed or added:
            hunk.changes.append(Change(len(hunk.old) - len(removed), tuple(removed), tuple(added)))
            removed.clear()
            added.clear()

    while counts != [0, 0]:
        line = reader.peek()
        if not reader.more() or line[:1] not in ("", " ", "-", "+", "\\") or min(counts) < 0:
            said = f"{header[2] or 1} old and {header[4] or 1} new lines"
            raise _malformed(f"a hunk that says {said} ends early", line or "end of file", reader.number)
        reader.skip()
        if line.startswith("\\"):
            raise _malformed("a '\\' line in the middle of a hunk", line, reader.number - 1)
        tag, content = line[:1] or " ", (line[1:].removesuffix("\r") if crlf else line[1:]) + "\n"
        if reader.peek().startswith(_NO_NEWLINE):
            content = content[:-1]
            reader.skip()
        counts[0] -= tag in " -"
        counts[1] -= tag in " +"
        if tag == " ":
            close()
            hunk.old.append(content)
        elif tag == "-":
            if added:
                close()
            removed.append(content)
            hunk.old.append(content)
        else:
            added.append(content)
    close()
    if min(counts) < 0:
        raise _malformed("a hunk has more lines than its header says", reader.peek(-1), reader.number - 1)
    if not hunk.old:
        raise PlaceFault(
            "E-EDIT",
            "a hunk has no context to recognise its place by",
            line=hunk.line,
            expected="a diff with context (git diff -U3)",
            found=header[0],
        )
    return hunk


def _path(header: str) -> str:
    """The path of a ``---`` or ``+++`` line without its time stamp; git's C quoting undone."""
    header = header.rstrip("\r")
    if header.startswith('"'):
        quoted = re.match(r'"((?:\\.|[^"\\])*)"', header)
        if quoted:
            raw = re.sub(
                rb'\\([0-7]{3}|[abfnrtv"\\])',
                lambda m: _unescape(m[1]),
                quoted[1].encode("utf-8", "surrogateescape"),
            )
            return raw.decode("utf-8", "surrogateescape")
    return header.split("\t", 1)[0].rstrip()


def _unescape(code: bytes) -> bytes:
    if code.isdigit():
        return bytes([int(code, 8) & 0xFF])
    names = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
    return names.get(code, code)


def _strip(path: str, other: str) -> str:
    """Without git's ``a/`` and ``b/`` (or one-letter mnemonic) prefix where both sides have one."""
    prefixes = ("a/", "b/", "i/", "w/", "c/", "o/")
    if path.startswith(prefixes) and (other.startswith(prefixes) or other == "/dev/null"):
        return path[2:]
    return path.removeprefix("./")


def _refused(what: str, found: str, line: int) -> PlaceFault:
    return PlaceFault("E-EDIT", f"the diff {what}", expected=_INSTEAD[what], found=found.strip(), line=line)


def _malformed(message: str, found: str, line: int) -> PlaceFault:
    return PlaceFault(
        "E-EDIT", f"the diff is malformed: {message}", expected="a unified diff", found=found[:160], line=line
    )


# --- placing


def _place_file(part: FileDiff, source: str) -> list[Placement]:
    lines = source.splitlines(keepends=True) if _plain_breaks(source) else _split(source)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    crlf = part.crlf and source.count("\r\n") * 2 > source.count("\n")
    symbols = _Symbols(part.file, source, offsets)
    placements: list[Placement] = []
    reached = 0
    for number, hunk in enumerate(part.hunks, 1):
        old = [_with_breaks(line, crlf) for line in hunk.old]
        at = _locate(part.file, lines, old, hunk, number)
        if at < reached:
            raise PlaceFault(
                "E-CONFLICT",
                f"hunk {number} of {part.file} lands before the end of the hunk before it",
                expected=f"a place after line {reached}",
                found=f"line {at + 1}",
                line=at + 1,
            )
        reached = at + len(old)
        groups: dict[str, list[tuple[Change, Span]]] = {}
        for change in hunk.changes:
            first = at + change.at
            last = first + len(change.removed)
            added = "".join(_with_breaks(line, crlf) for line in change.added)
            span = Span(offsets[first], offsets[last], added, "replace" if change.removed else "insert")
            names = symbols.of(first, last, change.added)
            groups.setdefault(names[0], []).append((change, span))
            for further in names[1:]:
                groups.setdefault(further, [])
        around = lines[max(0, at - _AROUND) : at + len(old) + _AROUND]
        near = _neighbours(part.file, "".join(around))
        for name, pairs in groups.items():
            first = at + (pairs[0][0].at if pairs else 0)
            spans = tuple(span for _, span in pairs)
            placements.append(Placement(spans, symbols.region(name), name, near, first + 1))
    return placements


def _split(source: str) -> list[str]:
    lines = source.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _plain_breaks(source: str) -> bool:
    """Whether ``splitlines`` (fast) breaks only at newlines here."""
    return source.isascii() and not any(c in source for c in "\r\v\f\x1c\x1d\x1e")


def _with_breaks(line: str, crlf: bool) -> str:
    return line[:-1] + "\r\n" if crlf and line.endswith("\n") else line


def _locate(file: str, lines: list[str], old: list[str], hunk: Hunk, number: int) -> int:
    """0-based line at which the hunk's old block stands."""
    width = len(old)
    hits = [n for n in range(len(lines) - width + 1) if lines[n] == old[0] and lines[n : n + width] == old]
    if len(hits) == 1:
        return hits[0]
    if hunk.start - 1 in hits:
        return hunk.start - 1
    what = f"hunk {number} of {file} (line {hunk.line} of the patch file)"
    if hits:
        raise PlaceFault(
            "E-AMBIGUOUS",
            f"{what} fits in {len(hits)} places, none of them its stated line",
            expected=f"one place, or one at line {hunk.start}",
            found=", ".join(f"line {n + 1}" for n in hits[:8]),
            candidates=[f"line {n + 1}: {lines[n].strip()[:160]}" for n in hits[:8]],
            line=hits[0] + 1,
        )
    at, difference = _nearest(lines, old, hunk.start - 1)
    raise PlaceFault(
        "E-CONFLICT",
        f"{what} fits nowhere",
        expected="its context and removed lines, unchanged",
        found=f"nearest at line {at + 1}" if difference else "nothing similar",
        candidates=difference,
        line=at + 1 if difference else 0,
    )


def _nearest(lines: list[str], old: list[str], stated: int) -> tuple[int, list[str]]:
    """0-based line of the most similar block, and the lines that differ there."""
    width = len(old)
    places: dict[str, list[int]] = {}
    for n, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(n)
    votes: dict[int, float] = {}
    for k, line in enumerate(old):
        here = places.get(line.strip(), [])
        for n in here[:50] if line.strip() else []:
            votes[n - k] = votes.get(n - k, 0.0) + 1 / len(here)
    if not votes:
        return 0, []
    at = max(votes, key=lambda n: (votes[n], -abs(n - stated)))
    at = max(0, at)
    shown = []
    for line in difflib.ndiff(
        [o.rstrip("\r\n") for o in old], [f.rstrip("\r\n") for f in lines[at : at + width]]
    ):
        if line[:1] in "-+":
            shown.append(f"{'wanted' if line[0] == '-' else 'found '} {line[2:].strip()[:160]}")
    if not shown:
        shown = ["the same words, with other white space or line breaks"]
    return at, shown[:8]


def _neighbours(file: str, text: str) -> str:
    family = "text" if file.endswith((".py", ".pyi")) else family_of(file)
    return token_fingerprint(t.text for t in tokenize(text, family))


class _Symbols:
    """The symbols of a file by lines (0-based, last one inclusive)."""

    def __init__(self, file: str, source: str, offsets: list[int]) -> None:
        language = language_of(file)
        self.python = language.name == "python"
        self.outside = "<module>" if self.python else ""
        self.source = source
        self.offsets = offsets
        self.entries: list[tuple[int, int, Symbol]] = []
        for symbol in language.symbols(source):
            if symbol.kind not in ("module", "file"):
                first = source.count("\n", 0, symbol.start)
                last = first + source.count("\n", symbol.start, symbol.end)
                self.entries.append((first, last, symbol))
        self.by_name = {s.qualname: s for _, _, s in self.entries}

    def region(self, name: str) -> tuple[int, int]:
        symbol = self.by_name.get(name)
        return (symbol.start, symbol.end) if symbol else (0, len(self.source))

    def of(self, start: int, stop: int, added: tuple[str, ...]) -> list[str]:
        """The innermost symbol around lines [start, stop); else ``<module>`` and the symbols they overlap."""
        inside = [e for e in self.entries if self._holds(e, start, stop, added)]
        if inside:
            _, _, symbol = min(inside, key=lambda e: (e[1] - e[0], -e[0]))
            return [symbol.qualname]
        touched = [e for e in self.entries if e[0] < stop and e[1] >= start]
        outer = [e for e in touched if not any(o is not e and o[0] <= e[0] and e[1] <= o[1] for o in touched)]
        return [self.outside, *(s.qualname for _, _, s in outer)] if self.python else [self.outside]

    def _holds(self, entry: tuple[int, int, Symbol], start: int, stop: int, added: tuple[str, ...]) -> bool:
        first, last, symbol = entry
        if stop > start:
            return first <= start and stop - 1 <= last
        if first < start <= last:
            return True
        # a statement put behind the last one of a Python block belongs to it by its indentation
        text = next((line for line in added if line.strip()), "")
        depth = len(text) - len(text.lstrip())
        column = symbol.start - self.offsets[first]
        return self.python and symbol.kind in ("function", "class") and start == last + 1 and depth > column
