"""Properties: what lands is what an independent transformation gives; a mutated input lands whole or not at
all."""

from __future__ import annotations

import ast
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from series_tools import VERSION, changed, edit, make_series, make_trees, place
from strata import apply, cli
from strata.apply import STATE, Disk, already_applied, unfinished, write
from strata.errors import StrataError
from strata.plan import plan_series
from strata.series import Series, load_series
from strata.spans import PlaceFault
from strata.trees import Trees

pytestmark = pytest.mark.slow

# --- random Python: source text with loose spelling, so that text and tree disagree as much as they may

NAMES = st.sampled_from(["a", "b", "cc", "f", "g"])
ATOMS = st.one_of(
    NAMES,
    st.integers(0, 9).map(str),
    st.sampled_from(["'s'", '"s"', "'''t\n  u'''", "b'x'", "f'{a}'", "'☃'", "None", "(a)"]),
)


def _spaced(draw: Any, *parts: str) -> str:
    return draw(st.sampled_from(["", " ", "  "])).join(parts)


@st.composite
def expressions(draw: Any, depth: int = 3) -> str:
    if depth == 0:
        return str(draw(ATOMS))
    inner = expressions(depth - 1)
    kind = draw(st.integers(0, 9))
    if kind <= 1:
        return str(draw(ATOMS))
    if kind <= 4:
        name = draw(st.sampled_from(["f", "g", "a.m"]))
        plain = draw(st.lists(inner, max_size=3))
        named = [f"k{n}={v}" for n, v in enumerate(draw(st.lists(inner, max_size=2)))]
        items = [*plain, *named]
        comma = draw(st.sampled_from(["", ",", ",  # c\n"])) if items else ""
        glue = draw(st.sampled_from([", ", ",", ",\n      ", ", # c\n  "]))
        return f"{name}({glue.join(items)}{comma})"
    if kind == 5:
        operator = draw(st.sampled_from(["+", "*", "**", "and", "<", "==", "or", "%"]))
        return (
            f"({draw(inner)}) {operator} ({draw(inner)})"
            if draw(st.booleans())
            else f"{draw(ATOMS)} {operator} {draw(ATOMS)}"
        )
    if kind == 6:
        return f"[{', '.join(draw(st.lists(inner, max_size=3)))}]"
    if kind == 7:
        return f"(lambda x, y=1: {draw(inner)})"
    if kind == 8:
        return f"({draw(inner)} if {draw(ATOMS)} else {draw(inner)})"
    return f"{{{draw(ATOMS)}: {draw(inner)}, **{draw(NAMES)}}}"


@st.composite
def blocks(draw: Any, depth: int = 2, indent: str = "") -> str:
    out = []
    step = draw(st.sampled_from(["    ", "  ", "\t"]))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 7)) if depth else draw(st.integers(0, 3))
        value = draw(expressions(2))
        comment = draw(st.sampled_from(["", "  # why", "  # ünï"]))
        if kind <= 1:
            out.append(f"{indent}x = {value}{comment}")
        elif kind == 2:
            out.append(f"{indent}{value}{comment}")
        elif kind == 3:
            out.append(f"{indent}y = 1; {draw(ATOMS)}; z = 2{comment}")
        elif kind == 4:
            out.append(f"{indent}if {draw(ATOMS)}: x = 1{comment}")
        elif kind == 5:
            out += [f"{indent}if {value}:{comment}", draw(blocks(depth - 1, indent + step))]
            if draw(st.booleans()):
                out += [f"{indent}elif {draw(ATOMS)}:", draw(blocks(depth - 1, indent + step))]
            if draw(st.booleans()):
                out += [f"{indent}else:", draw(blocks(depth - 1, indent + step))]
        elif kind == 6:
            out += [f"{indent}for i in {value}:", draw(blocks(depth - 1, indent + step))]
        else:
            body = draw(blocks(depth - 1, indent + step))
            out += [f"{indent}try:", body, f"{indent}finally:", f"{indent}{step}a{comment}"]
    return "\n".join(out)


