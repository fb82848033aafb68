"""What a vllm-ascend base overwrites or never runs: the join of a patch's symbols with it gives SHADOWED and
IDLE.

Five ways in which code on disk is not the code that runs, each told from syntax trees alone, nothing is
imported: assigned over by ``vllm_ascend/patch``, replaced by an out-of-tree operator class, overridden by the
subclass that the platform runs instead, in a branch that this base never takes, in a module that only such
branches import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from strata.branches import SPECIAL_CASES
from strata.model import At
from strata.modules import Module, Modules, Place, TreeSource, module_name
from strata.shadow_assigned import Assignment, Written, assignments, patch_files
from strata.shadow_imports import Imports
from strata.shadow_platform import Platform

ShadowKind = Literal["assigned", "out-of-tree", "overridden", "dead-branch", "dead-module", "dispatch"]


@dataclass(frozen=True)
class Shadow:
    """Why code at a place is not what runs.

    verdict: ``SHADOWED`` (something else runs instead) or ``IDLE`` (nothing gets there); by: ``file:line``
    that causes it; message: in words; condition: when it holds, empty for always.
    """

    kind: ShadowKind
    verdict: Literal["SHADOWED", "IDLE"]
    by: str
    message: str
    condition: str = ""


class ShadowInfo:
    """Answers for one pair of trees; work is done when asked for and kept. Made by :func:`shadow_map`."""

    def __init__(self, trees: TreeSource, version: str) -> None:
        self._modules = Modules(trees, version)
        self._known_written: dict[str, list[Written]] = {}

    @cached_property
    def assignments(self) -> list[Assignment]:
        """Everything that vllm-ascend's patch modules assign on this base, dead branches included and
        marked.
        """
        return [w.resolve() for file in patch_files(self._modules) for w in self._written(file)]

    def _written(self, file: str) -> list[Written]:
        if file not in self._known_written:
            self._known_written[file] = assignments(self._modules, file)
        return self._known_written[file]

    @cached_property
    def _platform(self) -> Platform:
        return Platform(self._modules)

    def explain(self, at: At, line: int | None = None) -> Shadow | None:
        """The worst reason why the code at ``at`` is not what runs; None where nothing speaks against it.

        line: 1-based line of an edit's anchor, to tell a dead branch inside a function; without it the
        definition's own line counts. Unconditional reasons come before conditional ones. Files that are not
        Python have no reasons.
        """
        return next(iter(self.explain_all(at, line)), None)

    def explain_all(self, at: At, line: int | None = None) -> list[Shadow]:
        """Every reason, unconditional ones first, in a stable order."""
        if not at.file.endswith(".py"):
            return []
        found = [*self._idle(at, line)]
        if at.symbol and at.symbol != "<module>":
            name = plain_name(at.symbol)
            found += [*self._assigned(at, name), *self._rebound(at, name), *self._replaced(at, name)]
        always = {s.by for s in found if not s.condition}
        unique = dict.fromkeys(s for s in found if not s.condition or s.by not in always)
        return sorted(unique, key=lambda s: (bool(s.condition), s.verdict != "IDLE", s.by))

    # --- assigned over

    def _assigned(self, at: At, name: str) -> Iterator[Shadow]:
        parts = set(name.split("."))
        files = [f for f in patch_files(self._modules) if self._mentions(f, parts)]
        for item in (w.resolve() for f in files for w in self._written(f) if w.name in parts):
            if item.place is None or item.dead or (item.place.tree, item.place.file) != at.path:
                continue
            target = item.place.qualname
            if name != target and not name.startswith(target + "."):
                continue
            conditions = [*item.conditions]
            if item.kind == "imported":
                conditions.append(f"where {item.owner} calls it")
            elif item.kind == "inherited":
                conditions.append(f"for {item.owner}")
            if item.replacement is not None and item.subclass:
                if name == target:
                    continue  # still the base class of what runs
                yield from self._by_subclass(item.replacement, at, name, "assigned", item.by, conditions)
                continue
            if item.wraps:
                conditions.append(f"the replacement keeps the original and calls it ({item.wraps})")
            yield Shadow(
                "assigned", "SHADOWED", item.by, f"{item.target} is assigned over", _join(conditions)
            )

    def _mentions(self, file: str, words: set[str]) -> bool:
        text = self._modules.text("vllm-ascend", file) or ""
        return any(word in text for word in words)

    def _rebound(self, at: At, name: str) -> Iterator[Shadow]:
        """What top-level statements of the file itself put in the definition's place after it: ``C.m = …``,
        ``del f``, an import of the name. A plain ``f = …`` is a definition of its own, ``f#2``.
        """
        module = self._modules.module(at.tree, at.file)
        for site in module.branches.live if module is not None else ():
            written = [w for w in _rebinds(site.node) if name == w or name.startswith(w + ".")]
            if site.scope or not written or module is None:
                continue
            defined = module.all_definitions.get(written[0], [])
            if not defined or site.node.lineno <= max(n.end_lineno or 0 for n in defined):
                continue
            conditions = [*site.conditions]
            tries = (n for n in module.node.body if isinstance(n, ast.Try))
            if any(n.lineno <= site.node.lineno <= (n.end_lineno or 0) for n in tries):
                conditions.append("where that does not fail")
            value = getattr(site.node, "value", None)
            if isinstance(value, ast.expr) and written[0] in ast.unparse(value):
                conditions.append("what takes its place is made from it")
            yield Shadow(
                "assigned",
                "SHADOWED",
                f"{at.file}:{site.node.lineno}",
                f"{written[0]} is bound anew",
                _join(conditions),
            )

    # --- replaced classes

    def _replaced(self, at: At, name: str) -> Iterator[Shadow]:
        if at.tree != "vllm" or "." not in name:
            return
        module = self._modules.module(at.tree, at.file)
        class_name = name.split(".", 1)[0]
        if module is None or class_name not in module.all_definitions:
            return
        place = Place(at.tree, at.file, class_name)
        method = name.split(".")[1]
        registered = self._platform.registered(place)
        for operator in registered:
            yield from self._by_subclass(
                operator.place, at, name, "out-of-tree", operator.by, list(operator.labels)
            )
        yield from self._dispatch(place, method, bool(registered))
        for running in self._platform.running_subclasses(place):
            yield from self._by_subclass(
                running.place, at, name, "overridden", running.by, list(running.labels)
            )

    def _by_subclass(
        self, subclass: Place, at: At, name: str, kind: ShadowKind, by: str, conditions: list[str]
    ) -> Iterator[Shadow]:
        """The shadow that a subclass casts on one member of its base class, if it overrides that member."""
        base = Place(at.tree, at.file, name.split(".", 1)[0])
        method = name.split(".")[1]
        found = self._platform.override(subclass, base, method)
        if found is None:
            return
        overrider, line, through_super = found
        if through_super == "always":
            return
        conditions = list(conditions)
        where = f"{overrider.file}:{line}"
        if through_super:
            conditions.append(f"reached only where {overrider.qualname}.{method} calls super()")
        words = {
            "assigned": f"{subclass.qualname} is put in place of {base.qualname} at {by}",
            "out-of-tree": f"{subclass.qualname} is registered for {base.qualname} at {by}",
            "overridden": f"the platform uses {subclass.qualname} ({by})",
        }[kind]
        message = f"{overrider.qualname}.{method} runs instead: {words}"
        yield Shadow(kind, "SHADOWED", where, message, _join(conditions))

    def _dispatch(self, place: Place, method: str, registered: bool) -> Iterator[Shadow]:
        """forward_cuda and its like of vLLM's operator classes: an out-of-tree platform is given
        forward_oot.
        """
        by = self._platform.other_platform_forward(place, method)
        if by:
            yield Shadow("dispatch", "IDLE", by, f"an out-of-tree platform is never dispatched to {method}")
        elif method == "forward_native" and registered and self._platform.has_own_forward(place):
            yield Shadow(
                "dispatch",
                "IDLE",
                self._platform.dispatch_line,
                "forward_oot of the Ascend class runs while its operator is enabled",
                "unless custom_ops switches the operator off",
            )

    # --- dead code

    def _idle(self, at: At, line: int | None) -> Iterator[Shadow]:
        module = self._modules.module(at.tree, at.file)
        if module is None:
            return
        lines = [line] if line is not None else []
        if at.symbol and at.symbol != "<module>":
            lines += _definition_lines(module, at.symbol)
        for number in lines:
            dead = module.branches.dead_at(number)
            if dead:
                yield Shadow("dead-branch", "IDLE", f"{at.file}:{dead.line}", dead.reason)
                break
            special = [
                c for c in module.branches.conditions_at(number) if c in {label for _, label in SPECIAL_CASES}
            ]
            if special:
                yield Shadow(
                    "dead-branch",
                    "IDLE",
                    f"{at.file}:{number}",
                    "the branch is not taken by default",
                    f"only with {_join(special)}",
                )
                break
        if at.tree == "vllm-ascend":
            yield from self._idle_module(module)

    def _idle_module(self, module: Module) -> Iterator[Shadow]:
        state = self._imports.state(module)
        if state.kind == "dead":
            yield Shadow(
                "dead-module",
                "IDLE",
                state.by,
                f"{module.name} is imported only where this base never gets: {state.reason}",
            )
        elif state.kind == "special":
            yield Shadow(
                "dead-module",
                "IDLE",
                state.by,
                f"{module.name} is imported only for a special case",
                f"only with {state.reason}",
            )

    @cached_property
    def _imports(self) -> Imports:
        return Imports(self._modules)


def _definition_lines(module: Module, symbol: str) -> list[int]:
    """The line of the definition that a symbol names; of several without a number, the first live one or the
    first.
    """
    number = symbol.partition("#")[2]
    nodes = module.all_definitions.get(plain_name(symbol), [])
    if number.isdigit() and int(number) <= len(nodes):
        return [nodes[int(number) - 1].lineno]
    live = [n for n in nodes if module.branches.dead_at(n.lineno) is None]
    return [n.lineno for n in (live or nodes)[:1]]


def plain_name(symbol: str) -> str:
    """A qualified name without ``#n`` and without ``.setter`` and its like."""
    name = symbol.split("#", 1)[0]
    for suffix in (".setter", ".getter", ".deleter"):
        name = name.removesuffix(suffix)
    return name


def _join(conditions: list[str]) -> str:
    return " and ".join(dict.fromkeys(c for c in conditions if c))


def shadow_map(trees: TreeSource, version: str) -> ShadowInfo:
    """What the trees of a base, whose vLLM is release ``version``, overwrite or never run."""
    return ShadowInfo(trees, version)


__all__ = ["Shadow", "ShadowInfo", "module_name", "plain_name", "shadow_map"]


def _rebinds(node: ast.stmt) -> list[str]:
    """Names and ``C.m`` that a statement binds anew or takes away, in the order written."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [a.asname or a.name.split(".", 1)[0] for a in node.names]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.Assign):
        targets = [t for t in node.targets if isinstance(t, ast.Attribute)]
    return [ast.unparse(t) for t in targets if isinstance(t, ast.Name | ast.Attribute)]
