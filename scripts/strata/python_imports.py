"""The ``import`` verb: where an import goes, what it merges with, and when it is refused or not needed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from strata.python_layout import Work, insert_after
from strata.python_lists import insert_item, items_between
from strata.python_symbols import DEFINITIONS, PyModule
from strata.python_text import tokens
from strata.spans import PlaceFault, Span

Import = ast.Import | ast.ImportFrom


def parse_imports(text: str) -> list[Import]:
    """The import statements of an edit; E-EDIT for anything else."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise PlaceFault("E-EDIT", f"not an import: {error.msg}", found=text) from error
    imports = [s for s in body if isinstance(s, ast.Import | ast.ImportFrom)]
    if not imports or len(imports) != len(body):
        raise PlaceFault("E-EDIT", "'import' takes import statements only", found=text)
    if any(a.name == "*" for s in imports for a in s.names):
        raise PlaceFault("E-EDIT", "'import' takes no star: name what is used", found=text)
    return imports


def bindings(node: Import) -> dict[str, str]:
    """Name bound -> what it is bound to, in one spelling (``.mod:name`` or ``pkg``)."""
    out: dict[str, str] = {}
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            out[alias.asname or alias.name] = f"{'.' * node.level}{node.module or ''}:{alias.name}"
        elif alias.asname:
            out[alias.asname] = alias.name
        else:
            out[alias.name.partition(".")[0]] = alias.name.partition(".")[0]
    return out


def import_spans(
    work: Work,
    text: str,
    at_start: Callable[[Work, str, str], None],
) -> None:
    """Add the spans of an import edit to ``work``; none where the file has the import already.

    at_start: puts text at the start of the edited symbol or file.
    """
    module = work.module
    local = work.edit.local
    for node in parse_imports(text):
        if local:
            _check_local(work, node)
            at_start(work, ast.unparse(node), f"import {ast.unparse(node)}")
            continue
        fresh = [a for a in node.names if not _present(module, node, a)]
        for alias in fresh:
            _check_free(module, node, alias)
        run = _first_run(module)
        if run and not work.anchors:
            work.anchors.append(run[-1])
        if not fresh:
            continue
        home = _same_module(run, node)
        if home is not None:
            for alias in fresh:
                _merge(work, home, alias)
            continue
        statement = ast.unparse(_with_names(node, fresh))
        merge = f"import {statement}"
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future = [s for s in run if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
            if future:
                insert_after(work, future[-1], statement, merge)
                continue
            at_start(work, statement, merge)
        elif run:
            insert_after(work, run[-1], statement, merge)
        else:
            at_start(work, statement, merge)


def _with_names(node: Import, names: list[ast.alias]) -> Import:
    if isinstance(node, ast.ImportFrom):
        return ast.ImportFrom(node.module, names, node.level)
    return ast.Import(names)


def _first_run(module: PyModule) -> list[Import]:
    """The first unbroken run of top-level imports."""
    run: list[Import] = []
    for statement in module.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            run.append(statement)
        elif run:
            break
    return run


def _present(module: PyModule, node: Import, alias: ast.alias) -> bool:
    """Whether the file has this very import, unconditionally, at top level."""
    for other in module.tree.body:
        if type(other) is not type(node):
            continue
        if (getattr(other, "module", ""), getattr(other, "level", 0)) != (
            getattr(node, "module", ""),
            getattr(node, "level", 0),
        ):
            continue
        if isinstance(other, ast.Import | ast.ImportFrom) and any(
            (a.name, a.asname or a.name) == (alias.name, alias.asname or alias.name) for a in other.names
        ):
            return True
    return False


def _check_free(module: PyModule, node: Import, alias: ast.alias) -> None:
    name, target = next(iter(bindings(_with_names(node, [alias])).items()))
    for other, line, what in top_bindings(module):
        if other == name and what != target:
            start = module.lines.starts[line - 1]
            raise PlaceFault(
                "E-EDIT",
                f"the name {name} is bound already, on line {line}",
                expected="a free name; import it with 'as'",
                found=module.source[start : module.lines.end_of(start)].strip()[:120],
                line=line,
            )


def top_bindings(module: PyModule) -> Iterator[tuple[str, int, str]]:
    """(name, line, what) of every binding at module level, conditional ones included; what is "" but for
    imports."""
    todo: list[ast.AST] = list(module.tree.body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, DEFINITIONS):
            yield node.name, node.lineno, ""
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, what in bindings(node).items():
                yield name, node.lineno, what
            continue
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, ""
        todo += ast.iter_child_nodes(node)


def _check_local(work: Work, node: Import) -> None:
    entry = work.scope.entry
    assert entry is not None
    function = entry.node
    taken: dict[str, int] = {}
    for inner in ast.walk(function):
        if isinstance(inner, ast.arg):
            taken.setdefault(inner.arg, inner.lineno)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            taken.setdefault(inner.id, inner.lineno)
        elif isinstance(inner, DEFINITIONS) and inner is not function:
            taken.setdefault(inner.name, inner.lineno)
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            for name, what in bindings(inner).items():
                if bindings(node).get(name, what) != what:
                    taken.setdefault(name, inner.lineno)
    for name in bindings(node):
        if name in taken:
            raise PlaceFault(
                "E-EDIT",
                f"the name {name} is bound in {entry.qualname} already, on line {taken[name]}",
                expected="a free name; import it with 'as'",
                line=taken[name],
            )


def _same_module(run: list[Import], node: Import) -> ast.ImportFrom | None:
    if not isinstance(node, ast.ImportFrom):
        return None
    for other in run:
        if (
            isinstance(other, ast.ImportFrom)
            and (other.module, other.level) == (node.module, node.level)
            and other.names[0].name != "*"
        ):
            return other
    return None


def _merge(work: Work, home: ast.ImportFrom, alias: ast.alias) -> None:
    """Add a name to a from-import that is there."""
    module = work.module
    start, end = module.span(home)
    found = list(tokens(module.lines, start, end))
    word = next(n for n, t in enumerate(found) if t.text == "import")
    bracketed = found[word + 1].text == "("
    low = found[word + 1].end if bracketed else found[word + 1].start
    high = found[-1].start if bracketed else end
    group = items_between(module, start, low, high, closed=bracketed)
    text = alias.name + (f" as {alias.asname}" if alias.asname else "")
    for span in insert_item(module, group, len(group.items), text):
        work.add(
            Span(
                span.start,
                span.end,
                span.text,
                "insert",
                merge=span.merge or f"import {text}",
                rank=span.rank,
            )
        )
    work.anchors.append(home)
