"""Floating-point arithmetic and conversions with their oracles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import scalar_floats as floats
from micro_kernels import Agreement, Case, same_float, same_float_pair
from scalar_floats import BF16, FP16, FP32, FloatFormat
from scalar_integers import INTEGER_TYPES, value_of, wrap


def _close_pair(fmt: FloatFormat) -> Agreement:
    """One ulp in each half: the emulator rounds product and sum apart."""

    def close(got: int, want: int) -> bool:
        if fmt.is_nan(got) or fmt.is_nan(want):
            return fmt.is_nan(got) and fmt.is_nan(want)
        return floats.ulps_apart(fmt, got, want) <= 1

    return lambda got, want: close(got & 0xFFFF, want & 0xFFFF) and close(got >> 16, want >> 16)


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


def _close_fma(got: int, want: int) -> bool:
    if FP32.is_nan(got) or FP32.is_nan(want):
        return FP32.is_nan(got) and FP32.is_nan(want)
    return floats.ulps_apart(FP32, got, want) <= 1


def _ordinary(fmt: FloatFormat) -> Callable[..., bool]:
    """Finite and neither tiny nor huge: where subnormals and overflow play no part."""

    def check(*values: int) -> bool:
        numbers = [fmt.decode(bits) for bits in values]
        return all(math.isfinite(x) and (x == 0 or 2.0**-20 < abs(x) < 2.0**20) for x in numbers)

    return check


def _relative(limit: float) -> Agreement:
    def agree(got: int, want: int) -> bool:
        if FP32.is_nan(want) or math.isinf(FP32.decode(want)) or FP32.decode(want) == 0.0:
            return same_float(FP32)(got, want)
        x, y = FP32.decode(got), FP32.decode(want)
        # .ftz and the approximations may give zero for a subnormal result.
        return abs(x - y) <= limit * abs(y) or (abs(y) < 2.0**-126 and x == 0.0)

    return agree


def approximations() -> Iterator[Case]:
    def unary(
        name: str, oracle: Callable[[int], int], limit: float, domain: Callable[[int], bool]
    ) -> Case:
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


def _packed_arithmetic(kind: str, fmt: FloatFormat) -> Iterator[Case]:
    def halves(oracle: Callable[..., int]) -> Callable[..., int]:
        return lambda *v: oracle(*(x & 0xFFFF for x in v)) | oracle(*(x >> 16 for x in v)) << 16

    same = same_float_pair(fmt)
    pair = (kind, kind)
    yield Case(
        f"fma.rn.{kind}",
        f"fma.rn.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
        (kind,) * 3,
        kind,
        halves(lambda a, b, c: floats.fused_multiply_add(fmt, a, b, c)),
        _close_pair(fmt),
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


def float_conversions() -> Iterator[Case]:
    for target, width, sign in INTEGER_TYPES:
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
