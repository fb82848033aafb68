"""What the verbs write in Python files."""

from __future__ import annotations

import ast

import pytest
from series_tools import changed, code, edit, fault, place
from strata.python_text import dedent, indent_after_first, string_rows


def one(source: str, at: str = "f.py", **parts: object) -> str:
    return changed(source, edit(at, **parts))


# --- replace


def test_replace_keeps_comments_and_the_source_of_captures() -> None:
    source = code("""
        x = call(
            1,  # one
            'two',
        )  # end
    """)
    assert one(source, find="call(1, $$$REST)", replace="other($$$REST, 3)") == code("""
        x = other('two', 3)  # end
    """)
    assert one(source, find="call($$$ALL)", replace="other($$$ALL)") == code("""
        x = other(1,  # one
            'two')  # end
    """)


@pytest.mark.parametrize(
    ("source", "find", "replace", "result"),
    [
        ("x = a * b\n", "a", "c + d", "x = (c + d) * b\n"),
        ("x = f(a)\n", "a", "c + d", "x = f(c + d)\n"),
        ("x = (a) * b\n", "a", "c + d", "x = (c + d) * b\n"),
        ("x = a.b\n", "a", "1", "x = (1).b\n"),
        ("x = a.b\n", "a", "-c", "x = (-c).b\n"),
        ("x = f(a)\n", "a", "b, c", "x = f((b, c))\n"),
        ("x = a\n", "a", "b, c", "x = b, c\n"),
        ("x = f(a=b)\n", "b", "lambda: 1", "x = f(a=lambda: 1)\n"),
        ("x = -a\n", "a", "b ** c", "x = -(b ** c)\n"),
        ("x = [a for a in b if c]\n", "c", "d if e else f", "x = [a for a in b if (d if e else f)]\n"),
        ("f(a + b)\n", "f($X)", "$X * 2", "(a + b) * 2\n"),
        ("f(a, b)\n", "f($X, $Y)", "$X.g($Y)", "a.g(b)\n"),
        ("f(1)\n", "f($X)", "$X.bit_length()", "(1).bit_length()\n"),
        ("f(x for x in y)\n", "f($X)", "g($X, 1)", "g((x for x in y), 1)\n"),
        ("f(x for x in y)\n", "(x for x in y)", "z", "f(z)\n"),
        ("f()\n", "f($$$A)", "g(1, $$$A)", "g(1)\n"),
        ("f()\n", "f($$$A)", "g($$$A, 1)", "g(1)\n"),
        ("f()\n", "f($$$A)", "g($$$A)", "g()\n"),
        ("f(*a, k=1, **b)\n", "f($$$A)", "g($$$A)", "g(*a, k=1, **b)\n"),
        ("f((a), (b))\n", "f($$$A)", "g($$$A)", "g((a), (b))\n"),
        ("obj.get(k)\n", "obj.$M($$$A)", "other.$M($$$A)", "other.get(k)\n"),
    ],
)
def test_replaced_expressions_mean_what_they_say(source: str, find: str, replace: str, result: str) -> None:
    assert one(source, find=find, replace=replace) == result


def test_a_template_of_several_lines_is_safe_outside_brackets() -> None:
    assert one("def f():\n    return x\n", "f", find="x", replace="a +\\\n  b") in (
        "def f():\n    return a +\\\n      b\n",
        "def f():\n    return (a +\\\n      b)\n",
    )
    assert one("def f():\n    return x\n", "f", find="x", replace="g(\n    1,\n)") == (
        "def f():\n    return g(\n        1,\n    )\n"
    )


def test_replace_statements_with_statements() -> None:
    source = code("""
        def f(x):
            a = 1
            b = 2  # two
            return a
    """)
    assert one(
        source, "f", find="a = $V\nb = $W", replace="if x:\n    a, b = $V, $W\nelse:\n    a = b = 0"
    ) == code("""
        def f(x):
            if x:
                a, b = 1, 2
            else:
                a = b = 0  # two
            return a
    """)


def test_a_captured_block_moves_with_its_comments_and_strings() -> None:
    source = code('''
        def f(x):
            if x:
                # why
                text = """
            kept
        """
                go(text,
                   1)  # tail
            return x
    ''')
    assert one(
        source, "f", find="if x:\n    $$$BODY", replace="for _ in x:\n    with y:\n        $$$BODY"
    ) == code('''
        def f(x):
            for _ in x:
                with y:
                    text = """
            kept
        """
                    go(text,
                       1)  # tail
            return x
    ''')


