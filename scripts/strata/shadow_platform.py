"""Which of vllm-ascend's classes run in place of vLLM's: out-of-tree operators, and what the platform
instantiates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from strata.branches import SPECIAL_CASES
from strata.modules import Definition, Module, Modules, Place
from strata.shadow_assigned import bases_of

# what vLLM's CustomOp offers to each platform; an out-of-tree one gets forward_oot
# (model_executor/custom_op.py)
_FORWARDS = {"forward_cuda", "forward_hip", "forward_xpu", "forward_cpu", "forward_tpu"}
_CUSTOM_OP = ("vllm", "vllm/model_executor/custom_op.py", "CustomOp")
_PLATFORM_FILE = "vllm_ascend/platform.py"
_LABELS = {label for _, label in SPECIAL_CASES}
_COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
)
_Named = tuple[str, str, tuple[str, ...]]  # dotted name, file:line, labels
Super = Literal["", "sometimes", "always"]


@dataclass(frozen=True)
class Running:
    """A vllm-ascend class that stands in for a vLLM class. by: ``file:line`` that puts it there; labels: the
    special cases or features under which it does, empty for always.
    """

    place: Place
    by: str
    labels: tuple[str, ...]


class Platform:
    """Answers about classes; searches only what a question needs."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._known_subclasses: dict[tuple[str, str, str], list[Place]] = {}
        self._known_running: dict[tuple[str, str, str], Running | None] = {}

    # --- classes

    def override(self, subclass: Place, base: Place, method: str) -> tuple[Place, int, Super] | None:
        """(class, line, use of super) of the definition of ``method`` that ``subclass`` uses before
        ``base``'s own.

        Walks the subclass and its bases down to ``base``; None where nothing between them defines the method.
        """
        for place in (subclass, *bases_of(self._modules, subclass)):
            if place.key == base.key:
                return None
            module = self._modules.module(place.tree, place.file)
            node = module.definitions.get(f"{place.qualname}.{method}") if module else None
            if node is not None:
                return place, node.lineno, _super_use(node, method, base)
            if module is not None and f"{place.qualname}.{method}" in module.assigned:
                return place, module.all_definitions[place.qualname][0].lineno, ""
        return None

    def _definition(self, place: Place) -> Definition | None:
        module = self._modules.module(place.tree, place.file)
        nodes = module.all_definitions.get(place.qualname, []) if module else []
        return nodes[-1] if nodes else None

    def _is_custom_op(self, place: Place) -> bool:
        return any(b.key == _CUSTOM_OP for b in bases_of(self._modules, place))

    # --- out-of-tree operators

    def registered(self, place: Place) -> list[Running]:
        """The Ascend classes registered for a vLLM operator class (vLLM looks them up by the class's
        name).
        """
        found = []
        for dotted, by, labels in self._registry.get(place.qualname, []):
            own = self._modules.origin(dotted)
            if own is not None and any(b.key == place.key for b in bases_of(self._modules, own)):
                found.append(Running(own, by, labels))
        return found

    @cached_property
    def _registry(self) -> dict[str, list[_Named]]:
        registry: dict[str, list[_Named]] = {}
        for module in self._modules.mentioning("vllm-ascend", "register_oot"):
            for name, named in self._registrations(module):
                registry.setdefault(name, []).append(named)
        return registry

    def _registrations(self, module: Module) -> Iterator[tuple[str, _Named]]:
        tables: set[str] = set()
        for site in module.branches.live:
            if isinstance(site.node, ast.For) and _mentions(site.node, "register_oot"):
                iterated = site.node.iter
                if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute):
                    iterated = iterated.func.value
                if isinstance(iterated, ast.Name):
                    tables.add(iterated.id)
        for site in module.branches.live:
            bound = module.bindings_in(site.scope)
            labels = tuple(c for c in site.conditions if c in _LABELS or "model" in c)
            for name, value in _pairs(site.node, tables):
                dotted = module.dotted(value, bound)
                if dotted:
                    yield name, (dotted, f"{module.file}:{value.lineno}", labels)

    def other_platform_forward(self, place: Place, method: str) -> str:
        """``file:line`` of the dispatch that keeps ``method`` from running here; empty where it may run."""
        if method not in _FORWARDS or not self._is_custom_op(place):
            return ""
        node = self._definition(place)
        if not isinstance(node, ast.ClassDef):
            return ""
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name not in _FORWARDS and _mentions(item, method):
                return ""
        return self.dispatch_line

    def has_own_forward(self, place: Place) -> bool:
        """Whether every registered class brings a forward_oot that does not fall back to forward_native."""
        for running in self.registered(place):
            found = self.override(running.place, place, "forward_oot")
            if found is None:
                return False
            module = self._modules.module(found[0].tree, found[0].file)
            node = module.definitions.get(f"{found[0].qualname}.forward_oot") if module else None
            if node is None or _mentions(node, "forward_native"):
                return False
        return True

    @cached_property
    def dispatch_line(self) -> str:
        """``file:line`` of vLLM's choice of a forward method."""
        module = self._modules.module(_CUSTOM_OP[0], _CUSTOM_OP[1])
        node = module.definitions.get("CustomOp.dispatch_forward") if module else None
        return f"vllm::{_CUSTOM_OP[1]}:{node.lineno}" if node else f"vllm::{_CUSTOM_OP[1]}"

    # --- what the platform runs

    def running_subclasses(self, place: Place) -> list[Running]:
        """The platform's own subclasses of a vLLM class, each with the special cases under which it runs."""
        found = []
        for subclass in self._subclasses(place):
            running = self._running(subclass)
            if running is not None:
                found.append(running)
        return sorted(found, key=lambda r: (len(r.labels), r.by))

    def _subclasses(self, place: Place) -> list[Place]:
        """All classes of vllm-ascend that derive from a class of either tree, through classes of either
        tree.
        """
        if place.key not in self._known_subclasses:
            found: dict[tuple[str, str, str], Place] = {}
            names, known = [place.qualname], {place.qualname}
            while names:
                for module, name in self._naming_as_base(names.pop()):
                    candidate = Place(module.tree, module.file, name)
                    if candidate.key in found or not self._derives(candidate, place):
                        continue
                    if module.tree == "vllm-ascend":
                        found[candidate.key] = candidate
                    if name not in known:
                        known.add(name)
                        names.append(name)
            self._known_subclasses[place.key] = list(found.values())
        return self._known_subclasses[place.key]

    def _naming_as_base(self, name: str) -> Iterator[tuple[Module, str]]:
        """(module, class) of the classes that have ``name``, or what a file imports it as, in their list of
        bases.
        """
        for tree in ("vllm-ascend", "vllm"):
            for file in self._modules.files(tree):
                text = self._modules.text(tree, file) or ""
                if name not in text:
                    continue
                renamed = re.findall(rf"\b{re.escape(name)} +as +(\w+)", text) if f"{name} as" in text else []
                names = {name, *renamed}
                words = "|".join(map(re.escape, sorted(names)))
                for match in re.finditer(rf"^class\s+(\w+)\s*\([^)]*\b(?:{words})\b", text, re.MULTILINE):
                    module = self._modules.module(tree, file)
                    if module is not None and match[1] in module.classes:
                        yield module, match[1]

    def _derives(self, subclass: Place, base: Place) -> bool:
        return any(b.key == base.key for b in bases_of(self._modules, subclass))

    def _running(self, place: Place) -> Running | None:
        """How a class or function of vllm-ascend comes to run, by the way with the fewest special cases;
        None: never.

        It runs where the platform names it in a string, or where code that runs calls it; the code of a class
        runs where the class or one of its subclasses does.
        """
        if place.key in self._known_running:
            return self._known_running[place.key]
        self._known_running[place.key] = None  # a way that leads back here is none
        best = self._named(place)
        if best is None or best.labels:
            for way in self._calls_of(place):
                if best is None or len(way.labels) < len(best.labels):
                    best = way
                if not best.labels:
                    break
        self._known_running[place.key] = best
        return best

    def _calls_of(self, place: Place) -> Iterator[Running]:
        name = place.qualname.rsplit(".", 1)[-1]
        for module in self._modules.mentioning("vllm-ascend", name):
            for site in module.branches.live:
                if not site.scope or isinstance(site.node, _COMPOUND):
                    continue
                for node in ast.walk(site.node):
                    if not isinstance(node, ast.Call) or _last(node.func, module, site.scope) != name:
                        continue
                    dotted = module.dotted(node.func, module.bindings_in(site.scope))
                    target = self._modules.origin(dotted) if dotted else None
                    if target is None or target.key != place.key:
                        continue
                    caller = self._code_runs(Place(module.tree, module.file, site.scope[0]))
                    if caller is not None:
                        labels = (*caller.labels, *(c for c in site.conditions if c in _LABELS))
                        yield Running(place, f"{module.file}:{node.lineno}", tuple(dict.fromkeys(labels)))

    def _code_runs(self, place: Place) -> Running | None:
        """The same for the code of a class, which its subclasses run too."""
        best = self._running(place)
        if best is not None and not best.labels:
            return best
        if isinstance(self._definition(place), ast.ClassDef):
            for subclass in self._subclasses(place):
                running = self._running(subclass)
                if running is not None and (best is None or len(running.labels) < len(best.labels)):
                    best = running
        return best

    @cached_property
    def _named_by_platform(self) -> dict[str, list[_Named]]:
        """Dotted names in the platform's strings by their last part, with the features they depend on."""
        module = self._modules.module("vllm-ascend", _PLATFORM_FILE)
        found: dict[str, list[_Named]] = {}
        for site in module.branches.live if module is not None else ():
            if isinstance(site.node, _COMPOUND):
                continue
            for node in ast.walk(site.node):
                if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                    continue
                if node.value.startswith("vllm_ascend."):
                    named = (node.value, f"{_PLATFORM_FILE}:{node.lineno}", _feature_labels(site.conditions))
                    found.setdefault(node.value.rsplit(".", 1)[-1], []).append(named)
        return found

    def _named(self, place: Place) -> Running | None:
        """How the platform names a class in a string, by the way with the fewest features."""
        best: Running | None = None
        for dotted, by, labels in self._named_by_platform.get(place.qualname, []):
            own = self._modules.origin(dotted)
            if own is not None and own.key == place.key and (best is None or len(labels) < len(best.labels)):
                best = Running(place, by, labels)
        return best


