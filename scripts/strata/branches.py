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
    _walk(module.body, facts, {}, (), (), result)
    result.dead.sort(key=lambda d: (d.first, -d.last))
    return result


def _walk(
    body: list[ast.stmt],
    facts: Facts,
    names: dict[str, bool],
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
            inner = dict(names)
            if inner and not isinstance(node, ast.ClassDef):
                for name in _bound_names(node):
                    inner.pop(name, None)
            _walk(node.body, facts, inner, conditions, (*scope, node.name), result)
        elif isinstance(node, ast.Try | ast.TryStar):
            _walk(node.body, facts, names, conditions, scope, result)
            for handler in node.handlers:
                failed = ast.unparse(handler.type) if handler.type else "any error"
                _walk(handler.body, facts, dict(names), (*conditions, f"{failed} is raised"), scope, result)
            _walk(node.orelse, facts, names, conditions, scope, result)
            _walk(node.finalbody, facts, names, conditions, scope, result)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                words = f"match {ast.unparse(node.subject)}: {ast.unparse(case.pattern)}"
                _walk(case.body, facts, dict(names), (*conditions, words), scope, result)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith):
            _forget(node, names)
            _walk(node.body, facts, names, conditions, scope, result)
            _walk(getattr(node, "orelse", []), facts, names, conditions, scope, result)
        else:
            _remember(node, facts, names, bool(conditions))


def _walk_if(
    node: ast.If,
    rest: list[ast.stmt],
    facts: Facts,
    names: dict[str, bool],
    conditions: tuple[str, ...],
    scope: tuple[str, ...],
    result: Branches,
) -> tuple[str, ...]:
    """Both arms of an ``if``; returns the conditions under which the statements after it run."""
    value = facts.truth(node.test, names)
    for arm, taken in ((node.body, True), (node.orelse, False)):
        if not arm:
            continue
        if value is not None and value is not taken:
            _bury(arm, f"`{ast.unparse(node.test)}` is {value} on {facts.version}", node.lineno, result)
        elif value is not None:
            _walk(arm, facts, names, conditions, scope, result)
        else:
            more = facts.conditions(node.test, taken, names)
            before = dict(names)
            _walk(arm, facts, before, (*conditions, *more), scope, result)
            for name in list(names):  # an open branch may have bound it otherwise
                if before.get(name) != names[name]:
                    names.pop(name)
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


def _remember(node: ast.stmt, facts: Facts, names: dict[str, bool], conditional: bool) -> None:
    """Keep names bound to a decided constant; forget names bound to anything else, or under an open
    condition.
    """
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        _forget(node, names)
        return
    truth = (
        facts.truth(value, names)
        if not isinstance(value, ast.Constant) or isinstance(value.value, bool)
        else None
    )
    for target in targets:
        if isinstance(target, ast.Name) and truth is not None and not conditional:
            names[target.id] = truth
        else:
            _forget(target, names)


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
