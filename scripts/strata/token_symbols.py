"""Brackets, blocks and named symbols of token files: functions and classes of C++, CMake and shell."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from strata.spans import PlaceFault
from strata.tokens import Family, Token, tokenize


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


_CLOSES = {")": "(", "]": "[", "}": "{"}
_OPENS = frozenset(_CLOSES.values())
_CLASS_WORDS = frozenset({"class", "struct", "union", "enum"})
_ATTRIBUTES = words(
    """
    __attribute__ __declspec alignas decltype noexcept requires __launch_bounds__ asm throw explicit
    typeof sizeof static_assert
    """
)
_AFTER_PARAMETERS = words(
    """
    const volatile noexcept override final try mutable requires throw __attribute__
    """
)
_ACCESS = frozenset({"public", "private", "protected", "signals", "slots"})
_BLOCK_BEFORE = words(") else do try ; { } const override noexcept final mutable :") | {"\n"}
_SHELL_ENDS = {"fi": "if", "done": "do", "esac": "case"}
_SHELL_PARTS = frozenset({"then", "elif", "else"})
_SHELL_COMMAND_AFTER = words("; ;; & && || | ( ) { then do else elif if while until !") | {"\n"}
_CMAKE_ENDS = {
    "endif": "if",
    "endforeach": "foreach",
    "endwhile": "while",
    "endfunction": "function",
    "endmacro": "macro",
    "endblock": "block",
}


@dataclass(frozen=True)
class Found:
    """A symbol by token indices: first and last token, those that open and close its body, its name's."""

    qualname: str
    kind: str
    first: int
    last: int
    opens: int
    closes: int
    name: int


