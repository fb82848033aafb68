"""fp: 1 gives equal digests for equal code on every interpreter, and different ones for different code."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.errors import StrataError
from strata.fingerprint import is_tree_source, python_fingerprint, serialise, token_fingerprint, tree_hash
from strata.trees import Trees

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "fingerprint_every_symbol.py"
GOLDEN = HERE / "data" / "fingerprint_golden.json"


def fp(source: str) -> str:
    return python_fingerprint(source)


# --- what does not count


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1  # why\n", "x=1"),
        ("def f():\n  'doc'\n  return 1", "def f():\n    return 1\n"),
        ("class A:\n    x = 1\n    'told'\n", "class A:\n    'other'\n    x = 1\n"),
        ("x = ('a' 'b')", 'x = "ab"'),
        ("x = u'a'", "x = 'a'"),
        ("f(a, b,)", "f(\n    a,\n    (b)\n)"),
        ("x = f'{a}' f'b' 'c'", "x = f'{a}bc'"),
        ("x = f'{a:}'", "x = f'{a}'"),
        ("x = 0x10", "x = 16"),
        ("x = 1_0.5", "x = 10.5"),
        ("with (a as b, c): pass", "with a as b, c: pass"),
        ("a = b; c = d", "a = b\nc = d\n"),
    ],
)
def test_equal(one: str, other: str) -> None:
    assert fp(one) == fp(other)


# --- what counts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 2"),
        ("x = 1", "x = '1'"),
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = None", "x = 'None'"),
        ("return_(None)", "return_()"),
        ("x = b'a'", "x = 'a'"),
        ("x = -1", "x = 1"),
        ("x = 10**4", "x = 10*4"),
        ("f(a=b)", "f(b=a)"),
        ("f(*a)", "f(**a)"),
        ("{**a}", "{None: a}"),
        ("def f(*, a, b=None): ...", "def f(*, a=None, b): ..."),
        ("def f(a, b): ...", "def f(a, *, b): ..."),
        ("def f(a, b): ...", "def f(a, b, /): ..."),
        ("if a: b\nelse: c", "if a: b\nc"),
        ("if a:\n b\n c", "if a:\n b\nc"),
        ("for a in b: c", "while b: c"),
        ("x = f'{a}{b}'", "x = f'{b}{a}'"),
        ("x = f'{a}'", "x = '{a}'"),
        ("x = f'{a!r}'", "x = f'{a}'"),
        ("x = f'{a:>1}'", "x = f'{a}'"),
        ("x = f'abc'", "x = 'abc'"),
        ("from . import a", "import a"),
        ("from . import a", "from .. import a"),
        ("match x:\n case None: pass", "match x:\n case _: pass"),
        ("match x:\n case True: pass", "match x:\n case False: pass"),
        ("@a\ndef f(): ...", "def f(): ..."),
        ("async def f(): ...", "def f(): ..."),
        ("x: int = 1", "x = 1"),
        ("a[1:2]", "a[1, 2]"),
        ("a < b < c", "(a < b) < c"),
        ("x = '\\ud800'", "x = '\\ud801'"),
    ],
)
def test_different(one: str, other: str) -> None:
    assert fp(one) != fp(other)


def test_body_fingerprint_leaves_out_only_the_own_name() -> None:
    def body(source: str) -> str:
        return python_fingerprint(source, without_name=True)

    assert body("def f(x): return g(x)") == body("def h(x): return g(x)")
    assert body("class A(B): x = 1") == body("class C(B): x = 1")
    assert body("A = [1]") == body("B = [1]")
    assert body("A: int = 1") == body("B: int = 1")
    assert body("def f(x): return f(x)") != body("def h(x): return h(x)")
    assert body("def f(x): return 1") != body("def f(y): return 1")
    assert body("def f(): ...") != body("class f: ...")
    assert body("a.b = 1") != body("a.c = 1")
    assert body("def f(): ...\ndef g(): ...") != body("def h(): ...\ndef g(): ...")


def test_form() -> None:
    assert re.fullmatch(r"py1:[0-9a-f]{32}", fp("x = 1"))
    assert re.fullmatch(r"tok1:[0-9a-f]{32}", token_fingerprint(["a", "b"]))


def test_statements_and_source_agree() -> None:
    source = "import a\n\ndef f(): pass\n"
    assert python_fingerprint(ast.parse(source).body) == fp(source)


def test_deep_trees() -> None:
    node: ast.expr = ast.Name("a")
    for _ in range(20_000):
        node = ast.UnaryOp(ast.Not(), node)
    assert len(serialise(node)) > 20_000


def test_token_boundaries_count() -> None:
    assert token_fingerprint(["ab", "c"]) != token_fingerprint(["a", "bc"])
    assert token_fingerprint(["a", ""]) != token_fingerprint(["a"])


_names = st.sampled_from("abcd")
_leaves = st.one_of(_names, st.integers(-5, 5).map(str), st.text(max_size=3).map(repr), st.just("None"))
_expressions = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "and", "if x else", "is not", "**"]), inner).map(" ".join),
        st.lists(inner, max_size=3).map(lambda i: "[" + ", ".join(i) + "]"),
        st.tuples(_names, inner).map(lambda p: f"{p[0]}({p[1]})"),
        inner.map(lambda i: f"({i})"),
    ),
    max_leaves=8,
)


@given(_expressions, _expressions)
def test_digest_differs_exactly_where_the_ast_does(one: str, other: str) -> None:
    # ast.dump is the independent judge: these expressions hold nothing that fp: 1 levels
    same = ast.dump(ast.parse(f"x = ({one})")) == ast.dump(ast.parse(f"x = ({other})"))
    assert (fp(f"x = ({one})") == fp(f"x = ({other})")) == same
    assert fp(f"x = ({one})") == fp(f"x = ((  {one} ))  # c")


# --- the same on every interpreter


def test_golden_digests() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for name, sample in golden.items():
        if tuple(int(n) for n in sample.get("since", "3.11").split(".")) > sys.version_info[:2]:
            continue
        assert fp(sample["source"]) == sample["fingerprint"], name
        body = python_fingerprint(ast.parse(sample["source"]).body, without_name=True)
        assert body == sample["body"], name


@functools.cache
def other_interpreters() -> dict[str, str]:
    """Working Pythons of other supported minor versions, on PATH or of pyenv: version -> executable."""
    found: dict[str, str] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in ("3.11", "3.12", "3.13"):
        if minor == f"{sys.version_info[0]}.{sys.version_info[1]}":
            continue
        candidates = [shutil.which(f"python{minor}"), *sorted(map(str, pyenv.glob(f"{minor}*/bin/python")))]
        for candidate in filter(None, candidates):
            ask = [candidate, "-c", "import sys; print(sys.version_info[:2])"]
            run = subprocess.run(ask, capture_output=True, text=True)
            if run.returncode == 0 and run.stdout.strip() == f"({minor.replace('.', ', ')})":
                found[minor] = candidate
                break
    return found


@functools.cache
def run_script(interpreter: str, *arguments: str) -> str:
    done = subprocess.run([interpreter, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("minor", sorted(other_interpreters()))
def test_golden_digests_on_other_interpreters(minor: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    digests = json.loads(run_script(other_interpreters()[minor], "--golden", str(GOLDEN)))
    assert len(digests) >= 34
    for name, digest in digests.items():
        assert digest == {k: golden[name][k] for k in ("fingerprint", "body")}, name


@pytest.mark.sources
@pytest.mark.slow
@pytest.mark.parametrize("minor", sorted(other_interpreters()))
def test_every_symbol_of_the_real_trees_agrees(minor: str, real_trees: Trees) -> None:
    roots = [str(root) for root in real_trees.roots.values()]
    here = run_script(sys.executable, *roots).splitlines()
    there = run_script(other_interpreters()[minor], *roots).splitlines()
    assert len(here) > 1000, f"only {len(here)} Python files in {roots}"
    assert not [line for line in here if line.endswith("syntax-error")]
    assert [(a, b) for a, b in zip(here, there, strict=True) if a != b] == []


# --- trees


def make_tree(root: Path) -> None:
    for name in ("vllm_ascend/a.py", "csrc/build.sh", "vllm_ascend/build/keep.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


IGNORED = [
    "vllm_ascend/_build_info.py", "vllm/_version.py", "vllm_ascend/x.so",
    "vllm_ascend/__pycache__/a.cpython-311.pyc",
    "vllm_ascend.egg-info/PKG-INFO", "vllm-0.23.0.dist-info/RECORD", ".git/HEAD",
    "csrc/build/x", "csrc/output/y",
    "csrc/build_out/z", "build/lib/a.py", "vllm_ascend/_cann_ops_custom/vendors/op.py",
]  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
def test_tree_hash_ignores_what_is_made(tmp_path: Path, name: str) -> None:
    make_tree(tmp_path)
    before = tree_hash(tmp_path)
    extra = tmp_path / name
    extra.parent.mkdir(parents=True, exist_ok=True)
    extra.write_text("made")
    assert tree_hash(tmp_path) == before
    assert not is_tree_source(name)


def test_tree_hash_sees_content_names_additions_and_links(tmp_path: Path) -> None:
    make_tree(tmp_path)
    seen = {tree_hash(tmp_path)}
    (tmp_path / "vllm_ascend/a.py").write_text("changed")
    seen.add(tree_hash(tmp_path))
    (tmp_path / "vllm_ascend/a.py").rename(tmp_path / "vllm_ascend/b.py")
    seen.add(tree_hash(tmp_path))
    (tmp_path / "vllm_ascend/build/keep.py").write_text("changed")
    seen.add(tree_hash(tmp_path))
    (tmp_path / "link").symlink_to("vllm_ascend")
    seen.add(tree_hash(tmp_path))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("nowhere")
    seen.add(tree_hash(tmp_path))
    assert len(seen) == 6


def test_tree_hash_of_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match="E-TREE"):
        tree_hash(tmp_path / "absent")
