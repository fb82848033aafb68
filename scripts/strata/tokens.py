"""Source text of C++, CMake, shell and plain files as tokens: white space and comments ignored.

Every token keeps its place, so joining the source slices of the tokens with the gaps between them gives the
source back. ``text`` is what is compared: line continuations taken out, adjacent C++ string literals joined.
A newline that has meaning is a token of kind ``eol``: it ends a preprocessor directive or a shell command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Family = Literal["cpp", "cmake", "shell", "hash", "text"]
Kind = Literal["word", "string", "punct", "eol"]

_CPP = (
    ".c",
    ".cc",
    ".cce",
    ".cpp",
    ".cxx",
    ".cu",
    ".cuh",
    ".h",
    ".hh",
    ".hpp",
    ".hxx",
    ".asc",
    ".inc",
    ".proto",
)
_HASH = (".toml", ".cfg", ".ini", ".yml", ".yaml", ".mk", ".env", ".txt", ".gitignore", ".gitmodules")
_HASH_NAMES = ("Dockerfile", "Makefile", "Containerfile")


@dataclass(frozen=True, slots=True)
class Token:
    """One token. start, end: character offsets in the source; text: the form in which tokens are compared.

    directive: whether it belongs to a preprocessor line.
    """

    text: str
    start: int
    end: int
    kind: Kind
    directive: bool = False


def family_of(file: str) -> Family:
    """The tokenizer for a file, by its name; ``hash`` is plain text with ``#`` comments."""
    name = file.rsplit("/", 1)[-1]
    lowered = name.lower()
    if name == "CMakeLists.txt" or lowered.endswith((".cmake", ".cmake.in")):
        return "cmake"
    if lowered.endswith(_CPP) or lowered.endswith((".h.in", ".cpp.in")):
        return "cpp"
    if lowered.endswith((".sh", ".bash", ".sh.in")):
        return "shell"
    if lowered.endswith(_HASH) or name.startswith(_HASH_NAMES):
        return "hash"
    return "text"


@lru_cache(maxsize=64)
def tokenize(source: str, family: Family) -> tuple[Token, ...]:
    """All tokens of ``source``. Never fails: what is no token of the family is a one-character ``punct``."""
    if family == "cpp":
        return tuple(_join_strings(_cpp(source)))
    if family == "cmake":
        return tuple(_scan(source, _CMAKE))
    if family == "shell":
        return tuple(_Shell(source).tokens())
    return tuple(_scan(source, _HASH_TEXT if family == "hash" else _TEXT))


# --- C++

