"""Every instruction under test with its oracle: the tables behind test_opcodes*.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import scalar_floats as floats
import scalar_integers as integers
from micro_kernels import Case, same_float, same_float_pair
from scalar_floats import BF16, FP16, FP32, FloatFormat
from scalar_integers import value_of, wrap

_INTEGER_TYPES = [(f"{sign}{width}", width, sign == "s") for width in (16, 32, 64) for sign in "us"]


def integer_arithmetic() -> Iterator[Case]:
    for kind, width, sign in _INTEGER_TYPES:
        register = f"b{width}"
        pair, triple = (register,) * 2, (register,) * 3

        def value(bits: int, width: int = width, sign: bool = sign) -> int:
            return value_of(bits, width, sign)

        def fit(number: int, width: int = width) -> int:
            return wrap(number, width)

        def case(name, inputs, oracle, *, kind=kind, register=register, **more) -> Case:  # type: ignore[no-untyped-def]
            operands = ", ".join(["{d}", "{a}", "{b}", "{c}"][: len(inputs) + 1])
            return Case(
                f"{name}.{kind}", f"{name}.{kind} {operands};", inputs, register, oracle, **more
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


def comparisons() -> Iterator[Case]:
    for kind, width, sign in _INTEGER_TYPES:
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


def _setp(name: str, register: str, oracle) -> Case:  # type: ignore[no-untyped-def]
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


def _ordinary(fmt: FloatFormat):  # type: ignore[no-untyped-def]
    """Finite and neither tiny nor huge: where subnormals and overflow play no part."""

    def check(*values: int) -> bool:
        numbers = [fmt.decode(bits) for bits in values]
        return all(math.isfinite(x) and (x == 0 or 2.0**-20 < abs(x) < 2.0**20) for x in numbers)

    return check


def _close_fma(got: int, want: int) -> bool:
    if FP32.is_nan(got) or FP32.is_nan(want):
        return FP32.is_nan(got) and FP32.is_nan(want)
    return floats.ulps_apart(FP32, got, want) <= 1


def float_arithmetic() -> Iterator[Case]:
    same = same_float(FP32)
    pair = ("f32", "f32")
    for spelling in ("", ".rn"):
        for name, oracle in (
            ("add", floats.add),
            ("sub", floats.subtract),
            ("mul", floats.multiply),
        ):
            yield Case(
                f"{name}{spelling}.f32",
                f"{name}{spelling}.f32 {{d}}, {{a}}, {{b}};",
                pair,
                "f32",
                lambda a, b, o=oracle: o(FP32, a, b),
                same,
            )
    yield Case(
        "fma.rn.f32",
        "fma.rn.f32 {d}, {a}, {b}, {c};",
        ("f32",) * 3,
        "f32",
        lambda a, b, c: floats.fused_multiply_add(FP32, a, b, c),
        _close_fma,
    )
    yield Case(
        "div.rn.f32",
        "div.rn.f32 {d}, {a}, {b};",
        pair,
        "f32",
        lambda a, b: floats.divide(FP32, a, b),
        same,
    )
    yield Case(
        "rcp.rn.f32",
        "rcp.rn.f32 {d}, {a};",
        ("f32",),
        "f32",
        lambda a: floats.divide(FP32, FP32.encode(1.0), a),
        same,
    )
    for larger, name in ((False, "min"), (True, "max")):
        yield Case(
            f"{name}.f32",
            f"{name}.f32 {{d}}, {{a}}, {{b}};",
            pair,
            "f32",
            lambda a, b, x=larger: floats.extreme(FP32, a, b, x),
            same,
        )
        yield Case(
            f"{name}.NaN.f32",
            f"{name}.NaN.f32 {{d}}, {{a}}, {{b}};",
            pair,
            "f32",
            lambda a, b, x=larger: floats.extreme(FP32, a, b, x, True),
            same,
        )
    yield Case("abs.f32", "abs.f32 {d}, {a};", ("f32",), "f32", lambda a: a & 0x7FFFFFFF, same)
    yield Case("neg.f32", "neg.f32 {d}, {a};", ("f32",), "f32", lambda a: a ^ 0x80000000, same)


def _relative(limit: float):  # type: ignore[no-untyped-def]
    def agree(got: int, want: int) -> bool:
        if FP32.is_nan(want) or math.isinf(FP32.decode(want)) or FP32.decode(want) == 0.0:
            return same_float(FP32)(got, want)
        x, y = FP32.decode(got), FP32.decode(want)
        # .ftz and the approximations may give zero for a subnormal result.
        return abs(x - y) <= limit * abs(y) or (abs(y) < 2.0**-126 and x == 0.0)

    return agree


def _exp2(bits: int) -> int:
    value = FP32.decode(bits)
    if math.isnan(value):
        return FP32.nan
    return FP32.encode(math.inf if value >= 1023 else 0.0 if value < -1000 else 2.0**value)


def _log2(bits: int) -> int:
    value = FP32.decode(bits)
    if math.isnan(value) or value < 0:
        return FP32.nan
    return FP32.encode(-math.inf if value == 0 else math.log2(value))


def _reciprocal_root(bits: int) -> int:
    value = FP32.decode(bits)
    if math.isnan(value) or value < 0:
        return FP32.nan
    if value == 0:
        return FP32.encode(math.copysign(math.inf, value))
    return FP32.encode(0.0 if math.isinf(value) else 1.0 / math.sqrt(value))


def _root(bits: int) -> int:
    value = FP32.decode(bits)
    if math.isnan(value) or value < 0:
        return FP32.nan
    return FP32.encode(math.sqrt(value))


def _normal(bits: int) -> bool:
    """Not subnormal: what .ftz makes of those inputs is not modelled."""
    value = FP32.decode(bits)
    return not 0 < abs(value) < 2.0**-126


def approximations() -> Iterator[Case]:
    def unary(name: str, oracle, limit: float, domain) -> Case:  # type: ignore[no-untyped-def]
        return Case(
            name, f"{name} {{d}}, {{a}};", ("f32",), "f32", oracle, _relative(limit), domain
        )

    def away_from_one(bits: int) -> bool:
        value = FP32.decode(bits)
        return _normal(bits) and not 0.9 < value < 1.1

    def reciprocal(bits: int) -> int:
        return floats.divide(FP32, FP32.encode(1.0), bits)

    for spelling in ("", ".ftz"):
        yield unary(f"ex2.approx{spelling}.f32", _exp2, 2.0**-21, _normal)
        yield unary(f"lg2.approx{spelling}.f32", _log2, 2.0**-18, away_from_one)
        yield unary(f"rcp.approx{spelling}.f32", reciprocal, 2.0**-22, _normal)
        yield unary(f"rsqrt.approx{spelling}.f32", _reciprocal_root, 2.0**-21, _normal)
        yield unary(f"sqrt.approx{spelling}.f32", _root, 2.0**-20, _normal)
    yield Case(
        "div.approx.f32",
        "div.approx.f32 {d}, {a}, {b};",
        ("f32", "f32"),
        "f32",
        lambda a, b: floats.divide(FP32, a, b),
        _relative(2.0**-20),
        lambda a, b: _ordinary(FP32)(a, b) and FP32.decode(b) != 0,
    )
    for kind, fmt in (("f16x2", FP16), ("bf16x2", BF16)):
        yield from _packed_arithmetic(kind, fmt)


def _packed_arithmetic(kind: str, fmt: FloatFormat) -> Iterator[Case]:
    def halves(oracle):  # type: ignore[no-untyped-def]
        return lambda *v: oracle(*(x & 0xFFFF for x in v)) | oracle(*(x >> 16 for x in v)) << 16

    same = same_float_pair(fmt)
    pair = (kind, kind)
    yield Case(
        f"fma.rn.{kind}",
        f"fma.rn.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
        (kind,) * 3,
        kind,
        halves(lambda a, b, c: floats.fused_multiply_add(fmt, a, b, c)),
        same,
    )
    for larger, name in ((False, "min"), (True, "max")):
        yield Case(
            f"{name}.{kind}",
            f"{name}.{kind} {{d}}, {{a}}, {{b}};",
            pair,
            kind,
            halves(lambda a, b, x=larger: floats.extreme(fmt, a, b, x)),
            same,
        )
    if fmt is FP16:
        yield Case(
            f"add.{kind}",
            f"add.{kind} {{d}}, {{a}}, {{b}};",
            pair,
            kind,
            halves(lambda a, b: floats.add(fmt, a, b)),
            same,
        )
        yield Case(
            f"mul.{kind}",
            f"mul.{kind} {{d}}, {{a}}, {{b}};",
            pair,
            kind,
            halves(lambda a, b: floats.multiply(fmt, a, b)),
            same,
        )


def integer_conversions() -> Iterator[Case]:
    for source, from_width, from_sign in _INTEGER_TYPES:
        for target, to_width, to_sign in _INTEGER_TYPES:
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


def float_conversions() -> Iterator[Case]:
    for target, width, sign in _INTEGER_TYPES:
        if width == 16:
            continue
        for mode in ("rni", "rzi", "rmi", "rpi"):
            yield Case(
                f"cvt.{mode}.{target}.f32",
                f"cvt.{mode}.{target}.f32 {{d}}, {{a}};",
                ("f32",),
                f"b{width}",
                lambda a, m=mode, w=width, s=sign: floats.to_integer(FP32, a, m, w, s),
            )
        for mode in ("rn", "rz", "rm", "rp"):
            yield Case(
                f"cvt.{mode}.f32.{target}",
                f"cvt.{mode}.f32.{target} {{d}}, {{a}};",
                (f"b{width}",),
                "f32",
                lambda a, m=mode, w=width, s=sign: FP32.encode(
                    floats.Fraction(value_of(a, w, s)), m
                ),
            )
    for mode in ("rni", "rzi", "rmi", "rpi"):
        yield Case(
            f"cvt.{mode}.f32.f32",
            f"cvt.{mode}.f32.f32 {{d}}, {{a}};",
            ("f32",),
            "f32",
            lambda a, m=mode: floats.round_to_integral(FP32, a, m),
            same_float(FP32),
        )
    yield Case(
        "cvt.sat.f32.f32",
        "cvt.sat.f32.f32 {d}, {a};",
        ("f32",),
        "f32",
        _saturate_unit,
        same_float(FP32),
    )
    yield from _half_conversions()


def _saturate_unit(bits: int) -> int:
    if FP32.is_nan(bits) or FP32.decode(bits) <= 0.0:
        return 0
    return min(bits, FP32.encode(1.0))


def _half_conversions() -> Iterator[Case]:
    for kind, fmt in (("f16", FP16), ("bf16", BF16)):
        for mode in ("rn", "rz"):
            yield Case(
                f"cvt.{mode}.{kind}.f32",
                f"cvt.{mode}.{kind}.f32 {{d}}, {{a}};",
                ("f32",),
                kind,
                lambda a, f=fmt, m=mode: floats.convert(FP32, f, a, m),
                same_float(fmt),
            )
            # The first source lands in the upper half.
            yield Case(
                f"cvt.{mode}.{kind}x2.f32",
                f"cvt.{mode}.{kind}x2.f32 {{d}}, {{a}}, {{b}};",
                ("f32", "f32"),
                f"{kind}x2",
                lambda a, b, f=fmt, m=mode: (
                    floats.convert(FP32, f, a, m) << 16 | floats.convert(FP32, f, b, m)
                ),
                same_float_pair(fmt),
            )
        # Halfway between neighbours, one bit below and one above: where wrong rounding shows.
        drop = FP32.mantissa_bits - fmt.mantissa_bits
        yield Case(
            f"cvt.rn.{kind}.f32-ties",
            f"and.b32 %r1, {{a}}, {wrap(-(1 << drop), 32):#x};\n"
            f"rem.u32 %r2, {{b}}, 3; add.u32 %r2, %r2, {(1 << (drop - 1)) - 1:#x};\n"
            f"or.b32 %r1, %r1, %r2; mov.b32 %f1, %r1; cvt.rn.{kind}.f32 {{d}}, %f1;",
            ("f32", "b32"),
            kind,
            lambda a, b, f=fmt, n=drop: floats.convert(
                FP32, f, (a >> n << n) | (b % 3 + (1 << (n - 1)) - 1)
            ),
            same_float(fmt),
        )
    yield Case(
        "cvt.f32.f16",
        "cvt.f32.f16 {d}, {a};",
        ("f16",),
        "f32",
        lambda a: floats.convert(FP16, FP32, a),
        same_float(FP32),
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


TABLES = {
    "integer arithmetic": integer_arithmetic,
    "bit operations": bit_operations,
    "comparisons": comparisons,
    "float arithmetic": float_arithmetic,
    "approximations": approximations,
    "integer conversions": integer_conversions,
    "float conversions": float_conversions,
    "moves": moves,
}


def all_cases() -> list[Case]:
    return [case for table in TABLES.values() for case in table()]