class Document:
    """A token file: tokens, matching brackets, symbols. Any text will do; odd brackets stay unpaired."""

    def __init__(self, source: str, family: Family) -> None:
        self.source = source
        self.family = family
        self.tokens: Sequence[Token] = tokenize(source, family)
        self.texts = [t.text for t in self.tokens]
        self.starts = [t.start for t in self.tokens]

    @cached_property
    def spelled(self) -> list[str]:
        """The texts as fingerprints take them: marked where white space alone changes the meaning, the value
        in ``#define F (x)`` and the argument in ``run 2 >log``.
        """
        spelled = list(self.texts)
        for n in range(1, len(spelled)):
            before, token = self.tokens[n - 1], self.tokens[n]
            if before.end == token.start:
                continue
            if self.family == "cpp":
                defines = token.directive and self.texts[max(n - 3, 0) : n - 1] == ["#", "define"]
                apart = defines and token.text == "("
            else:
                apart = self.family == "shell" and token.text[0] in "<>" and before.text.isdigit()
            if apart:
                spelled[n] = " " + spelled[n]
        return spelled

    def line(self, offset: int) -> int:
        """1-based line of a character offset."""
        return self.source.count("\n", 0, offset) + 1

    def first_token(self, offset: int) -> int:
        """Index of the first token that starts at or after ``offset``."""
        return bisect.bisect_left(self.starts, offset)

    @cached_property
    def pairs(self) -> dict[int, int]:
        """Index of an opening bracket (or block word) to that of its closing one, and back."""
        if self.family == "shell":
            return self._shell_pairs()
        pairs = self._brackets()
        if self.family == "cmake":
            pairs |= self._cmake_pairs()
        return pairs

    @cached_property
    def at(self) -> dict[str, list[int]]:
        """Token text to the indices where it stands."""
        places: dict[str, list[int]] = {}
        for n, text in enumerate(self.texts):
            places.setdefault(text, []).append(n)
        return places

    @cached_property
    def found(self) -> list[Found]:
        """Every symbol in order of appearance; a name used more than once carries ``#1``, ``#2``, …"""
        scan: Callable[[], list[Found]] = {
            "cpp": self._cpp_symbols,
            "cmake": self._cmake_symbols,
            "shell": self._shell_symbols,
        }.get(self.family, list)
        entries = sorted(scan(), key=lambda f: (f.first, -f.last))
        total: dict[str, int] = {}
        for entry in entries:
            total[entry.qualname] = total.get(entry.qualname, 0) + 1
        seen: dict[str, int] = {}
        numbered = []
        for entry in entries:
            name = entry.qualname
            if total[name] > 1:
                seen[name] = seen.get(name, 0) + 1
                entry = replace(entry, qualname=f"{name}#{seen[name]}")
            numbered.append(entry)
        return numbered

    def symbol(self, name: str) -> Found:
        """The symbol that ``name`` means: a full name, or the end of one (namespaces may be left out).

        A function wins over a class of the same name's end (a constructor is named in full).
        PlaceFault E-SYMBOL-GONE where there is none, E-AMBIGUOUS where there are several.
        """
        wanted, _, number = name.partition("#")
        ends = [f for f in self.found if _ends(f.qualname.partition("#")[0], wanted)]
        exact = [f for f in ends if f.qualname.partition("#")[0] == wanted]
        hits = exact or ends
        if number:
            same = {f.qualname.partition("#")[0] for f in hits}
            hits = (
                [f for f in hits if f.qualname.partition("#")[2] == number] if len(same) == 1 or exact else []
            )
        if len(hits) == 1:
            return hits[0]
        if hits:
            raise PlaceFault(
                "E-AMBIGUOUS",
                f"{name} is defined {len(hits)} times",
                expected="one definition; choose it with #n or its full name",
                found=", ".join(f"{f.qualname} (line {self._line_of(f)})" for f in hits),
                candidates=[f"{f.qualname} (line {self._line_of(f)})" for f in hits],
                line=self._line_of(hits[0]),
            )
        raise PlaceFault(
            "E-SYMBOL-GONE",
            f"no symbol {name} in this file",
            expected=name,
            found="no such definition",
            candidates=self._near(wanted),
        )

    def _line_of(self, found: Found) -> int:
        return self.line(self.tokens[found.name].start)

    def _near(self, name: str) -> list[str]:
        last = name.rsplit("::", 1)[-1]
        same = [f for f in self.found if f.qualname.rsplit("::", 1)[-1].partition("#")[0] == last]
        names = {f.qualname: f for f in self.found}
        close = [names[n] for n in difflib.get_close_matches(name, list(names), n=5, cutoff=0.5)]
        ends = {f.qualname.rsplit("::", 1)[-1]: f for f in self.found}
        close += [ends[n] for n in difflib.get_close_matches(last, list(ends), n=5, cutoff=0.6)]
        unique = list(dict.fromkeys([*same, *close]))[:5]
        return [f"{f.qualname} (line {self._line_of(f)})" for f in unique]

    # brackets

    def _brackets(self) -> dict[int, int]:
        pairs: dict[int, int] = {}
        stack: list[tuple[int, ...]] = []
        # one per #if: the stack before it, and the stack at the end of its first branch
        branches: list[tuple[list[tuple[int, ...]], list[tuple[int, ...]] | None]] = []
        n, count = 0, len(self.tokens)
        while n < count:
            if self.tokens[n].directive:
                stop = self._directive_end(n)
                self._bracket_run(range(n, stop), [], pairs)
                word = self.texts[n + 1] if n + 1 < stop else ""
                if word in ("if", "ifdef", "ifndef"):
                    branches.append((list(stack), None))
                elif word in ("else", "elif", "elifdef", "elifndef") and branches:
                    before, first = branches[-1]
                    branches[-1] = (before, list(stack) if first is None else first)
                    stack = list(before)
                elif word == "endif" and branches:
                    _, first = branches.pop()
                    if first is not None:
                        stack = _merged(first, stack)
                n = stop
            else:
                self._bracket_run((n,), stack, pairs)
                n += 1
        return pairs

    def _directive_end(self, n: int) -> int:
        while n < len(self.tokens) and self.tokens[n].kind != "eol":
            n += 1
        return min(n + 1, len(self.tokens))

    def _bracket_run(self, run: Sequence[int], stack: list[tuple[int, ...]], pairs: dict[int, int]) -> None:
        for n in run:
            if self.tokens[n].kind != "punct":
                continue
            text = self.texts[n]
            if text in _OPENS:
                stack.append((n,))
            elif text in _CLOSES:
                depth = len(stack)
                while depth and self.texts[stack[depth - 1][0]] != _CLOSES[text]:
                    # a stray ")" must not close a block; a "}" ends whatever is open inside it
                    depth = depth - 1 if text == "}" else 0
                if depth:
                    openers = stack[depth - 1]
                    del stack[depth - 1 :]
                    for opener in openers:
                        pairs[opener] = n
                    pairs[n] = openers[0]

    def _cmake_commands(self) -> list[tuple[str, int]]:
        """(lower-case command name, index of its word) of every command invocation."""
        brackets = self._brackets()
        commands, n = [], 0
        while n + 1 < len(self.tokens):
            if self.tokens[n].kind == "word" and self.texts[n + 1] == "(" and n + 1 in brackets:
                commands.append((self.texts[n].lower(), n))
                n = brackets[n + 1]
            n += 1
        return commands

    def _cmake_pairs(self) -> dict[int, int]:
        """From the word of a block's command, or its ``elseif``/``else``, to the word that ends that part."""
        pairs: dict[int, int] = {}
        stack: list[tuple[str, int]] = []
        for name, n in self._cmake_commands():
            if name in _CMAKE_ENDS.values():
                stack.append((name, n))
            elif name in ("else", "elseif") and stack and stack[-1][0] == "if":
                pairs[stack[-1][1]] = n
                stack[-1] = ("if", n)
            elif name in _CMAKE_ENDS and stack and stack[-1][0] == _CMAKE_ENDS[name]:
                pairs[stack.pop()[1]] = n
        return pairs

    def _shell_pairs(self) -> dict[int, int]:
        """Brackets, braces, and from ``if``, ``elif``, ``else``, ``do``, ``case`` to the end of that part."""
        pairs: dict[int, int] = {}
        stack: list[tuple[str, int]] = []
        for n, text in enumerate(self.texts):
            if text == "(":
                stack.append(("(", n))
            elif text == ")":
                if stack and stack[-1][0] == "(":
                    opener = stack.pop()[1]
                    pairs[opener], pairs[n] = n, opener
            elif (
                text in ("{", "}")
                or text in _SHELL_ENDS
                or text in _SHELL_PARTS
                or text in ("if", "do", "case")
            ):
                if not self._starts_command(n):
                    continue
                if text in ("{", "if", "do", "case"):
                    stack.append((text, n))
                elif text == "}" and stack and stack[-1][0] == "{":
                    opener = stack.pop()[1]
                    pairs[opener], pairs[n] = n, opener
                elif text in ("elif", "else") and stack and stack[-1][0] == "if":
                    pairs[stack[-1][1]] = n
                    stack[-1] = ("if", n)
                elif text in _SHELL_ENDS and stack and stack[-1][0] == _SHELL_ENDS[text]:
                    pairs[stack.pop()[1]] = n
        return pairs

    def _starts_command(self, n: int) -> bool:
        if n == 0 or self.texts[n - 1] in _SHELL_COMMAND_AFTER:
            return True
        return n >= 2 and self.texts[n] == "{" and self.texts[n - 2] == "function"

    # symbols

    def _shell_symbols(self) -> list[Found]:
        entries = []
        for n, text in enumerate(self.texts):
            if text != "{" or n not in self.pairs:
                continue
            head = n - 1
            while head >= 0 and self.texts[head] == "\n":
                head -= 1
            if head >= 2 and self.texts[head - 1 : head + 1] == ["(", ")"]:
                name = head - 2
            elif head >= 1 and self.texts[head - 1] == "function":
                name = head
            else:
                continue
            first = name - 1 if name >= 1 and self.texts[name - 1] == "function" else name
            entries.append(Found(self.texts[name], "function", first, self.pairs[n], n, self.pairs[n], name))
        return entries

    def _cmake_symbols(self) -> list[Found]:
        entries = []
        for command, n in self._cmake_commands():
            if command in ("function", "macro") and n in self.pairs and self.pairs[n + 1] > n + 2:
                end = self.pairs[n]
                last = self.pairs.get(end + 1, end)
                entries.append(Found(self.texts[n + 2], command, n, last, self.pairs[n + 1], end, n + 2))
        return entries

    def _cpp_symbols(self) -> list[Found]:
        entries: list[Found] = []
        todo = [(0, len(self.tokens), "")]
        while todo:
            start, stop, scope = todo.pop()
            n = head = start
            while n < stop:
                text = self.texts[n]
                if self.tokens[n].directive:
                    stop_at = self._directive_end(n)
                    head = stop_at if head == n else head
                    n = stop_at
                elif text in ("(", "[") and n in self.pairs:
                    n = self.pairs[n] + 1
                elif text == "{" and n in self.pairs:
                    close = self.pairs[n]
                    piece = _Head(self, head, n)
                    if piece.initialises:
                        n = close + 1
                        continue
                    if piece.scope is not None:
                        todo.append((n + 1, close, _joined(scope, piece.scope)))
                    if piece.kind:
                        last = close
                        if piece.kind == "class" and close + 1 < stop and self.texts[close + 1] == ";":
                            last = close + 1
                        qualname = _joined(scope, piece.name)
                        entries.append(
                            Found(qualname, piece.kind, piece.first, last, n, close, piece.name_token)
                        )
                    n = head = close + 1
                elif text in (";", "}") or (text == ":" and n > start and self.texts[n - 1] in _ACCESS):
                    n += 1
                    head = n
                else:
                    n += 1
        return entries

    # statements

    def is_block(self, opener: int) -> bool:
        """Whether a ``{`` opens a block of statements rather than a list of initialisers."""
        if opener == 0:
            return True
        if self.texts[opener - 1] in _BLOCK_BEFORE:
            return True
        return opener in self._bodies

    @cached_property
    def _bodies(self) -> set[int]:
        return {f.opens for f in self.found}

    def statement(self, first: int, last: int) -> tuple[int, int]:
        """First and last token of the statement, command or directive around ``first``…``last``."""
        if self.family == "cmake":
            return self._cmake_statement(first, last)
        ends = {";", "\n"} if self.family == "cpp" else {";", "\n", "then", "do", "else", "{"}
        if self.family in ("hash", "text"):
            return self._text_line(first, last)
        if self.tokens[first].directive:
            while first > 0 and self.tokens[first - 1].directive and self.tokens[first - 1].kind != "eol":
                first -= 1
            while last + 1 < len(self.tokens) and self.tokens[last].kind != "eol":
                last += 1
            return first, last
        return self._left(first, ends), self._right(last, ends)

    def _left(self, n: int, ends: set[str]) -> int:
        while n > 0:
            before = n - 1
            text = self.texts[before]
            if text in ends or self.tokens[before].directive:
                break
            if text in _CLOSES and before in self.pairs:
                opener = self.pairs[before]
                if text == "}" and self.is_block(opener):
                    break
                n = opener
            elif (text == "{" and self.is_block(before)) or (
                text == ":" and before > 0 and (self.texts[before - 1] in _ACCESS | {"default"})
            ):
                break
            else:
                n = before
        return n

    def _right(self, n: int, ends: set[str]) -> int:
        last = len(self.tokens) - 1
        while True:
            text = self.texts[n]
            if text in _OPENS and n in self.pairs:
                block = text == "{" and self.is_block(n)
                n = self.pairs[n]
                if block and not (n < last and self.texts[n + 1] in ("else", "catch")):
                    return n
            elif text == ";" and self.family == "cpp":
                return n
            if n >= last:
                return last
            follows = self.texts[n + 1]
            if self.tokens[n + 1].directive or follows == "}" or (follows in ends and follows != ";"):
                return n
            if follows == ";" and self.family == "shell":
                return n
            n += 1

    def _cmake_statement(self, first: int, last: int) -> tuple[int, int]:
        commands = [n for _, n in self._cmake_commands()]
        where = bisect.bisect_right(commands, first) - 1
        if where >= 0:
            first = min(first, commands[where])
        where = bisect.bisect_right(commands, last) - 1
        if where >= 0:
            last = max(last, self.pairs.get(commands[where] + 1, last))
        return first, last

    def _text_line(self, first: int, last: int) -> tuple[int, int]:
        start = self.source.rfind("\n", 0, self.tokens[first].start) + 1
        stop = self.source.find("\n", self.tokens[last].end)
        stop = len(self.source) if stop < 0 else stop
        return self.first_token(start), max(last, self.first_token(stop) - 1)