@st.composite
def modules(draw: Any) -> str:
    source = "def fun():\n" + draw(blocks(2, "    ")) + "\n    return 0\n"
    return source.replace("\n", draw(st.sampled_from(["\n", "\n", "\r\n"])))


def parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        assume(False)
        raise


def same(left: ast.AST, right: ast.AST) -> bool:
    return ast.dump(left) == ast.dump(right)


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a plain name with a positional argument first, outside f-strings."""
    inside = {id(n) for j in ast.walk(tree) if isinstance(j, ast.JoinedStr) for n in ast.walk(j)}
    return [
        n for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name and id(n) not in inside
        and n.args and not isinstance(n.args[0], ast.Starred)
    ]  # fmt: skip


def nested(nodes: list[ast.Call]) -> bool:
    return any(n is not m and n in set(ast.walk(m)) for m in nodes for n in nodes)


class Rewrite(ast.NodeTransformer):
    """The independent transformation: each node of ``targets`` becomes ``make(node)``."""

    def __init__(self, targets: list[Any], make: Any) -> None:
        self.targets, self.make = {id(t) for t in targets}, make

    def visit(self, node: ast.AST) -> Any:
        return self.make(node) if id(node) in self.targets else super().generic_visit(node)


RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def call(name: str, *args: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), keywords or [])


@RELAXED
@given(
    modules(),
    st.sampled_from(["h($X, $$$REST)", "h($$$REST)", "-$X", "$X ** 2 + h($$$REST)", "h(*[$X], $$$REST).m"]),
)
def test_replace_is_the_transformation_of_the_tree(source: str, template: str) -> None:
    tree = parsed(source)
    targets = calls(tree, "f")
    assume(targets and not nested(targets))

    def make(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.Call)
        first, rest, keywords = node.args[0], node.args[1:], node.keywords
        if template == "h($X, $$$REST)":
            return call("h", first, *rest, keywords=keywords)
        if template == "h($$$REST)":
            return call("h", *rest, keywords=keywords)
        if template == "-$X":
            return ast.UnaryOp(ast.USub(), first)
        if template == "$X ** 2 + h($$$REST)":
            power = ast.BinOp(first, ast.Pow(), ast.Constant(2))
            return ast.BinOp(power, ast.Add(), call("h", *rest, keywords=keywords))
        unpacked = ast.Starred(ast.List([first], ast.Load()), ast.Load())
        return ast.Attribute(call("h", unpacked, *rest, keywords=keywords), "m", ast.Load())

    result = changed(source, edit("fun", find="f($X, $$$REST)", replace=template, count=len(targets)))
    wanted = Rewrite(targets, make).visit(tree)
    assert same(ast.parse(result), wanted), result


@RELAXED
@given(modules(), st.data())
def test_statement_verbs_are_transformations_of_the_tree(source: str, data: Any) -> None:
    tree = parsed(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    lists = [
        (node, name) for node in ast.walk(function) for name in ("body", "orelse", "finalbody")
        if isinstance(getattr(node, name, None), list) and getattr(node, name)
        and isinstance(getattr(node, name)[0], ast.stmt)
        and not (name == "orelse" and isinstance(node, ast.If) and isinstance(node.orelse[0], ast.If))
    ]  # fmt: skip
    owner, name = data.draw(st.sampled_from(lists))
    block: list[ast.stmt] = getattr(owner, name)
    low = data.draw(st.integers(0, len(block) - 1))
    high = data.draw(st.integers(low, len(block) - 1))
    run = block[low : high + 1]
    pattern = "\n".join(ast.unparse(s) for s in run)
    assume(len(run) > 1 or not isinstance(run[0], ast.Expr))
    verb = data.draw(st.sampled_from(["delete", "wrap", "before", "after", "replace"]))
    text = {
        "delete": True, "wrap": "with w:\n    $BODY\ndone()", "before": "p()\nif q: r()", "after": "p()\nif q: r()",
        "replace": "for i in w:\n    p()\nelse:\n    q()",
    }[verb]  # fmt: skip
    place = edit("fun", find=pattern, **{verb: text})
    try:
        result = changed(source, place)
    except Exception as error:
        code = getattr(error, "code", None)
        # the same statements may stand in several places; a raw dump of them cannot be told apart by a
        # pattern
        assume(code != "E-AMBIGUOUS")
        raise
    extra = ast.parse("p()\nif q: r()").body
    if verb == "delete":
        new = block[:low] + block[high + 1 :] or [ast.Pass()]
        if not block[:low] + block[high + 1 :] and name != "body":
            new = [ast.Pass()]
    elif verb == "wrap":
        new = [
            *block[:low],
            ast.With([ast.withitem(ast.Name("w", ast.Load()))], run),
            *ast.parse("done()").body,
            *block[high + 1 :],
        ]
    elif verb == "before":
        new = block[:low] + extra + block[low:]
    elif verb == "after":
        new = block[: high + 1] + extra + block[high + 1 :]
    else:
        new = block[:low] + ast.parse(str(text)).body + block[high + 1 :]
    setattr(owner, name, new)
    assert same(ast.parse(result), tree), result


@RELAXED
@given(modules(), expressions(2))
def test_add_item_adds_one_argument_to_each_call(source: str, value: str) -> None:
    tree = parsed(source)
    parsed(f"f({value})")
    assume(len(ast.parse(f"f({value})").body) == 1)
    targets = calls(tree, "f")
    assume(targets and not nested(targets))
    result = changed(
        source, edit("fun", find="f($X, $$$R)", count=len(targets), add_item={"value": f"new={value}"})
    )
    item = ast.parse(f"f(new={value})").body[0].value.keywords[0]  # type: ignore[attr-defined]

    def make(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.Call)
        node.keywords.append(item)
        return node

    assert same(ast.parse(result), Rewrite(targets, make).visit(tree)), result


@RELAXED
@given(modules(), st.integers(1, 4))
def test_the_span_of_a_call_is_the_call(source: str, nth: int) -> None:
    """What is cut out parses to what was looked for; what goes in is the captures as they were written."""
    tree = parsed(source)
    wanted = [c for c in calls(tree, "g") if not c.keywords]
    try:
        placement = place(source, "fun", find="g($X, $$$A)", nth=nth, replace="h($X, $$$A)")
    except PlaceFault as error:
        assert error.code in ("E-CONFLICT", "E-EDIT", "E-AMBIGUOUS")
        assert len(wanted) < nth
        return
    (span,) = placement.spans
    found = ast.parse(source[span.start : span.end].replace("\r\n", "\n"), mode="eval").body
    put = ast.parse(span.text.replace("\r\n", "\n"), mode="eval").body
    assert isinstance(found, ast.Call)
    assert isinstance(put, ast.Call)
    assert [ast.dump(f) for f in (found.func, put.func)] == [ast.dump(ast.Name(n, ast.Load())) for n in "gh"]
    assert [ast.dump(a) for a in found.args] == [ast.dump(a) for a in put.args]
    assert [ast.dump(k) for k in found.keywords] == [ast.dump(k) for k in put.keywords]


VERBS_OF_STATEMENTS = {
    "wrap": "with w{n}:\n    $BODY\ndone{n}()",
    "before": "p{n}()\nif q{n}:\n    r()",
    "after": "s{n}()\nif t{n}:\n    u()",
    "replace": "for i in v{n}:\n    x = (1,\n      2)",
}


@RELAXED
@given(modules(), st.data())
def test_edits_of_several_patches_are_as_if_made_one_after_the_other(source: str, data: Any) -> None:
    """Composed on the pristine text in any order, or made each on the last one's result: the same."""
    tree = parsed(source)
    statements = [
        n
        for n in ast.walk(tree.body[0])
        if isinstance(n, ast.stmt) and n is not tree.body[0] and not isinstance(n, ast.Expr)
    ]
    assume(len(statements) > 1)
    chosen = data.draw(st.lists(st.sampled_from(statements), min_size=2, max_size=3, unique_by=id))
    verbs = data.draw(
        st.lists(st.sampled_from(list(VERBS_OF_STATEMENTS)), min_size=len(chosen), max_size=len(chosen))
    )
    inside = [(a, b) for a in chosen for b in chosen if a is not b and b in set(ast.walk(a))]
    # what stands inside another anchor would change that anchor: such edits cannot be made in turn
    assume(not inside)
    edits = [
        edit("fun", find=ast.unparse(node), **{verb: VERBS_OF_STATEMENTS[verb].format(n=n)})
        for n, (node, verb) in enumerate(zip(chosen, verbs, strict=True))
    ]
    try:
        in_turn = source
        for one in edits:
            in_turn = changed(in_turn, one)
        backwards = changed(source, *edits[::-1])
        together = changed(source, *edits)
    except PlaceFault as error:
        assume(error.code not in ("E-AMBIGUOUS", "E-CONFLICT"))  # an elif, or one statement twice
        raise
    assert together == backwards
    assert together == in_turn


