"""Whether a vllm-ascend module is ever imported: a search backwards through the import graph.

Imports are found by their text, so that a question about one module does not parse the whole package; only a
file that has a decidable test in it is parsed, to tell which of its imports are in branches that this base
takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from strata.branches import SPECIAL_CASES
from strata.modules import Module, Modules, module_name

Kind = Literal["live", "special", "dead"]
_TREE = "vllm-ascend"
_PLATFORM = "vllm_ascend/platform.py"
_IMPORT = re.compile(
    r"^[ \t]*(?:"
    r"from[ \t]+(?P<base>[.\w]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n]+)"
    r"|import[ \t]+(?P<modules>[^\n]+)"
    r")"
    r"|[\"'](?P<string>vllm_ascend(?:\.\w+)+)[\"']",
    re.MULTILINE,
)
_NAME = re.compile(r"([\w.]+)(?:\s+as\s+\w+)?")
# a file without any of these words has no branch that a base decides, so all its imports are live
_DECIDABLE = re.compile(
    "|".join(
        ["vllm_version_is", "TYPE_CHECKING", "current_platform", *(re.escape(m) for m, _ in SPECIAL_CASES)]
    )
)
_LABELS = {label for _, label in SPECIAL_CASES}


@dataclass(frozen=True)
class Edge:
    """An import: who, at which 1-based line, in a live, special or dead branch, and which case or why."""

    file: str
    line: int
    kind: Kind
    reason: str


@dataclass(frozen=True)
class ImportState:
    """How a module is imported: ``live``, ``special`` (reason: the cases), or ``dead`` (reason: why). by:
    ``file:line``.
    """

    kind: Kind
    by: str = ""
    reason: str = ""


class Imports:
    """The import graph of vllm-ascend, read when first asked."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._edges: dict[tuple[str, int], Edge] = {}

    def state(self, module: Module) -> ImportState:
        """How a module is reached on this base from what every start loads."""
        if self._path(module.file, {"live"}) is not None:
            return ImportState("live")
        special = self._path(module.file, {"live", "special"})
        if special is not None:
            first = next(e for e in special if e.kind == "special")
            labels = dict.fromkeys(e.reason for e in special if e.kind == "special")
            return ImportState("special", f"{first.file}:{first.line}", " and ".join(labels))
        path = self._path(module.file, {"live", "special", "dead"})
        if path is None:
            return ImportState("live")  # nothing names it: loaded in a way that the text doesn't show
        first = next(e for e in path if e.kind == "dead")
        return ImportState("dead", f"{first.file}:{first.line}", first.reason)

    def _path(self, file: str, kinds: set[Kind]) -> list[Edge] | None:
        """Edges of these kinds that lead from a root to a file; None where there are none."""
        seen = {file}
        path: list[Edge] = []
        todo = [
            iter(self._sites(file))
        ]  # depth first, one importer at a time: to look at one may mean to parse it
        if _is_root(file):
            return path
        while todo:
            for importer, line in todo[-1]:
                if importer in seen:
                    continue
                edge = self._edge(importer, line)
                if edge.kind not in kinds:
                    continue
                seen.add(importer)
                sites = self._sites(importer)
                if _is_root(importer) or not sites:
                    return [*path, edge]
                path.append(edge)
                todo.append(iter(sites))
                break
            else:
                todo.pop()
                if path:
                    path.pop()
        return None

    def _sites(self, file: str) -> list[tuple[str, int]]:
        return self._importers.get(module_name(file), [])

    def _edge(self, file: str, line: int) -> Edge:
        if (file, line) not in self._edges:
            self._edges[file, line] = Edge(file, line, *self._classified(file, line))
        return self._edges[file, line]

    def _classified(self, file: str, line: int) -> tuple[Kind, str]:
        if not _DECIDABLE.search(self._modules.text(_TREE, file) or ""):
            return "live", ""
        module = self._modules.module(_TREE, file)
        if module is None:
            return "live", ""
        dead = module.branches.dead_at(line)
        if dead:
            return "dead", dead.reason
        labels = [c for c in module.branches.conditions_at(line) if c in _LABELS]
        return ("special", " and ".join(labels)) if labels else ("live", "")

    @cached_property
    def _importers(self) -> dict[str, list[tuple[str, int]]]:
        """Module name → (file, line) of what imports it or names it in a string; plain files and roots
        first.
        """
        found: dict[str, list[tuple[str, int]]] = {}
        decidable: dict[str, bool] = {}
        for file in self._modules.files(_TREE):
            text = self._modules.text(_TREE, file) or ""
            decidable[file] = bool(_DECIDABLE.search(text))
            for name, line in _imported(file, text):
                found.setdefault(name, []).append((file, line))
        for sites in found.values():
            sites.sort(key=lambda s: (not _is_root(s[0]), decidable[s[0]], s))
        return found


def _imported(file: str, text: str) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything in a file's imports and strings that can be a module of
    vllm-ascend.
    """
    package = module_name(file).split(".")
    if not file.endswith("/__init__.py"):
        package = package[:-1]
    count = _line_counter(text)
    for match in _IMPORT.finditer(text):
        if match["string"]:
            line = count(match.start("string"))
            parts = match["string"].split(".")
            for cut in range(len(parts), 1, -1):
                yield ".".join(parts[:cut]), line
        elif match["base"]:
            base = match["base"]
            level = len(base) - len(base.lstrip("."))
            if level:
                head = package[: len(package) - level + 1]
                base = ".".join([*head, *([base.lstrip(".")] if base.lstrip(".") else [])])
            if base.split(".")[0] != "vllm_ascend":
                continue
            line = count(match.start("base"))
            yield base, line
            names = re.sub(r"#[^\n]*", "", match["names"]).strip("()")
            for name in _NAME.finditer(names):
                yield f"{base}.{name[1]}", line
        else:
            line = count(match.start("modules"))
            for name in _NAME.finditer(match["modules"].split("#")[0]):
                parts = name[1].split(".")
                if parts[0] == "vllm_ascend":
                    yield ".".join(parts), line


def _line_counter(text: str) -> Callable[[int], int]:
    """A function from rising offsets to 1-based lines."""
    state = [0, 1]

    def line(offset: int) -> int:
        state[1] += text.count("\n", state[0], offset)
        state[0] = offset
        return state[1]

    return line


def _is_root(file: str) -> bool:
    """Files that every start loads: packages (loaded with whatever is in them) and the platform."""
    return file.endswith("/__init__.py") or file == _PLATFORM
