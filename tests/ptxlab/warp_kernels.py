"""Warp-wide instructions under test: shuffles, votes, ldmatrix and mma.sync with their oracles.

Each ``WarpCase`` gives the columns that its threads load, and what they must store. The oracles
are the ISA's index formulas, one element at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from micro_kernels import INPUT_NAMES, Executor, run_columns
from scalar_floats import BF16, FP16, FP32, FloatFormat

Columns = list[list[int]]


@dataclass(frozen=True)
class WarpCase:
    name: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    columns: Columns
    expected: Callable[[Columns], Columns]
    declarations: str = ""

    def __str__(self) -> str:
        return self.name


def wrong_lanes(case: WarpCase, execute: Executor) -> list[str]:
    got = run_columns(
        execute, case.body, case.inputs, case.outputs, case.columns, case.declarations
    )
    want = case.expected(case.columns)
    return [
        f"{case.name}: output {k}, thread {t}: {g:#x}, the ISA says {w:#x}"
        for k, (got_k, want_k) in enumerate(zip(got, want, strict=True))
        for t, (g, w) in enumerate(zip(got_k, want_k, strict=True))
        if g != w
    ]


# Shuffles and votes -------------------------------------------------------------------------


def _shuffle_source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane that shfl.sync reads, and its predicate."""
    segment_mask, clamp = (c >> 8) & 31, c & 31
    max_lane = (lane & segment_mask) | (clamp & ~segment_mask)
    min_lane = lane & segment_mask
    b &= 31
    source, inside = {
        "up": (lane - b, lane - b >= max_lane),
        "down": (lane + b, lane + b <= max_lane),
        "bfly": (lane ^ b, (lane ^ b) <= max_lane),
        "idx": (
            min_lane | (b & ~segment_mask & 31),
            (min_lane | (b & ~segment_mask & 31)) <= max_lane,
        ),
    }[mode]
    return (source if inside else lane), inside


def shuffles() -> Iterator[WarpCase]:
    threads = 64
    rng = random.Random("shuffles")
    values = [rng.getrandbits(32) for _ in range(threads)]
    for mode in ("up", "down", "bfly", "idx"):
        for width in (32, 16, 8, 4, 2):
            clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
            for b in (0, 1, 2, 3, 4, 7, 8, 16, 31):
                yield _shuffle(f"{mode}-w{width}-{b}", mode, values, [b] * threads, clamp)
        odd_clamp = 0x0C07
        yield _shuffle(f"{mode}-odd", mode, values, [5] * threads, odd_clamp)
    lanes = [rng.randrange(32) for _ in range(threads)]
    yield _shuffle("idx-per-lane", "idx", values, lanes, 31)
    yield _shuffle("idx-high-bits", "idx", values, [lane | 0x60 for lane in lanes], 31)


def _shuffle(name: str, mode: str, values: list[int], b: list[int], clamp: int) -> WarpCase:
    def expected(columns: Columns) -> Columns:
        found = [
            _shuffle_source(mode, thread & 31, columns[1][thread], clamp)
            for thread in range(len(columns[0]))
        ]
        data = [columns[0][(t & ~31) | source] for t, (source, _) in enumerate(found)]
        return [data, [int(inside) for _, inside in found]]

    body = f"shfl.sync.{mode}.b32 {{d}}|%p1, {{a}}, {{b}}, {clamp:#x}, 0xffffffff;\n"
    body += "selp.b32 {f}, 1, 0, %p1;"
    return WarpCase(f"shfl.{name}", body, ("b32", "b32"), ("b32", "b32"), [values, b], expected)


