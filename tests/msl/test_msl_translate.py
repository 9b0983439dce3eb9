# SPDX-License-Identifier: Apache-2.0
"""Metal Shading Language as text: flattening, preprocessing, translation. Running it: test_msl_emulator.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from msl_compiler import the_compiler
from msl_harness import needs_clang

from lily.kernels import KERNELS
from lily.msl.flatten import constant_index, flatten, shader_files
from lily.msl.host import host_source
from lily.msl.preprocess import metal_defines, preprocess
from lily.msl.tokens import SourceError, spelled, tokenize, untokenize
from lily.msl.translate import Options, translate
from lily.msl.translation import Translation


def _expanded(text: str, **defines: str) -> str:
    return spelled(preprocess(text, "t.metal", defines))


def _translated(text: str, **options: object) -> Translation:
    return translate(preprocess(text, "t.metal", metal_defines(320)), Options(**options))  # type: ignore[arg-type]


def _text(text: str, **options: object) -> str:
    tokens = [t for chunk in _translated(text, **options).chunks for t in chunk.tokens]
    return re.sub(r"\s+", " ", untokenize(tokens, markers=False)).strip()


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_tokens_know_their_file_and_line() -> None:
    tokens = tokenize('a /* b\n c */ d // e\n\\\nf "g//h" 1.5e-3f a->b', "x.metal")
    assert [(t.text, t.line) for t in tokens] == [
        ("a", 1), ("d", 2), ("f", 4), ('"g//h"', 4), ("1.5e-3f", 4), ("a", 4), ("->", 4), ("b", 4),
    ]  # fmt: skip
    with pytest.raises(SourceError, match=r"x\.metal:2: unreadable character '\\x01'"):
        tokenize("a\n\x01", "x.metal")


def test_text_made_of_tokens_keeps_every_line_where_it_was() -> None:
    source = "int a;\n\n\nint b = a+ +a;\n" + "\n" * 20 + "int c;\n"
    text = untokenize(tokenize(source, "x.metal"))
    assert '#line 1 "x.metal"\nint a;\n\n\nint b = a+ +a;\n#line 25 "x.metal"\nint c;\n' in text


# ---- preprocessor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("#define A 1\nA B", "1 B"),
        ("#define F(x, y) x + y * x\nF(a, (b, c))", "a + (b, c) * a"),
        ("#define F(x) x\nF F(1)", "F 1"),
        ('#define S(x) #x\nS(a  + "b")', '"a + \\"b\\""'),
        ("#define C(a, b) a##b\n#define A 1\nC(A, B) C(x, ) C(, y)", "AB x y"),
        ("#define V(f, ...) f(__VA_ARGS__)\nV(g, 1, 2) V(h)", "g(1, 2) h()"),
        ("#define A B\n#define B A\nA", "A"),
        ("#define F(x) G(x)\n#define G(x) F(x) + 1\nF(2)", "F(2) + 1"),
        ("#define A x\\\n y\nA", "x y"),
        ("#define A 1\n#undef A\nA", "A"),
        ("#define F() 3\nF()", "3"),
        ("#define E\n#define X E 1 E\nX", "1"),
        ("#define X 2\n#if X * 3 == 6 && defined(X) && !defined Y\nyes\n#else\nno\n#endif", "yes"),
        ("#if 0\na\n#elif 1 ? 0 : 1\nb\n#elif (5 >> 1) - 2 == 0 || UNKNOWN\nc\n#else\nd\n#endif", "c"),
        ("#ifdef A\n#if garbage (\n#endif\n#else\nb\n#endif\n#ifndef A\nc\n#endif", "b c"),
        ("#if __METAL_VERSION__ >= 400\nnew\n#else\nold\n#endif", "old"),
    ],
)
def test_macros_and_conditions(source: str, expected: str) -> None:
    assert _expanded(source, __METAL_VERSION__="320") == expected


def test_includes_are_resolved_once_and_system_headers_vanish() -> None:
    files = {"a.h": '#pragma once\nint a;\n#include "b.h"\n', "b.h": '#include "a.h"\nint b;\n'}
    source = '#include <metal_stdlib>\n#include "a.h"\n#include "a.h"\nint c;'
    tokens = preprocess(source, "t.metal", {}, lambda _, name, quoted: (name, files[name]) if quoted else None)
    assert spelled(tokens) == "int a; int b; int c;"
    assert [(t.file, t.line) for t in tokens if t.text in "abc"] == [("a.h", 2), ("b.h", 2), ("t.metal", 4)]


def test_pragmas_to_unroll_stay_and_others_go() -> None:
    source = (
        '#pragma METAL x\n#pragma unroll(4)\na;\n#define P _Pragma("clang loop unroll(full)")\nP b; _Pragma("once") c;'
    )
    tokens = preprocess(source, "t.metal")
    assert [t.text for t in tokens if t.kind == "pragma"] == ["#pragma unroll(4)", "#pragma clang loop unroll(full)"]
    assert spelled(t for t in tokens if t.kind != "pragma") == "a; b; c;"


def test_line_directives_are_obeyed() -> None:
    tokens = preprocess('a\n#line 10 "x.h"\nb\nc\n#line 1 "y.h"\n#define M d\nM', "t.metal")
    assert [(t.text, t.file, t.line) for t in tokens] == [
        ("a", "t.metal", 1), ("b", "x.h", 10), ("c", "x.h", 11), ("d", "y.h", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("#if 1\n", "#if without #endif"),
        ("a\n#endif", "t.metal:2: #endif without #if"),
        ('#include "no.h"', "included file 'no.h' not found"),
        ("#error stop here", "#error stop here"),
        ("#frob", "unknown directive #frob"),
        ("#define F(a, b) a\nF(1)", "macro F takes 2 arguments, got 1"),
        ("#define F(a) a\nF(1", "call of macro F does not end"),
        ("#if 1 +\n#endif", "ends early"),
    ],
)
def test_mistakes_are_named_with_their_place(source: str, says: str) -> None:
    with pytest.raises(SourceError, match=re.escape(says)):
        preprocess(source, "t.metal")


@needs_clang
def test_the_preprocessor_agrees_with_clang_on_the_shaders() -> None:
    source = flatten()
    defines = [f"-D{k}={v}" for k, v in metal_defines(320).items()]
    command = [*the_compiler().command, "-E", "-P", "-undef", "-nostdinc", "-x", "c++", "-w", *defines, "-"]
    without = re.sub(r"#include <.*", "", source)
    clang = subprocess.run(command, input=without, capture_output=True, text=True, check=True).stdout
    ours = preprocess(source, "t.metal", metal_defines(320))
    theirs = [t.text for t in tokenize(re.sub(r"#pragma.*", "", clang))]
    assert [t.text for t in ours if t.kind != "pragma"] == theirs


# ---- flattening -----------------------------------------------------------------------------------------------------


def test_constants_are_numbered_by_first_appearance() -> None:
    index = constant_index()
    seen = dict.fromkeys(c for k in KERNELS.values() for c in k.constants)
    assert list(index) == list(seen)
    assert list(index.values()) == list(range(len(seen)))
    assert f"constant int C_BITS [[function_constant({index['bits']})]];" in flatten()


def test_headers_come_before_their_users_and_before_all_sources(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text("int b;\n")
    (tmp_path / "a.metal").write_text('#include "a.h"\n#include <metal_stdlib>\nint c;\n')
    assert [p.name for p in shader_files(tmp_path)] == ["b.h", "a.h", "a.metal"]
    text = flatten(tmp_path)
    assert text.index('#line 1 "b.h"\nint b;') < text.index('#line 1 "a.h"') < text.index('#line 1 "a.metal"')
    places = {t.text: (t.file, t.line) for t in preprocess(text, "flat") if t.text in "abc"}
    assert places == {"a": ("a.h", 3), "b": ("b.h", 1), "c": ("a.metal", 3)}


@pytest.mark.parametrize(
    ("text", "says"), [('#include "no.h"', "includes 'no.h'"), ('#include "a.h"', "include each other")]
)
def test_wrong_includes_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.h").write_text(text)
    with pytest.raises(ValueError, match=says):
        flatten(tmp_path)


def test_act_f32_is_a_macro() -> None:
    assert "#define LILY_ACT_F32 1" in flatten(act_f32=True)
    assert "#define LILY_ACT_F32 1" not in flatten()


# ---- translation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("constant float t[2] = {1.0, 2};", "const float t[2] = {1.0f, 2};"),
        ("float f(device const float* p, thread float& x);", "static float f( const float* p, float& x);"),
        ("inline float g(constant int& n) { return n * 1e3 + .5h; }",
         "inline float g(const int& n) { return n * 1e3f + half(.5f); }"),
        ("coherent(device) device float* p;", "volatile float* p;"),
        ("inline float2 h(float4 v) { v.xy = v.zw; v.w += 1; return v.yx; }",
         "inline float2 h(float4 v) { v.template swizzle_ref<0, 1>() = v.template swizzle<2, 3>(); v.w += 1; "
         "return v.template swizzle<1, 0>(); }"),
        ("struct alignas(8) A { int a; } x; struct A f(int n) { return x; }",
         "struct alignas(8) A { int a; } x; static struct A f(int n) { return x; }"),
        ("struct S { device uint* p; uint n; };", "struct S { uint* p; uint n; };"),
        ("inline int k(int i) { if (i) return 1; else if (i > 2) return 2; for (;;) i++; }",
         "inline int k(int i) { if (i){ return 1;} else if (i > 2){ return 2;} for (;;){ i++;} }"),
        ("uint hex() { return 0xfeu + 0x1e5; }", "static uint hex() { return 0xfeu + 0x1e5; }"),
    ],
)  # fmt: skip
def test_metal_becomes_cpp(source: str, expected: str) -> None:
    assert _text(source) == expected


def test_threadgroup_variables_become_references_to_the_groups_memory() -> None:
    text = _text("kernel void f() { threadgroup alignas(32) float a[4][8], b; threadgroup float* p = a[0]; }")
    assert "typedef float msl_type_of_a[4][8]; MSL_THREADGROUP(msl_type_of_a, a, 32);" in text
    assert "typedef float msl_type_of_b; MSL_THREADGROUP(msl_type_of_b, b, 32);" in text
    assert "float* p = a[0];" in text
    with pytest.raises(SourceError, match="cannot be initialised"):
        _text("kernel void f() { threadgroup int a = 1; }")


def test_kernels_and_their_arguments_are_collected() -> None:
    entries = _translated("""
        struct P { uint n; };
        constant constexpr uint LIMIT = 64;
        [[kernel, max_total_threads_per_threadgroup(LIMIT)]] void a(device const float* x [[buffer(2)]],
            constant P& p [[buffer(0)]], threadgroup float* s [[threadgroup(1)]], device int* y,
            uint lane [[thread_index_in_simdgroup]], uint2 at [[thread_position_in_grid]]) {}
        template <typename T, int N> kernel void b(device T* x [[buffer(0)]]) {}
        template [[host_name("b_half_3")]] kernel void b<half, 3>(device half*);
        template [[host_name("b_uint_4")]] [[kernel]] decltype(b<uint, 4>) b<uint, 4>;
    """).entries
    found = {e.name: e for e in entries}
    assert set(found) == {"a", "b_half_3", "b_uint_4"}
    kinds = [(x.kind, x.index, x.readonly, x.name) for x in found["a"].arguments]
    assert kinds == [
        ("BUFFER", "2", True, "x"), ("BUFFER", "0", True, "p"), ("THREADGROUP", "1", False, "s"),
        ("BUFFER", "1", False, "y"), ("LANE", "0", True, "lane"), ("GRID_POSITION", "0", True, "at"),
    ]  # fmt: skip
    assert found["a"].max_threads == "LIMIT"
    assert found["b_half_3"].function == "b<half, 3>"
    assert found["b_uint_4"].function == "b<uint, 4>"


def test_a_kernel_comes_with_what_it_reaches_and_nothing_else() -> None:
    translated = _translated("""
        using namespace metal;
        constant constexpr uint USED = 3, UNUSED = 4;
        struct Inner { float x; };
        struct Outer { Inner inner; };
        inline float helper(Outer o) { return o.inner.x; }
        inline float other(Inner i) { return i.x; }
        enum { FIRST, SECOND };
        kernel void a(device float* y [[buffer(0)]]) { y[0] = helper(Outer()) + USED; }
        kernel void b(device float* y [[buffer(0)]]) { y[0] = other(Inner()) + SECOND; }
    """)
    a, b = (host_source(translated, {name}).text for name in "ab")
    assert "helper" in a
    assert "struct Inner" in a
    assert "other" not in a
    assert "SECOND" not in a
    assert "other" in b
    assert "SECOND" in b
    assert "Outer" not in b
    assert "using namespace metal" in a
    assert '"a", msl_entry_0' in a
    assert '"b", msl_entry' not in a


def test_every_statement_is_marked_for_coverage() -> None:
    source = "kernel void f(device int* o [[buffer(0)]]) {\n  int a = 1;\n  if (a)\n    o[0] = 2;\n"
    source += "  else { o[1] = 3; o[2] = 4; }\n"
    source += (
        "  for (;;) a++;\n  switch (a) {\n  case 1:\n    a = 2;\n    break;\n  }\n}\nconstexpr int g() { return 1; }"
    )
    made = host_source(_translated(source, coverage=True))
    assert [line for _, line in made.statements] == [2, 3, 4, 5, 5, 6, 6, 7, 9, 10]
    assert "MSL_COVER(0); int a = 1;" in made.text


def test_function_constants_take_the_values_they_are_given() -> None:
    made = host_source(
        _translated("constant int C_N [[function_constant(3)]];\nkernel void f() { int a = C_N; }"), None, {"C_N": 7}
    )
    assert "#define MSL_VALUE_C_N 7" in made.text
    assert "MSL_DEFINE_CONSTANT(int, C_N, MSL_VALUE_C_N);" in made.text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("kernel void f(uint i [[vertex_id]]) {}", "unknown attribute 'vertex_id' of argument i"),
        ("kernel void f() {}\nkernel void f() {}", "t.metal:2: kernel f is defined twice"),
        ("void f() { (", "is never closed"),
        ("int a", "does not end"),
    ],
)
def test_what_is_not_understood_is_named(source: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        _translated(source)
