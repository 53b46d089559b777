"""Integer, bit and move instructions with their oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import scalar_floats as floats
import scalar_integers as integers
from micro_kernels import Case, same_float
from scalar_floats import FP32
from scalar_integers import INTEGER_TYPES, value_of, wrap


def integer_arithmetic() -> Iterator[Case]:
    for kind, width, sign in INTEGER_TYPES:
        register = f"b{width}"
        pair, triple = (register,) * 2, (register,) * 3

        def value(bits: int, width: int = width, sign: bool = sign) -> int:
            return value_of(bits, width, sign)

        def fit(number: int, width: int = width) -> int:
            return wrap(number, width)

        def case(
            name: str,
            inputs: tuple[str, ...],
            oracle: Callable[..., int],
            domain: Callable[..., bool] = lambda *values: True,
            kind: str = kind,
            register: str = register,
        ) -> Case:
            operands = ", ".join(["{d}", "{a}", "{b}", "{c}"][: len(inputs) + 1])
            return Case(
                f"{name}.{kind}",
                f"{name}.{kind} {operands};",
                inputs,
                register,
                oracle,
                domain=domain,
            )

        yield case("add", pair, lambda a, b, f=fit: f(a + b))
        yield case("sub", pair, lambda a, b, f=fit: f(a - b))
        yield case("mul.lo", pair, lambda a, b, f=fit: f(a * b))
        yield case("mul.hi", pair, lambda a, b, f=fit, v=value, w=width: f(v(a) * v(b) >> w))
        yield case("mad.lo", triple, lambda a, b, c, f=fit: f(a * b + c))
        yield case("min", pair, lambda a, b, f=fit, v=value: f(min(v(a), v(b))))
        yield case("max", pair, lambda a, b, f=fit, v=value: f(max(v(a), v(b))))
        # Division by zero and the overflowing quotient are left open by the ISA.
        defined = lambda a, b, v=value: b != 0 and not (v(a) < 0 and v(b) == -1)  # noqa: E731
        yield case(
            "div",
            pair,
            lambda a, b, f=fit, v=value: f(integers.truncating_divide(v(a), v(b))),
            domain=defined,
        )
        yield case(
            "rem",
            pair,
            lambda a, b, f=fit, v=value: f(integers.truncating_remainder(v(a), v(b))),
            domain=defined,
        )
        if sign:
            yield case("abs", (register,), lambda a, f=fit, v=value: f(abs(v(a))))
            yield case("neg", (register,), lambda a, f=fit, v=value: f(-v(a)))
        if width < 64:
            wide = f"b{2 * width}"
            yield Case(
                f"mul.wide.{kind}",
                f"mul.wide.{kind} {{d}}, {{a}}, {{b}};",
                pair,
                wide,
                lambda a, b, v=value, w=width: wrap(v(a) * v(b), 2 * w),
            )
            yield Case(
                f"mad.wide.{kind}",
                f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
                (register, register, wide),
                wide,
                lambda a, b, c, v=value, w=width: wrap(v(a) * v(b) + c, 2 * w),
            )


def extended_precision() -> Iterator[Case]:
    """Sums, differences and products of numbers of two words, which a carry holds together."""
    wide = ("b64", "b64", "b64")
    split = "mov.b64 {%r1, %r2}, {a}; mov.b64 {%r3, %r4}, {b};\n"
    join = "mov.b64 {d}, {%r5, %r6};"

    def case(name: str, body: str, oracle: Callable[..., int], inputs: int = 2) -> Case:
        return Case(name, split + body + join, wide[:inputs], "b64", oracle)

    yield case(
        "add.cc", "add.cc.u32 %r5, %r1, %r3; addc.u32 %r6, %r2, %r4;\n",
        lambda a, b: wrap(a + b, 64),
    )  # fmt: skip
    yield case(
        "sub.cc", "sub.cc.s32 %r5, %r1, %r3; subc.s32 %r6, %r2, %r4;\n",
        lambda a, b: wrap(a - b, 64),
    )  # fmt: skip
    yield case(
        "mad.lo.cc",
        "mul.lo.u32 %r5, %r1, %r3; mul.hi.u32 %r6, %r1, %r3;\n"
        "mad.lo.cc.u32 %r5, %r2, %r4, %r5; madc.hi.u32 %r6, %r2, %r4, %r6;\n",
        lambda a, b: wrap((a & _LOW) * (b & _LOW) + (a >> 32) * (b >> 32), 64),
    )
    # The carry of three words: what comes out of the third is the sign of the sum.
    yield case(
        "addc.cc",
        "add.cc.u32 %r5, %r1, %r1; addc.cc.u32 %r5, %r3, %r1; addc.cc.u32 %r5, %r4, %r2;\n"
        "addc.u32 %r6, 0, 0;\n",
        lambda a, b: _three_words(a, b),
    )
    yield Case(
        "add.cc.u64",
        "add.cc.u64 %rd5, {a}, {b}; addc.u64 {d}, {a}, {c};",
        wide,
        "b64",
        lambda a, b, c: wrap(a + c + (a + b >> 64), 64),
    )
    yield Case(
        "guarded add.cc",
        "setp.gt.s64 %p1, {b}, 0; add.cc.u64 %rd5, {a}, {a};\n"
        "@%p1 add.cc.u64 %rd5, {b}, {b}; addc.u64 {d}, 0, 0;",
        ("b64", "b64"),
        "b64",
        lambda a, b: 0 if value_of(b, 64, True) > 0 else a >> 63,
    )


_LOW = 0xFFFFFFFF


def _three_words(a: int, b: int) -> int:
    first = a & _LOW, b & _LOW, b >> 32
    second = a & _LOW, a & _LOW, a >> 32
    total = sum((x + y) << 32 * k for k, (x, y) in enumerate(zip(first, second, strict=True)))
    return (total >> 64) & _LOW | (total >> 96) << 32


def dot_products() -> Iterator[Case]:
    triple = ("b32",) * 3
    for first in "us":
        for second in "us":
            for name, width, begin in (
                ("dp4a", 8, 0), ("dp2a.lo", 16, 0), ("dp2a.hi", 16, 16),
            ):  # fmt: skip
                yield Case(
                    f"{name}.{first}32.{second}32",
                    f"{name}.{first}32.{second}32 {{d}}, {{a}}, {{b}}, {{c}};",
                    triple,
                    "b32",
                    lambda a, b, c, w=width, i=begin, s=(first == "s", second == "s"): (
                        integers.dot_product(a, b, c, w, i, *s)
                    ),
                )
    for kind, width, sign in INTEGER_TYPES:
        yield Case(
            f"sad.{kind}",
            f"sad.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
            (f"b{width}",) * 3,
            f"b{width}",
            lambda a, b, c, w=width, s=sign: wrap(
                abs(value_of(a, w, s) - value_of(b, w, s)) + c, w
            ),
        )


def bit_operations() -> Iterator[Case]:
    for width in (16, 32, 64):
        register = f"b{width}"
        mask = (1 << width) - 1
        pair = (register, register)
        suffix = f".b{width}"
        yield Case(
            f"and{suffix}", f"and{suffix} {{d}}, {{a}}, {{b}};", pair, register, lambda a, b: a & b
        )
        yield Case(
            f"or{suffix}", f"or{suffix} {{d}}, {{a}}, {{b}};", pair, register, lambda a, b: a | b
        )
        yield Case(
            f"xor{suffix}", f"xor{suffix} {{d}}, {{a}}, {{b}};", pair, register, lambda a, b: a ^ b
        )
        yield Case(
            f"not{suffix}",
            f"not{suffix} {{d}}, {{a}};",
            (register,),
            register,
            lambda a, m=mask: a ^ m,
        )
        shifted = (register, "b32")
        yield Case(
            f"shl{suffix}",
            f"shl{suffix} {{d}}, {{a}}, {{b}};",
            shifted,
            register,
            lambda a, n, w=width: integers.shift_left(a, n, w),
        )
        for sign in "us":
            yield Case(
                f"shr.{sign}{width}",
                f"shr.{sign}{width} {{d}}, {{a}}, {{b}};",
                shifted,
                register,
                lambda a, n, w=width, s=sign == "s": integers.shift_right(a, n, w, s),
            )
        yield Case(
            f"shr{suffix}",
            f"shr{suffix} {{d}}, {{a}}, {{b}};",
            shifted,
            register,
            lambda a, n, w=width: integers.shift_right(a, n, w, False),
        )
    for left in (True, False):
        for clamp in (True, False):
            name = f"shf.{'l' if left else 'r'}.{'clamp' if clamp else 'wrap'}.b32"
            yield Case(
                name,
                f"{name} {{d}}, {{a}}, {{b}}, {{c}};",
                ("b32",) * 3,
                "b32",
                lambda a, b, n, x=left, y=clamp: integers.funnel_shift(a, b, n, x, y),
            )
    yield Case(
        "prmt.b32", "prmt.b32 {d}, {a}, {b}, {c};", ("b32",) * 3, "b32", integers.permute_bytes
    )
    for selector in (0x5410, 0x7632, 0x3210, 0xFEDC, 0x0123):
        yield Case(
            f"prmt.b32-{selector:x}",
            f"prmt.b32 {{d}}, {{a}}, {{b}}, {selector:#x}U;",
            ("b32",) * 2,
            "b32",
            lambda a, b, s=selector: integers.permute_bytes(a, b, s),
        )
    for table in (0x00, 0xFF, 0xF8, 0x96, 0xE8, 0xCA, 0x1B, 0x80):
        yield Case(
            f"lop3.b32-{table:02x}",
            f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};",
            ("b32",) * 3,
            "b32",
            lambda a, b, c, t=table: integers.lookup3(a, b, c, t),
        )
    yield from _bit_fields()


def _bit_fields() -> Iterator[Case]:
    for width in (32, 64):
        register = f"b{width}"
        for sign in "us":
            kind = f"{sign}{width}"
            yield Case(
                f"bfe.{kind}",
                f"and.b32 %r1, {{b}}, 255; and.b32 %r2, {{c}}, 127;\n"
                f"bfe.{kind} {{d}}, {{a}}, %r1, %r2;",
                (register, "b32", "b32"),
                register,
                lambda a, p, n, w=width, s=sign == "s": integers.extract_field(
                    a, p & 255, n & 127, w, s
                ),
            )
            yield Case(
                f"bfind.{kind}",
                f"bfind.{kind} {{d}}, {{a}};",
                (register,),
                "b32",
                lambda a, w=width, s=sign == "s": integers.find_leading(a, w, s),
            )
            yield Case(
                f"bfind.shiftamt.{kind}",
                f"bfind.shiftamt.{kind} {{d}}, {{a}};",
                (register,),
                "b32",
                lambda a, w=width, s=sign == "s": integers.find_shift(a, w, s),
            )
        yield Case(
            f"bfi.b{width}",
            f"and.b32 %r1, {{c}}, 127; and.b32 %r2, {{e}}, 127;\n"
            f"bfi.b{width} {{d}}, {{a}}, {{b}}, %r1, %r2;",
            (register, register, "b32", "b32"),
            register,
            lambda a, b, p, n, w=width: integers.insert_field(a, b, p & 127, n & 127, w),
        )
        yield Case(
            f"popc.b{width}",
            f"popc.b{width} {{d}}, {{a}};",
            (register,),
            "b32",
            lambda a: bin(a).count("1"),
        )
        yield Case(
            f"clz.b{width}",
            f"clz.b{width} {{d}}, {{a}};",
            (register,),
            "b32",
            lambda a, w=width: integers.leading_zeros(a, w),
        )
        yield Case(
            f"brev.b{width}",
            f"brev.b{width} {{d}}, {{a}};",
            (register,),
            register,
            lambda a, w=width: integers.reverse_bits(a, w),
        )


def integer_conversions() -> Iterator[Case]:
    for source, from_width, from_sign in INTEGER_TYPES:
        for target, to_width, to_sign in INTEGER_TYPES:
            if source == target:
                continue
            yield Case(
                f"cvt.{target}.{source}",
                f"cvt.{target}.{source} {{d}}, {{a}};",
                (f"b{from_width}",),
                f"b{to_width}",
                lambda a, w=from_width, s=from_sign, t=to_width: wrap(value_of(a, w, s), t),
            )
            # .sat is legal only where the target cannot hold every source value.
            if (
                to_width < from_width
                or (from_sign and not to_sign)
                or (to_width == from_width and to_sign)
            ):
                yield Case(
                    f"cvt.sat.{target}.{source}",
                    f"cvt.sat.{target}.{source} {{d}}, {{a}};",
                    (f"b{from_width}",),
                    f"b{to_width}",
                    lambda a, w=from_width, s=from_sign, t=to_width, u=to_sign: integers.saturate(
                        value_of(a, w, s), t, u
                    ),
                )
    for kind, sign in (("u8", False), ("s8", True)):
        yield Case(
            f"cvt.{kind[0]}32.{kind}",
            f"cvt.{kind[0]}32.{kind} {{d}}, {{a}};",
            ("b32",),
            "b32",
            lambda a, s=sign: wrap(value_of(a & 255, 8, s), 32),
        )


def moves() -> Iterator[Case]:
    yield Case(
        "mov.b32-unpack",
        "mov.b32 {%h1, %h2}, {a}; mov.b32 {d}, {%h2, %h1};",
        ("b32",),
        "b32",
        lambda a: (a >> 16) | (a & 0xFFFF) << 16,
    )
    yield Case(
        "mov.b64-unpack",
        "mov.b64 {%r1, %r2}, {a}; mov.b64 {d}, {%r2, %r1};",
        ("b64",),
        "b64",
        lambda a: (a >> 32) | (a & 0xFFFFFFFF) << 32,
    )
    yield Case(
        "mov.b64-4x16",
        "mov.b64 {%h1, %h2, %h3, %h4}, {a}; mov.b64 {d}, {%h4, %h1, %h3, %h2};",
        ("b64",),
        "b64",
        lambda a: _shuffle_quarters(a, (3, 0, 2, 1)),
    )
    yield Case(
        "mov.b32-sink",
        "mov.b32 {_, %h2}, {a}; mov.b32 {d}, {%h2, %h2};",
        ("b32",),
        "b32",
        lambda a: (a >> 16) * 0x10001,
    )
    yield Case(
        "mov.b16-pair", "mov.b32 {d}, {{a}, {b}};", ("b16", "b16"), "b32", lambda a, b: a | b << 16
    )
    for width in (16, 32, 64):
        yield Case(
            f"mov.b{width}", f"mov.b{width} {{d}}, {{a}};", (f"b{width}",), f"b{width}", lambda a: a
        )
    yield Case(
        "mov.f32-immediate",
        "mov.f32 %f1, 0f3FB8AA3B; mul.f32 {d}, {a}, %f1;",
        ("f32",),
        "f32",
        lambda a: floats.multiply(FP32, a, 0x3FB8AA3B),
        same_float(FP32),
    )
    yield Case(
        "negative-immediate", "add.s32 {d}, {a}, -17;", ("b32",), "b32", lambda a: wrap(a - 17, 32)
    )
    yield Case(
        "hexadecimal-immediate",
        "xor.b32 {d}, {a}, 0xDEADBEEF;",
        ("b32",),
        "b32",
        lambda a: a ^ 0xDEADBEEF,
    )


def _shuffle_quarters(bits: int, order: tuple[int, ...]) -> int:
    return sum(((bits >> 16 * source) & 0xFFFF) << 16 * i for i, source in enumerate(order))