def _pairs(node: ast.stmt, tables: Iterable[str]) -> Iterator[tuple[str, ast.expr]]:
    """(operator name, class expression) that a statement puts into a registration table or registers
    directly.
    """
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id in tables and isinstance(node.value, ast.Dict):
                yield from _dict_pairs(node.value)
            elif (
                isinstance(target, ast.Subscript)
                and isinstance(target.value, ast.Name)
                and target.value.id in tables
                and isinstance(target.slice, ast.Constant)
                and isinstance(target.slice.value, str)
            ):
                yield target.slice.value, node.value
    elif (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
    ):
        call, function = node.value, node.value.func
        if function.attr == "update" and isinstance(function.value, ast.Name) and function.value.id in tables:
            for argument in call.args:
                if isinstance(argument, ast.Dict):
                    yield from _dict_pairs(argument)
        elif function.attr == "register_oot":
            given = {k.arg: k.value for k in call.keywords}
            name, value = (
                given.get("name"),
                next((v for k, v in given.items() if k and k.startswith("_decorated")), None),
            )
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and value is not None:
                yield name.value, value
    elif isinstance(node, ast.ClassDef):
        for decorator in node.decorator_list:
            if (
                isinstance(decorator, ast.Call)
                and isinstance(decorator.func, ast.Attribute)
                and decorator.func.attr == "register_oot"
            ):
                names = [k.value for k in decorator.keywords if k.arg == "name"] or decorator.args[:1]
                for name in names:
                    if isinstance(name, ast.Constant) and isinstance(name.value, str):
                        yield name.value, ast.copy_location(ast.Name(node.name, ast.Load()), node)


