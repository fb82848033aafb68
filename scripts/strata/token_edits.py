"""Edits of token files (C++, CMake, shell, plain text): the verbs, as spans on the pristine source."""

from __future__ import annotations

import re
import textwrap
from functools import cache

from strata.fingerprint import token_fingerprint
from strata.model import Edit
from strata.spans import PlaceFault, Placement, Span, Symbol
from strata.token_find import Match, Region, dollar_is_literal, find, region, siblings
from strata.token_lists import add_item
from strata.token_symbols import Document, document
from strata.tokens import Family, family_of, tokenize

_PYTHON_ONLY = {
    "wrap": "use 'before' and 'after', or 'replace' with a capture",
    "add_param": "use 'add_item' on the parameter list",
    "decorate": "use 'before' on the definition's first tokens",
    "import": "use 'before' or 'after' on an #include or include() line",
}
_TEMPLATE = re.compile(r"\$\$\$([A-Z_][A-Z0-9_]*)|\$([A-Z_][A-Z0-9_]*)(?![\w{])")
_STEP = "    "
_BEHIND = (
    -1
)  # rank of lines that belong to what stands above them: they come before other lines at that point


class TokenLanguage:
    """The token language of one family of files; see :class:`strata.languages.Language`."""

    name = "tokens"

    def __init__(self, family: Family) -> None:
        self.family = family

    def place(self, source: str, edit: Edit) -> Placement:
        """The spans of one edit. PlaceFault as in :mod:`strata.spans`; nothing is changed."""
        if edit.verb in _PYTHON_ONLY:
            raise PlaceFault(
                "E-EDIT",
                f"'{edit.verb}' is for Python files only",
                found=edit.verb,
                expected=_PYTHON_ONLY[edit.verb],
            )
        if edit.at is None:
            raise PlaceFault("E-EDIT", f"'{edit.verb}' needs 'at'")
        doc = document(source, self.family)
        where = region(doc, edit.at.symbol, edit.between)
        return _Placer(doc, edit, where).placement()

    def symbols(self, source: str) -> list[Symbol]:
        """Functions, classes and enums with a body, CMake functions and macros, shell functions."""
        doc = document(source, self.family)
        return [
            Symbol(
                f.qualname,
                f.kind,
                doc.tokens[f.first].start,
                doc.tokens[f.last].end,
                doc.line(doc.tokens[f.name].start),
            )
            for f in doc.found
        ]

    def fingerprint(self, source: str, symbol: str | None) -> str:
        """Of the tokens of a symbol, of a ``<between:…>`` region, or of the file (None or empty)."""
        doc = document(source, self.family)
        where = region(doc, symbol, None)
        return token_fingerprint(doc.spelled[where.start : where.stop])

    def body_fingerprint(self, source: str, symbol: str) -> str:
        """Without the token of the symbol's own name (the last part of a qualified one)."""
        doc = document(source, self.family)
        where = region(doc, symbol, None)
        texts = doc.spelled[where.start : where.stop]
        if where.symbol and "<between:" not in where.symbol:
            del texts[doc.symbol(where.symbol).name - where.start]
        return token_fingerprint(texts)


@cache
def _language(family: Family) -> TokenLanguage:
    return TokenLanguage(family)


def token_language(file: str) -> TokenLanguage:
    """The token language of a file, by its name."""
    return _language(family_of(file))