# --- mutations of patch files and trees

FILES = {
    "vllm_ascend/a.py": "import os\n\n\nclass A:\n    def f(self, x):\n        y = one(x)\n        if y:\n            two(y)\n        return y\n",  # noqa: E501
    "vllm_ascend/b.py": "NAMES = (\n    'a',\n    'b',\n)\n\n\ndef g():\n    for i in NAMES:\n        three(i)\n",
    "csrc/CMakeLists.txt": "set(OPS\n    alpha\n    beta\n)\ninclude(cmake/x.cmake)\n",
    "vllm::vllm/c.py": "def h(p):\n    return four(p)\n",
}
PATCHES: dict[str, dict[str, Any]] = {
    "first": {
        "edits": [
            {"at": "vllm_ascend/a.py::A.f", "find": "one($X)", "replace": "mark_0($X)"},
            {"at": "vllm_ascend/a.py::A.f", "find": "if y: $$$B", "after": "mark_1(y)"},
            {"at": "vllm::vllm/c.py::h", "find": "four(p)", "wrap": "with mark_2():\n    $BODY"},
        ],
        "files": {"vllm_ascend/strata/n.py": "mark_3 = 1\n"},
    },
    "second": {
        "requires": ["first"],
        "edits": [
            {"at": "vllm_ascend/b.py::NAMES", "add_item": {"value": "'mark_4'"}},
            {"at": "vllm_ascend/b.py", "import": "from x import mark_5"},
            {"at": "csrc/CMakeLists.txt", "find": "include(cmake/x.cmake)", "before": "include(mark_6)"},
            {
                "at": "vllm_ascend/a.py::A.f",
                "find": "mark_0($X)",
                "replace": "mark_0(mark_7($X))",
                "on": "first",
            },
        ],
    },
}
PATCHES["first"]["edits"][2] = {
    "at": "vllm::vllm/c.py::h",
    "find": "return four(p)",
    "wrap": "with mark_2():\n    $BODY",
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A series and its trees, with locks as an author would leave them."""
    root = tmp_path_factory.mktemp("pristine")
    make_trees(root / "trees", FILES)
    make_series(root / "repo", PATCHES)
    code, out = run(root, "affirm", "--all", "--reason", "seen by its author")
    assert code == 0, out
    code, out = run(root, "check")
    assert code == 0, out
    return root


def run(root: Path, command: str, *more: str) -> tuple[int, str]:
    """The strata command in this process: exit code and everything it said."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        code = cli.main(
            [command, *more, "--root", str(root / "repo"), "--trees", str(root / "trees"), "--base", VERSION]
        )
    return code, text.getvalue()