def test_statements_on_one_line_and_one_line_suites() -> None:
    assert one("if x: a = 1; b = 2\n", find="b = 2", replace="for i in x:\n    b = i") == (
        "if x:\n    a = 1\n    for i in x:\n        b = i\n"
    )
    assert one("if x: a = 1; b = 2\n", find="b = 2", replace="c = 3") == "if x: a = 1; c = 3\n"


def test_an_expression_cannot_become_statements() -> None:
    assert fault("x = f(1)\n", find="f(1)", replace="y = 2").code == "E-EDIT"
    assert one("f(1)\n", find="f(1)", replace="y = 2\nz = 3") == "y = 2\nz = 3\n"


def test_a_comment_cannot_swallow_what_follows() -> None:
    assert fault("x = f(1) * 2\n", find="f(1)", replace="g(1)  # why").code == "E-EDIT"
    assert fault("f(1)\n", find="f(1)", add_item={"value": "2  # why"}).code == "E-EDIT"
    assert one("x = f(1) * 2\n", find="f(1)", replace="g('#')") == "x = g('#') * 2\n"
    assert one("x = 1; y = 2\n", find="x = 1", replace="x = 3  # why") == "x = 3  # why\ny = 2\n"
    assert one("x = f(1) * 2\n", find="f(1)", replace="g(\n    1,  # why\n)") == (
        "x = g(\n    1,  # why\n) * 2\n"
    )


def test_unknown_captures_are_named() -> None:
    found = fault("f(1)\n", find="f($A)", replace="g($B)")
    assert found.code == "E-EDIT"
    assert "$B" in found.message
    assert "$A" in found.expected


# --- delete


@pytest.mark.parametrize(
    ("source", "find", "result"),
    [
        ("if x:\n    a\n    b\n", "b", "if x:\n    a\n"),
        ("if x:\n    a  # why\n", "a", "if x:\n    pass  # why\n"),
        ("if x: a\n", "a", "if x: pass\n"),
        ("a; b; c\n", "b", "a; c\n"),
        ("a; b; c\n", "a", "b; c\n"),
        ("a; b; c\n", "c", "a; b\n"),
        ("a\n", "a", ""),
        ("a  # why\nb", "b", "a  # why\n"),
        ("try:\n    a\nfinally:\n    b\n", "b", "try:\n    a\nfinally:\n    pass\n"),
        ("@deco\ndef f():\n    pass\nx = 1\n", "@deco\ndef f(): $$$B", "x = 1\n"),
    ],
)
def test_delete_leaves_valid_code(source: str, find: str, result: str) -> None:
    assert one(source, find=find, delete=True) == result


def test_delete_of_all_statements_of_a_block_leaves_one_pass() -> None:
    assert one("if x:\n    a()\n    a()\ny\n", find="a()", count=2, delete=True) == "if x:\n    pass\ny\n"


def test_delete_takes_no_part_of_a_statement() -> None:
    assert fault("x = f(1)\n", find="f(1)", delete=True).code == "E-EDIT"


# --- before, after


def test_before_and_after_take_the_indentation_of_the_anchor() -> None:
    source = "def f():\n    a()  # a\n    if b():\n        c()\n    return 1\n"
    assert one(source, "f", find="a()", after="if 1:\n    x()") == (
        "def f():\n    a()  # a\n    if 1:\n        x()\n    if b():\n        c()\n    return 1\n"
    )
    assert one(source, "f", find="b()", before="x()") == (
        "def f():\n    a()  # a\n    x()\n    if b():\n        c()\n    return 1\n"
    )
    assert one(source, "f", find="b()", after="x()") == (
        "def f():\n    a()  # a\n    if b():\n        c()\n    x()\n    return 1\n"
    )


def test_an_elif_is_lifted_to_its_whole_statement() -> None:
    source = "if a:\n    x\nelif b():\n    y\n"
    assert one(source, find="b()", before="z") == "z\n" + source
    assert one(source, find="b()", after="z") == source + "z\n"


def test_before_a_decorated_definition_comes_before_its_decorators() -> None:
    source = "@d\ndef f():\n    pass\n"
    assert one(source, find="@$D\ndef f(): $$$B", before="x = 1") == "x = 1\n" + source
    assert fault(source, find="def f(): $$$B", before="x = 1").code == "E-PARTIAL"