def votes() -> Iterator[WarpCase]:
    rng = random.Random("votes")
    patterns = {
        "mixed": [rng.randrange(2) for _ in range(64)],
        "all": [1] * 64,
        "none": [0] * 64,
        "warp": [int(thread < 32) for thread in range(64)],
    }
    for name, flags in patterns.items():
        yield _vote(f"vote.{name}", flags)
    halves = [int(thread % 32 < 16) for thread in range(64)]

    def low_half(columns: Columns) -> Columns:
        # Only the low half of each warp shuffles; the others keep their own value.
        data = columns[0]
        return [[data[t ^ 1] if halves[t] else data[t] for t in range(len(data))]]

    body = "mov.b32 {d}, {a};\nand.b32 %r1, %r0, 16;\nsetp.ne.b32 %p1, %r1, 0;\n"
    body += "@%p1 bra SKIP;\nshfl.sync.bfly.b32 {d}, {a}, 1, 31, 0x0000ffff;\nSKIP:"
    values = [rng.getrandbits(32) for _ in range(64)]
    yield WarpCase("shfl.half-a-warp", body, ("b32",), ("b32",), [values], low_half)


def _vote(name: str, flags: list[int]) -> WarpCase:
    def expected(columns: Columns) -> Columns:
        outputs: Columns = [[], [], []]
        for thread in range(len(flags)):
            warp = flags[thread & ~31 : (thread & ~31) + 32]
            outputs[0].append(sum(flag << lane for lane, flag in enumerate(warp)))
            outputs[1].append(int(all(warp)))
            outputs[2].append(int(any(warp)) | 2 * int(len(set(warp)) == 1))
        return outputs

    body = "setp.ne.b32 %p1, {a}, 0;\nvote.sync.ballot.b32 {d}, %p1, 0xffffffff;\n"
    body += "vote.sync.all.pred %p2, %p1, 0xffffffff; selp.b32 {f}, 1, 0, %p2;\n"
    body += "vote.sync.any.pred %p2, %p1, 0xffffffff; selp.b32 {g}, 1, 0, %p2;\n"
    body += "vote.sync.uni.pred %p2, %p1, 0xffffffff; selp.b32 %r1, 2, 0, %p2;\n"
    body += "or.b32 {g}, {g}, %r1;"
    return WarpCase(name, body, ("b32",), ("b32",) * 3, [flags], expected)