def content(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted((root / "trees").rglob("*"))
        if p.is_file() and STATE not in p.parts
    }


@contextmanager
def copied(pristine: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(pristine, Path(directory), dirs_exist_ok=True)
        yield Path(directory)


def marks_wanted(series: Series) -> set[str]:
    """The marks that the series, as it now reads, is to leave."""
    found: set[str] = set()
    for patch in series.patches:
        text = patch.yaml_path.read_text() + "".join(f.read_text() for f in patch.files.values())
        for e in patch.spec.edits:
            text = e.model_dump_json()
            found |= {m for m in (f"mark_{n}" for n in range(10)) if m in text and m not in (e.find or "")}
        found |= {
            m for f in patch.files.values() for m in (f"mark_{n}" for n in range(10)) if m in f.read_text()
        }
    return found


ANCHORS = (b"one(x)", b"if y:", b"four(p)", b"NAMES = ", b"import os", b"include(", b"two(y)", b"def f")
TREE_FILES = [
    "vllm-ascend/vllm_ascend/a.py",
    "vllm-ascend/vllm_ascend/b.py",
    "vllm-ascend/csrc/CMakeLists.txt",
    "vllm/vllm/c.py",
]
PATCH_FILES = [
    "patches/group/first/patch.yaml",
    "patches/group/second/patch.yaml",
    "layers/source/series.yaml",
]


@st.composite
def mutations(draw: Any) -> tuple[str, str, int, int, str]:
    kind = draw(st.sampled_from([
        "anchor removed", "anchor doubled", "anchor moved", "anchor moved", "drop line", "double line",
        "swap lines", "rename", "remove file", "bad utf-8", "cut", "flip", "insert", "unknown key",
        "read only",
        "directory", "crlf", "exists",
    ]))  # fmt: skip
    places = TREE_FILES if kind.startswith("anchor") else TREE_FILES + [f"repo:{p}" for p in PATCH_FILES]
    where = draw(st.sampled_from(places))
    return (
        kind,
        where,
        draw(st.integers(0, 400)),
        draw(st.integers(0, 400)),
        draw(st.sampled_from(list("x:$(\"'\t\n}-#é"))),
    )


def mutate(root: Path, mutation: tuple[str, str, int, int, str]) -> None:
    kind, where, n, m, letter = mutation
    path = (
        root / "repo" / where.removeprefix("repo:") if where.startswith("repo:") else root / "trees" / where
    )
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    n_line, m_line = n % len(lines), m % len(lines)
    at = n % len(data)
    if kind.startswith("anchor"):
        anchors = [i for i, line in enumerate(lines) if any(word in line for word in ANCHORS)]
        if not anchors:  # an earlier mutation took them
            return
        i = anchors[n % len(anchors)]
        line = lines[i]
        if kind != "anchor doubled":
            del lines[i]
        if kind != "anchor removed":
            lines.insert(m % (len(lines) + 1), line)
        path.write_bytes(b"".join(lines))
    elif kind == "drop line":
        del lines[n_line]
        path.write_bytes(b"".join(lines))
    elif kind == "double line":
        path.write_bytes(b"".join([*lines[: n_line + 1], *lines[n_line:]]))
    elif kind == "swap lines":
        lines[n_line], lines[m_line] = lines[m_line], lines[n_line]
        path.write_bytes(b"".join(lines))
    elif kind == "rename":
        words = [
            b"one",
            b"two",
            b"three",
            b"four",
            b"NAMES",
            b"A",
            b"def f",
            b"alpha",
            b"find",
            b"edits",
            b"first",
        ]
        path.write_bytes(data.replace(words[n % len(words)], words[n % len(words)] + b"q"))
    elif kind == "remove file":
        path.unlink()
    elif kind == "bad utf-8":
        path.write_bytes(data[:at] + b"\xff" + data[at:])
    elif kind == "cut":
        path.write_bytes(data[:at])
    elif kind == "flip":
        path.write_bytes(data[:at] + letter.encode() + data[at + 1 :])
    elif kind == "insert":
        path.write_bytes(data[:at] + letter.encode() + data[at:])
    elif kind == "unknown key":
        path.write_bytes(data + b"\nnonsense: 1\n")
    elif kind == "read only":
        path.chmod(0o444)
        path.parent.chmod(0o555)
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    elif kind == "crlf":
        path.write_bytes(data.replace(b"\n", b"\r\n"))
    elif kind == "exists":
        target = root / "trees/vllm-ascend/vllm_ascend/strata/n.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text("theirs = 1\n")


SETTINGS = settings(
    max_examples=int(os.environ.get("STRATA_EXAMPLES", "60")), deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip


def test_without_mutation_everything_lands(pristine: Path) -> None:
    with copied(pristine) as root:
        code, out = run(root, "apply")
        assert code == 0, out
        text = b"".join(content(root).values())
        assert all(f"mark_{n}".encode() in text for n in range(8))
        landed = content(root)
        code, out = run(root, "apply")
        assert code == 0
        assert "already applied" in out
        assert content(root) == landed


@SETTINGS
@given(st.lists(mutations(), min_size=1, max_size=2))
def test_the_command_never_says_good_when_something_did_not_land(
    pristine: Path, todo: list[tuple[str, str, int, int, str]]
) -> None:
    with copied(pristine) as root:
        for mutation in todo:
            try:
                mutate(root, mutation)
            except (FileNotFoundError, IsADirectoryError, ZeroDivisionError):
                assume(False)
        before = content(root)
        code, out = run(root, "apply")
        after = content(root)
        assert "Traceback" not in out
        event(f"exit {code}")
        if code == 0:
            wanted = marks_wanted(load_series(root / "repo"))
            text = b"".join(after.values()).decode("utf-8", "replace")
            assert all(m in text for m in wanted), (todo, out)
        else:
            assert code in (1, 2)
            assert after == before, (todo, out)
            assert "E-" in out, (todo, out)


@settings(SETTINGS, max_examples=4 * SETTINGS.max_examples)
@given(st.lists(mutations(), min_size=1, max_size=3))
def test_the_engine_alone_lands_all_or_nothing(
    pristine: Path, todo: list[tuple[str, str, int, int, str]]
) -> None:
    """The same without locks in front: even what a person affirmed blindly lands whole or not at all."""
    with copied(pristine) as root:
        for mutation in todo:
            try:
                mutate(root, mutation)
            except (FileNotFoundError, IsADirectoryError, ZeroDivisionError):
                assume(False)
        before = content(root)
        try:
            trees = Trees.at(root / "trees")
            series = load_series(root / "repo")
            plan = plan_series(series, trees, VERSION)
            write(plan, trees)
        except StrataError as error:
            event(error.findings[0].code)
            assert error.findings
            assert content(root) == before, todo
            return
        event("landed")
        text = b"".join(content(root).values()).decode()
        assert all(m in text for m in marks_wanted(series)), todo
        for (_, file), result in plan.files.items():
            if file.endswith(".py"):
                compile(result.removeprefix("\ufeff"), file, "exec")
        assert already_applied(series, trees)


@pytest.mark.parametrize("command", ["check", "diff", "apply"])
def test_a_command_undoes_a_killed_run_before_it_reads(pristine: Path, command: str) -> None:
    """Half-patched trees with a journal: what a kill between two renames leaves."""
    with copied(pristine) as root:
        wanted = run(root, command) if command != "apply" else (0, "")
    with copied(pristine) as root:
        before = content(root)
        trees = Trees.at(root / "trees")
        plan = plan_series(load_series(root / "repo"), trees, VERSION)
        child = os.fork()
        if child == 0:
            moves = 0

            class Dying(Disk):
                def move(self, source: Path, target: Path) -> None:
                    nonlocal moves
                    moves += 1
                    if moves == 4:
                        os._exit(77)
                    super().move(source, target)

            apply.DISK = Dying()
            write(plan, trees)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
        assert unfinished(trees)
        assert content(root) != before
        code, out = run(root, command)
        assert code == 0, out
        assert not unfinished(trees)
        if command == "apply":
            assert already_applied(load_series(root / "repo"), trees)
        else:
            assert content(root) == before
            assert out == wanted[1]