@pytest.mark.parametrize(
    ("source", "find", "verb", "result"),
    [
        ("a; b\n", "b", "before", "a\nx()\nb\n"),
        ("a; b\n", "a", "after", "a\nx()\nb\n"),
        ("if t: a; b\n", "a", "after", "if t:\n    a\n    x()\n    b\n"),
        ("if t:a\n", "a", "before", "if t:\n    x()\n    a\n"),
        ("if t:\n\ta\n", "a", "after", "if t:\n\ta\n\tx()\n"),
        ("if t: a\n", "t", "after", "if t: a\nx()\n"),
        ("x = [\n  1]; b\n", "b", "before", "x = [\n  1]\nx()\nb\n"),
        ("if t: \\\n a; \\\n b\n", "b", "before", "if t:\n    a\n    x()\n    b\n"),
        ("if t:  # why:\\\n    b\n", "b", "before", "if t:  # why:\\\n    x()\n    b\n"),
        ("# C:\\\nb\n", "b", "before", "# C:\\\nx()\nb\n"),
        ("a", "a", "after", "a\nx()"),
        ("a\r\nb\r\n", "a", "after", "a\r\nx()\r\nb\r\n"),
    ],
)
def test_insertions_on_shared_lines(source: str, find: str, verb: str, result: str) -> None:
    assert one(source, find=find, **{verb: "x()"}) == result


def test_one_statement_gets_one_insertion_however_often_it_matches() -> None:
    assert one("x = f(1) + f(1)\n", find="f(1)", count=2, after="y") == "x = f(1) + f(1)\ny\n"


# --- wrap


def test_wrap_indents_all_but_strings() -> None:
    source = code('''
        def f(x):
            a = """
        text
            """
            go(a,
          1)
        # odd comment
            if x:
                pass
            return a
    ''')
    template = "with t(x):\n    $BODY\nlog()"
    assert one(source, "f", find="a = $A\n$$$MID\nif x: pass", wrap=template) == code('''
        def f(x):
            with t(x):
                a = """
        text
            """
                go(a,
              1)
            # odd comment
                if x:
                    pass
            log()
            return a
    ''')


def test_wrap_of_part_of_a_line() -> None:
    assert one("a; b; c\n", find="b", wrap="if x:\n    $BODY") == "a\nif x:\n    b\nc\n"
    assert one("if t: a\n", find="a", wrap="try:\n    $BODY\nfinally:\n    z") == (
        "if t:\n    try:\n        a\n    finally:\n        z\n"
    )


def test_wrap_holds_other_edits() -> None:
    source = "def f():\n    a(1)\n    b(2)\n    c(3)\n"
    edits = [
        edit("f", find="a(1)\nb(2)", wrap="with w:\n    $BODY"),
        edit("f", find="a(1)", replace='a("""\nx""")'),
        edit("f", find="b(2)", after="if y:\n    z()"),
        edit("f", find="a(1)", before="first()"),
        edit("f", find="c(3)", before="last()"),
    ]
    result = 'def f():\n    with w:\n        first()\n        a("""\nx""")\n        b(2)\n        if y:\n            z()\n    last()\n    c(3)\n'  # noqa: E501
    assert changed(source, *edits) == result
    assert changed(source, *edits[::-1]) == result


def test_wrap_needs_statements_and_a_body() -> None:
    assert fault("x = f(1)\n", find="f(1)", wrap="with w:\n    $BODY").code == "E-EDIT"
    assert fault("f(1)\n", find="f(1)", wrap="g($BODY)").code == "E-EDIT"
    assert fault("f(1)\n", find="f(1)", wrap="if x:\n    $BODY\nelse:\n    $BODY").code == "E-EDIT"


# --- add_item


