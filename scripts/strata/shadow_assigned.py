"""What vllm-ascend's patch modules assign over: ``x.y = …`` and ``setattr(x, "y", …)`` on imported names."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from strata.branches import Site
from strata.modules import Module, Modules, Place

_PATCH_FILE = re.compile(r"^vllm_ascend/patch/(platform|worker)/(.+/)?patch_[^/]*\.py$")
_ENTRY = re.compile(r"^vllm_ascend/patch/(platform|worker)/__init__\.py$")
TargetKind = Literal["defined", "imported", "inherited", "added", "outside"]


@dataclass(frozen=True)
class Assignment:
    """One name that a patch module assigns.

    target: dotted name as written, e.g. ``vllm.v1.core.sched.scheduler.Scheduler.schedule``; owner: dotted
    name of what is assigned to; place: the definition that is no longer reached through it (None for kind
    ``added``/``outside``); kind: ``defined`` at the target, ``imported`` there from elsewhere, ``inherited``
    from a base class, ``added`` (there is no such name), ``outside`` both trees. wraps: name under which the
    replacement keeps the original, if it does; replacement: class or function put in its place, if it is one;
    subclass: the replacement derives from the original. conditions: open conditions for the assignment to
    happen; dead: reason why it never happens here, else empty.
    """

    target: str
    owner: str
    by: str
    kind: TargetKind
    place: Place | None
    wraps: str
    replacement: Place | None
    subclass: bool
    conditions: tuple[str, ...]
    dead: str


def is_patch_file(file: str) -> bool:
    """Whether a vllm-ascend file is one of its patch modules."""
    return bool(_PATCH_FILE.match(file))


@dataclass(frozen=True)
class Written:
    """An assignment as it stands, its target not looked up yet: most questions are about few names."""

    name: str
    resolve: Callable[[], Assignment]


def patch_files(modules: Modules) -> list[str]:
    """The patch modules of the vllm-ascend tree, sorted."""
    return [file for file in modules.files("vllm-ascend") if is_patch_file(file)]


def assignments(modules: Modules, file: str) -> list[Written]:
    """All assignments of one patch module in order; none where it does not parse."""
    module = modules.module("vllm-ascend", file)
    return list(_of_module(module, modules)) if module is not None else []


def _of_module(module: Module, modules: Modules) -> Iterator[Written]:
    at_import = _called_at_import(module)

    @cache
    def loaded() -> tuple[tuple[str, ...], str]:
        return _import_conditions(module, modules)

    for dead_range in [None, *module.branches.dead]:
        sites = (
            module.branches.live
            if dead_range is None
            else _sites_in(module, dead_range.first, dead_range.last)
        )
        reason = f"{module.file}:{dead_range.line}: {dead_range.reason}" if dead_range else ""
        for site in sites:
            if not isinstance(site.node, ast.Assign | ast.AnnAssign | ast.Expr):
                continue
            bound = module.bindings_in(site.scope) | _local_imports(module, site, dead_range is not None)
            outer = site.scope[0] if site.scope else ""
            late = () if not outer or outer in at_import else (f"once {outer} runs",)
            for owner, name, value in _targets(site.node, module, bound):
                yield Written(
                    name,
                    cache(
                        partial(
                            _resolve, modules, module, site, bound, owner, name, value, loaded, late, reason
                        )
                    ),
                )


def _targets(node: ast.stmt, module: Module, bound: dict[str, str]) -> Iterator[tuple[str, str, ast.expr]]:
    """(dotted owner, attribute, value) of every assignment to an attribute of something imported."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        given = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target, value in [pair for t in given if node.value for pair in _pairs(t, node.value)]:
            holder, name = _holder(target)
            owner = module.dotted(holder, bound) if holder is not None else ""
            if owner and not owner.startswith(module.name + "."):
                yield owner, name, value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and len(node.value.args) == 3:
        call = node.value
        if isinstance(call.func, ast.Name) and call.func.id == "setattr":
            owner = module.dotted(call.args[0], bound)
            if owner and not owner.startswith(module.name + "."):
                for name in _strings(call.args[1], module):
                    yield owner, name, call.args[2]


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each single target with what it gets; the whole value where that cannot be told."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    starred = any(isinstance(e, ast.Starred) for e in (*values, *target.elts))
    plain = len(values) == len(target.elts) and not starred
    for n, element in enumerate(target.elts):
        yield from _pairs(element, values[n] if plain else value)


