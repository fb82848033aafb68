"""Token edits: symbols by brackets, patterns, every verb, faults that say where to look."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from strata.composition import Keyed, Piece, compose, text_of
from strata.model import Edit
from strata.spans import PlaceFault, Placement
from strata.token_edits import TokenLanguage, token_language
from strata.token_symbols import Document
from strata.tokens import tokenize
from strata.trees import Trees


def place(file: str, source: str, symbol: str | None = None, **words: Any) -> Placement:
    at = file + (f"::{symbol}" if symbol else "")
    edit = Edit.model_validate({"at": at, **{k.rstrip("_"): v for k, v in words.items()}})
    return token_language(file).place(source, edit)


def changed(source: str, placement: Placement) -> str:
    for span in sorted(placement.spans, key=lambda s: (s.start, s.end), reverse=True):
        assert (span.op == "insert") == (span.start == span.end)
        source = source[: span.start] + span.text + source[span.end :]
    return source


def cpp(source: str, symbol: str | None = None, **words: Any) -> str:
    return changed(source, place("csrc/x.cpp", source, symbol, **words))


def cmake(source: str, symbol: str | None = None, **words: Any) -> str:
    return changed(source, place("csrc/CMakeLists.txt", source, symbol, **words))


def shell(source: str, symbol: str | None = None, **words: Any) -> str:
    return changed(source, place("csrc/build.sh", source, symbol, **words))


def fault(file: str, source: str, symbol: str | None = None, **words: Any) -> PlaceFault:
    with pytest.raises(PlaceFault) as caught:
        place(file, source, symbol, **words)
    return caught.value


# --- symbols

CPP = """\
#include "a.h"

namespace ns {
namespace {
constexpr int N = 3;
}

template <typename T, int K = (1 > 0)>
class Op : public Base<T> {
public:
    __aicore__ inline Op(int a) : a_(a), b_{a}, Base<T>(a) { Init(); }
    ~Op() = default;
    __aicore__ inline void Copy(uint64_t n)
    {
        if (n) {
            Load(n);  // first
        } else {
            Store(n);
        }
        Done();
    }
    bool operator==(const Op &o) const { return a_ == o.a_; }
    T operator()(int i) const noexcept(true) { return v[i]; }
    explicit operator bool() const { return true; }
private:
    int a_, b_{0};
    struct Inner { int x; };
    static constexpr int kSizes[] = {1, 2};
};

void Plain(int a) { Use(a); }
void Plain(long a) { Use(a); }
template <> std::vector<int> Outer<int>::Get<2>(std::function<void(int)> f) { return {}; }
auto lambda = [](int x) { return x; };
extern "C" __global__ __aicore__ void entry(GM_ADDR x) { Run(x); }
}
__launch_bounds__(64) void Bounded() {}
enum class Color : int { Red, Blue };
REGISTER(CONCAT(a, b), ops) { ops.def("x"); }
"""


def test_cpp_symbols() -> None:
    names = [s.qualname for s in TokenLanguage("cpp").symbols(CPP)]
    assert names == [
        "ns::Op", "ns::Op::Op", "ns::Op::Copy", "ns::Op::operator==", "ns::Op::operator()",
        "ns::Op::operatorbool", "ns::Op::Inner", "ns::Plain#1", "ns::Plain#2", "ns::Outer::Get", "ns::entry",
        "Bounded", "Color", "REGISTER",
    ]  # fmt: skip


def test_symbol_extent_line_and_kind() -> None:
    by_name = {s.qualname: s for s in TokenLanguage("cpp").symbols(CPP)}
    copy, op = by_name["ns::Op::Copy"], by_name["ns::Op"]
    assert CPP[copy.start : copy.end].startswith("__aicore__ inline void Copy(")
    assert CPP[copy.start : copy.end].endswith("Done();\n    }")
    assert (copy.kind, op.kind, by_name["Color"].kind) == ("function", "class", "enum")
    assert CPP.splitlines()[copy.line - 1].strip().startswith("__aicore__ inline void Copy")
    assert CPP[op.start : op.end].startswith("template <typename T")
    assert CPP[op.start : op.end].endswith("};")


@pytest.mark.parametrize("name", ["ns::Op::Copy", "Op::Copy", "Copy"])
def test_namespaces_may_be_left_out(name: str) -> None:
    assert place("csrc/x.h", CPP, name, append="x();").symbol == "ns::Op::Copy"


def test_overloads_need_a_number() -> None:
    error = fault("csrc/x.h", CPP, "Plain", append="x();")
    assert error.code == "E-AMBIGUOUS"
    assert error.candidates == ["ns::Plain#1 (line 31)", "ns::Plain#2 (line 32)"]
    assert place("csrc/x.h", CPP, "Plain#2", append="x();").line == 32
    assert fault("csrc/x.h", CPP, "Plain#3", append="x();").code == "E-SYMBOL-GONE"


def test_missing_symbol_names_similar_ones() -> None:
    error = fault("csrc/x.h", CPP, "Op::Copi", append="x();")
    assert error.code == "E-SYMBOL-GONE"
    assert "ns::Op::Copy (line 13)" in error.candidates


def test_branches_of_the_preprocessor_may_each_open_a_brace() -> None:
    source = "#if A\nvoid f(int a) {\n#else\nvoid f(long a) {\n#endif\n  x();\n}\n"
    source += "void g() {\n#if B\n}\n#else\n}\n#endif\nint z;"
    document = Document(source, "cpp")
    braces = [n for n, t in enumerate(document.texts) if t in "{}"]
    assert all(n in document.pairs for n in braces)
    names = [s.qualname for s in TokenLanguage("cpp").symbols(source)]
    assert names[-1] == "g"
    assert names[0].startswith("f")


def test_macros_with_odd_braces_do_not_disturb() -> None:
    source = "#define OPEN namespace a {\n#define CLOSE }\nvoid f() { g(); }\n"
    assert [s.qualname for s in TokenLanguage("cpp").symbols(source)] == ["f"]


CMAKE = """\
function(add_ops)
  if (A)
    message("x")
  else ()
    message("y")
  endif ()