@pytest.mark.parametrize(
    ("source", "find", "value", "place_", "result"),
    [
        ("f(1, k=2)\n", "f($$$A)", "3", "last", "f(1, 3, k=2)\n"),
        ("f(1, k=2)\n", "f($$$A)", "m=3", "last", "f(1, k=2, m=3)\n"),
        ("f(1, k=2)\n", "f($$$A)", "m=3", "before k", "f(1, m=3, k=2)\n"),
        ("f(k=2)\n", "f($$$A)", "3", "last", "f(3, k=2)\n"),
        ("f()\n", "f()", "3", "last", "f(3)\n"),
        ("f((1),)\n", "f(1)", "3", "last", "f((1), 3,)\n"),
        ("x = (1,)\n", "(1,)", "2", "last", "x = (1, 2,)\n"),
        ("x = 1, 2\n", "(1, 2)", "3", "last", "x = 1, 2, 3\n"),
        ("x = 1, 2\n", "(1, 2)", "3", "first", "x = 3, 1, 2\n"),
        ("x = ()\n", "()", "3,", "last", None),
        ("x = [lambda a, b: 1]\n", "[$A]", "2", "last", "x = [lambda a, b: 1, 2]\n"),
        ("x = {1, 2}\n", "{1, 2}", "3", "after 1", "x = {1, 3, 2}\n"),
        ("x = {'a': 1}\n", "{'a': 1}", "'b': 2", "last", "x = {'a': 1, 'b': 2}\n"),
        ("x = {'a': 1}\n", "{'a': 1}", "'b': 2", "before 'a'", "x = {'b': 2, 'a': 1}\n"),
        (
            "x = [\n    1,\n    2,  # two\n]\n",
            "[1, 2]",
            "3",
            "last",
            "x = [\n    1,\n    2,  # two\n    3,\n]\n",
        ),
        (
            "x = [\n    1,\n    2  # two\n]\n",
            "[1, 2]",
            "3",
            "last",
            "x = [\n    1,\n    2,  # two\n    3,\n]\n",
        ),
        ("x = [\n    1,\n    2,\n]\n", "[1, 2]", "0", "first", "x = [\n    0,\n    1,\n    2,\n]\n"),
    ],
)
def test_add_item(source: str, find: str, value: str, place_: str, result: str | None) -> None:
    parts = {"find": find, "add_item": {"value": value, "place": place_}}
    if result is None:
        assert ast.literal_eval(one(source, **parts).removeprefix("x = ").strip()) in ((3,), 3)
        return
    assert one(source, **parts) == result


def test_add_item_to_an_assignment_by_name() -> None:
    source = "class C:\n    names = (\n        'a',\n    )\n"
    assert (
        one(source, "C.names", add_item={"value": "'b'"})
        == "class C:\n    names = (\n        'a',\n        'b',\n    )\n"
    )
    assert fault("x = a + b\n", "x", add_item={"value": "1"}).code == "E-EDIT"
    assert fault("def f(): pass\n", "f", add_item={"value": "1"}).code == "E-EDIT"


def test_items_of_two_edits_follow_one_another() -> None:
    for source in ("x = []\n", "x = [0]\n", "x = [0,]\n", "x = [\n    0  # c\n]\n", "x = [\n    0,\n]\n"):
        edits = [edit("x", add_item={"value": str(n)}) for n in (1, 2)]
        values = ast.literal_eval(changed(source, *edits).partition("=")[2].strip())
        assert values[-2:] == [1, 2]


def test_add_item_refuses_what_is_not_one_item() -> None:
    assert fault("f(1)\n", find="f(1)", add_item={"value": "2, 3"}).code == "E-EDIT"
    assert fault("x = {1: 2}\n", find="{1: 2}", add_item={"value": "3"}).code == "E-EDIT"
    assert fault("f(x for x in y)\n", find="f($A)", add_item={"value": "3"}).code == "E-EDIT"
    assert fault("f(1)\n", find="f(1)", add_item={"value": "2", "place": "before 7"}).code == "E-CONFLICT"
    assert fault("f(1)\n", find="f(1)", add_item={"value": "2", "place": "middle"}).code == "E-EDIT"


# --- add_param, decorate


@pytest.mark.parametrize(
    ("head", "spec", "result"),
    [
        ("def f():", {"name": "n"}, "def f(n):"),
        ("def f(a, b=1):", {"name": "n", "default": "2"}, "def f(a, b=1, n=2):"),
        ("def f(a, *c, k, **d):", {"name": "n"}, "def f(a, n, *c, k, **d):"),
        ("def f(a, *c, k, **d):", {"name": "n", "place": "keyword"}, "def f(a, *c, k, n, **d):"),
        ("def f(a, **d):", {"name": "n", "place": "keyword"}, "def f(a, *, n, **d):"),
        ("def f(a, /, b):", {"name": "n", "place": "after a"}, "def f(a, n, /, b):"),
        ("def f(a, /, b):", {"name": "n", "place": "after b"}, "def f(a, /, b, n):"),
        ("def f(a, *, k):", {"name": "n", "place": "after k"}, "def f(a, *, k, n):"),
        ("def f(a=(1, 2)) -> T[int]:", {"name": "n", "default": "()", "annotation": "tuple"},
         "def f(a=(1, 2), n: tuple = ()) -> T[int]:"),
        ("async def f(a,):", {"name": "n", "place": "first"}, "async def f(n, a,):"),
    ],
)  # fmt: skip
def test_add_param(head: str, spec: dict[str, str], result: str) -> None:
    assert one(f"{head}\n    pass\n", "f", add_param=spec) == f"{result}\n    pass\n"