def matches() -> Iterator[WarpCase]:
    rng = random.Random("matches")
    patterns = {
        "mixed": [rng.randrange(3) for _ in range(64)],
        "one": [7] * 64,
        "warp": [thread // 32 for thread in range(64)],
        "all different": [rng.getrandbits(64) for _ in range(64)],
        # Equal in their lower words.
        "high": [5 | (thread % 2) << 40 for thread in range(64)],
    }
    for name, values in patterns.items():
        for width in (32, 64):
            yield _match(f"match.{name}.b{width}", values, width)


def _match(name: str, values: list[int], width: int) -> WarpCase:
    values = [value & ((1 << width) - 1) for value in values]

    def expected(columns: Columns) -> Columns:
        same, everyone = [], []
        for thread, value in enumerate(columns[0]):
            warp = columns[0][thread & ~31 : (thread & ~31) + 32]
            same.append(sum(1 << lane for lane, other in enumerate(warp) if other == value))
            everyone.append(0xFFFFFFFF if len(set(warp)) == 1 else 0)
        return [same, everyone, [int(mask != 0) for mask in everyone]]

    body = f"match.any.sync.b{width} {{d}}, {{a}}, 0xffffffff;\n"
    body += f"match.all.sync.b{width} {{f}}|%p1, {{a}}, 0xffffffff; selp.b32 {{g}}, 1, 0, %p1;"
    return WarpCase(name, body, (f"b{width}",), ("b32",) * 3, [values], expected)


def barrier_reductions() -> Iterator[WarpCase]:
    rng = random.Random("bar.red")
    patterns = {
        "mixed": [rng.randrange(2) for _ in range(64)],
        "all": [1] * 64,
        "none": [0] * 64,
        "one": [int(thread == 37) for thread in range(64)],
    }
    for name, flags in patterns.items():
        yield _barrier_reduction(f"bar.red.{name}", flags)


def _barrier_reduction(name: str, flags: list[int]) -> WarpCase:
    def expected(columns: Columns) -> Columns:
        threads, yes = len(columns[0]), sum(columns[0])
        return [[yes] * threads, [int(yes > 0) | 2 * int(yes == threads)] * threads]

    body = "setp.ne.b32 %p1, {a}, 0;\nbar.red.popc.u32 {d}, 0, %p1;\n"
    body += "bar.red.or.pred %p2, 0, %p1; selp.b32 {f}, 1, 0, %p2;\n"
    body += "barrier.red.and.pred %p2, 1, 64, %p1; selp.b32 %r1, 2, 0, %p2;\n"
    body += "or.b32 {f}, {f}, %r1;"
    return WarpCase(name, body, ("b32",), ("b32",) * 2, [flags], expected)


# ldmatrix -----------------------------------------------------------------------------------


def matrix_loads() -> Iterator[WarpCase]:
    for count in (1, 2, 4):
        for transposed in (False, True):
            yield _matrix_load(count, transposed)


def _matrix_load(count: int, transposed: bool) -> WarpCase:
    """Two warps; each first writes 32 rows of 16 bytes, then loads them in a random order."""
    rng = random.Random(f"ldmatrix{count}{transposed}")
    data = [rng.getrandbits(64) for _ in range(64)], [rng.getrandbits(64) for _ in range(64)]
    # Row addresses of lanes that the form does not use must not matter: they point anywhere valid.
    rows = [rng.randrange(64) for _ in range(64)]

    def element(columns: Columns, row: int, column: int) -> int:
        word = columns[column // 4][row]
        return (word >> 16 * (column % 4)) & 0xFFFF

    def expected(columns: Columns) -> Columns:
        outputs: Columns = [[0] * 64 for _ in range(4)]
        for thread in range(64):
            warp, lane = thread & ~31, thread & 31
            for matrix in range(count):
                address = [columns[2][warp + 8 * matrix + i] for i in range(8)]
                for half in (0, 1):
                    row, column = lane // 4, 2 * (lane % 4) + half
                    if transposed:
                        row, column = column, row
                    outputs[matrix][thread] |= element(columns, address[row], column) << 16 * half
        return outputs

    registers = ["{d}", "{f}", "{g}", "{h}"]
    body = "mov.u32 %r1, tile;\nshl.b32 %r2, %r0, 4; add.s32 %r2, %r1, %r2;\n"
    body += "st.shared.v2.b64 [%r2], {{a}, {b}};\nbar.sync 0;\n"
    body += "shl.b32 %r3, {c}, 4; add.s32 %r3, %r1, %r3;\n"
    body += "".join(f"mov.b32 {register}, 0;\n" for register in registers)
    trans = ".trans" if transposed else ""
    body += f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 "
    body += f"{{{', '.join(registers[:count])}}}, [%r3];"
    return WarpCase(
        f"ldmatrix.x{count}{trans}",
        body,
        ("b64", "b64", "b32"),
        ("b32",) * 4,
        [*data, rows],
        expected,
        ".shared .align 16 .b8 tile[1024];\n",
    )


# mma.sync -----------------------------------------------------------------------------------


def matrix_products() -> Iterator[WarpCase]:
    for fmt in (FP16, BF16):
        for k in (16, 8):
            yield _product(fmt, k)


def _product(fmt: FloatFormat, k: int) -> WarpCase:
    """Small whole numbers, so that every sum is exact in fp32 in any order."""
    rng = random.Random(f"mma{fmt.name}{k}")

    def packed() -> int:
        low, high = (fmt.encode(float(rng.randint(-8, 8))) for _ in range(2))
        return low | high << 16

    count_a, count_b = k // 4, k // 8
    warps = 2
    columns = [[packed() for _ in range(32 * warps)] for _ in range(count_a + count_b)]
    columns += [
        [FP32.encode(float(rng.randint(-50, 50))) for _ in range(32 * warps)] for _ in range(4)
    ]

    def half(register: int, i: int) -> float:
        return fmt.decode((register >> 16 * (i & 1)) & 0xFFFF)

    def expected(cols: Columns) -> Columns:
        a_registers, b_registers = cols[:count_a], cols[count_a : count_a + count_b]
        accumulators = cols[count_a + count_b :]
        outputs: Columns = [[0] * (32 * warps) for _ in range(4)]
        for warp in range(warps):
            a = [[0.0] * k for _ in range(16)]
            b = [[0.0] * 8 for _ in range(k)]
            for lane in range(32):
                group, within = lane >> 2, lane & 3
                thread = 32 * warp + lane
                for i in range(2 * count_a):
                    # ISA: rows alternate every register, columns step by 8 every two.
                    row = group + (8 if (i // 2) % 2 else 0)
                    column = within * 2 + (i & 1) + (8 if i >= 4 else 0)
                    a[row][column] = half(a_registers[i // 2][thread], i)
                for i in range(2 * count_b):
                    row = within * 2 + (i & 1) + (8 if i >= 2 else 0)
                    b[row][group] = half(b_registers[i // 2][thread], i)
            for lane in range(32):
                group, within = lane >> 2, lane & 3
                thread = 32 * warp + lane
                for i in range(4):
                    row = group + (8 if i >= 2 else 0)
                    column = within * 2 + (i & 1)
                    total = FP32.decode(accumulators[i][thread])
                    for inner in range(k):
                        total += a[row][inner] * b[inner][column]
                    outputs[i][thread] = FP32.encode(total)
        return outputs

    kind = fmt.name
    inputs = ("b32",) * (count_a + count_b) + ("f32",) * 4
    names = [f"{{{name}}}" for name in INPUT_NAMES[: len(inputs)]]
    a_text, b_text = ", ".join(names[:count_a]), ", ".join(names[count_a : count_a + count_b])
    c_text = ", ".join(names[count_a + count_b :])
    body = (
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{{{d}}, {{f}}, {{g}}, {{h}}}},"
        f" {{{a_text}}}, {{{b_text}}}, {{{c_text}}};"
    )
    return WarpCase(f"mma.m16n8k{k}.{kind}", body, inputs, ("f32",) * 4, columns, expected)


def tf32_products() -> Iterator[WarpCase]:
    """One element a register, small whole numbers again."""
    for k in (8, 4):
        rng = random.Random(f"tf32 {k}")
        count_a, count_b = k // 2, k // 4
        counts = count_a + count_b + 4
        columns = [
            [FP32.encode(float(rng.randint(-8, 8))) for _ in range(32)] for _ in range(counts)
        ]
        yield _tf32_product(k, count_a, count_b, columns)


def _tf32_product(k: int, count_a: int, count_b: int, columns: Columns) -> WarpCase:
    def expected(cols: Columns) -> Columns:
        a = [[0.0] * k for _ in range(16)]
        b = [[0.0] * 8 for _ in range(k)]
        outputs: Columns = [[0] * 32 for _ in range(4)]
        for lane in range(32):
            group, within = lane >> 2, lane & 3
            for i in range(count_a):
                a[group + 8 * (i % 2)][within + 4 * (i // 2)] = FP32.decode(cols[i][lane])
            for i in range(count_b):
                b[within + 4 * i][group] = FP32.decode(cols[count_a + i][lane])
        for lane in range(32):
            group, within = lane >> 2, lane & 3
            for i in range(4):
                row, column = group + 8 * (i // 2), within * 2 + i % 2
                total = FP32.decode(cols[count_a + count_b + i][lane])
                total += sum(a[row][inner] * b[inner][column] for inner in range(k))
                outputs[i][lane] = FP32.encode(total)
        return outputs

    inputs = ("b32",) * (count_a + count_b) + ("f32",) * 4
    names = [f"{{{name}}}" for name in INPUT_NAMES[: len(inputs)]]
    a_text, b_text = ", ".join(names[:count_a]), ", ".join(names[count_a : count_a + count_b])
    c_text = ", ".join(names[count_a + count_b :])
    body = (
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32 {{{{d}}, {{f}}, {{g}}, {{h}}}},"
        f" {{{a_text}}}, {{{b_text}}}, {{{c_text}}};"
    )
    return WarpCase(f"mma.m16n8k{k}.tf32", body, inputs, ("f32",) * 4, columns, expected)


def all_warp_cases() -> list[WarpCase]:
    return [
        *shuffles(),
        *votes(),
        *matches(),
        *barrier_reductions(),
        *matrix_loads(),
        *matrix_products(),
        *tf32_products(),
    ]
