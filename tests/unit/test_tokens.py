"""Tokens keep their places, ignore white space and comments, and see every other change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strata.fingerprint import token_fingerprint
from strata.token_symbols import Document
from strata.tokens import Family, family_of, tokenize
from strata.trees import Trees

GAPS: dict[Family, re.Pattern[str]] = {
    "cpp": re.compile(r"(?:\s|\ufeff|\\[ \t]*\r?\n|//(?:\\\r?\n|[^\n])*|/\*.*?(?:\*/|\Z))*", re.DOTALL),
    "cmake": re.compile(r"(?:\s|#\[(=*)\[.*?(?:\]\1\]|\Z)|#[^\n]*)*", re.DOTALL),
    "shell": re.compile(r"(?:[ \t\r\n]|\\\r?\n|#[^\n]*)*"),
    "hash": re.compile(r"(?:\s|#[^\n]*)*"),
    "text": re.compile(r"\s*"),
}
FAMILIES: list[Family] = list(GAPS)


def texts(source: str, family: Family = "cpp") -> list[str]:
    return [t.text for t in tokenize(source, family)]


def check_round_trip(source: str, family: Family) -> None:
    position = 0
    pieces = []
    for token in tokenize(source, family):
        assert position <= token.start <= token.end <= len(source)
        gap = source[position : token.start]
        assert GAPS[family].fullmatch(gap), (gap, token)
        pieces += [gap, source[token.start : token.end]]
        position = token.end
    assert GAPS[family].fullmatch(source[position:])
    assert "".join(pieces) + source[position:] == source


# --- families


@pytest.mark.parametrize(
    ("file", "family"),
    [
        ("csrc/torch_binding.cpp", "cpp"),
        ("csrc/a/op_kernel/x.h", "cpp"),
        ("csrc/x.cce", "cpp"),
        ("csrc/CMakeLists.txt", "cmake"),
        ("csrc/cmake/func.cmake", "cmake"),
        ("csrc/build_aclnn.sh", "shell"),
        ("Dockerfile.a3", "hash"),
        ("requirements.txt", "hash"),
        ("pyproject.toml", "hash"),
        ("csrc/version.info", "text"),
        ("a.json", "text"),
    ],
)
def test_family(file: str, family: Family) -> None:
    assert family_of(file) == family


# --- C++


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a->b::c", ["a", "->", "b", "::", "c"]),
        ("V<V<int>>x;", ["V", "<", "V", "<", "int", ">", ">", "x", ";"]),
        ("x /* a */ = // b\n 1;", ["x", "=", "1", ";"]),
        ("// one \\\n still\nx", ["x"]),
        ("1'000u + 0x1p-3f + .5e+2", ["1'000u", "+", "0x1p-3f", "+", ".5e+2"]),
        ("'\\'' '\"'", ["'\\''", "'\"'"]),
        ('"a" /* c */ "b"\n  u8"c"', ['u8"abc"']),
        ('"a\\"b" x', ['"a\\"b"', "x"]),
        ('R"x(a)" "b)x" y', ['R"x(a)" "b)x"', "y"]),
        ('"\\x1" "2"', ['"\\x1""2"']),
        ('"\\\\x1" "2"', ['"\\\\x12"']),
        ('"a\\\nb"', ['"ab"']),
        ("#include <a/b.h> // c\nx", ["#", "include", "<a/b.h>", "\n", "x"]),
        ("#define A(x) \\\n  f(x)\ny", ["#", "define", "A", "(", "x", ")", "f", "(", "x", ")", "\n", "y"]),
        ("#if A", ["#", "if", "A", "\n"]),
        ("#error don't\nx", ["#", "error", "don", "'", "t", "\n", "x"]),
        ("a # b\nc", ["a", "#", "b", "c"]),
        ("kernel<<<n, s>>>(x)", ["kernel", "<<", "<", "n", ",", "s", ">", ">", ">", "(", "x", ")"]),
    ],
)
def test_cpp(source: str, expected: list[str]) -> None:
    assert texts(source) == expected


def test_strings_of_two_lines_of_directives_stay_apart() -> None:
    assert texts('#define A "a"\n"b"') == ["#", "define", "A", '"a"', "\n", '"b"']


# --- CMake and shell


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('set(A "b c" ${D}/e) # f', ["set", "(", "A", '"b c"', "${D}/e", ")"]),
        ("a(#[[ x ) ]] b)", ["a", "(", "b", ")"]),
        ("a([=[ x ]] y ]=])", ["a", "(", "[=[ x ]] y ]=]", ")"]),
        ("a($<IF:x,y>:-I${B})", ["a", "(", "$<IF:x,y>:-I${B}", ")"]),
        ('a(-DX="y z" \\;)', ["a", "(", '-DX="y z"', "\\;", ")"]),
        ('a("x\\"y\n z")', ["a", "(", '"x\\"y\n z"', ")"]),
    ],
)
def test_cmake(source: str, expected: list[str]) -> None:
    assert texts(source, "cmake") == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a  b # c\n\n# d\ne", ["a", "b", "\n", "e"]),
        ('echo "${#A[@]} $(b "c d") e"', ["echo", '"${#A[@]} $(b "c d") e"']),
        ("A=(\n 'x'\n # c\n \"y\"\n)\nb", ["A=", "(", "'x'", '"y"', ")", "\n", "b"]),
        ("a \\\n b", ["a", "b"]),
        ("if a; then\n b\nfi", ["if", "a", ";", "then", "b", "\n", "fi"]),
        ("f() {\n a\n}", ["f", "(", ")", "{", "a", "\n", "}"]),
        ("cat <<EOF > x\n # $a 'b\nEOF\nc", ["cat", "<<", "EOF", ">", "x", "\n", " # $a 'b\nEOF\n", "c"]),
        ("cat <<-'E'\n\tx\n\tE\nc", ["cat", "<<-", "'E'", "\n", "\tx\n\tE\n", "c"]),
        ("((x = 1 << 4))\n4\na", ["(", "(", "x", "=", "1", "<<", "4", ")", ")", "\n", "4", "\n", "a"]),
        ("cat <<E\na\n", ["cat", "<<", "E", "\n", "a"]),
        ("a && \\\n b |\n c", ["a", "&&", "b", "|", "c"]),
        ("x=$((1 + 2)) # c", ["x=$((1 + 2))"]),
        ("a=${b:-it's} c", ["a=${b:-it's}", "c"]),
        ("a#b $#", ["a#b", "$#"]),
        ("case $x in\n a) b ;;\nesac", ["case", "$x", "in", "a", ")", "b", ";;", "esac"]),
    ],
)
def test_shell(source: str, expected: list[str]) -> None:
    assert texts(source, "shell") == expected


# --- properties

SNIPPETS = st.text(alphabet="ab1 \n\t\"'#/*\\(){}[]<>;,.:$=-+|&!R`_\r", max_size=60)


@given(st.sampled_from(FAMILIES), st.one_of(SNIPPETS, st.text(max_size=40)))
def test_round_trip(family: Family, source: str) -> None:
    check_round_trip(source, family)
    Document(source, family).found  # noqa: B018  (symbols of any text, without failing)


POOLS: dict[Family, list[str]] = {
    "cpp": [
        "a",
        "b1",
        "42",
        '"s"',
        "'c'",
        "(",
        ")",
        "{",
        "}",
        "<",
        ">",
        "::",
        "->",
        "+",
        ";",
        'R"(x )"',
        "/",
    ],
    "cmake": ["set", "(", ")", "${A}", '"x y"', "-DB=c", "[[z]]", "A;B"],
    "shell": ["a", '"b c"', "$D", "${E[@]}", "|", "&&", ";", "'f'", "x=1", "[[", "]]", "!"],
    "hash": ["a", "=", '"b"', "1", ":", "[", "]", ","],
    "text": ["a", "=", '"b"', "1", ":", "{", "}", ","],
}
SPACES: dict[Family, list[str]] = {
    "cpp": [" ", "\n", "\t", " \\\n", " // e '\n", ' /* c \n"d */ '],
    "cmake": [" ", "\n", "\t", " # c\n", " #[[ d\n ) ]] "],
    "shell": [" ", "\t", " \\\n", "  "],
    "hash": [" ", "\n", " # c\n"],
    "text": [" ", "\n", "\t"],
}


@st.composite
def spaced(draw: st.DrawFn) -> tuple[Family, list[str], str, str]:
    """A family, tokens, and two ways to write them with other gaps."""
    family = draw(st.sampled_from(FAMILIES))
    tokens = draw(st.lists(st.sampled_from(POOLS[family]), min_size=1, max_size=15))
    gap = st.lists(st.sampled_from(SPACES[family]), min_size=1, max_size=3).map("".join)
    one, other = ("".join(draw(gap) + t for t in tokens) + draw(gap) for _ in range(2))
    return family, tokens, one, other


@given(spaced())
def test_white_space_and_comments_never_count(case: tuple[Family, list[str], str, str]) -> None:
    family, _, one, other = case
    assert texts(one, family) == texts(other, family)
    assert token_fingerprint(texts(one, family)) == token_fingerprint(texts(other, family))


@given(spaced(), st.data())
def test_another_token_always_counts(case: tuple[Family, list[str], str, str], data: st.DataObject) -> None:
    family, tokens, one, _ = case
    n = data.draw(st.integers(0, len(tokens) - 1))
    instead = data.draw(st.sampled_from(POOLS[family]))
    assume(instead != tokens[n])
    changed = " ".join([*tokens[:n], instead, *tokens[n + 1 :]])
    assert token_fingerprint(texts(one, family)) != token_fingerprint(texts(changed, family))


# --- the real sources


def csrc_files(real_trees: Trees) -> list[Path]:
    root = real_trees.roots["vllm-ascend"] / "csrc"
    wanted = (".h", ".hpp", ".cpp", ".cc", ".txt", ".cmake", ".sh", ".inc", ".in", ".info", ".json", ".ini")
    return sorted(p for p in root.rglob("*") if p.is_file() and p.name.endswith(wanted))


@pytest.mark.sources
@pytest.mark.slow
def test_every_csrc_file_round_trips_and_may_be_respaced(real_trees: Trees) -> None:
    files = csrc_files(real_trees)
    assert len(files) > 1000
    for path in files:
        source = path.read_bytes().decode("utf-8")
        family = family_of(path.name)
        tokens = tokenize(source, family)
        respaced, position = "", 0
        for n, token in enumerate(tokens):
            assert token.start >= position, path
            position = token.end
            here = source[token.start : token.end]
            follows = tokens[n + 1] if n + 1 < len(tokens) else None
            respaced += " # x\n" if family == "shell" and token.kind == "eol" else here
            if follows and follows.directive and (token.kind == "eol" or not token.directive):
                respaced += "\n"  # a directive begins a line
            elif token.directive:
                respaced += " "
            elif family in ("cpp", "cmake"):
                respaced += SPACES[family][-1] + SPACES[family][0]
            elif follows and follows.start > token.end and not here.endswith("\n"):
                respaced += {"shell": " \\\n ", "hash": " # x\n ", "text": "\n "}[family]
        if "third_party" in path.parts or (
            family == "shell" and any(t.text.startswith("<<") for t in tokens)
        ):
            continue  # a here-document begins at the next line; others' code: a round trip will do
        assert [t.text for t in tokenize(respaced, family)] == [t.text for t in tokens], path