def test_add_param_of_methods_and_long_signatures() -> None:
    source = "class C:\n    def f(\n        self,\n        a,  # a\n        **k,\n    ):\n        pass\n"
    assert one(source, "C.f", add_param={"name": "n", "place": "first"}) == source.replace(
        "a,  # a", "n,\n        a,  # a"
    )
    assert one(source, "C.f", add_param={"name": "n"}) == source.replace("**k", "n,\n        **k")


def test_add_param_refuses_nonsense() -> None:
    source = "def f(a, b=1): pass\n"
    assert fault(source, "f", add_param={"name": "b"}).code == "E-EDIT"
    assert fault(source, "f", add_param={"name": "n"}).code == "E-EDIT"
    assert fault(source, "f", add_param={"name": "n", "default": "1", "place": "first"}).code == "E-EDIT"
    assert fault(source, "f", add_param={"name": "n", "place": "after z"}).code == "E-EDIT"
    assert fault(source, "f", add_param={"name": "1n"}).code == "E-EDIT"
    assert fault("x = 1\n", "x", add_param={"name": "n"}).code == "E-EDIT"


def test_decorate() -> None:
    source = "class C:\n    @a\n    def f(self):\n        pass\n"
    assert (
        one(source, "C.f", decorate={"with": "b(1)"})
        == "class C:\n    @b(1)\n    @a\n    def f(self):\n        pass\n"
    )
    assert one(source, "C.f", decorate={"with": "@b", "place": "inner"}) == (
        "class C:\n    @a\n    @b\n    def f(self):\n        pass\n"
    )
    assert one("def f():\n    pass\n", "f", decorate={"with": "b"}) == "@b\ndef f():\n    pass\n"
    both = [edit("f", decorate={"with": "b"}), edit(find="def f(): $$$B", before="x = 1")]
    assert changed("def f():\n    pass\n", *both) == "x = 1\n@b\ndef f():\n    pass\n"
    assert fault(source, "C.f", decorate={"with": "b c"}).code == "E-EDIT"
    assert fault("x = 1\n", "x", decorate={"with": "b"}).code == "E-EDIT"


# --- prepend, append


def test_prepend_comes_after_the_docstring() -> None:
    assert (
        one('def f():\n    """d"""\n    return 1\n', "f", prepend="x()")
        == 'def f():\n    """d"""\n    x()\n    return 1\n'
    )
    assert one("def f():\n    return 1\n", "f", prepend="x()") == "def f():\n    x()\n    return 1\n"
    assert one("def f(): return 1\n", "f", prepend="x()") == "def f():\n    x()\n    return 1\n"
    assert one('"""d"""\nfrom __future__ import annotations\nimport a\n', prepend="x()") == (
        '"""d"""\nfrom __future__ import annotations\nx()\nimport a\n'
    )


def test_append() -> None:
    assert (
        one("class C:\n    x = 1\n\ny = 2\n", "C", append="z = 3")
        == "class C:\n    x = 1\n    z = 3\n\ny = 2\n"
    )
    assert one("class C:\n    x = 1\n", "C", append="def f(self):\n    pass") == (
        "class C:\n    x = 1\n\n    def f(self):\n        pass\n"
    )
    assert (
        one("def f():\n    if x:\n        y\n", "f", append="z") == "def f():\n    if x:\n        y\n    z\n"
    )
    assert fault("def f():\n    return 1\n", "f", append="x()").code == "E-EDIT"
    assert fault("x = 1\n", "x", append="y = 2").code == "E-EDIT"


def test_text_after_an_inner_block_comes_before_text_after_the_outer_one() -> None:
    source = "def f():\n    if a:\n        b()\nx = 1\n"
    edits = [
        edit("f", append="outer()"),
        edit("f", find="b()", after="inner()"),
        edit(find="def f(): $$$B", after="z = 2"),
    ]
    for order in (edits, edits[::-1]):
        assert (
            changed(source, *order)
            == "def f():\n    if a:\n        b()\n        inner()\n    outer()\nz = 2\nx = 1\n"
        )


# --- import

HEAD = '"""d"""\n\nfrom __future__ import annotations\nimport os\nfrom a import (\n    b,\n    c,\n)\n\nif T:\n    import late\nx = 1\n'  # noqa: E501


