"""What an anchor matches in Python, and what is said when it does not."""

from __future__ import annotations

import pytest
from series_tools import code, fault, place
from strata.languages import language_of
from strata.python_symbols import module_of
from strata.spans import PlaceFault

SOURCE = code('''
    """Doc."""
    import os

    LIMIT = 3
    A, B = 1, 2

    class Thing:
        size: int = 4

        @property
        def width(self):
            return self._w

        @width.setter
        def width(self, value):
            self._w = value

        def run(self, x, *rest, key="q", **more):
            if x:
                self.step(x, key='q',)  # trailing comma, other quotes
            elif key:
                self.step((x))
            else:
                self.stop()
            try:
                go(x)
            except ValueError:
                back()
            finally:
                done()

            def inner(y):
                return self.step(y)

            for i in rest:
                self.step(i)
                log(i)
                log(i)
            return f"{self.step(x)} {x!r:>{len(x)}}"

    if os.name == "nt":
        def where():
            return 1
    else:
        def where():
            return 2

    try:
        import fast
    except ImportError:
        fast = None
''')


def line(at: str, **parts: object) -> int:
    return (
        place(SOURCE, at, delete=True, **parts).line
        if "replace" not in parts
        else place(SOURCE, at, **parts).line
    )


def test_symbols_name_everything_addressable() -> None:
    names = [s.qualname for s in language_of("f.py").symbols(SOURCE)]
    assert names == [
        "<module>", "LIMIT", "A", "B", "Thing", "Thing.size", "Thing.width", "Thing.width.setter", "Thing.run",
        "Thing.run.inner", "where#1", "where#2", "fast",
    ]  # fmt: skip


def test_conditional_definitions_carry_their_condition() -> None:
    found = {s.qualname: s.condition for s in language_of("f.py").symbols(SOURCE)}
    assert found["where#1"] == "if os.name == 'nt'"
    assert found["where#2"] == "if not (os.name == 'nt')"
    assert found["fast"] == "except ImportError"
    assert found["Thing.run"] == ""


def test_a_condition_is_part_of_the_fingerprint_but_not_of_the_body() -> None:
    language = language_of("f.py")
    bare, under = "def f():\n    return 1\n", "if X:\n    def f():\n        return 1\n"
    assert language.fingerprint(bare, "f") != language.fingerprint(under, "f")
    assert language.body_fingerprint(bare, "f") == language.body_fingerprint(under, "f")
    other = under.replace("if X", "if Y")
    assert language.fingerprint(under, "f") != language.fingerprint(other, "f")


def test_a_body_fingerprint_leaves_out_the_own_name() -> None:
    language = language_of("f.py")
    twins = "def f(x):\n    return x\ndef g(x):\n    return x\n"
    assert language.body_fingerprint(twins, "f") == language.body_fingerprint(twins, "g")
    assert language.fingerprint(twins, "f") != language.fingerprint(twins, "g")


def test_a_name_defined_twice_needs_its_number() -> None:
    found = fault(SOURCE, "where", find="return 1", replace="return 3")
    assert found.code == "E-AMBIGUOUS"
    assert "where#1 (function, line 42, under if os.name == 'nt')" in found.candidates
    assert line("where#2", find="return 2", replace="return 3") == 46


def test_a_lone_definition_wins_over_assignments_of_its_name() -> None:
    source = "def f():\n    pass\nf = wrap(f)\n"
    assert module_of(source).find("f").qualname == "f#1"


def test_locals_may_be_spelled_or_left_out() -> None:
    for name in ("Thing.run.inner", "Thing.run.<locals>.inner"):
        assert line(name, find="return self.step(y)") == 33


def test_nested_functions_are_searched_only_when_named() -> None:
    found = fault(SOURCE, "Thing.run", find="self.step(y)", replace="0")
    assert found.code == "E-CONFLICT"
    assert "Thing.run.inner" in found.found


def test_a_missing_symbol_names_its_neighbours() -> None:
    found = fault(SOURCE, "Thing.rum", find="x", replace="y")
    assert found.code == "E-SYMBOL-GONE"
    assert "Thing.run" in found.candidates


@pytest.mark.parametrize(
    "pattern",
    [
        "self.step(x, key='q')",
        'self.step(x, key="q")',
        "self.step((x), key='q',)",
        "self.step(\n  x,  # why\n  key='q')",
    ],
)
def test_spelling_does_not_matter(pattern: str) -> None:
    assert line("Thing.run", find=pattern, replace="0") == 20


def test_captures_take_one_node_or_a_list() -> None:
    assert line("Thing.run", find="self.step(x, $$$REST)", nth=1, replace="0") == 20
    assert line("Thing.run", find="self.step($A, key=$B)", replace="0") == 20
    assert line("Thing.run", find="self.step($$$ANY)", nth=3, replace="0") == 36


def test_a_repeated_capture_must_be_equal() -> None:
    source = "f(a, a)\nf(a, b)\nf((b), b)\n"
    assert [place(source, find="f($X, $X)", nth=n, replace="0").line for n in (1, 2)] == [1, 3]
    assert place(source, find="f($_, $_)", nth=2, replace="0").line == 2