def _holder(target: ast.expr) -> tuple[ast.expr | None, str]:
    """What a target belongs to, and its name there: ``x.y``, ``x.__dict__["y"]``, ``vars(x)["y"]``."""
    if isinstance(target, ast.Attribute):
        return target.value, target.attr
    if not (isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)):
        return None, ""
    space, name = target.value, target.slice.value
    if isinstance(name, str) and isinstance(space, ast.Attribute) and space.attr == "__dict__":
        return space.value, name
    if (
        isinstance(name, str)
        and isinstance(space, ast.Call)
        and isinstance(space.func, ast.Name)
        and space.func.id == "vars"
        and len(space.args) == 1
    ):
        return space.args[0], name
    return None, ""


def _strings(expression: ast.expr, module: Module) -> list[str]:
    """The strings that an expression can be: itself, or what top-level statements or the lists of loops bind
    a name to.
    """
    if isinstance(expression, ast.Constant):
        return [expression.value] if isinstance(expression.value, str) else []
    if not isinstance(expression, ast.Name):
        return []
    found = []
    for site in module.branches.live:
        node = site.node
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List | ast.Set):
            if isinstance(node.target, ast.Name) and node.target.id == expression.id:
                items = [e.value for e in node.iter.elts if isinstance(e, ast.Constant)]
                found += [item for item in items if isinstance(item, str)]
            continue
        if (
            site.scope
            or not isinstance(node, ast.Assign | ast.AnnAssign)
            or not isinstance(node.value, ast.Constant)
        ):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node.value.value, str) and any(
            isinstance(t, ast.Name) and t.id == expression.id for t in targets
        ):
            found.append(node.value.value)
    return list(dict.fromkeys(found))


def _resolve(
    modules: Modules,
    module: Module,
    site: Site,
    bound: dict[str, str],
    owner: str,
    name: str,
    value: ast.expr,
    loaded: Callable[[], tuple[tuple[str, ...], str]],
    late: tuple[str, ...],
    dead: str,
) -> Assignment:
    on_import, never = loaded()
    target = f"{owner}.{name}"
    kind, place = _target_place(modules, owner, name)
    replacement = _replacement(modules, module, bound, value)
    subclass = False
    if replacement is not None and place is not None:
        subclass = any(p.key == place.key for p in bases_of(modules, replacement))
    return Assignment(
        target=target,
        owner=owner,
        by=f"{module.file}:{site.node.lineno}",
        kind=kind,
        place=place,
        wraps="" if subclass else _keeps_original(module, site, bound, target, value),
        replacement=replacement,
        subclass=subclass,
        conditions=tuple(dict.fromkeys((*on_import, *late, *site.conditions))),
        dead=never or dead,
    )


def _target_place(modules: Modules, owner: str, name: str) -> tuple[TargetKind, Place | None]:
    place = modules.origin(owner)
    if place is None:
        return "outside", None
    module = modules.module(place.tree, place.file)
    if module is None:
        return "outside", None
    qualname = f"{place.qualname}.{name}" if place.qualname else name
    if qualname in module.all_definitions or qualname in module.assigned:
        return "defined", Place(place.tree, place.file, qualname)
    if not place.qualname:
        if name in module.bindings:
            origin = modules.origin(module.bindings[name])
            if origin is not None and origin.qualname:
                return "imported", origin
            return ("imported", None) if origin is not None else ("outside", None)
        return "added", None
    for base in bases_of(modules, place):
        base_module = modules.module(base.tree, base.file)
        inherited = f"{base.qualname}.{name}"
        if base_module is not None and (
            inherited in base_module.definitions or inherited in base_module.assigned
        ):
            return "inherited", Place(base.tree, base.file, inherited)
    return "added", None


def bases_of(modules: Modules, place: Place) -> list[Place]:
    """The base classes of a class, nearest first, as far as they lie in the trees (depth first, each
    once).
    """
    found: dict[tuple[str, str, str], Place] = {}
    todo = [place]
    while todo:
        current = todo.pop(0)
        module = modules.module(current.tree, current.file)
        nodes = module.all_definitions.get(current.qualname, []) if module else []
        node = next((n for n in nodes if isinstance(n, ast.ClassDef)), None)
        if module is None or node is None:
            continue
        bound = module.bindings_in(tuple(current.qualname.split(".")[:-1]))
        parents = []
        for expression in node.bases:
            if isinstance(expression, ast.Subscript):
                expression = expression.value
            dotted = module.dotted(expression, bound)
            origin = modules.origin(dotted) if dotted else None
            if origin is not None and origin.qualname and origin.key not in found:
                found[origin.key] = origin
                parents.append(origin)
        todo = [*parents, *todo]
    return list(found.values())


