"""The verbs on Python files: an edit becomes spans on the pristine source."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import replace

from strata.fingerprint import python_fingerprint
from strata.model import Edit
from strata.python_find import Match, find, scope_of
from strata.python_imports import import_spans
from strata.python_layout import (
    Work,
    after_point,
    block_indent,
    break_at,
    break_suite,
    insert_after,
    insert_before,
    next_on_line,
    previous_on_line,
    where,
)
from strata.python_lists import Items, insert_item, items_between
from strata.python_patterns import Matcher, arguments, pairs, parse_pattern
from strata.python_symbols import DEFINITIONS, FUNCTIONS, MODULE, module_of
from strata.python_templates import (
    BODY,
    Rendered,
    is_bare_tuple,
    needs_parentheses,
    outer_span,
    own_span,
    render,
    stands_alone,
)
from strata.python_text import ends_in_comment, indent_after_first, tokens
from strata.spans import RANK_START, PlaceFault, Placement, Span


def place(source: str, edit: Edit) -> Placement:
    """The spans of one edit on a Python source. Raises PlaceFault for whatever keeps it from landing."""
    module = module_of(source)
    symbol = edit.at.symbol if edit.at else None
    work = Work(scope_of(module, symbol), edit)
    try:
        _VERBS[edit.verb](work)
    except SyntaxError as error:  # the tokenizer gave up on a piece of source or template
        raise PlaceFault("E-EDIT", f"cannot be read as Python tokens: {error}") from error
    entry = work.scope.entry
    region = module.span(entry.node) if entry else (0, len(source))
    line = module.lines.line_of(module.start(work.anchors[0])) if work.anchors else 1
    if edit.verb == "import" and not edit.local:
        region = (0, len(source))
    # the place is part of the key: one edit may break several lines, or import into several functions
    spans = (replace(s, merge=f"{s.merge} @{s.start}") if s.merge else s for s in work.spans)
    return Placement(tuple(spans), region, entry.qualname if entry else MODULE, _neighbours(work), line)


def _neighbours(work: Work) -> str:
    """Fingerprint of the anchor with its direct siblings; of a definition its header alone counts."""
    if not work.anchors:
        return python_fingerprint([])
    block, first = where(work.scope, work.anchors[0])
    entry = work.scope.entry
    if entry is not None and work.anchors[0] is entry.node:
        return python_fingerprint([_header(entry.node)])
    try:
        last = next(i for i, s in enumerate(block) if s is work.anchors[-1])
    except StopIteration:
        last = first
    return python_fingerprint([_header(s) for s in block[max(first - 1, 0) : last + 2]])


def _header(node: ast.stmt) -> ast.stmt:
    if not isinstance(node, DEFINITIONS):
        return node
    bare = copy.copy(node)
    bare.body = []
    return bare


def _whole_statements(work: Work, match: Match, verb: str) -> tuple[ast.stmt, ast.stmt]:
    """First and last statement of a match; an expression must be a statement of its own."""
    if not match.is_expression:
        return match.nodes[0], match.nodes[-1]  # type: ignore[return-value]
    statement = work.scope.statement_of(match.nodes[0])
    if isinstance(statement, ast.Expr) and statement.value is match.nodes[0]:
        return statement, statement
    raise PlaceFault(
        "E-EDIT",
        f"'{verb}' works on whole statements; the anchor is an expression inside one",
        expected="a pattern of the whole statement",
        found=work.module.text(statement).splitlines()[0],
        line=statement.lineno,
    )


# --- verbs


def _replace(work: Work) -> None:
    assert work.edit.replace is not None
    for match in find(work.scope, work.edit):
        done = render(work.scope, work.edit.replace, match.env, "the text of 'replace'")
        node = match.nodes[0]
        if isinstance(node, ast.expr):
            statement = work.scope.statement_of(node)
            if done.expression is not None:
                _replace_expression(work, node, done)
                work.anchors.append(statement)
                continue
            if not (isinstance(statement, ast.Expr) and statement.value is node):
                raise PlaceFault(
                    "E-EDIT",
                    "the anchor is an expression inside a statement, the replacement is not an expression",
                    expected="an expression, or a pattern of the whole statement",
                    found=done.text,
                    line=statement.lineno,
                )
        _replace_statements(work, *_whole_statements(work, match, "replace"), done)


def _replace_expression(work: Work, node: ast.expr, done: Rendered) -> None:
    new, module = done.expression, work.module
    assert new is not None
    _no_comment(done.text, "the text of 'replace'")
    start, end = own_span(work.scope, node)
    text = done.text
    parent, name = work.scope.parent.get(id(node), (None, ""))
    if outer_span(work.scope, node) == module.span(node):
        bare = is_bare_tuple(new, text)
        if needs_parentheses(new, bare, parent, name) or ("\n" in text and not stands_alone(text)):
            text = f"({text})"
    text = indent_after_first(text, module.lines.indent_of(start), work.newline)
    work.add(Span(start, end, text, "replace"))


def _no_comment(text: str, what: str) -> None:
    """Refuse text that would turn the rest of its line into a comment."""
    if ends_in_comment(text):
        raise PlaceFault(
            "E-EDIT", f"{what} ends in a comment, which would swallow the rest of the line", found=text
        )


def _replace_statements(work: Work, first: ast.stmt, last: ast.stmt, done: Rendered) -> None:
    indent = block_indent(work.scope, first)
    if not done.is_simple_line:
        break_suite(work, first)
        if previous_on_line(work.scope, first):
            break_at(work, work.module.start(first), indent)
        mate = next_on_line(work.scope, last)
        if mate is not None:
            break_at(work, work.module.start(mate), indent)
    text = indent_after_first(done.text, indent, work.newline)
    work.add(Span(work.module.start(first), work.module.end(last), text, "replace"))
    work.anchors += [first, last] if first is not last else [first]


def _delete(work: Work) -> None:
    runs = [_whole_statements(work, m, "delete") for m in find(work.scope, work.edit)]
    gone: dict[int, set[int]] = {}
    for first, last in runs:
        block, n = work.scope.place[id(first)]
        end = next(i for i, s in enumerate(block.statements) if s is last)
        gone.setdefault(id(block.statements), set()).update(range(n, end + 1))
    kept_pass: set[int] = set()
    for first, last in runs:
        block, _ = work.scope.place[id(first)]
        key = id(block.statements)
        empty = block.owner is not None and len(gone[key]) == len(block.statements)
        if empty and key not in kept_pass:
            kept_pass.add(key)
            work.add(Span(work.module.start(first), work.module.end(last), "pass", "replace"))
        else:
            work.add(Span(*_lines_of_run(work, first, last), "", "replace"))
        work.anchors += [first, last] if first is not last else [first]


def _lines_of_run(work: Work, first: ast.stmt, last: ast.stmt) -> tuple[int, int]:
    """What goes with a run of statements: its lines with their comments, or its part of a shared line."""
    module, lines = work.module, work.module.lines
    start, end = module.start(first), module.end(last)
    mate = next_on_line(work.scope, last)
    if mate is not None:
        return start, module.start(mate)
    if previous_on_line(work.scope, first):
        block, n = where(work.scope, first)
        return module.end(block[n - 1]), end
    return lines.start_of(start), lines.next_start(end)


def _beside(work: Work, template: str, verb: str) -> None:
    for match in find(work.scope, work.edit):
        done = render(work.scope, template, match.env, f"the text of '{verb}'")
        first = work.scope.statement_of(match.nodes[0])
        if verb == "before":
            insert_before(work, first, done.text)
        else:
            last = first if match.is_expression else match.nodes[-1]
            assert isinstance(last, ast.stmt)
            insert_after(work, last, done.text)


def _before(work: Work) -> None:
    _beside(work, work.edit.before or "", "before")


def _after(work: Work) -> None:
    _beside(work, work.edit.after or "", "after")


def _wrap(work: Work) -> None:
    assert work.edit.wrap is not None
    for match in find(work.scope, work.edit):
        first, last = _whole_statements(work, match, "wrap")
        what = "the template of 'wrap'"
        done = render(work.scope, work.edit.wrap, match.env, what, {"BODY": BODY})
        lines = done.text.split("\n")
        rows = [n for n, line in enumerate(lines) if line.strip() == BODY]
        if len(rows) != 1 or done.text.count(BODY) != 1:
            raise PlaceFault(
                "E-EDIT", f"{what} needs $BODY once, on a line of its own", found=work.edit.wrap.strip()
            )
        margin = lines[rows[0]][: -len(BODY)]
        indent = block_indent(work.scope, first)
        break_suite(work, first)
        start = work.module.start(first)
        if previous_on_line(work.scope, first):
            break_at(work, start, indent)
        head, tail = "\n".join(lines[: rows[0]]), "\n".join(lines[rows[0] + 1 :])
        opening = (
            indent_after_first(head, indent, work.newline) + work.newline + indent + margin
            if head
            else margin
        )
        closing = work.newline + indent + indent_after_first(tail, indent, work.newline) if tail else ""
        end = after_point(work, last, indent)
        work.add(Span(start, start, opening, "open", indent=margin, base=indent))
        work.add(Span(end, end, closing, "close", indent=margin, base=indent, rank=-1 - len(indent)))
        work.anchors += [first, last] if first is not last else [first]


def _add_item(work: Work) -> None:
    edit, scope = work.edit, work.scope
    assert edit.add_item is not None
    if edit.find is not None:
        targets = [(_container(work, m.nodes[0]), m.env) for m in find(scope, edit)]
    else:
        entry = scope.entry
        value = getattr(entry.node, "value", None) if entry else None
        if entry is None or entry.kind != "assignment" or not isinstance(value, ast.expr):
            raise PlaceFault(
                "E-EDIT",
                "'add_item' without 'find' needs 'at' to name an assignment",
                expected="an assignment of a tuple, list, set, dict or call",
                found=entry.kind if entry else MODULE,
                line=entry.node.lineno if entry else 0,
            )
        targets = [(_container(work, value), {})]
    for node, env in targets:
        text = _item_text(work, node, edit.add_item.value, env)
        group = _items_of(work, node)
        index = _item_index(work, node, text, edit.add_item.place)
        for span in insert_item(work.module, group, index, text):
            work.add(span)
        work.anchors.append(scope.statement_of(node))


def _container(work: Work, node: ast.AST) -> ast.expr:
    value = node if isinstance(node, ast.expr) else getattr(node, "value", None)
    if isinstance(value, ast.Call | ast.Tuple | ast.List | ast.Set | ast.Dict):
        return value
    raise PlaceFault(
        "E-EDIT",
        "'add_item' needs a call, tuple, list, set or dict",
        expected="an anchor of that kind",
        found=type(value or node).__name__.lower(),
        line=getattr(node, "lineno", 0),
    )


def _item_text(work: Work, node: ast.expr, template: str, env: object) -> str:
    """The item's source, checked to be exactly one item of that kind of container."""
    shells = {ast.Call: ("f(", ")"), ast.Dict: ("{", "}")}
    low, high = shells.get(type(node), ("[", "]"))
    done = render(work.scope, f"{low}\n{template.strip()}\n{high}", env, "the value of 'add_item'")  # type: ignore[arg-type]
    shell = done.expression
    if isinstance(shell, ast.Call):
        n = len(arguments(shell))
    elif isinstance(shell, ast.Dict):
        n = len(pairs(shell))
    else:
        n = len(shell.elts) if isinstance(shell, ast.List) else 0
    text = done.text[len(low) : -len(high)].strip().removesuffix(",")
    _no_comment(text, "the value of 'add_item'")
    if n != 1:
        kind = {"f(": "argument", "{": "'key: value'"}.get(low, "element")
        raise PlaceFault("E-EDIT", f"the value of 'add_item' must be one {kind}", found=template.strip())
    return indent_after_first(text, work.module.lines.indent_of(work.module.start(node)), work.newline)