def test_consecutive_statements_of_one_block() -> None:
    assert line("Thing.run", find="self.step(i)\nlog(i)") == 36
    assert line("Thing.run", find="self.step($X)\n$$$MID\nlog($X)", replace="0") == 36
    assert fault(SOURCE, "Thing.run", find="go(x)\nback()", delete=True).code == "E-CONFLICT"


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("if x:\n  $$$A", "elif"),
        ("try:\n  $$$A\nexcept ValueError:\n  $$$B", "finally"),
        ("try:\n  $$$A\nfinally:\n  $$$B", "except"),
    ],
)
def test_every_clause_must_be_accounted_for(pattern: str, word: str) -> None:
    found = fault(SOURCE, "Thing.run", find=pattern, replace="pass")
    assert found.code == "E-PARTIAL"
    assert found.message.endswith(word)


def test_a_compound_statement_with_all_clauses_matches() -> None:
    assert line("Thing.run", find="if x:\n  $$$A\nelif key:\n  $$$B\nelse:\n  $$$C") == 19
    assert line("Thing.run", find="if x:\n  $$$A\nelse:\n  $$$C") == 19
    assert line("Thing.run", find="try:\n  $$$A\nexcept ValueError:\n  $$$B\nfinally:\n  $$$C") == 25


def test_an_elif_is_no_statement_of_its_own() -> None:
    source = "if a:\n    x\nelif b:\n    y\n"
    assert fault(source, find="if b:\n  $$$A", delete=True).code == "E-CONFLICT"


def test_narrowing_then_counting() -> None:
    assert line("Thing.run", find="self.step($X)", in_="for i in rest:", replace="0") == 36
    assert line("Thing.run", find="self.step($X)", next_to="log($X)", replace="0") == 36
    assert line("Thing.run", find="log(i)", next_to="self.step(i)") == 37
    assert place(SOURCE, "Thing.run", find="log(i)", count=2, delete=True).line == 37
    assert fault(SOURCE, "Thing.run", find="log(i)", delete=True).code == "E-AMBIGUOUS"
    assert fault(SOURCE, "Thing.run", find="log(i)", count=3, delete=True).code == "E-AMBIGUOUS"
    assert fault(SOURCE, "Thing.run", find="log(i)", nth=3, delete=True).code == "E-AMBIGUOUS"
    assert fault(SOURCE, "Thing.run", find="log(i)", in_="while $C:", delete=True).code == "E-CONFLICT"


def test_captures_of_in_are_captures() -> None:
    source = "def f():\n    for item in rest:\n        go(1)\n"
    spans = place(source, "f", find="go(1)", in_="for $V in $L:", replace="go($V, $L)").spans
    assert spans[0].text == "go(item, rest)"


def test_inside_an_f_string_nothing_can_be_edited() -> None:
    found = fault(SOURCE, "Thing.run", find="len(x)", replace="0")
    assert found.code == "E-EDIT"
    assert "f-string" in found.message
    assert line("Thing.run", find='return f"{self.step(x)} {x!r:>{len(x)}}"') == 39


def test_the_nearest_candidates_are_shown() -> None:
    found = fault(SOURCE, "Thing.run", find="go(z)", replace="0")
    assert found.candidates[0] == "line 26: go(x)"


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("if x:", "not Python"),
        ("f(", "not Python"),
        ("$X", "would match anything"),
        ("x = $$$A", "stands for a list"),
        ("$$$A\nf()", "starts or ends"),
        ("# only a comment", "holds no code"),
    ],
)
def test_misuse_of_a_pattern_is_an_edit_fault(pattern: str, word: str) -> None:
    found = fault("x = f()\n", find=pattern, delete=True)
    assert found.code == "E-EDIT"
    assert word in found.message


def test_dollars_in_strings_are_no_captures() -> None:
    assert place("f('$HOME')\n", find='f("$HOME")', replace="0").line == 1
    assert fault("f('x')\n", find='f("$HOME")', replace="0").code == "E-CONFLICT"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_positions_hold_for_every_newline_and_for_wide_characters(newline: str) -> None:
    source = newline.join(["x = '☃ü'", "def f():", "    a = '☃'; b = g('ü', 1)", ""])
    span = place(source, "f", find="g($$$A)", replace="h($$$A)").spans[0]
    assert source[span.start : span.end] == "g('ü', 1)"
    assert span.text == "h('ü', 1)"


def test_a_byte_order_mark_shifts_nothing() -> None:
    span = place("\ufeffx = f(1)\n", find="f(1)", replace="g").spans[0]
    assert (span.start, span.end) == (5, 9)


def test_a_file_that_is_no_python() -> None:
    with pytest.raises(PlaceFault) as found:
        place("def f(:\n", find="x", replace="y")
    assert found.value.code == "E-PARSE"
    assert found.value.line == 1


def test_patterns_of_definitions_match_parameters_as_lists() -> None:
    source = "class C:\n    def f(self, a: int, *b, c=1, **d) -> int:\n        return 1\n"
    for pattern in (
        "def f(self, $$$REST) -> int: $$$B",
        "def f($$$ALL) -> $R: $$$B",
        "def $F($$$ALL) -> int:\n  return 1",
    ):
        assert place(source, "C", find=pattern, delete=True).line == 2
    assert fault(source, "C", find="def f(self): $$$B", delete=True).code == "E-CONFLICT"


def test_dicts_match_by_pairs() -> None:
    source = "x = {'a': 1, **rest, 'b': 2}\n"
    assert (
        place(source, find="{'a': $V, $$$MORE}", replace="{$$$MORE, 'a': $V}").spans[0].text
        == "{**rest, 'b': 2, 'a': 1}"
    )
