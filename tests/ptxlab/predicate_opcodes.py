"""Comparisons, predicates and selections with their oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import scalar_floats as floats
import scalar_integers as integers
from micro_kernels import Case
from scalar_floats import FP16, FP32
from scalar_integers import INTEGER_TYPES, value_of, wrap


def comparisons() -> Iterator[Case]:
    for kind, width, sign in INTEGER_TYPES:
        names = ("eq", "ne", "lt", "le", "gt", "ge") if sign else integers.INTEGER_COMPARISONS
        for name in names:
            yield _setp(
                f"{name}.{kind}",
                f"b{width}",
                lambda a, b, n=name, w=width, s=sign: integers.compare(
                    n, value_of(a, w, s), value_of(b, w, s)
                ),
            )
    for width in (16, 32, 64):
        yield _setp(f"eq.b{width}", f"b{width}", lambda a, b: a == b)
        yield _setp(f"ne.b{width}", f"b{width}", lambda a, b: a != b)
    for name in floats.FLOAT_COMPARISONS:
        yield _setp(f"{name}.f32", "f32", lambda a, b, n=name: floats.compare(FP32, n, a, b))
    for name in ("lt", "geu", "eq", "nan"):
        yield _setp(f"{name}.f16", "f16", lambda a, b, n=name: floats.compare(FP16, n, a, b))
    for name in ("lt", "ne", "geu", "nan"):
        yield Case(
            f"set.{name}.f16x2",
            f"set.{name}.f16x2.f16x2 {{d}}, {{a}}, {{b}};",
            ("f16x2", "f16x2"),
            "f16x2",
            lambda a, b, n=name: sum(
                0x3C00 << shift
                for shift in (0, 16)
                if floats.compare(FP16, n, (a >> shift) & 0xFFFF, (b >> shift) & 0xFFFF)
            ),
        )
    for joint in ("and", "or", "xor"):
        yield Case(
            f"setp.lt.{joint}.s32",
            f"setp.ne.s32 %p1, {{c}}, 0;\nsetp.lt.{joint}.s32 %p2|%p3, {{a}}, {{b}}, %p1;\n"
            "selp.b32 {d}, 1, 0, %p2; selp.b32 %r1, 2, 0, %p3; or.b32 {d}, {d}, %r1;",
            ("b32",) * 3,
            "b32",
            lambda a, b, c, j=joint: _both_predicates(a, b, c, j),
        )
    for name, oracle in (
        ("and", lambda p, q: p and q),
        ("or", lambda p, q: p or q),
        ("xor", lambda p, q: p != q),
    ):
        yield Case(
            f"{name}.pred",
            f"setp.gt.s32 %p1, {{a}}, 7; setp.lt.s32 %p2, {{b}}, 9;\n"
            f"{name}.pred %p3, %p1, %p2; selp.b32 {{d}}, 1, 0, %p3;",
            ("b32", "b32"),
            "b32",
            lambda a, b, o=oracle: int(o(value_of(a, 32, True) > 7, value_of(b, 32, True) < 9)),
        )
    yield Case(
        "not.pred",
        "setp.gt.s32 %p1, {a}, 7; not.pred %p2, %p1; selp.b32 {d}, 1, 0, %p2;",
        ("b32",),
        "b32",
        lambda a: int(not value_of(a, 32, True) > 7),
    )
    for width in (16, 32, 64):
        yield Case(
            f"selp.b{width}",
            f"setp.lt.u32 %p1, {{c}}, 100; selp.b{width} {{d}}, {{a}}, {{b}}, %p1;",
            (f"b{width}", f"b{width}", "b32"),
            f"b{width}",
            lambda a, b, c: a if c < 100 else b,
        )
    yield Case(
        "selp.f32",
        "setp.lt.u32 %p1, {c}, 100; selp.f32 {d}, {a}, {b}, %p1;",
        ("f32", "f32", "b32"),
        "f32",
        lambda a, b, c: a if c < 100 else b,
    )
    yield Case(
        "guard",
        "mov.b32 {d}, {b}; setp.lt.s32 %p1, {a}, 0; @%p1 add.s32 {d}, {d}, 1;\n"
        "@!%p1 sub.s32 {d}, {d}, 1;",
        ("b32", "b32"),
        "b32",
        lambda a, b: wrap(b + 1 if a >> 31 else b - 1, 32),
    )


def _setp(name: str, register: str, oracle: Callable[[int, int], bool]) -> Case:
    return Case(
        f"setp.{name}",
        f"setp.{name} %p1, {{a}}, {{b}};\nselp.b32 {{d}}, 1, 0, %p1;",
        (register, register),
        "b32",
        lambda a, b: int(oracle(a, b)),
    )


def _both_predicates(a: int, b: int, c: int, joint: str) -> int:
    less, given = value_of(a, 32, True) < value_of(b, 32, True), c != 0
    join = {"and": lambda p: p and given, "or": lambda p: p or given, "xor": lambda p: p != given}
    return int(join[joint](less)) | int(join[joint](not less)) << 1