def _dict_pairs(table: ast.Dict) -> Iterator[tuple[str, ast.expr]]:
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, value


def _feature_labels(conditions: tuple[str, ...]) -> tuple[str, ...]:
    """Special cases and switched-on features among conditions; the ordinary checks of the platform are
    none.
    """
    return tuple(
        c for c in conditions if c in _LABELS or (c.startswith("ascend_config.") and not c.startswith("not "))
    )


def _last(function: ast.expr, module: Module, scope: tuple[str, ...]) -> str:
    """The last part of the name that a call leads to, imports with ``as`` undone."""
    if isinstance(function, ast.Name):
        return module.bindings_in(scope).get(function.id, function.id).rsplit(".", 1)[-1]
    return function.attr if isinstance(function, ast.Attribute) else ""


def _mentions(node: ast.AST, name: str) -> bool:
    return any(
        (isinstance(n, ast.Attribute) and n.attr == name) or (isinstance(n, ast.Name) and n.id == name)
        for n in ast.walk(node)
    )


def _super_use(node: Definition, method: str, base: Place) -> Super:
    """Whether an override calls what it overrides: at the top level of its body (always) or somewhere in
    it.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""

    def calls(tree: ast.AST) -> bool:
        return any(
            isinstance(n, ast.Attribute)
            and n.attr == method
            and (
                (
                    isinstance(n.value, ast.Call)
                    and isinstance(n.value.func, ast.Name)
                    and n.value.func.id == "super"
                )
                or (isinstance(n.value, ast.Name) and n.value.id == base.qualname)
            )
            for n in ast.walk(tree)
        )

    leaves = False
    for item in node.body:
        plain = isinstance(item, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return | ast.With)
        if plain and not leaves and calls(item):
            return "always"
        leaves = leaves or any(isinstance(n, ast.Return) for n in ast.walk(item))
    return "sometimes" if calls(node) else ""