endfunction()
macro(more NAME)
endmacro()
if (OPEN)
    list(APPEND OPTS -a)
else()
    list(APPEND OPTS -a)
endif()
set(FLAGS "-O2"
    -g  # debug
)
install(FILES a.h b.h DESTINATION inc OPTIONAL)
"""

SHELL = """\
#!/bin/bash
log() {
    echo "[x] $*"
}
function other {
  for i in a b; do
    log "$i"
  done
}
if [[ "$SOC" =~ ^ascend910b ]]; then
    OPS=(
        "one"
        "two"
    )
elif [[ "$SOC" =~ ^ascend910_93 ]]; then
    OPS=(
        "one"
        "three"  # last
    )
else
    OPS=(one)
fi
cmd --a \\
    --b
"""


def test_cmake_and_shell_symbols() -> None:
    assert [(s.qualname, s.kind) for s in TokenLanguage("cmake").symbols(CMAKE)] == [
        ("add_ops", "function"),
        ("more", "macro"),
    ]
    symbols = TokenLanguage("shell").symbols(SHELL)
    assert [(s.qualname, SHELL[s.end - 1]) for s in symbols] == [("log", "}"), ("other", "}")]


# --- fingerprints


def test_fingerprint_of_a_symbol_sees_only_it() -> None:
    language = TokenLanguage("cpp")
    before = language.fingerprint(CPP, "Op::Copy")
    assert re.fullmatch(r"tok1:[0-9a-f]{32}", before)
    assert language.fingerprint(CPP.replace("Use(a)", "Use(b)"), "Op::Copy") == before
    assert language.fingerprint(CPP.replace("// first", "/* 1st */"), "Op::Copy") == before
    assert language.fingerprint(CPP.replace("Load(n)", "Load(m)"), "Op::Copy") != before
    assert language.fingerprint(CPP, None) == language.fingerprint(CPP, "")
    assert language.fingerprint(CPP.replace("Use(a)", "Use(b)"), None) != language.fingerprint(CPP, None)
    with pytest.raises(PlaceFault):
        language.fingerprint(CPP, "Op::Gone")


def test_body_fingerprint_leaves_out_the_name() -> None:
    language = TokenLanguage("cpp")
    renamed = CPP.replace("Copy(uint64_t n)", "Fetch(uint64_t n)")
    assert language.fingerprint(CPP, "Copy") != language.fingerprint(renamed, "Fetch")
    assert language.body_fingerprint(CPP, "Copy") == language.body_fingerprint(renamed, "Fetch")
    assert language.body_fingerprint(CPP, "Copy") != language.body_fingerprint(CPP, "Plain#1")
    one, other = (f"{n}() {{\n  echo x\n}}\n" for n in ("f", "g"))
    assert TokenLanguage("shell").body_fingerprint(one, "f") == TokenLanguage("shell").body_fingerprint(
        other, "g"
    )


def test_between_is_a_region_that_the_lock_can_name() -> None:
    words = {"between": ["elif", "else"], "find": "OPS=(", "add_item": {"value": "new"}}
    placed = place("csrc/build.sh", SHELL, **words)
    language = TokenLanguage("shell")
    assert not re.search(r"\s", placed.symbol)
    assert SHELL[slice(*placed.region)].startswith('[[ "$SOC" =~ ^ascend910_93')
    seen = language.fingerprint(SHELL, placed.symbol)
    assert language.fingerprint(SHELL.replace('"two"', '"2"'), placed.symbol) == seen
    assert language.fingerprint(SHELL.replace('"three"', '"3"'), placed.symbol) != seen
    assert language.body_fingerprint(SHELL, placed.symbol) == seen


def test_between_faults() -> None:
    words = {"find": "OPS=(", "add_item": {"value": "new"}}
    assert fault("csrc/build.sh", SHELL, between=["OPS=(", "else"], **words).code == "E-AMBIGUOUS"
    assert fault("csrc/build.sh", SHELL, between=["nowhere", "else"], **words).code == "E-CONFLICT"
    assert fault("csrc/build.sh", SHELL, between=["elif", "nowhere"], **words).code == "E-CONFLICT"


def test_neighbours_see_the_statements_beside_and_no_others() -> None:
    source = "void f() {\n  a();\n  b();\n  c();\n  d();\n}\n"
    near = place("csrc/x.cpp", source, "f", find="b()", replace="x()").neighbours
    for old, same in (("a()", False), ("c()", False), ("d()", True), ("f()", True)):
        other = source.replace(old, "z()")
        symbol = "z" if old == "f()" else "f"
        assert (place("csrc/x.cpp", other, symbol, find="b()", replace="x()").neighbours == near) is same, old


# --- finding


def test_white_space_comments_and_split_strings_do_not_matter() -> None:
    source = 'void f() {\n  def("a(int x) "\n      "-> int" /* c */ , 1);\n}\n'
    assert cpp(source, find='def( "a(int x) -> int", $N )', replace="use($N)") == "void f() {\n  use(1);\n}\n"


def test_captures_keep_brackets_and_give_source_text() -> None:
    source = "x = f(a + 1, g(b, c),  d /* k */ + e);\n"
    assert (
        cpp(source, find="f($A, $$$REST)", replace="h($$$REST, $A)")
        == "x = h(g(b, c),  d /* k */ + e, a + 1);\n"
    )
    assert cpp("f();", find="f($$$A)", replace="f(x, $$$A)") == "f(x);"
    assert cpp("f();", find="f($$$A)", replace="f($$$A, x)") == "f(x);"
    assert cpp("f(a, a); f(a, b);", find="f($X, $X)", replace="g($X)") == "g(a); f(a, b);"
    assert cpp("f(a, b);", find="f($_, $_)", replace="g()") == "g();"
    assert cmake("set(A b c)", find="set($N $$$V)", replace="set($N x $$$V)") == "set(A x b c)"
    assert shell("echo $HOME a", find="echo $HOME", replace="printf $HOME") == "printf $HOME a"
    assert fault("csrc/x.sh", "echo $HOMES a", find="echo $HOME", replace="x").code == "E-CONFLICT"


def test_matching_does_not_run_over_directives() -> None:
    source = "#define A f(\nx);\n#include <a.h>\n"
    assert fault("csrc/x.h", source, find="f( $$$X )", replace="g()").code == "E-CONFLICT"
    assert cpp(source, find="#include <a.h>", replace="#include <b.h>").endswith("#include <b.h>\n")
    assert fault("csrc/x.h", "#define A 1\n", find="#define A", replace="x").code == "E-CONFLICT"


def test_bad_patterns() -> None:
    for pattern in ("$$$A x", "x $$$A", "$A", "// only a comment", "$_ $$$_ $_"):
        error = fault("csrc/x.cpp", "x y z", find=pattern, replace="q")
        assert error.code == "E-EDIT", pattern
    assert fault("csrc/x.cpp", "f(a)", find="f($A)", replace="g($B)").code == "E-EDIT"
    assert fault("csrc/x.cpp", "a a a", find="a a", count=2, replace="b").code == "E-EDIT"


def test_count_nth_in_and_next_to() -> None:
    source = "void f() {\n  if (a) {\n    x();\n  } else {\n    x();\n  }\n  y();\n  x();\n  z();\n}\n"
    error = fault("csrc/x.cpp", source, find="x()", replace="q()")
    assert (error.code, error.line) == ("E-AMBIGUOUS", 3)
    assert error.candidates == ["line 3: x();", "line 5: x();", "line 8: x();"]
    assert cpp(source, find="x()", count=3, replace="q()") == source.replace("x()", "q()")
    assert cpp(source, find="x()", nth=2, replace="q()").splitlines()[4] == "    q();"
    assert cpp(source, find="x()", in_="if (a)", replace="q()").splitlines()[2] == "    q();"
    assert cpp(source, find="x()", in_="else {", replace="q()").splitlines()[4] == "    q();"
    assert cpp(source, find="x()", next_to="z()", replace="q()").splitlines()[7] == "  q();"
    assert fault("csrc/x.cpp", source, find="x()", nth=4, replace="q()").code == "E-AMBIGUOUS"
    assert fault("csrc/x.cpp", source, find="x()", nth=1, count=2, replace="q()").code == "E-EDIT"
    assert fault("csrc/x.cpp", source, find="x()", in_="while (a)", replace="q()").code == "E-CONFLICT"
    assert fault("csrc/x.cpp", source, find="x()", count=2, replace="q()").code == "E-AMBIGUOUS"


def test_left_out_clauses() -> None:
    source = "void f() {\n  if (a) { x(); } else { y(); }\n}\n"
    for verb in ({"replace": "z();"}, {"delete": True}, {"after": "z();"}):
        assert fault("csrc/x.cpp", source, find="if (a) { $$$B }", **verb).code == "E-PARTIAL"
    assert cpp(source, find="if (a) { $$$B } else { $$$C }", replace="z();") == "void f() {\n  z();\n}\n"
    assert cpp(source, find="if (a)", replace="if (b)") == source.replace("(a)", "(b)")


def test_nearest_candidates() -> None:
    error = fault("csrc/x.cpp", CPP, "Op::Copy", find="Store(m);", replace="x")
    assert error.code == "E-CONFLICT"
    assert error.candidates[0] == "line 18: Store(n);"
    assert "ns::Op::Copy" in error.message


@given(st.data())
def test_any_run_of_tokens_finds_itself(data: st.DataObject) -> None:
    tokens = tokenize(CPP, "cpp")
    first = data.draw(st.integers(0, len(tokens) - 1))
    last = data.draw(st.integers(first, min(first + 12, len(tokens) - 1)))
    run = tokens[first : last + 1]
    # a directive's end belongs to its beginning, and neighbouring lists overlap in "::" alone
    if any(t.directive for t in run) or all(len(t.text) == 1 for t in run):
        return
    pattern = " /* gap */ ".join(CPP[t.start : t.end] for t in run)
    try:
        placed = place("csrc/x.cpp", CPP, find=pattern, replace="REPLACED")
    except PlaceFault as error:
        assert error.code == "E-AMBIGUOUS"
        assert len(error.candidates) > 1
        return
    assert placed.spans[0].start == run[0].start
    assert placed.spans[0].end == run[-1].end


# --- verbs

BODY = "void f() {\n    a();  // one\n    b(c);\n}\n"


def test_before_and_after_are_lines_of_their_own() -> None:
    text = "if (x) {\n    y();\n}\n"
    assert cpp(BODY, find="b(c);", before=text) == BODY.replace(
        "    b(c);\n", "    if (x) {\n        y();\n    }\n    b(c);\n"
    )
    assert cpp(BODY, find="a()", after="y();") == BODY.replace("// one\n", "// one\n    y();\n")
    assert cpp("f();", find="f();", after="g();") == "f();\ng();"
    assert cpp("f();\r\nh();\r\n", find="f();", after="g();\nk();") == "f();\r\ng();\r\nk();\r\nh();\r\n"
    assert (
        cpp("#include <a>\n\nx;\n", find="#include <a>", after="#include <b>")
        == "#include <a>\n#include <b>\n\nx;\n"
    )
    assert cpp(BODY, find="void f() {", after="x();") == BODY.replace("{\n", "{\n    x();\n")


def test_before_and_after_inside_a_line() -> None:
    assert cpp("x = a + b;\n", find="b", after="+ c") == "x = a + b + c;\n"
    assert cpp("x = a + b;\n", find="b", before="c +") == "x = a + c + b;\n"
    error = fault("csrc/x.cpp", "x = a + b;\n", find="b", before="c\n+")
    assert error.code == "E-EDIT"
    assert fault("csrc/x.cpp", "a(); /* b\n c */ d();\n", find="a();", after="x();").code == "E-EDIT"


def test_lines_of_raw_strings_and_here_documents_keep_their_indentation() -> None:
    text = 'x(R"(a\nb)");\ny();'
    assert cpp("  f();\n", find="f();", before=text) == '  x(R"(a\nb)");\n  y();\n  f();\n'
    text = "cat <<EOF\nline\nEOF\n"
    assert (
        shell("if a; then\n  b\nfi\n", find="b", before=text)
        == "if a; then\n  cat <<EOF\nline\nEOF\n  b\nfi\n"
    )


def test_lines_joined_by_backslashes_stay_joined() -> None:
    source = "#define M(x) \\\n    a(x); \\\n    b(x)\n"
    assert cpp(source, find="a(x);", after="c(x);") == source.replace(
        "a(x); \\\n", "a(x); \\\n    c(x); \\\n"
    )
    assert cpp(source, find="b(x)", before="c(x);") == source.replace("    b(x)", "    c(x); \\\n    b(x)")
    assert cpp(source, find="a(x);", replace="a(x);\nc(x);") == source.replace("a(x);", "a(x); \\\n    c(x);")
    assert shell(SHELL, find="--b", before="--c").endswith("cmd --a \\\n    --c \\\n    --b\n")


def test_replace_indents_its_further_lines() -> None:
    assert cpp(BODY, find="b(c);", replace="if (d) {\n    b(c);\n}") == BODY.replace(
        "b(c);", "if (d) {\n        b(c);\n    }"
    )


def test_delete_takes_whole_lines_where_nothing_else_is_on_them() -> None:
    assert cpp(BODY, find="a();", delete=True) == BODY.replace("    a();  // one\n", "")
    assert cpp("x = a + b;\n", find="+ b", delete=True) == "x = a ;\n"
    assert cpp("#include <a>\n#include <b>\n", find="#include <b>", delete=True) == "#include <a>\n"
    assert cpp("a();\nb();", find="b();", delete=True) == "a();"
    assert cmake(CMAKE, find="install(FILES $$$A)", delete=True) == CMAKE[: CMAKE.index("install")]


def test_append_and_prepend() -> None:
    assert cpp(BODY, "f", append="z();") == BODY.replace("b(c);\n", "b(c);\n    z();\n")
    assert cpp(BODY, "f", prepend="z();") == BODY.replace("{\n", "{\n    z();\n")
    assert cpp("void f() { a(); }", "f", prepend="z();") == "void f() { z(); a(); }"
    assert cpp("void f() { a(); }", "f", append="z();") == "void f() { a(); z(); }"
    assert cpp("void f()\n{\n}\n", "f", append="z();") == "void f()\n{\n    z();\n}\n"
    assert cmake(CMAKE, "more", append="x()") == CMAKE.replace("NAME)\n", "NAME)\n    x()\n")
    assert shell(SHELL, "log", prepend="local a\nlocal b") == SHELL.replace(
        "{\n    echo", "{\n    local a\n    local b\n    echo"
    )
    assert shell(SHELL, "other", append="wait") == SHELL.replace("  done\n", "  done\n  wait\n")
    assert shell(SHELL, append="end").endswith("--b\nend\n")
    assert shell(SHELL, prepend="set -e").startswith("#!/bin/bash\nset -e\nlog()")


def test_verbs_of_python_are_refused() -> None:
    for words in (
        {"find": "a", "wrap": "$BODY"},
        {"import": "x"},
        {"decorate": {"with": "@x"}},
        {"add_param": {"name": "x"}},
    ):
        assert fault("csrc/x.cpp", BODY, **words).code == "E-EDIT"


# --- lists


@pytest.mark.parametrize(
    ("source", "place_", "expected"),
    [
        ("f(a, b);", "last", "f(a, b, x);"),
        ("f(a, b);", "first", "f(x, a, b);"),
        ("f(a, b);", "after a", "f(a, x, b);"),
        ("f(a, b);", "before b", "f(a, x, b);"),
        ("f();", "last", "f(x);"),
        ("f(g(1, 2), {3, 4});", "after g(1, 2)", "f(g(1, 2), x, {3, 4});"),
        ("f(\n    a,\n    b);", "last", "f(\n    a,\n    b,\n    x);"),
        ("f(\n    a,\n    b,\n);", "last", "f(\n    a,\n    b,\n    x,\n);"),
        ("f(\n    a,  // one\n    b  // two\n);", "last", "f(\n    a,  // one\n    b,  // two\n    x\n);"),
        ("f(\n    a,  // one\n    b\n);", "after a", "f(\n    a,  // one\n    x,\n    b\n);"),
        ("f(\n    a,\n    b\n);", "first", "f(\n    x,\n    a,\n    b\n);"),
    ],
)
def test_cpp_lists(source: str, place_: str, expected: str) -> None:
    assert cpp(source, find="f", add_item={"value": "x", "place": place_}) == expected


def test_what_the_list_is() -> None:
    item = {"value": "x"}
    assert cpp("int a[] = {1, 2};", find="a[] =", add_item=item) == "int a[] = {1, 2, x};"
    assert cpp("int a[] = {1, 2};", find="a[] = {", add_item=item) == "int a[] = {1, 2, x};"
    assert cpp("int a[] = {1, 2};", find="a[] = {$$$V}", add_item=item) == "int a[] = {1, 2, x};"
    assert cpp("f(a)(b);", find="f(a)", add_item=item) == "f(a, x)(b);"
    assert cpp("void f(int a) { }", "f", find="f", add_item=item) == "void f(int a, x) { }"
    assert fault("csrc/x.cpp", "a = b;", find="a", add_item=item).code == "E-EDIT"
    assert (
        fault("csrc/x.cpp", "f(a, b);", find="f", add_item={"value": "x", "place": "near a"}).code == "E-EDIT"
    )
    gone = fault("csrc/x.cpp", "f(a, b);", find="f", add_item={"value": "x", "place": "after c"})
    assert (gone.code, gone.candidates) == ("E-CONFLICT", ["line 1: a", "line 1: b"])
    twice = fault("csrc/x.cpp", "f(a, a);", find="f", add_item={"value": "x", "place": "after a"})
    assert twice.code == "E-AMBIGUOUS"


def test_cmake_lists() -> None:
    def add(find: str, value: str, place_: str = "last", **words: Any) -> str:
        return cmake(CMAKE, find=find, add_item={"value": value, "place": place_}, **words)

    assert "-a -b)\nelse()" in add("list(APPEND OPTS", "-b", in_="if (OPEN)")
    assert add("list(APPEND OPTS $$$A)", "-b", in_="else()").count("-a -b") == 1
    assert 'set(FLAGS "-O2"\n    -g  # debug\n    -w\n)' in add("set(FLAGS", "-w")
    assert 'set(FLAGS -w "-O2"\n' in add("set(FLAGS $$$A)", "-w", "first")
    assert 'set(FLAGS "-O2" -w\n' in add("set(FLAGS", "-w", 'after "-O2"')
    assert "install(FILES a.h b.h c.h DESTINATION" in add("install(FILES", "c.h")
    assert "install(FILES a.h b.h c.h DESTINATION" in add("install(FILES $$$A)", "c.h")
    assert "install(FILES a.h c.h b.h DESTINATION" in add("install(FILES", "c.h", "before b.h")
    doubled = fault("csrc/CMakeLists.txt", CMAKE, find="set(FLAGS", add_item={"value": "-g"})
    assert (doubled.code, doubled.line) == ("E-CONFLICT", 16)


def test_shell_lists_take_the_quotes_of_their_items() -> None:
    first, second = SHELL.split("elif")
    item = {"value": "new"}
    assert shell(SHELL, find="OPS=(", in_="^ascend910b", add_item=item) == SHELL.replace(
        '"two"\n', '"two"\n        "new"\n'
    )
    assert shell(
        SHELL, find="OPS=( $$$O )", in_='elif [[ "$SOC" =~ ^ascend910_93 ]]', add_item=item
    ) == SHELL.replace("# last\n", '# last\n        "new"\n')
    assert shell(SHELL, find="OPS=(", in_="else", nth=1, add_item=item).count("new") == 1
    after = shell(
        SHELL, between=["elif", "else"], find="OPS=(", add_item={"value": "new", "place": "after one"}
    )
    assert after == first + "elif" + second.replace('"one"\n', '"one"\n        "new"\n', 1)
    assert "OPS=(one new)" in shell(SHELL, find="OPS=(", nth=3, add_item=item)
    there = fault("csrc/x.sh", SHELL, find="OPS=(", nth=2, add_item={"value": "three"})
    assert (there.code, there.line) == ("E-CONFLICT", 18)


def compose_two(file: str, source: str, one: dict[str, Any], other: dict[str, Any]) -> str:
    spans = []
    for n, words in enumerate((one, other)):
        for k, span in enumerate(place(file, source, **words).spans):
            spans.append(Keyed(span, (n, f"patch-{n}", 0), k))
    pieces, overlaps = compose([Piece(source, ("base",))], spans)
    assert overlaps == []
    return text_of(pieces)


@pytest.mark.parametrize(
    ("source", "place_", "expected"),
    [
        ('OPS=(\n    "a"\n)\n', "last", 'OPS=(\n    "a"\n    "b"\n    "c"\n)\n'),
        ('OPS=(\n    "a"\n)\n', "first", 'OPS=(\n    "b"\n    "c"\n    "a"\n)\n'),
        ("OPS=()\n", "last", "OPS=(b c)\n"),
    ],
)
def test_two_patches_add_to_one_shell_list(source: str, place_: str, expected: str) -> None:
    one, other = ({"find": "OPS=(", "add_item": {"value": v, "place": place_}} for v in ("b", "c"))
    assert compose_two("csrc/x.sh", source, one, other) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f(a);", "f(a, b, c);"),
        ("f();", "f(b, c);"),
        ("f(\n  a,\n);", "f(\n  a,\n  b,\n  c,\n);"),
        ("f(\n  a\n);", "f(\n  a,\n  b,\n  c\n);"),
        ("f(\n  a  // one\n);", "f(\n  a,  // one\n  b,\n  c\n);"),
    ],
)
def test_two_patches_add_to_one_cpp_list(source: str, expected: str) -> None:
    one, other = ({"find": "f", "add_item": {"value": v}} for v in ("b", "c"))
    assert compose_two("csrc/x.cpp", source, one, other) == expected


def test_lines_after_one_statement_come_before_lines_before_the_next() -> None:
    one, other = {"find": "d();", "before": "c();"}, {"find": "a();", "after": "b();"}
    assert compose_two("csrc/x.cpp", "a();\nd();\n", one, other) == "a();\nb();\nc();\nd();\n"


FRAGMENT = st.text(alphabet="ab \n\"'#/(){}[];,.:$=<>\\\r", min_size=1, max_size=12)
PIECE = st.one_of(st.sampled_from(["f(", "a", "if", "}", "$A", "$$$B", "#if a\n", "set(", "(b c)"]), FRAGMENT)
TEXT = st.lists(PIECE, max_size=12).map(" ".join)


@given(
    st.sampled_from(["x.cpp", "CMakeLists.txt", "x.sh", "x.toml", "x.json"]),
    TEXT,
    TEXT.filter(str.strip),
    st.sampled_from(["replace", "before", "after", "delete", "append", "prepend", "add_item"]),
    TEXT.filter(str.strip),
    st.booleans(),
)
@example("x.cpp", "<{", "f( { }", "replace", "f(", True)  # a head whose parenthesis nothing closes
@settings(max_examples=400)
def test_any_edit_of_any_text_lands_inside_it_or_is_a_fault(
    file: str, source: str, find: str, verb: str, text: str, itself: bool
) -> None:
    if itself:
        source = f"{source} {find} {source[:7]}"
    words: dict[str, Any] = {} if verb in ("append", "prepend") else {"find": find}
    words[verb] = {"delete": True, "add_item": {"value": text}}.get(verb, text)
    try:
        placed = place(file, source, **words)
    except PlaceFault as error:
        event(error.code)
        assert error.message and error.line <= source.count("\n") + 1
        return
    event(f"{verb} lands")
    assert placed.spans
    for span in placed.spans:
        assert 0 <= span.start <= span.end <= len(source)
    changed(source, placed)
    assert 1 <= placed.line <= source.count("\n") + 1


# --- the real sources

KERNEL = "csrc/attention/recurrent_gated_delta_rule/op_kernel/recurrent_gated_delta_rule.h"
ACLNN = "csrc/build_aclnn.sh"


def source_of(trees: Trees, file: str) -> str:
    source = trees.read("vllm-ascend", file)
    assert source is not None, file
    return source


@pytest.mark.sources
def test_real_kernel_functions(real_trees: Trees) -> None:
    source = source_of(real_trees, KERNEL)
    symbols = {s.qualname: s for s in token_language(KERNEL).symbols(source)}
    for name in ("Init", "Process", "CopyInQKV", "PrefetchState", "Compute", "CopyOutAttn", "ProcessHead"):
        found = symbols[f"RecurrentGatedDeltaRule::RGDR::{name}"]
        body = source[found.start : found.end]
        assert body.count("{") == body.count("}")
        assert body.endswith("}")
        assert body.count("__aicore__ inline") == 1
    placed = place(
        KERNEL, source, "RGDR::CopyInQKV", find="Muls(qInUb, qInUb, $$$A);", before="L2Norm(qInUb);"
    )
    assert placed.symbol == "RecurrentGatedDeltaRule::RGDR::CopyInQKV"
    result = changed(source, placed)
    assert "        L2Norm(qInUb);\n        Muls(qInUb" in result.replace("\r\n", "\n")
    assert result.count("\r\n") - source.count("\r\n") == result.count("\n") - source.count("\n") == 1


@pytest.mark.sources
def test_one_operator_for_one_soc(real_trees: Trees) -> None:
    source = source_of(real_trees, ACLNN)

    def lists(text: str) -> dict[str, list[str]]:
        found = re.findall(r'CUSTOM_OPS_ARRAY=\((.*?)\).*?SOC_ARG="(\w+)"', text, re.DOTALL)
        return {soc: re.findall(r'"(\w+)"', items) for items, soc in found}

    before = lists(source)
    assert {s: len(o) for s, o in before.items()} == {
        "ascend310p": 4, "ascend910b": 39, "ascend910_93": 42, "ascend950": 23,
    }  # fmt: skip
    item = {"value": "our_op", "place": "after causal_conv1d"}
    for narrowed in (
        {"in": '"$SOC_VERSION" =~ ^ascend910_93'},
        {"between": ["=~ ^ascend910_93", 'SOC_ARG="ascend910_93"']},
    ):
        result = changed(source, place(ACLNN, source, find="CUSTOM_OPS_ARRAY=(", add_item=item, **narrowed))
        at = before["ascend910_93"].index("causal_conv1d") + 1
        wanted = [*before["ascend910_93"][:at], "our_op", *before["ascend910_93"][at:]]
        assert lists(result) == {**before, "ascend910_93": wanted}
        syntax = subprocess.run(["bash", "-n"], input=result.encode(), capture_output=True)
        assert syntax.returncode == 0, syntax.stderr


@pytest.mark.sources
def test_real_bindings_and_options(real_trees: Trees) -> None:
    file = "csrc/torch_binding.cpp"
    source = source_of(real_trees, file)
    words = {
        "find": 'ops.impl("npu_fused_gdn_gating", $$$A);',
        "after": 'ops.def("ours(Tensor x) -> Tensor");',
    }
    result = changed(source, place(file, source, "TORCH_LIBRARY_EXPAND#2", **words))
    added = set(result.splitlines()) - set(source.splitlines())
    assert added == {'    ops.def("ours(Tensor x) -> Tensor");'}
    file = "csrc/CMakeLists.txt"
    source = source_of(real_trees, file)
    words = {"find": "list(APPEND OPS_COMPILE_OPTIONS -include${VLLM_ASCEND_CANN_COMPAT_HEADER})",
             "replace": "list(APPEND OPS_COMPILE_OPTIONS -includecann_compat.h)"}  # fmt: skip
    result = changed(source, place(file, source, **words))
    assert len(result.splitlines()) == len(source.splitlines())
    assert "OPS_COMPILE_OPTIONS -includecann_compat.h" in result


@pytest.mark.sources
@pytest.mark.slow
def test_brackets_of_our_kernels_and_host_code_pair_up(real_trees: Trees) -> None:
    root = real_trees.roots["vllm-ascend"] / "csrc"
    odd, functions = [], 0
    for path in sorted(root.rglob("*")):
        if path.suffix in (".h", ".cpp", ".hpp", ".cc") and "third_party" not in path.parts:
            document = Document(path.read_bytes().decode("utf-8"), "cpp")
            functions += sum(f.kind == "function" for f in document.found)
            if any(t.text in ("{", "}") and not t.directive and n not in document.pairs
                   for n, t in enumerate(document.tokens)):  # fmt: skip
                odd.append(path.name)
    assert odd == []
    assert functions > 5000


@pytest.mark.parametrize(
    ("file", "one", "other"),
    [("a.h", "#define F(x) x\n", "#define F (x) x\n"), ("a.sh", "run 2>log\n", "run 2 >log\n")],
)
def test_white_space_that_has_a_meaning_counts(file: str, one: str, other: str) -> None:
    language = token_language(file)
    assert language.fingerprint(one, None) != language.fingerprint(other, None)
    assert language.fingerprint(one, None) == language.fingerprint(one.replace(" ", "  "), None)