def _items_of(work: Work, node: ast.expr) -> Items:
    module = work.module
    start, end = module.span(node)
    first = module.start(work.scope.statement_of(node))
    if isinstance(node, ast.Call):
        if (
            len(node.args) == 1
            and not node.keywords
            and own_span(work.scope, node.args[0]) != module.span(node.args[0])
        ):
            raise PlaceFault(
                "E-EDIT",
                "the call's only argument is a bare generator: it takes no second one",
                line=node.lineno,
            )
        func_end = outer_span(work.scope, node.func)[1]
        low = next(t.end for t in tokens(module.lines, first, end) if t.start >= func_end)
        return items_between(module, first, low, end - 1)
    if isinstance(node, ast.Tuple) and is_bare_tuple(node, module.source[start:end]):
        return items_between(module, first, start, end, closed=False)
    return items_between(module, first, start + 1, end - 1)


def _item_index(work: Work, node: ast.expr, text: str, spot: str) -> int:
    """Where the new item goes among the present ones."""
    if isinstance(node, ast.Call):
        items: list[object] = list(arguments(node))
    elif isinstance(node, ast.Dict):
        items = list(pairs(node))
    else:
        items = list(node.elts)  # type: ignore[attr-defined]
    if spot == "first":
        return 0
    if spot == "last":
        positional = isinstance(node, ast.Call) and ast.parse(f"f({text}\n)", mode="eval").body.args  # type: ignore[attr-defined]
        if positional:  # goes behind the last positional argument: none may follow a keyword
            return max((n + 1 for n, a in enumerate(items) if not isinstance(a, ast.keyword)), default=0)
        return len(items)
    word, _, wanted = spot.partition(" ")
    if word not in ("before", "after") or not wanted.strip():
        raise PlaceFault(
            "E-EDIT",
            f"'place: {spot}' is none of the places",
            expected="first, last, before <item>, after <item>",
        )
    hits = [n for n, item in enumerate(items) if _is_item(item, wanted.strip())]
    if len(hits) != 1:
        raise PlaceFault(
            "E-AMBIGUOUS" if hits else "E-CONFLICT",
            f"'place: {spot}': {len(hits)} items match",
            expected="one item",
            found=work.module.text(node)[:200],
            line=node.lineno,
        )
    return hits[0] + (word == "after")