class _Placer:
    def __init__(self, doc: Document, edit: Edit, where: Region) -> None:
        self.doc = doc
        self.edit = edit
        self.where = where
        self.source = doc.source
        self.newline = "\r\n" if doc.source.count("\r\n") * 2 > doc.source.count("\n") else "\n"

    def placement(self) -> Placement:
        edit, doc, where = self.edit, self.doc, self.where
        if edit.verb in ("append", "prepend"):
            spans, anchors = self._at_end() if edit.verb == "append" else self._at_start()
        elif edit.find is None:
            spans, anchor = add_item(doc, edit, None, where)
            anchors = [anchor]
        else:
            hits = find(doc, edit, where)
            spans = [span for hit in hits for span in self._spans(hit)]
            anchors = [(m.first, m.last) for m in hits]
        line = doc.line(doc.tokens[anchors[0][0]].start) if anchors else 1
        return Placement(tuple(spans), self._offsets(), where.symbol, self._neighbours(anchors), line)

    def _offsets(self) -> tuple[int, int]:
        where, tokens = self.where, self.doc.tokens
        if not where.symbol:
            return 0, len(self.source)
        if where.start >= where.stop:  # nothing lies between the two anchors
            here = tokens[where.start - 1].end
            return here, here
        return tokens[where.start].start, tokens[where.stop - 1].end

    def _neighbours(self, anchors: list[tuple[int, int]]) -> str:
        texts: list[str] = []
        for first, last in anchors:
            for a, b in siblings(self.doc, first, last):
                texts += [*self.doc.texts[a : b + 1], "\n"]
        return token_fingerprint(texts)

    def _spans(self, hit: Match) -> list[Span]:
        edit = self.edit
        if edit.add_item is None and edit.before is None:
            self._accounts_for_all(hit)
        if edit.replace is not None:
            return [self._replace(hit, edit.replace)]
        if edit.delete:
            return [self._delete(hit)]
        if edit.before is not None:
            return [self._before(hit, edit.before)]
        if edit.after is not None:
            return [self._after(hit, edit.after)]
        return add_item(self.doc, edit, hit, self.where)[0]

    def _accounts_for_all(self, hit: Match) -> None:
        """E-PARTIAL where the anchor is a whole compound statement but for its last clauses."""
        texts = self.doc.texts
        follows = texts[hit.last + 1] if hit.last + 1 < len(texts) else ""
        rest = {"if": ("else",), "else": ("else",), "try": ("catch",), "catch": ("catch",), "do": ("while",)}
        if self.doc.family == "cpp" and texts[hit.last] == "}" and follows in rest.get(texts[hit.first], ()):
            raise PlaceFault(
                "E-PARTIAL",
                f"the anchor leaves out the '{follows}' of its statement",
                expected=f"'find' that takes in the '{follows}' clause too, or stops before the braces",
                found=f"'{follows}' after the anchor",
                line=self.doc.line(self.doc.tokens[hit.last].start),
            )

    # verbs

    def _bounds(self, hit: Match) -> tuple[int, int]:
        """Offsets of the matched code without a closing end of line."""
        last = hit.last
        while last > hit.first and self.doc.tokens[last].kind == "eol":
            last -= 1
        return self.doc.tokens[hit.first].start, self.doc.tokens[last].end

    def _replace(self, hit: Match, template: str) -> Span:
        start, end = self._bounds(hit)
        text = self._expand(template, hit)
        lines = self._indented(text, self._indent_at(start), self._continues(start, end)).split(self.newline)
        lines[0] = lines[0].lstrip(" \t")
        return Span(start, end, self.newline.join(lines), "replace")

    def _delete(self, hit: Match) -> Span:
        start, end = self._bounds(hit)
        line_start, line_end = self._line_start(start), self._line_end(end)
        if (
            self._blank(line_start, start)
            and self._no_token(end, line_end)
            and not self._opens_comment(end, line_end)
        ):
            behind = line_end + (2 if self.source.startswith("\r\n", line_end) else 1)
            if behind <= len(self.source):
                return Span(line_start, behind, "", "replace")
            return Span(max(0, line_start - len(self.newline)), len(self.source), "", "replace")
        while end < line_end and self.source[end] in " \t":
            end += 1
        if end == line_end:
            while start > line_start and self.source[start - 1] in " \t":
                start -= 1
        return Span(start, end, "", "replace")

    def _before(self, hit: Match, template: str) -> Span:
        start, _ = self._bounds(hit)
        text = self._expand(template, hit)
        line_start = self._line_start(start)
        if self._blank(line_start, start):
            return self._own_lines(line_start, text, self._indent_at(start))
        return Span(start, start, self._inline(text, start) + " ", "insert")

    def _after(self, hit: Match, template: str) -> Span:
        start, end = self._bounds(hit)
        text = self._expand(template, hit)
        line_end = self._line_end(end)
        rest = [self.doc.texts[n] for n in self._tokens_in(end, line_end)]
        if self._blank(self._line_start(start), start) and rest in ([], [";"], [","], ["\n"]):
            if self._opens_comment(end, line_end):
                raise PlaceFault(
                    "E-EDIT",
                    "a comment that begins behind the anchor goes on in the next line",
                    expected="an anchor that ends its line",
                    found=self.source[start:line_end],
                    line=self.doc.line(start),
                )
            indent = self._indent_at(start)
            inner = self._first_indent(line_end) if self.source[end - 1] in "{(" else ""
            deeper = inner if len(inner) > len(indent) else indent
            return self._own_lines(self._next_line(line_end), text, deeper, rank=_BEHIND)
        return Span(end, end, " " + self._inline(text, start), "insert")

    def _at_start(self) -> tuple[list[Span], list[tuple[int, int]]]:
        text = self._plain(self.edit.prepend or "")
        opens, _ = self._body()
        if opens < 0:
            here = 1 if self.source.startswith("\ufeff") else 0
            if self.source.startswith("#!", here):
                here = self._next_line(self._line_end(here))
            return [self._own_lines(here, text, "")], [(0, 0)] if self.doc.tokens else []
        end = self.doc.tokens[opens].end
        line_end = self._line_end(end)
        if self._tokens_in(end, line_end):
            return [Span(end, end, " " + self._inline(text, end), "insert")], [(opens + 1, opens + 1)]
        inner = self._first_indent(line_end)
        indent = inner if len(inner) > len(self._indent_at(end)) else self._indent_at(end) + _STEP
        span = self._own_lines(self._next_line(line_end), text, indent, rank=_BEHIND)
        return [span], [(opens + 1, opens + 1)]

    def _at_end(self) -> tuple[list[Span], list[tuple[int, int]]]:
        text = self._plain(self.edit.append or "")
        opens, closes = self._body()
        if opens < 0:
            last = len(self.doc.tokens) - 1
            return [self._own_lines(len(self.source), text, "")], [(last, last)] if last >= 0 else []
        start = self.doc.tokens[closes].start
        line_start = self._line_start(start)
        anchor = (closes - 1, closes - 1)
        while anchor[0] > opens + 1 and self.doc.tokens[anchor[0]].kind == "eol":
            anchor = (anchor[0] - 1, anchor[0] - 1)
        if not self._blank(line_start, start):
            return [Span(start, start, self._inline(text, start) + " ", "insert")], [anchor]
        inner = self._first_indent(self._line_end(self.doc.tokens[opens].end))
        indent = inner if len(inner) > len(self._indent_at(start)) else self._indent_at(start) + _STEP
        return [self._own_lines(line_start, text, indent)], [anchor]

    def _body(self) -> tuple[int, int]:
        """Tokens that open and close the body of the edited region; -1 for the whole file."""
        where = self.where
        if not where.symbol:
            return -1, -1
        if "<between:" in where.symbol:
            return where.start - 1, where.stop
        found = self.doc.symbol(where.symbol)
        return found.opens, found.closes

    # text

    def _plain(self, template: str) -> str:
        if _TEMPLATE.search(template) and not dollar_is_literal(self.doc.family) and "$$$" in template:
            raise PlaceFault("E-EDIT", f"'{self.edit.verb}' has no captures to fill in", found=template)
        return template

    def _expand(self, template: str, hit: Match) -> str:
        """The template with its captures filled in by source text as it stands."""
        literal = dollar_is_literal(self.doc.family)
        tokens = self.doc.tokens
        for name, (a, b) in hit.captures.items():
            if a == b:  # nothing was captured: no comma is left hanging
                hole = re.escape(f"$$${name}")
                template = re.sub(rf",\s*{hole}(?!\w)", "", template)
                template = re.sub(rf"{hole}\s*,\s*", "", template)

        def fill(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if name in hit.captures:
                if found[2] and literal:
                    return found[0]
                a, b = hit.captures[name]
                if a == b:
                    return ""
                if self.doc.family == "cpp" and self.doc.texts[b - 1] == "," and b - 1 > a:
                    b -= 1
                return self.source[tokens[a].start : tokens[b - 1].end]
            if found[1] or self.doc.family in ("cpp", "cmake"):
                known = ", ".join(sorted(hit.captures)) or "none"
                raise PlaceFault(
                    "E-EDIT",
                    f"'{self.edit.verb}' uses {found[0]}, which 'find' does not capture",
                    expected=f"one of the captures of 'find': {known}",
                    found=found[0],
                )
            return found[0]

        return _TEMPLATE.sub(fill, template)

    def _own_lines(self, here: int, text: str, indent: str, *, rank: int = 0) -> Span:
        """Insertion of whole lines at the start of a line (or at the end of the file)."""
        continued = here > 0 and _ends_with_splice(self.source, here)
        body = self._indented(text, indent, continued)
        if here == len(self.source) and here and self.source[-1] != "\n":
            return Span(here, here, self.newline + body, "insert", rank=rank)
        return Span(here, here, body + (" \\" if continued else "") + self.newline, "insert", rank=rank)

    def _indented(self, text: str, indent: str, continued: bool) -> str:
        """``text`` at ``indent``; lines that begin inside a token of several lines stay as they are."""
        text = textwrap.dedent(text.replace("\r\n", "\n")).strip("\n")
        inside: set[int] = set()
        for token in tokenize(text, self.doc.family):
            here = text[token.start : token.end]
            if token.kind == "string" and "\n" in here and _keeps_lines(here):
                first = text.count("\n", 0, token.start)
                heredoc = token.start > 0 and text[token.start - 1] == "\n" and here[0] not in "\"'R"
                last = first + here.removesuffix("\n").count("\n")
                inside.update(range(first if heredoc else first + 1, last + 1))
        lines = text.split("\n")
        shown = [line if n in inside or not line.strip() else indent + line for n, line in enumerate(lines)]
        if continued:
            shown = [line if line.endswith("\\") else line + " \\" for line in shown[:-1]] + shown[-1:]
        return self.newline.join(shown)

    def _inline(self, text: str, near: int) -> str:
        text = textwrap.dedent(text).strip()
        if "\n" in text:
            raise PlaceFault(
                "E-EDIT",
                f"several lines cannot stand inside a line of code ('{self.edit.verb}')",
                expected="an anchor that is alone on its line, or 'replace'",
                found=self.source[self._line_start(near) : self._line_end(near)].strip(),
                line=self.doc.line(near),
            )
        return text

    def _continues(self, start: int, end: int) -> bool:
        """Whether the code between two offsets stands in lines that a backslash joins."""
        token = self.doc.first_token(start)
        if token < len(self.doc.tokens) and self.doc.tokens[token].directive:
            line_end = self._line_end(end)
            return self.source[:line_end].rstrip(" \t\r").endswith("\\") or "\\\n" in self.source[start:end]
        return False

    # lines

    def _line_start(self, offset: int) -> int:
        return self.source.rfind("\n", 0, offset) + 1

    def _line_end(self, offset: int) -> int:
        """Offset of the line break (of its ``\\r`` where it has one), or of the end of the file."""
        end = self.source.find("\n", offset)
        if end < 0:
            return len(self.source)
        return end - 1 if end > offset and self.source[end - 1] == "\r" else end

    def _next_line(self, line_end: int) -> int:
        if self.source.startswith("\r\n", line_end):
            return line_end + 2
        return min(line_end + 1, len(self.source))

    def _blank(self, start: int, end: int) -> bool:
        return not self.source[start:end].strip(" \t\ufeff")

    def _indent_at(self, offset: int) -> str:
        line = self.source[self._line_start(offset) : self._line_end(offset)].lstrip("\ufeff")
        return line[: len(line) - len(line.lstrip(" \t"))]

    def _first_indent(self, line_end: int) -> str:
        """The indentation of the first line of code after ``line_end``."""
        token = self.doc.first_token(line_end)
        while token < len(self.doc.tokens) and self.doc.tokens[token].kind == "eol":
            token += 1
        return self._indent_at(self.doc.tokens[token].start) if token < len(self.doc.tokens) else ""

    def _tokens_in(self, start: int, end: int) -> range:
        return range(self.doc.first_token(start), self.doc.first_token(end))

    def _no_token(self, start: int, end: int) -> bool:
        return all(self.doc.tokens[n].kind == "eol" for n in self._tokens_in(start, end))

    def _opens_comment(self, start: int, end: int) -> bool:
        """Whether a comment that begins in [start, end), where no token is, goes on in the next line."""
        gap = self.source[start:end]
        if self.doc.family == "cpp":
            # a "/*" behind "//" opens nothing
            return bool(re.match(r"(?:[^/]|/(?![/*])|/\*.*?\*/)*/\*", gap)) and not re.match(
                r"(?:[^/]|/(?![/*])|/\*.*?\*/)*(?://|$)", gap
            )
        if self.doc.family == "cmake":
            return bool(re.search(r"#\[(=*)\[(?!.*\]\1\])", gap))
        return False


def _ends_with_splice(source: str, line_start: int) -> bool:
    return source[:line_start].endswith(("\\\n", "\\\r\n"))


def _keeps_lines(text: str) -> bool:
    """Whether a string token's line breaks belong to its value (raw strings, quotes, here-documents)."""
    return not text.startswith('"') or '"\n' not in text