_CONTINUED = r"\\[ \t]*\r?\n"
_CPP_TOKEN = re.compile(
    rf"""
      (?P<space>(?:[ \t\f\v\r\ufeff]|{_CONTINUED})+)
    | (?P<newline>\n)
    | (?P<comment>//(?:[^\\\n]|\\(?:\r?\n|.)?)*|/\*.*?(?:\*/|\Z))
    | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{{0,16}})\(.*?\)(?P=delimiter)")
    | (?P<string>(?:u8|[uUL])?"(?:\\(?:\r\n|.)|[^"\\\n])*")
    | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
    | (?P<number>\.?[0-9](?:[eEpP][+-]|'?\w|\.)*)
    | (?P<word>\$\$\$[A-Z_]\w*|\$[A-Z_]\w*|[^\W\d]\w*)
    | (?P<punct>\.\.\.|->\*|<<=|\#\#|::|->|\+\+|--|<<|<=|==|!=|&&|\|\||\+=|-=|\*=|/=|%=|&=|\|=|\^=|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_HEADER = re.compile(r"[ \t]*(<[^>\n]*>)")
_SPLICE = re.compile(_CONTINUED)


def _cpp(source: str) -> list[Token]:
    """Tokens of C++ and AscendC. ``>`` is always a token of its own: ``>>`` may close two template lists."""
    tokens: list[Token] = []
    directive = False
    fresh = True  # no token yet on this logical line
    at, end = 0, len(source)
    while at < end:
        match = _CPP_TOKEN.match(source, at)
        if match is None:  # cannot happen: the last alternative takes any character
            raise AssertionError(f"no token at {at}")
        kind, text, start, at = match.lastgroup, match.group(), at, match.end()
        if kind == "delimiter":
            kind = "raw"
        if kind == "newline":
            if directive:
                tokens.append(Token("\n", start, at, "eol", True))
            directive, fresh = False, True
        elif kind not in ("space", "comment"):
            if fresh and text == "#":
                directive = True
            fresh = False
            if kind in ("string", "raw", "char"):
                shown: Kind = "string"
            else:
                shown = "punct" if kind == "punct" else "word"
            if "\\" in text and kind == "string":
                text = _SPLICE.sub("", text)
            tokens.append(Token(text, start, at, shown, directive))
            if directive and text in ("include", "import", "__has_include") and tokens[-2].text in ("#", "("):
                header = _HEADER.match(source, at)
                if header:
                    tokens.append(Token(header.group(1), header.start(1), header.end(), "string", True))
                    at = header.end()
    if directive:
        tokens.append(Token("\n", end, end, "eol", True))
    return tokens


_ORDINARY = re.compile(r'(u8|[uUL])?"(.*)"$', re.DOTALL)
_OPEN_ESCAPE = re.compile(r"(?:^|[^\\])(?:\\\\)*\\(?:x[0-9a-fA-F]+|[0-7]{1,2})$")


def _join_strings(tokens: list[Token]) -> list[Token]:
    joined: list[Token] = []
    for token in tokens:
        before = joined[-1] if joined else None
        if token.kind == "string" and before is not None and before.kind == "string":
            one, other = _ORDINARY.match(before.text), _ORDINARY.match(token.text)
            if one and other:
                left, right = one.group(2), other.group(2)
                # "\x1" "2" is not "\x12"
                seam = '""' if _OPEN_ESCAPE.search(left) and right[:1] in "0123456789abcdefABCDEF" else ""
                text = f'{one.group(1) or other.group(1) or ""}"{left}{seam}{right}"'
                joined[-1] = Token(text, before.start, token.end, "string", token.directive)
                continue
        joined.append(token)
    return joined


# --- CMake and plain text

_CMAKE = re.compile(
    r"""
      (?P<comment>\#\[(?P<c>=*)\[.*?(?:\](?P=c)\]|\Z)|\#[^\n]*)
    | (?P<string>\[(?P<b>=*)\[.*?\](?P=b)\]|"(?:\\.|[^"\\])*")
    | (?P<word>(?:\$\([A-Za-z0-9_]+\)|\\.|(?<=[^\s()])"(?:\\.|[^"\\\n])*"|[^\s()\#"\\])+)
    | (?P<punct>\S)
    """,
    re.VERBOSE | re.DOTALL,
)
_PLAIN = r"""
    | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    | (?P<word>\$\$\$[A-Z_]\w*|\$[A-Z_]\w*|\w+)
    | (?P<punct>\S)
    """
_TEXT = re.compile(r"(?P<comment>(?!))" + _PLAIN, re.VERBOSE | re.DOTALL)
_HASH_TEXT = re.compile(r"(?P<comment>(?:(?<=\s)|(?<![\s\S]))\#[^\n]*)" + _PLAIN, re.VERBOSE | re.DOTALL)


def _scan(source: str, pattern: re.Pattern[str]) -> list[Token]:
    tokens: list[Token] = []
    for match in pattern.finditer(source):
        for kind in ("string", "word", "punct"):
            if match.group(kind) is not None:
                tokens.append(Token(match.group(), match.start(), match.end(), kind))
    return tokens


# --- shell

_META = " \t\r\n;&|<>()"
_OPERATORS = (
    "<<<",
    "&>>",
    ";;&",
    "<<-",
    "<<",
    ">>",
    "&&",
    "||",
    ";;",
    ";&",
    "|&",
    "&>",
    ">&",
    "<&",
    ">|",
    "<>",
)
# after these a newline separates nothing
_NO_EOL_AFTER = frozenset({"\n", ";", ";;", "&", "&&", "||", "|", "(", "{", "then", "do", "else", "in"})
_ASSIGNS_ARRAY = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]*\])?\+?=$")


class _Shell:
    """A scanner of shell text: a word is one token with all its quoted and expanded parts."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.out: list[Token] = []
        self.depths: list[Literal["array", "arithmetic", "list"]] = []  # one per open parenthesis
        self.heredocs: list[tuple[str, bool]] = []

    def tokens(self) -> list[Token]:
        source, end = self.source, len(self.source)
        at = 0
        while at < end:
            char = source[at]
            if char == "\n":
                at = self._newline(at)
            elif char in " \t\r":
                at += 1
            elif source.startswith(("\\\n", "\\\r\n"), at):
                at = source.index("\n", at) + 1
            elif char == "#":
                at = self._line_end(at)
            elif char in ";&|<>()":
                at = self._operator(at)
            else:
                stop = self._word(at)
                self.out.append(Token(_SPLICE.sub("", source[at:stop]), at, stop, self._kind(source[at])))
                at = stop
        while self.out and self.out[-1].kind == "eol":
            self.out.pop()
        return self.out

    @staticmethod
    def _kind(first: str) -> Kind:
        return "string" if first in "\"'" else "word"

    def _line_end(self, at: int) -> int:
        stop = self.source.find("\n", at)
        return len(self.source) if stop < 0 else stop

    def _newline(self, at: int) -> int:
        in_array = self.depths[-1:] == ["array"]
        last = self.out[-1].text if self.out else "\n"
        if not in_array and last not in _NO_EOL_AFTER and not self._opens_case_branch():
            self.out.append(Token("\n", at, at + 1, "eol"))
        at += 1
        for word, tabs in self.heredocs:
            at = self._heredoc(at, word, tabs)
        self.heredocs = []
        return at

    def _opens_case_branch(self) -> bool:
        """A ``)`` that closes no parenthesis of ours ends a pattern of ``case``."""
        return bool(self.out) and self.out[-1].text == ")" and self._stray

    _stray = False

    def _operator(self, at: int) -> int:
        source = self.source
        text = next((o for o in _OPERATORS if source.startswith(o, at)), source[at])
        before = self.out[-1] if self.out else None
        if text == "(":
            array = before is not None and before.end == at and bool(_ASSIGNS_ARRAY.search(before.text))
            arithmetic = before is not None and before.end == at and before.text == "("
            self.depths.append("array" if array else "arithmetic" if arithmetic else "list")
        elif text == ")":
            self._stray = not self.depths
            if self.depths:
                self.depths.pop()
                while self.out and self.out[-1].kind == "eol":
                    self.out.pop()
        self.out.append(Token(text, at, at + len(text), "punct"))
        at += len(text)
        if text in ("<<", "<<-") and "arithmetic" not in self.depths:
            while at < len(source) and source[at] in " \t":
                at += 1
            stop = self._word(at)
            if stop > at:
                word = source[at:stop]
                self.out.append(Token(word, at, stop, "string"))
                self.heredocs.append((re.sub(r"[\\'\"]", "", word), text == "<<-"))
                at = stop
        return at

    def _heredoc(self, at: int, word: str, tabs: bool) -> int:
        start, stop = at, at
        while stop < len(self.source):
            line_end = self._line_end(stop)
            line = self.source[stop:line_end].rstrip("\r")
            stop = min(line_end + 1, len(self.source))
            if (line.lstrip("\t") if tabs else line) == word:
                self.out.append(Token(self.source[start:stop], start, stop, "string"))
                return stop
        return start  # its end is missing: no here-document swallows the rest of the file

    def _word(self, at: int) -> int:
        source, end = self.source, len(self.source)
        while at < end:
            char = source[at]
            if char in _META:
                break
            at = self._part(at)
        return at

    def _part(self, at: int) -> int:
        """The end of one character or quoted or expanded part of a word."""
        source, end = self.source, len(self.source)
        char = source[at]
        if char == "\\":
            return min(at + (3 if source.startswith("\\\r\n", at) else 2), end)
        if char == "'":
            return self._until(at + 1, "'", escapes=False)
        if source.startswith("$'", at):
            return self._until(at + 2, "'", escapes=True)
        if char == '"':
            return self._double(at + 1)
        if char == "`":
            return self._until(at + 1, "`", escapes=True)
        if source.startswith(("$(", "${"), at):
            return self._nested(at + 2, ")" if source[at + 1] == "(" else "}")
        if source.startswith("$#", at):
            return at + 2
        return at + 1

    def _until(self, at: int, quote: str, *, escapes: bool) -> int:
        while at < len(self.source) and self.source[at] != quote:
            at += 2 if escapes and self.source[at] == "\\" else 1
        return min(at + 1, len(self.source))

    def _double(self, at: int) -> int:
        while at < len(self.source) and self.source[at] != '"':
            if self.source[at] in "\\`" or self.source.startswith(("$(", "${"), at):
                at = self._part(at)
            else:
                at += 1
        return min(at + 1, len(self.source))

    def _nested(self, at: int, close: str) -> int:
        opener = "(" if close == ")" else "{"
        depth = 1
        while at < len(self.source):
            char = self.source[at]
            if char == close:
                depth -= 1
                if depth == 0:
                    return at + 1
                at += 1
            elif char == opener:
                depth += 1
                at += 1
            elif char == "#" and close == ")" and self.source[at - 1] in " \t\n":
                at = self._line_end(at)
            elif close == "}" and char == "'":
                at += 1  # inside "${x:-it's}" a single quote is a character
            else:
                at = self._part(at)
        return at