def _replacement(modules: Modules, module: Module, bound: dict[str, str], value: ast.expr) -> Place | None:
    dotted = module.dotted(value, bound)
    place = modules.origin(dotted) if dotted else None
    return place if place is not None and place.qualname else None


def _keeps_original(module: Module, site: Site, bound: dict[str, str], target: str, value: ast.expr) -> str:
    """The name under which the value, or the local function that it names, still reaches the original; else
    empty.
    """
    originals = {
        name for name, dotted in bound.items() if dotted == target and name not in module.definitions
    }
    attributes: set[str] = set()
    for other in module.branches.live:
        node = other.node
        if (
            isinstance(node, ast.Assign)
            and module.dotted(node.value, module.bindings_in(other.scope)) == target
        ):
            attributes |= {t.attr for t in node.targets if isinstance(t, ast.Attribute)}
            originals |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    if any(module.dotted(n, bound) == target for n in ast.walk(value) if isinstance(n, ast.Attribute)):
        return ast.unparse(value) if len(ast.unparse(value)) < 60 else "the value names it"
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    if names & originals:
        return min(names & originals)
    for name in names:
        local = ".".join((*site.scope, name))
        body = module.definitions.get(local) or module.definitions.get(name)
        for inner in ast.walk(body) if body is not None else ():
            if isinstance(inner, ast.Name) and inner.id in originals:
                return inner.id
            if isinstance(inner, ast.Attribute) and inner.attr in attributes:
                return inner.attr
    return ""


def _called_at_import(module: Module) -> set[str]:
    """Names of functions and classes that top-level statements call, and those that these call in turn."""
    called: set[str] = set()
    for site in module.branches.live:
        if not site.scope and not isinstance(
            site.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            called |= _calls(site.node) if isinstance(site.node, ast.Expr | ast.Assign) else set()
    todo = list(called)
    while todo:
        body = module.definitions.get(todo.pop())
        if body is not None:
            new = _calls(body) - called
            called |= new
            todo += new
    return called


def _calls(node: ast.AST) -> set[str]:
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            head = child.func
            while isinstance(head, ast.Attribute):
                head = head.value
            if isinstance(head, ast.Name):
                found.add(head.id)
    return found


def _import_conditions(
    module: Module, modules: Modules, seen: frozenset[str] = frozenset()
) -> tuple[tuple[str, ...], str]:
    """(open conditions, reason why never) for a patch module to be loaded; the easiest way in counts."""
    ways: list[tuple[tuple[str, ...], str]] = []
    for other in modules.mentioning("vllm-ascend", module.name.rsplit(".", 1)[-1]):
        if other.name == module.name or other.name in seen:
            continue
        for line in _import_lines_of(other, module.name):
            dead = other.branches.dead_at(line)
            if dead:
                ways.append(((), f"{other.file}:{dead.line}: {dead.reason}"))
                continue
            conditions = other.branches.conditions_at(line)
            if is_patch_file(other.file):
                outer, reason = _import_conditions(other, modules, seen | {module.name})
                ways.append(((*outer, *conditions), reason))
            elif _ENTRY.match(other.file):
                ways.append((conditions, ""))
            else:
                ways.append((conditions or (f"{other.file} imports it",), ""))
    open_ways = [c for c, reason in ways if not reason]
    if open_ways:
        return min(open_ways, key=len), ""
    if ways:
        return (), ways[0][1]
    return ("something imports it by another way than its name",), ""


def _import_lines_of(module: Module, name: str) -> list[int]:
    lines = []
    for node in ast.walk(module.node):
        if isinstance(node, ast.Import):
            named = any(a.name == name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.absolute(node)
            named = base == name or any(f"{base}.{a.name}" == name for a in node.names)
        else:
            continue
        if named:
            lines.append(node.lineno)
    return lines


def _sites_in(module: Module, first: int, last: int) -> list[Site]:
    """The statements of a dead range, taken as if it were live."""
    return [
        Site(node, (), ())
        for node in ast.walk(module.node)
        if isinstance(node, ast.stmt) and first <= node.lineno and (node.end_lineno or 0) <= last
    ]


def _local_imports(module: Module, site: Site, dead: bool) -> dict[str, str]:
    """What the imports of a dead range bind: the live bindings don't know them."""
    if not dead:
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(module.node):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            base = module.absolute(node)
            found |= {a.asname or a.name: f"{base}.{a.name}" for a in node.names}
    return found
