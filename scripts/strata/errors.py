"""Findings and errors in one shape: a code, the place, what was expected, what was found, what to type next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

EXIT_GOOD = 0
EXIT_NEEDS_PERSON = 1
EXIT_COULD_NOT_RUN = 2


@dataclass(frozen=True)
class Finding:
    """One thing to tell a person.

    code: stable identifier such as ``E-CONFLICT``; where: ``file[::symbol]`` or ``file:line``;
    hint: the next step, as something to type where possible; details: further lines, shown indented.
    """

    code: str
    message: str
    where: str = ""
    patch: str = ""
    expected: str = ""
    found: str = ""
    hint: str = ""
    details: tuple[str, ...] = field(default=())

    def render(self) -> str:
        """The finding as indented text, one labelled line per part that is known."""
        lines = [f"{self.code}: {self.message}"]
        for label, value in (
            ("patch", self.patch),
            ("at", self.where),
            ("expected", self.expected),
            ("found", self.found),
        ):
            if value:
                lines.append(f"  {label + ':':<10}" + value.replace("\n", "\n" + " " * 12))
        lines += [f"    {line}" for detail in self.details for line in detail.splitlines()]
        if self.hint:
            lines.append(f"  {'next:':<10}" + self.hint.replace("\n", "\n" + " " * 12))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The finding for ``--json``: the same words as :meth:`render`, empty parts left out."""
        return {k: list(v) if k == "details" else v for k, v in asdict(self).items() if v}


class StrataError(Exception):
    """One or more findings that end a command.

    exit_code: 1 where a person has to decide or mend something in the series, 2 where the command could not run
    (missing engine, unreadable file, bad arguments).
    """

    def __init__(self, findings: Finding | Iterable[Finding], exit_code: int = EXIT_COULD_NOT_RUN) -> None:
        self.findings = [findings] if isinstance(findings, Finding) else list(findings)
        self.exit_code = exit_code
        super().__init__("\n".join(f.render() for f in self.findings))