def test_import_after_the_first_run() -> None:
    assert one(HEAD, import_="import sys") == HEAD.replace(")\n\nif", ")\nimport sys\n\nif")
    assert one(HEAD, import_="from a import d as e") == HEAD.replace("    c,\n", "    c,\n    d as e,\n")
    assert one(HEAD, import_="from .a import d") == HEAD.replace(")\n\nif", ")\nfrom .a import d\n\nif")
    assert one(HEAD, import_="import os") == HEAD
    assert one(HEAD, import_="from a import c") == HEAD
    assert one(HEAD, import_="from a import c, z\nimport q") == HEAD.replace(
        "    c,\n)", "    c,\n    z,\n)\nimport q"
    )
    assert one("from a import b  # c\nx\n", import_="from a import d") == "from a import b, d  # c\nx\n"
    assert one('"""d"""\nx = 1\n', import_="import q") == '"""d"""\nimport q\nx = 1\n'
    assert one("x = 1\n", import_="import q") == "import q\nx = 1\n"
    assert one("import a.b\n", import_="import a.c") == "import a.b\nimport a.c\n"
    assert one('"""d"""\nimport os\n', import_="from __future__ import annotations") == (
        '"""d"""\nfrom __future__ import annotations\nimport os\n'
    )


@pytest.mark.parametrize("text", ["from z import b", "import x", "from q import r as late", "import b.c"])
def test_import_is_refused_where_the_name_is_taken(text: str) -> None:
    found = fault(HEAD, import_=text)
    assert found.code == "E-EDIT"
    assert "bound already" in found.message


def test_import_takes_imports_only() -> None:
    assert fault(HEAD, import_="x = 1").code == "E-EDIT"
    assert fault(HEAD, import_="from q import *").code == "E-EDIT"
    assert fault("def f(): pass\n", "f", import_="import q").code == "E-EDIT"


def test_local_import() -> None:
    source = 'def f(a):\n    """d"""\n    return a\n'
    assert (
        one(source, "f", import_="import q", local=True)
        == 'def f(a):\n    """d"""\n    import q\n    return a\n'
    )
    assert fault(source, "f", import_="import a", local=True).code == "E-EDIT"
    assert fault("x = 1\n", import_="import q", local=True).code == "E-EDIT"


def test_imports_of_two_edits_are_one() -> None:
    edits = [edit(import_="from q import r"), edit(import_="from q import r")]
    assert changed("import os\n", *edits) == "import os\nfrom q import r\n"
    assert changed("from q import s\n", *edits) == "from q import s, r\n"
    local = [edit("f", import_="import q", local=True)] * 2
    assert changed("def f():\n    return 1\n", *local) == "def f():\n    import q\n    return 1\n"


# --- what a placement says


def test_neighbours_tell_a_near_change_from_a_far_one() -> None:
    source = "def f():\n    a()\n    b()\n    c()\n    d()\n"
    anchor = place(source, "f", find="b()", replace="x()").neighbours
    assert place(source.replace("d()", "e()"), "f", find="b()", replace="x()").neighbours == anchor
    assert place(source.replace("c()", "e()"), "f", find="b()", replace="x()").neighbours != anchor
    header = place(source, "f", decorate={"with": "z"}).neighbours
    assert place(source.replace("c()", "e()"), "f", decorate={"with": "z"}).neighbours == header
    assert place(source.replace("f()", "f(n)"), "f", decorate={"with": "z"}).neighbours != header


def test_region_and_symbol_of_a_placement() -> None:
    source = "x = 1\n@d\ndef f():\n    a()\n"
    placement = place(source, "f", find="a()", replace="b()")
    assert source[slice(*placement.region)] == "@d\ndef f():\n    a()"
    assert (placement.symbol, placement.line) == ("f", 4)
    assert place(source, find="x = 1", replace="x = 2").symbol == "<module>"


# --- text


def test_string_rows_see_every_kind_of_string() -> None:
    assert string_rows("a = '''\nb\n'''\nc") == {1, 2}
    assert string_rows('    a = f"""\n{x}\n"""\n    c') == {1, 2}
    assert string_rows("a = 'x\\\ny'\n") == {1}
    assert string_rows("a = ('x'\n'y')\n") == set()


def test_indentation_leaves_strings_alone() -> None:
    assert dedent("\n    a = '''\n  x'''\n    b\n") == "a = '''\n  x'''\nb"
    assert indent_after_first("a = '''\nx'''\n\nb", "  ") == "a = '''\nx'''\n\n  b"
