"""Which language a file is edited in: Python by its syntax tree, everything else by its tokens."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from strata.model import Edit
from strata.spans import Placement, Symbol


class Language(Protocol):
    """How edits find their place in one kind of file. Every method raises PlaceFault for what it cannot
    do."""

    name: str

    def place(self, source: str, edit: Edit) -> Placement:
        """The spans of one edit on ``source``."""

    def symbols(self, source: str) -> list[Symbol]:
        """Every addressable symbol, in order of appearance."""

    def fingerprint(self, source: str, symbol: str | None) -> str:
        """``py1:<hex>`` or ``tok1:<hex>`` of one symbol, or of the whole file for None."""

    def body_fingerprint(self, source: str, symbol: str) -> str:
        """The same without the symbol's own name: equal for moved and for twin definitions."""


class PythonLanguage:
    """Python files."""

    name = "python"

    def place(self, source: str, edit: Edit) -> Placement:
        from strata.python_edits import place

        return place(source, edit)

    def symbols(self, source: str) -> list[Symbol]:
        from strata.python_symbols import module_of

        return module_of(source).symbols()

    def fingerprint(self, source: str, symbol: str | None) -> str:
        from strata.python_symbols import fingerprint

        return fingerprint(source, symbol)

    def body_fingerprint(self, source: str, symbol: str) -> str:
        from strata.python_symbols import body_fingerprint

        return body_fingerprint(source, symbol)


@cache
def _python() -> Language:
    return PythonLanguage()


def language_of(file: str) -> Language:
    """The language of a file, by its name."""
    if file.endswith((".py", ".pyi")):
        return _python()
    from strata.token_edits import token_language

    return token_language(file)
