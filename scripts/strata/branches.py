"""Which branches of a module a base ever takes, told from its syntax tree alone.

A test is decided where it asks for the installed vLLM's version, for type checking, for another vendor's
platform, or for a name that a decided branch bound to a constant. Everything else stays open and is handed on
as a condition in words.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

# tests that are false on the devices that Strata builds for unless somebody asks for the special case: the
# name tells the case to a person, and its absence is no condition at all
SPECIAL_CASES = (
    ("is_310p", "310P"),
    ("is_rc_device", "310P"),
    ("_310P", "310P"),
    ("use_v2_model_runner", "V2 runner"),
    ("VLLM_USE_V2_MODEL_RUNNER", "V2 runner"),
    ("xlite_graph_config", "xlite"),
)
# current_platform.is_x() of an out-of-tree platform: false for each of these (Platform compares its enum with
# theirs)
_OTHER_PLATFORMS = {"is_cuda", "is_rocm", "is_tpu", "is_xpu", "is_cpu", "is_cuda_alike", "is_zen_cpu"}
_MAX_WORDS = 110


@dataclass(frozen=True)
class Dead:
    """Lines ``first..last`` (1-based, inclusive) that this base never runs, and why; ``line`` is the test's
    line.
    """

    first: int
    last: int
    reason: str
    line: int


@dataclass(frozen=True)
class Site:
    """A statement that may run, with the open conditions under which it does (empty: always)."""

    node: ast.stmt
    conditions: tuple[str, ...]
    scope: tuple[str, ...]
    """Names of the classes and functions around the statement, outermost first."""


@dataclass
class Branches:
    """The dead lines and the live statements of one module."""

    dead: list[Dead] = field(default_factory=list)
    live: list[Site] = field(default_factory=list)

    def dead_at(self, line: int) -> Dead | None:
        """The outermost dead range that holds ``line``."""
        return next((d for d in self.dead if d.first <= line <= d.last), None)

    def conditions_at(self, line: int) -> tuple[str, ...]:
        """Open conditions of the innermost live statement that holds ``line``."""
        best: Site | None = None
        for site in self.live:
            if _first_line(site.node) <= line <= (site.node.end_lineno or 0) and (
                best is None or site.node.lineno >= best.node.lineno
            ):
                best = site
        return best.conditions if best else ()


@dataclass(frozen=True)
class Facts:
    """What is known of a base. version: the vLLM release that it carries, e.g. ``0.23.0``."""

    version: str

    def truth(self, test: ast.expr, names: Mapping[str, bool]) -> bool | None:
        """The value of a test on this base, or None where it stays open."""
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            value = self.truth(test.operand, names)
            return None if value is None else not value
        if isinstance(test, ast.BoolOp):
            values = [self.truth(v, names) for v in test.values]
            deciding = isinstance(test.op, ast.Or)
            if deciding in values:
                return deciding
            return None if None in values else not deciding
        if isinstance(test, ast.Name):
            return names.get(test.id, False if test.id == "TYPE_CHECKING" else None)
        if isinstance(test, ast.Attribute):
            return False if test.attr == "TYPE_CHECKING" else None
        if isinstance(test, ast.Call):
            return self._call(test)
        return None

    def _call(self, call: ast.Call) -> bool | None:
        name = _last_name(call.func)
        if name == "vllm_version_is" and len(call.args) == 1 and isinstance(call.args[0], ast.Constant):
            return _same_release(str(call.args[0].value), self.version)
        if isinstance(call.func, ast.Attribute) and _last_name(call.func.value) == "current_platform":
            if name in _OTHER_PLATFORMS:
                return False
            if name == "is_out_of_tree":
                return True
        return None

    def conditions(self, test: ast.expr, taken: bool, names: Mapping[str, bool]) -> tuple[str, ...]:
        """The open conditions, in words, under which ``test`` comes out as ``taken``."""
        if self.truth(test, names) is not None:
            return ()
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.conditions(test.operand, not taken, names)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == taken:
            return tuple(c for v in test.values for c in self.conditions(v, taken, names))
        words = ast.unparse(test)
        for marker, label in SPECIAL_CASES:
            if marker in words and isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Compare):
                negated = isinstance(test, ast.Compare) and any(
                    isinstance(o, ast.NotEq | ast.IsNot) for o in test.ops
                )
                return (label,) if taken != negated else ()
        words = words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 3] + "..."
        return (words if taken else f"not ({words})",)


def branches_of(module: ast.Module, facts: Facts) -> Branches:
    """Walk a module once: every statement is either live, with its conditions, or inside a dead range."""
    result = Branches()
    _walk(module.body, facts, _Names(_rebound(module)), (), (), result)
    result.dead.sort(key=lambda d: (d.first, -d.last))
    return result


class _Names(dict[str, bool]):
    """Names that stand for a decided test, as far as that can be followed.

    Only a binding that a decided branch makes, or that is such a test itself, says something of the base; a
    flag that a function sets on its way does not. shared: names that are never followed, because code that
    runs at another time binds them too. sure: whether the code being walked is that of a decided branch.
    """

    def __init__(
        self, shared: frozenset[str], known: Mapping[str, bool] | None = None, sure: bool = False
    ) -> None:
        super().__init__(known or {})
        self.shared, self.sure = shared, sure

    def inner(self, *, sure: bool = False) -> _Names:
        """A copy for code whose bindings may not hold after it."""
        return _Names(self.shared, self, sure)


def _rebound(module: ast.Module) -> frozenset[str]:
    """Names that functions rebind from inside, or that more than one top-level statement binds."""
    found = {
        n for node in ast.walk(module) if isinstance(node, ast.Global | ast.Nonlocal) for n in node.names
    }
    once: set[str] = set()
    for statement in module.body:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound = set(_stored(statement))
            found |= once & bound
            once |= bound
    return frozenset(found)


def _walk(
    body: list[ast.stmt],
    facts: Facts,
    names: _Names,
    conditions: tuple[str, ...],
    scope: tuple[str, ...],
    result: Branches,
) -> None:
    for index, node in enumerate(body):
        result.live.append(Site(node, conditions, scope))
        if isinstance(node, ast.If):
            conditions = _walk_if(node, body[index + 1 :], facts, names, conditions, scope, result)
            if _ends(node, facts, names):
                _bury(
                    body[index + 1 :],
                    f"the branch taken at line {node.lineno} leaves before it",
                    node.lineno,
                    result,
                )
                return
            continue
        if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
            _bury(body[index + 1 :], f"line {node.lineno} leaves before it", node.lineno, result)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = names.inner()
            if inner and not isinstance(node, ast.ClassDef):
                for name in _bound_names(node):
                    inner.pop(name, None)
            _walk(node.body, facts, inner, conditions, (*scope, node.name), result)
        elif isinstance(node, ast.Try | ast.TryStar):
            _forget(node, names)  # how far the body gets is open
            for part in (node.body, node.orelse, node.finalbody):
                _walk(part, facts, names.inner(), conditions, scope, result)
            for handler in node.handlers:
                failed = ast.unparse(handler.type) if handler.type else "any error"
                _walk(handler.body, facts, names.inner(), (*conditions, f"{failed} is raised"), scope, result)
        elif isinstance(node, ast.Match):
            _forget(node, names)
            for case in node.cases:
                words = f"match {ast.unparse(node.subject)}: {ast.unparse(case.pattern)}"
                _walk(case.body, facts, names.inner(), (*conditions, words), scope, result)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith):
            _forget(node, names)
            for part in (node.body, getattr(node, "orelse", [])):
                _walk(part, facts, names.inner(), conditions, scope, result)
        else:
            _remember(node, facts, names)


def _walk_if(
    node: ast.If,
    rest: list[ast.stmt],
    facts: Facts,
    names: _Names,
    conditions: tuple[str, ...],
    scope: tuple[str, ...],
    result: Branches,
) -> tuple[str, ...]:
    """Both arms of an ``if``; returns the conditions under which the statements after it run."""
    _forget(node.test, names)  # what a := in it binds
    value = facts.truth(node.test, names)
    if value is None:
        after = names.inner()
        _forget(node, after)
        for arm, taken in ((node.body, True), (node.orelse, False)):
            more = facts.conditions(node.test, taken, names)
            _walk(arm, facts, names.inner(), (*conditions, *more), scope, result)
        names.clear()
        names.update(after)
    else:
        arm, other = (node.body, node.orelse) if value else (node.orelse, node.body)
        _bury(other, f"`{ast.unparse(node.test)}` is {value} on {facts.version}", node.lineno, result)
        before, names.sure = names.sure, True
        _walk(arm, facts, names, conditions, scope, result)
        names.sure = before
    if value is None and rest:
        if node.body and _leaves(node.body):
            return (*conditions, *facts.conditions(node.test, False, names))
        if node.orelse and _leaves(node.orelse):
            return (*conditions, *facts.conditions(node.test, True, names))
    return conditions


def _ends(node: ast.If, facts: Facts, names: Mapping[str, bool]) -> bool:
    """Whether no statement after the ``if`` is ever reached."""
    value = facts.truth(node.test, names)
    if value is None:
        return bool(node.orelse) and _leaves(node.body) and _leaves(node.orelse)
    return _leaves(node.body if value else node.orelse)


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _bury(body: list[ast.stmt], reason: str, line: int, result: Branches) -> None:
    if body:
        result.dead.append(Dead(_first_line(body[0]), body[-1].end_lineno or body[-1].lineno, reason, line))


def _remember(node: ast.stmt, facts: Facts, names: _Names) -> None:
    """Follow a name that is bound to a decided value; forget one that is bound to anything else."""
    truth = None
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        constant = isinstance(node.value, ast.Constant)
        if not constant or (names.sure and isinstance(getattr(node.value, "value", None), bool)):
            truth = facts.truth(node.value, names)
    _forget(node, names)
    if truth is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
        if isinstance(target, ast.Name) and target.id not in names.shared:
            names[target.id] = truth


def _forget(node: ast.AST, names: dict[str, bool]) -> None:
    if names:
        for name in _stored(node):
            names.pop(name, None)


def _stored(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id


def _bound_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return names | {a.arg for a in (arguments.vararg, arguments.kwarg) if a} | set(_stored(function))


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _same_release(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other
