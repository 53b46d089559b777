"""Sums of tensor cores to the last bit: against fractions, by hand, and through instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_programs import aligned, program, run
from scalar_tensor_core import step
from test_mma_chains import PROGRAMS, clear, load, mma, result, store, text_of
from test_wgmma import fragment_program
from test_wmma import launch, stored, wmma
from wgmma_programs import operands, tiles_body, whole_program
from wgmma_tiles import Tile, accumulators, floats, words_of

import ptxlab
from ptxlab.errors import ArgumentError, EmulatorError
from ptxlab.machine.tensor_cores import OPERAND_TYPES, TENSOR_CORES, TensorCore

f4, u4 = np.float32, np.uint32
AMPERE, HOPPER = TENSOR_CORES[80], TENSOR_CORES[90]
KINDS = ("f16", "bf16", "tf32")
#: Of an instruction's k, by type.
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8}


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 with so many bits as the type has."""
    if kind == "f16":
        return values.astype(np.float16).astype(f4)
    mask = u4(0xFFFF0000 if kind == "bf16" else 0xFFFFE000)
    return (values.astype(f4).view(u4) & mask).view(f4)


def drawn(style: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Operands of a style."""
    if style == "any bits":
        bits = rng.integers(0, 1 << 32, shape, dtype=u4)
        return rounded(bits.view(f4), kind) if kind != "f16" else (
            bits.astype(np.uint16).view(np.float16).astype(f4)
        )  # fmt: skip
    x = rng.standard_normal(shape)
    if style == "24 octaves":
        x = np.copysign(np.exp2(-24 * rng.random(shape)), x)
    elif style == "zeros of both signs":
        x = np.where(rng.random(shape) < 0.2, x, np.copysign(0, x))
    elif style == "subnormal":
        x = np.ldexp(x, {"f16": -20}.get(kind, -128))
    elif style == "products below float32":
        x = np.ldexp(x, {"f16": -12}.get(kind, -74))
    elif style == "large":
        x = np.ldexp(x, {"f16": 13}.get(kind, 63))
    elif style == "infinity and NaN":
        x = np.where(rng.random(shape) < 0.02, rng.choice([np.inf, -np.inf, np.nan], shape), x)
    return rounded(x, kind)


STYLES = [
    "normal",
    "24 octaves",
    "zeros of both signs",
    "subnormal",
    "products below float32",
    "large",
    "infinity and NaN",
    "any bits",
]


def addends(shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    normal = rng.standard_normal(shape).astype(f4)
    any_bits = rng.integers(0, 1 << 32, shape, dtype=u4).view(f4)
    return {
        "zero": np.zeros(shape, f4),
        "-0": np.full(shape, -0.0, f4),
        "normal": normal,
        "subnormal": normal * f4(2.0**-128),
        "large": normal * f4(2.0**125),
        "any bits": any_bits,
    }


def by_fractions(
    core: TensorCore, a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str
) -> np.ndarray:
    """What multiply_add is to give, as bits."""
    depth = min(DEPTH[kind], core.step_bytes // OPERAND_TYPES[kind].nbytes)
    found = c.view(u4).copy()
    for unit, row, column in np.ndindex(*c.shape):
        for k in range(0, a.shape[2], depth):
            sum_before = float(found[unit, row, column : column + 1].view(f4)[0])
            found[unit, row, column] = step(
                a[unit, row, k : k + depth].tolist(), b[unit, k : k + depth, column].tolist(),
                sum_before, kind, core.fraction_bits, core.zero_exponent,
            )  # fmt: skip
    return found


def bits_of(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str = "f16", core: TensorCore = HOPPER
) -> np.ndarray:
    return core.multiply_add(a, b, c, OPERAND_TYPES[kind], DEPTH[kind]).view(u4)


@pytest.mark.parametrize("core", [AMPERE, HOPPER], ids=["Ampere", "Hopper"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_hostile_operands_against_fractions(style: str, kind: str, core: TensorCore) -> None:
    rng = np.random.default_rng((STYLES.index(style), KINDS.index(kind)))
    a, b = drawn(style, (2, 4, 32), kind, rng), drawn(style, (2, 32, 4), kind, rng)
    for name, c in addends((2, 4, 4), rng).items():
        found, wanted = bits_of(a, b, c, kind, core), by_fractions(core, a, b, c, kind)
        assert np.array_equal(found, wanted), (
            name,
            found[found != wanted],
            wanted[found != wanted],
        )


def test_styles_reach_both_ways_of_adding() -> None:
    """Of bfloat16 products some are beyond float32 and go through float64."""
    largest = {
        style: np.abs(drawn(style, (99,), "bf16", np.random.default_rng(0))).max()
        for style in ("normal", "large")
    }
    assert largest["normal"] ** 2 < 100
    assert float(largest["large"]) ** 2 > float(np.finfo(f4).max)


# By hand -----------------------------------------------------------------------------------------


def one(
    pairs: list[tuple[float, float]], c: float = 0.0, kind: str = "f16", core: TensorCore = HOPPER
) -> float:
    """The sum of a single accumulator; the rest of its 16 products is zero."""
    filled = pairs + [(0.0, 0.0)] * (16 - len(pairs))
    a, b = np.array(filled, f4).T
    found = bits_of(a[None, None], b[None, :, None], np.full((1, 1, 1), c, f4), kind, core)
    return float(found.view(f4)[0, 0, 0])


SMALL = (2.0**-12, 2.0**-13)  # a product of 2**-25


def test_a_term_of_the_25th_bit_counts_on_hopper_only() -> None:
    assert one([SMALL] * 16, 1.0) == 1 + 2.0**-21
    assert one([SMALL] * 16, 1.0, core=AMPERE) == 1
    assert one([(2.0**-12, 2.0**-12)] * 16, 1.0, core=AMPERE) == 1 + 2.0**-20


def test_terms_are_cut_off_towards_zero() -> None:
    large = (1.9375 * 2.0**-12, 2.0**-13)  # 1.9375 of the last unit
    assert one([large] * 16, 1.0) == 1 + 2.0**-21
    minus = (-large[0], large[1])
    assert one([minus] * 16, -1.0) == -1 - 2.0**-21


def test_the_sum_is_cut_off_towards_zero() -> None:
    three_quarters = (1.5 * 2.0**-12, 2.0**-12)  # of the last bit of 1
    assert one([three_quarters], 1.0) == 1
    assert one([three_quarters, three_quarters], 1.0) == 1 + 2.0**-23
    assert one([(-three_quarters[0], three_quarters[1])], -1.0) == -1


def test_a_product_has_the_exponent_of_its_factors() -> None:
    """1.5 x 1.5 is 2.25, and is aligned as 1 x 1 is: what is less than 2**-24 stays."""
    assert one([(1.5, 1.5)] + [SMALL] * 15) == 2.25 + 2.0**-22


def test_what_is_lost_beside_a_large_term_stays_lost_when_that_cancels() -> None:
    assert one([(1.0, 1.0), (-1.0, 1.0), SMALL]) == 2.0**-25
    assert one([(2.0, 1.0), (-2.0, 1.0), SMALL]) == 0


def test_half_of_the_products_at_a_time_on_ampere() -> None:
    pairs = [(1.0, 1.0)] + [(0.0, 0.0)] * 7 + [(-1.0, 1.0), (2.0**-12, 2.0**-14)]
    # Hopper loses 2**-26 beside 1; Ampere has it beside 1 and -1, too.
    assert one(pairs) == one(pairs, core=AMPERE) == 0
    # In a step of its own that sum is left, and the small one is added to nothing else.
    apart = [(1.0, 1.0), (-1.0, 1.0)] + [(0.0, 0.0)] * 6 + [(2.0**-12, 2.0**-14)]
    assert one(apart) == 0
    assert one(apart, core=AMPERE) == 2.0**-26


def test_zeros_infinities_and_nan() -> None:
    def bits(value: float) -> int:
        return int(np.array(value, f4).view(u4))

    assert bits(one([(-0.0, 1.0)], -0.0)) == 0
    assert bits(one([(-1.0, 1.0), (1.0, 1.0)])) == 0
    assert bits(one([(np.inf, 1.0), (-1.0, 1.0)])) == 0x7F800000
    assert bits(one([(1.0, 1.0)], -np.inf)) == 0xFF800000
    for pairs in ([(np.inf, 0.0)], [(np.inf, 1.0), (-np.inf, 1.0)], [(np.nan, 0.0)]):
        assert bits(one(pairs, -1.0)) == 0x7FFFFFFF


def test_beside_a_zero_the_smallest_products_are_lost() -> None:
    """Hopper's zeros have the exponent -133, other addends -126 at least: what is below 2**-158 or
    2**-151 is cut off."""
    sixteenth = (2.0**-76, 2.0**-77)  # of float32's least number
    assert one([sixteenth] * 16, 0.0, "bf16") == 2.0**-149
    assert one([sixteenth] * 16, 2.0**-149, "bf16") == 2.0**-149
    # Together exactly 2**-149 and a little, if nothing of the fifteen were lost.
    less = (255 / 128 * 2.0**-77, 2.0**-77)
    more = (1.0625 * 2.0**-76, 2.0**-77)
    assert 15 * less[0] * less[1] + more[0] * more[1] > 2.0**-149
    assert one([less] * 15 + [more], 0.0, "bf16") == 0
    # A negative sum that is cut off to zero is +0.
    assert np.signbit(one([(-(2.0**-76), 2.0**-77)], 0.0, "bf16")) == 0


def test_products_beyond_float32_cancel() -> None:
    large = 2.0**127
    assert one([(large, large), (-large, large)], 3.0, "bf16") == 0
    assert one([(large, 1.0), (large, 1.0)], 0.0, "bf16") == np.inf
    assert one([(large, 1.0), (large, 1.0), (-1.0, 2.0**104)], 0.0, "bf16") == 2.0**128 - 2.0**104


# Properties --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_the_order_within_a_step_does_not_matter_and_that_of_steps_does(kind: str) -> None:
    rng = np.random.default_rng(5)
    a, b = drawn("24 octaves", (2, 64, 48), kind, rng), drawn("24 octaves", (2, 48, 64), kind, rng)
    c = rng.standard_normal((2, 64, 64)).astype(f4)
    found = bits_of(a, b, c, kind)
    within = np.concatenate([16 * s + rng.permutation(16) for s in range(3)])
    assert np.array_equal(bits_of(a[:, :, within], b[:, within], c, kind), found)
    steps = np.concatenate([np.arange(32, 48), np.arange(32)])
    assert not np.array_equal(bits_of(a[:, :, steps], b[:, steps], c, kind), found)


def test_a_chain_is_its_steps_one_after_the_other_and_blocks_do_not_matter() -> None:
    rng = np.random.default_rng(6)
    a, b = drawn("normal", (5, 48, 64), "f16", rng), drawn("normal", (5, 64, 264), "f16", rng)
    c = rng.standard_normal((5, 48, 264)).astype(f4)
    whole = bits_of(a, b, c)
    sums = c
    for k in range(0, 64, 16):
        sums = bits_of(a[:, :, k : k + 16], b[:, k : k + 16], sums).view(f4)
    assert np.array_equal(sums.view(u4), whole)
    part = bits_of(a[3:4, 7:9], b[3:4, :, 100:104], c[3:4, 7:9, 100:104])
    assert np.array_equal(part, whole[3:4, 7:9, 100:104])


# Through instructions ----------------------------------------------------------------------------


def by_wgmma(text: str, image: np.ndarray, n: int, **how: Any) -> np.ndarray:
    """Accumulators by register and thread."""
    source, out = aligned(image.shape, np.uint8), aligned((n // 2, 128), f4)
    source[:] = image
    run(text, [(source, False), (out, True)], threads=128, **how)
    return out


def drawn_operands(n: int, depth: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A and B of the programs, as float32."""
    a, b, _ = operands(n, depth, kind)
    with np.errstate(invalid="ignore"):  # a flag that the product of float64 left behind
        return floats(a, kind).astype(f4), floats(b, kind).astype(f4)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_wgmma_is_a_chain_of_steps(kind: str) -> None:
    body, image, _ = tiles_body(Tile(64, 64, True, 128), Tile(32, 64, False, 64), kind)
    text = whole_program(body, image.size)
    a, b = drawn_operands(32, 64, kind)
    sums = bits_of(a[None], b.T[None], np.zeros((1, 64, 32), f4), kind).view(f4)[0]
    found = by_wgmma(text, image, 32, exact_mma=True)
    assert np.array_equal(found, accumulators(sums))
    # The warps one by one, their operands read early: the same bits.
    assert np.array_equal(by_wgmma(text, image, 32, exact_mma=True, seed=3), found)
    assert not np.array_equal(by_wgmma(text, image, 32), found)


def test_wgmma_adds_to_what_its_registers_hold() -> None:
    body, image, _ = fragment_program()
    a, b = drawn_operands(32, 16, "f16")
    found = by_wgmma(whole_program(body, image.size), image, 32, exact_mma=True)
    sums = bits_of(a[None], b.T[None], np.full((1, 64, 32), 2, f4)).view(f4)[0]
    assert np.array_equal(found, accumulators(sums))


def by_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str) -> np.ndarray:
    """c + a b of 16 x 32 and 32 x 8 words by two mma.sync, through the ISA's fragments."""
    source = np.zeros((64, 64), u4)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for half, r in np.ndindex(2, 4):
            column = 16 * half + 8 * (r // 2) + 2 * t
            source[lane, 4 * half + r] = pair(a[g + 8 * (r % 2), column : column + 2])
        for half, r in np.ndindex(2, 2):
            row = 16 * half + 8 * r + 2 * t
            source[lane, 16 + 2 * half + r] = pair(b[row : row + 2, g])
        source[lane, 24:28] = c[[g, g, g + 8, g + 8], [2 * t, 2 * t + 1] * 2].view(u4)
    body = load("a", 0, 8, 0) + load("b", 0, 4, 16) + load("a", 8, 4, 24)
    body += "".join(f"mov.b32 %d{r}, %a{8 + r};\n" for r in range(4))
    body += mma(0, 0, 0, kind=kind) + mma(0, 4, 2, kind=kind) + store(0, 4)
    out = np.zeros((64, 64), f4)
    run(text_of(body).replace("sm_80", "sm_90"), [(out, True), (source, False)], exact_mma=True)
    found = np.zeros_like(c)
    for lane in range(32):
        g, t = divmod(lane, 4)
        found[[g, g, g + 8, g + 8], [2 * t, 2 * t + 1] * 2] = out[lane, :4]
    return found


def pair(words: np.ndarray) -> int:
    return int(words[0]) | int(words[1]) << 16


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("style", ["24 octaves", "infinity and NaN"])
def test_mma_is_a_chain_of_steps(style: str, kind: str) -> None:
    rng = np.random.default_rng(8)
    a, b = drawn(style, (16, 32), kind, rng), drawn(style, (32, 8), kind, rng)
    c = rng.standard_normal((16, 8)).astype(f4)
    found = by_mma(words_of(a, kind), words_of(b, kind), c, kind)
    assert np.array_equal(found.view(u4), bits_of(a[None], b[None], c[None], kind)[0])


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_chains_that_run_as_one_have_the_bits_of_single_instructions(
    name: str, target: str
) -> None:
    body, accumulators, _ = PROGRAMS[name]
    text = text_of(body + store(0, accumulators)).replace("sm_80", target)
    fused, single = (result(text, "f16", fuse=fuse, exact_mma=True) for fuse in (True, False))
    assert np.array_equal(fused.view(u4), single.view(u4))


def test_k8_instructions_are_steps_of_their_own() -> None:
    body = load("a", 0, 4, 0) + load("b", 0, 2, 16) + clear(0, 4)
    deep = body + mma(0, 0, 0) + store(0, 4)
    shallow = body + mma(0, 0, 0, k=8) + mma(0, 2, 1, k=8) + store(0, 4)
    for target, equal in (("sm_80", True), ("sm_90", False)):
        one, two = (
            result(text_of(text).replace("sm_80", target), "f16", fuse=True, exact_mma=True)
            for text in (deep, shallow)
        )
        assert np.array_equal(one.view(u4), two.view(u4)) == equal


def test_wmma_has_the_bits_of_two_mma() -> None:
    rng = np.random.default_rng(9)
    a, b = (drawn("24 octaves", (16, 16), "bf16", rng) for _ in range(2))
    c = rng.standard_normal((16, 16)).astype(f4)
    out = stored(np.zeros((16, 16)), "f32", "row")
    given = [stored(a, "bf16", "row"), stored(b, "bf16", "col"), stored(c, "f32", "row")]
    launch(wmma("bf16", "row", "col", "row", "f32", ""), [out, *given], exact_mma=True)
    found = np.ascontiguousarray(out[:, :16]).view(u4)
    assert np.array_equal(found, bits_of(a[None], b[None], c[None], "bf16", AMPERE)[0])


def test_what_has_no_exact_mma_says_so() -> None:
    arrays = [stored(np.zeros((16, 16)), "f16", "row") for _ in range(4)]
    with pytest.raises(EmulatorError, match=r"wmma.mma with .f16 sums has no exact_mma; use .f32"):
        launch(wmma("f16", "row", "row", "row", "f16", ""), arrays, exact_mma=True)
    text = program("ret;", 0).replace("sm_80", "sm_75")
    with pytest.raises(
        ArgumentError,
        match=r"exact_mma: the rounding of sm_75's .* not known; compile for one of sm_80, .*121,",
    ):
        ptxlab.load(text).launch("main", [], grid=1, block=32, exact_mma=True)


def test_a_launch_takes_float32_sums_unless_told() -> None:
    body = load("a", 0, 4, 0) + load("b", 0, 2, 16) + clear(0, 4) + mma(0, 0, 0) + store(0, 4)
    module = ptxlab.load(text_of(body).replace("sm_80", "sm_90a"))
    source = np.random.default_rng(7).standard_normal((64, 128)).astype(np.float16)
    outs = {}
    for exact in (False, True):
        outs[exact] = np.zeros((64, 64), f4)
        how = {"grid": 1, "block": 64, "exact_mma": exact}
        assert not module.launch("main", [outs[exact], source], **how).findings
    assert not np.array_equal(outs[False], outs[True])
    assert np.allclose(outs[False], outs[True], atol=1e-5)