def _is_item(item: object, wanted: str) -> bool:
    if isinstance(item, ast.keyword):
        if item.arg == wanted.removesuffix("="):
            return True
        item = item.value
    elif not isinstance(item, ast.AST):
        item = item.key or item.value  # type: ignore[attr-defined]
    pattern = parse_pattern(wanted, "the item of 'place'").expression
    return pattern is not None and Matcher().expression(pattern, item, {}) is not None  # type: ignore[arg-type]


def _function(work: Work, verb: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    entry = work.scope.entry
    if entry is None or not isinstance(entry.node, FUNCTIONS):
        raise PlaceFault(
            "E-EDIT", f"'{verb}' needs 'at' to name a function", found=entry.kind if entry else "the module"
        )
    return entry.node


def _add_param(work: Work) -> None:
    spec = work.edit.add_param
    assert spec is not None
    node, module = _function(work, "add_param"), work.module
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    if not spec.name.isidentifier():
        raise PlaceFault("E-EDIT", f"{spec.name!r} is not a parameter name")
    every = [*plain, *args.kwonlyargs, *(a for a in (args.vararg, args.kwarg) if a)]
    if spec.name in {a.arg for a in every}:
        raise PlaceFault("E-EDIT", f"{node.name} has a parameter {spec.name} already", line=node.lineno)
    text = spec.name + (f": {spec.annotation}" if spec.annotation else "")
    if spec.default is not None:
        text += f" = {spec.default}" if spec.annotation else f"={spec.default}"
    try:
        ast.parse(f"def f(*, {text}): pass")
    except SyntaxError as error:
        raise PlaceFault("E-EDIT", f"not a parameter: {error.msg}", found=text) from error
    start = module.start(node)
    low, high = _parameter_brackets(work, node)
    group = items_between(module, start, low, high)
    slash = 1 if args.posonlyargs else 0
    after_plain = len(plain) + slash
    star = 1 if args.vararg or args.kwonlyargs else 0
    # index among the written items, and among the positional parameters where it becomes one of these
    if spec.place == "keyword":
        index, positional = after_plain + star + len(args.kwonlyargs), None
        if not star:
            text = f"*, {text}"
    elif spec.place == "last":
        index, positional = after_plain, len(plain)
    elif spec.place == "first":
        bound = _is_method(work, node) and bool(plain)
        index = positional = 1 if bound else 0
        index += slash if positional > len(args.posonlyargs) else 0
    elif spec.place.startswith("after "):
        name = spec.place[6:].strip()
        names = [a.arg for a in plain]
        keywords = [a.arg for a in args.kwonlyargs]
        if name in names:
            positional = names.index(name) + 1
            index = positional + (slash if positional > len(args.posonlyargs) else 0)
        elif name in keywords:
            index, positional = after_plain + star + keywords.index(name) + 1, None
        else:
            raise PlaceFault(
                "E-EDIT",
                f"{node.name} has no parameter {name}",
                expected=", ".join(names + keywords),
                line=node.lineno,
            )
    else:
        raise PlaceFault("E-EDIT", f"'place: {spec.place}' is none of the places",
                         expected="first, last, keyword, after <name>")  # fmt: skip
    if positional is not None:
        first_default = len(plain) - len(args.defaults)
        if spec.default is None and positional > first_default:
            raise PlaceFault(
                "E-EDIT", f"{spec.name} follows a parameter with a default and has none", line=node.lineno
            )
        if spec.default is not None and positional < first_default:
            raise PlaceFault("E-EDIT", f"{spec.name} has a default, but a parameter without one follows",
                             line=node.lineno)  # fmt: skip
    for span in insert_item(module, group, index, text):
        work.add(span)
    work.anchors.append(node)


def _is_method(work: Work, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    owner = work.scope.entry.owner if work.scope.entry else None
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    return owner is not None and isinstance(owner.node, ast.ClassDef) and not static


def _parameter_brackets(work: Work, node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """Offsets just inside the parentheses of a function's parameters."""
    module = work.module
    begin = module.keyword_start(node)
    depth = low = seen = 0
    for token in tokens(module.lines, begin, module.end(node)):
        if token.text == "def":
            seen = 1
        elif seen and token.text and token.text in "([{":
            if depth == 0 and not low and token.text == "(":
                low = token.end
            depth += 1
        elif seen and token.text and token.text in ")]}":
            depth -= 1
            if depth == 0 and low:
                return low, token.start
    raise AssertionError("a function without parentheses")


def _decorate(work: Work) -> None:
    spec, entry = work.edit.decorate, work.scope.entry
    assert spec is not None
    if entry is None or not isinstance(entry.node, DEFINITIONS):
        raise PlaceFault(
            "E-EDIT",
            "'decorate' needs 'at' to name a function or class",
            found=entry.kind if entry else "the module",
        )
    text = "@" + spec.with_.strip().removeprefix("@").strip()
    try:
        ast.parse(f"{text}\ndef f(): pass")
    except SyntaxError as error:
        raise PlaceFault("E-EDIT", f"not a decorator: {error.msg}", found=text) from error
    outer = spec.place == "outer"
    at = work.module.start(entry.node) if outer else work.module.keyword_start(entry.node)
    indent = work.module.lines.indent_of(at)
    body = indent_after_first(text, indent, work.newline) + work.newline + indent
    work.add(Span(at, at, body, "insert", rank=1 if outer else 2))
    work.anchors.append(entry.node)


def _body(work: Work, verb: str) -> list[ast.stmt]:
    """The statements of the block that ``prepend`` and ``append`` extend."""
    entry = work.scope.entry
    if entry is None:
        if not work.module.tree.body:
            raise PlaceFault("E-EDIT", f"'{verb}' needs a file with a statement in it")
        return work.module.tree.body
    if isinstance(entry.node, DEFINITIONS):
        return entry.node.body
    raise PlaceFault("E-EDIT", f"'{verb}' needs 'at' to name a function, a class or a file", found=entry.kind)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _insert_at_start(work: Work, text: str, merge: str = "") -> None:
    """Put statements at the start of the symbol's body, after its docstring and ``__future__`` imports."""
    body = _body(work, work.edit.verb)
    lead = 1 if _is_docstring(body[0]) else 0
    while work.scope.entry is None and lead < len(body) and _is_future(body[lead]):
        lead += 1
    if lead:
        insert_after(work, body[lead - 1], text, merge)
    else:
        insert_before(work, body[0], text)
        work.spans[-1] = replace(work.spans[-1], merge=merge, rank=RANK_START)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _prepend(work: Work) -> None:
    done = render(work.scope, work.edit.prepend or "", {}, "the text of 'prepend'")
    _insert_at_start(work, done.text)


def _append(work: Work) -> None:
    done = render(work.scope, work.edit.append or "", {}, "the text of 'append'")
    last = _body(work, "append")[-1]
    if work.scope.entry and isinstance(last, ast.Return | ast.Raise) and work.scope.entry.kind == "function":
        raise PlaceFault(
            "E-EDIT",
            f"{work.scope.entry.qualname} ends with a {type(last).__name__.lower()}: what follows never runs",
            expected="'before' with that statement as its anchor",
            found=work.module.text(last).splitlines()[0],
            line=last.lineno,
        )
    insert_after(work, last, done.text)


def _import(work: Work) -> None:
    text = (work.edit.import_ or "").strip()
    if work.edit.local:
        _function(work, "import, local: true")
    elif work.scope.entry is not None:
        raise PlaceFault(
            "E-EDIT",
            "an import goes to the top of the file, but 'at' names a symbol",
            expected="'at' with the file alone, or 'local: true' for the start of the function",
            found=work.scope.entry.qualname,
        )
    import_spans(work, text, _insert_at_start)


_VERBS: dict[str, Callable[[Work], None]] = {
    "replace": _replace,
    "delete": _delete,
    "before": _before,
    "after": _after,
    "wrap": _wrap,
    "add_item": _add_item,
    "add_param": _add_param,
    "decorate": _decorate,
    "prepend": _prepend,
    "append": _append,
    "import": _import,
}