@lru_cache(maxsize=64)
def document(source: str, family: Family) -> Document:
    """The document of a source text, kept for the edits that follow on the same file."""
    return Document(source, family)


class _Head:
    """What stands before a ``{`` at namespace or class level, and so what the brace opens.

    kind: ``function``, ``class`` or empty; scope: name added inside the braces, None where nothing is sought
    inside; initialises: the brace belongs to an expression or a member initialiser and ends nothing.
    """

    def __init__(self, doc: Document, start: int, brace: int) -> None:
        self.doc = doc
        self.kind = ""
        self.name = ""
        self.name_token = start
        self.scope: str | None = None
        self.initialises = False
        self.first = start
        texts = doc.texts
        head = [n for n in range(start, brace) if not doc.tokens[n].directive]
        if head:
            self.first = head[0]
        flat = self._flat(head)
        words = [texts[n] for n in flat]
        if "namespace" in words[:3]:
            names = [w for w in words[words.index("namespace") + 1 :] if w not in ("::", "inline")]
            self.scope = "::".join(names)
            return
        if words[:1] == ["extern"] and len(words) == 2:
            self.scope = ""
            return
        parsed = self._function(flat)
        if parsed is None and self._class(flat):
            return
        if parsed is None:
            self.initialises = bool(words) and ("=" in words or words[-1] not in _BLOCK_BEFORE)
            return
        name, token, after = parsed
        rest = [texts[n] for n in flat if n > after]
        if (
            ":" in rest
            and texts[brace - 1] not in (")", "}")
            and texts[brace - 1] not in _BLOCK_BEFORE - {":"}
        ):
            self.initialises = True
            return
        self.kind, self.name, self.name_token = "function", name, token

    def _flat(self, head: list[int]) -> list[int]:
        """The head without ``template <…>`` and what stands inside brackets (the opening ones stay)."""
        doc, flat, n = self.doc, [], 0
        position = {token: k for k, token in enumerate(head)}
        while n < len(head):
            token = head[n]
            text = doc.texts[token]
            if text == "template" and n + 1 < len(head) and doc.texts[head[n + 1]] == "<":
                n = self._angles(head, n + 1) + 1
                continue
            if text in _OPENS and doc.pairs.get(token) in position:
                flat.append(token)
                n = position[doc.pairs[token]] + 1
                continue
            if (
                text == "<"
                and flat
                and doc.texts[flat[-1]] != "operator"
                and doc.tokens[flat[-1]].kind == "word"
            ):
                stop = self._angles(head, n)
                if stop > n:
                    n = stop + 1
                    continue
            flat.append(token)
            n += 1
        return flat

    def _angles(self, head: list[int], n: int) -> int:
        """Position in ``head`` of the ``>`` that closes the ``<`` at ``n``; ``n`` where none does."""
        doc, depth, k = self.doc, 0, n
        position = {token: p for p, token in enumerate(head)}
        while k < len(head):
            text = doc.texts[head[k]]
            if text in _OPENS and doc.pairs.get(head[k]) in position:
                k = position[doc.pairs[head[k]]]
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return k
            k += 1
        return n

    def _function(self, flat: list[int]) -> tuple[str, int, int] | None:
        """(name, its token, closing parenthesis of the parameters) where the head declares a function."""
        doc = self.doc
        texts = [doc.texts[n] for n in flat]
        for k, text in enumerate(texts):
            if text == "=" and "operator" not in texts[max(0, k - 2) : k]:
                return None
            if text != "(" or k == 0 or texts[k - 1] in _ATTRIBUTES or flat[k] not in doc.pairs:
                continue
            if texts[k - 1] == "operator" and texts[k + 1 : k + 2] == ["("]:
                continue  # operator()(…): the parameters come next
            operator = next((o for o in range(k - 1, max(-1, k - 5), -1) if texts[o] == "operator"), None)
            if operator is None and doc.tokens[flat[k - 1]].kind != "word":
                continue
            follows = texts[k + 1] if k + 1 < len(texts) else ""
            if follows and doc.tokens[flat[k + 1]].kind == "word" and follows not in _AFTER_PARAMETERS:
                continue  # a macro in front of the declaration
            begin = k - 1 if operator is None else operator
            spelled = "()" if texts[k - 1] == "(" else ""
            name = "".join(texts[begin:k]) if not spelled else "operator()"
            token = flat[begin]
            if begin > 0 and texts[begin - 1] == "~":
                begin, name = begin - 1, "~" + name
            while begin >= 2 and texts[begin - 1] == "::" and doc.tokens[flat[begin - 2]].kind == "word":
                begin -= 2
                name = f"{texts[begin]}::{name}"
            return name, token, doc.pairs[flat[k]]
        return None

    def _class(self, flat: list[int]) -> bool:
        doc = self.doc
        texts = [doc.texts[n] for n in flat]
        start = next((k for k, t in enumerate(texts) if t in _CLASS_WORDS), None)
        if start is None or "=" in texts:
            return False
        name = ""
        for k in range(start + 1, len(texts)):
            if texts[k] in (":", "final"):
                break
            if doc.tokens[flat[k]].kind == "word" and texts[k] not in _CLASS_WORDS | _ATTRIBUTES:
                qualified = name and texts[k - 1] == "::"
                name = f"{name}::{texts[k]}" if qualified else texts[k]
                self.name_token = flat[k]
        enum = texts[start] == "enum"
        self.scope = None if enum else name
        if name:
            self.kind, self.name = ("enum" if enum else "class"), name
        return True


def _joined(scope: str, name: str) -> str:
    return f"{scope}::{name}" if scope and name else scope or name


def _ends(full: str, wanted: str) -> bool:
    return full == wanted or full.endswith("::" + wanted)


def _merged(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The open brackets after two branches of an ``#if``: each branch may have opened its own."""
    if len(one) != len(other):
        return one
    return [tuple(dict.fromkeys(a + b)) for a, b in zip(one, other, strict=True)]
