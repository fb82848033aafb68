"""A ``vllm serve`` start line taken apart and put together again: options in order, JSON options as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.errors import Finding
from strata.serving.facts import Catalogue, Flag

JSON_OPTIONS = (
    "--compilation-config",
    "--additional-config",
    "--speculative-config",
    "--profiler-config",
    "--structured-outputs-config",
    "--kv-transfer-config",
    "--kv-events-config",
    "--eplb-config",
)


@dataclass
class Option:
    """One option. name: canonical (long, with dashes); written: as it stood; values: its values as text.

    data: the value of a JSON option once read (None: not one, or not readable).
    """

    name: str
    written: str
    values: list[str] = field(default_factory=list)
    flag: Flag | None = None
    data: dict[str, Any] | None = None

    def tokens(self) -> list[str]:
        """The option as arguments; JSON from the data where there is any."""
        return [self.name, *([dumps(self.data)] if self.data is not None else self.values)]


@dataclass
class StartLine:
    """model: the positional argument, None where there is none; extra: further positional arguments."""

    model: str | None = None
    options: list[Option] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def get(self, name: str) -> Option | None:
        """The last option of that canonical name: the one that counts."""
        return next((o for o in reversed(self.options) if o.name == name), None)

    def text(self, *names: str) -> str | None:
        """The value of the last of these options."""
        for option in reversed(self.options):
            if option.name in names and option.values:
                return option.values[0]
        return None

    def data(self, name: str) -> dict[str, Any]:
        """The JSON of an option, empty where it is absent or unreadable."""
        option = self.get(name)
        return option.data if option and option.data is not None else {}

    def ensure(self, name: str) -> dict[str, Any]:
        """The JSON of an option, which is added where it is absent."""
        option = self.get(name)
        if option is None:
            option = Option(name, name, data={})
            self.options.append(option)
        if option.data is None:
            option.data = {}
        return option.data

    def remove(self, *names: str) -> None:
        self.options = [o for o in self.options if o.name not in names]

    def arguments(self) -> list[str]:
        """The line as a list of arguments."""
        head = [self.model] if self.model is not None else []
        return [*head, *self.extra, *(t for o in self.options for t in o.tokens())]


def dumps(data: Any) -> str:
    """Compact JSON, keys in the order given."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def integer(text: str | None) -> int | None:
    """A count as vLLM reads it: plain, or with k/m/g (1000) or K/M/G (1024). None where it is none."""
    if text is None:
        return None
    factor = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    digits = text if factor == 1 else text[:-1]
    try:
        value = float(digits) if "." in digits and factor > 1 else int(digits)
    except ValueError:
        return None
    return int(value * factor)


def read(arguments: Sequence[str], catalogue: Catalogue) -> tuple[StartLine, list[Finding]]:
    """Take a line apart. A leading ``vllm serve`` is skipped; ``_`` in option names reads as ``-``.

    Findings: E-JSON for each JSON value that does not read (with column), E-TWICE for each option given more
    than once (JSON options are merged, the later value winning key by key; of other options the last is
    kept).
    """
    tokens = list(arguments)
    for head in (["vllm", "serve"], ["serve"]):
        if tokens[: len(head)] == head:
            tokens = tokens[len(head) :]
            break
    line = StartLine()
    findings: list[Finding] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("-") or _is_number(token):
            if line.model is None and not line.options:
                line.model = token
            else:
                line.extra.append(token)
            continue
        written, _, inline = token.partition("=")
        stem, *path = written.split(".")
        name, flag = _canonical(stem, catalogue)
        option = Option(name, written, flag=flag)
        if "=" in token:
            option.values = [inline]
        else:
            takes = flag.takes if flag else "maybe"
            if takes in ("one", "many") and position < len(tokens):
                option.values.append(tokens[position])
                position += 1
            while takes in ("maybe", "many") and position < len(tokens) and not _is_option(tokens[position]):
                option.values.append(tokens[position])
                position += 1
                if takes == "maybe":
                    break
        if path:
            _dotted(line, option, path)
        else:
            if name in JSON_OPTIONS:
                findings += read_json(option)
            line.options.append(option)
    findings += _twice(line)
    return line, findings


def _is_number(token: str) -> bool:
    return token[1:].replace(".", "", 1).isdigit()


def _is_option(token: str) -> bool:
    return token.startswith("-") and len(token) > 1 and not _is_number(token)


def _canonical(head: str, catalogue: Catalogue) -> tuple[str, Flag | None]:
    name = "--" + head[2:].replace("_", "-") if head.startswith("--") else head
    flag = catalogue.flag(name)
    if flag is not None and not name.startswith("--"):
        name = next(n for n in flag.names if n.startswith("--"))
    return name, flag


def read_json(option: Option) -> list[Finding]:
    """Read the option's text into ``data``; E-JSON with the column where that fails."""
    text = option.values[0] if option.values else ""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        start = max(0, error.pos - 40)
        return [
            Finding(
                "E-JSON",
                f"the value of {option.name} is not JSON: {error.msg}",
                where=f"{option.name}, column {error.pos + 1}",
                expected="one JSON object"
                if error.msg != "Extra data"
                else "the end of the value: its braces close before",
                found=text[error.pos : error.pos + 20] or "the end of the value",
                details=(text[start : error.pos + 40], " " * (error.pos - start) + "^"),
                hint="correct the braces and quotes; strata preset render writes such values by serialiser",
            )
        ]
    if not isinstance(data, dict):
        return [
            Finding(
                "E-JSON",
                f"the value of {option.name} is not an object",
                where=option.name,
                expected="{…}",
                found=text[:60],
            )
        ]
    option.data = data
    return []


def _dotted(line: StartLine, option: Option, path: list[str]) -> None:
    """``--option.key.inner value``: merged into the option's JSON as vLLM does."""
    value: Any = option.values[0] if option.values else ""
    try:
        value = json.loads(value)
    except json.JSONDecodeError:
        value = integer(value) if integer(value) is not None else value
    data = line.ensure(option.name)
    line.options[-1].flag = line.options[-1].flag or (
        option.flag if line.options[-1].name == option.name else None
    )
    for key in path[:-1]:
        data = data.setdefault(key, {})
    data[path[-1]] = value


def _twice(line: StartLine) -> list[Finding]:
    findings: list[Finding] = []
    merged: dict[str, Option] = {}
    order: list[Option] = []
    for option in line.options:
        first = merged.get(option.name)
        if first is None:
            merged[option.name] = option
            order.append(option)
            continue
        if option.data is not None and first.data is not None:
            lost = [k for k in first.data if k not in option.data]
            changed = [k for k in option.data if k in first.data and option.data[k] != first.data[k]]
            message = f"{option.name} is given twice; only the last counts"
            if lost:
                message += f", so {', '.join(lost)} would be lost"
            first.data.update(option.data)
            findings.append(
                Finding(
                    "E-TWICE",
                    message,
                    where=option.name,
                    expected="one JSON object",
                    found=f"two, which differ in {', '.join(changed)}" if changed else "two",
                    hint=f"merge them: {option.name} {dumps(first.data)}",
                )
            )
        else:
            findings.append(
                Finding(
                    "E-TWICE",
                    f"{option.name} is given twice; only the last counts",
                    where=option.name,
                    found=f"{' '.join(first.values)!r} and {' '.join(option.values)!r}",
                    hint="keep one of them",
                )
            )
            first.values, first.data = option.values, option.data
    line.options = order
    return findings
