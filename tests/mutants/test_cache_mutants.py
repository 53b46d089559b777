"""Mistakes in what kernels over caches of 8-bit floats have alone are caught: how codes are widened
and written, and how scales are applied."""

from __future__ import annotations

import pytest
import shared_kernels
from decode_mistakes import AskedDecode
from operation_victims import OperationVictim, SourcePatch, patched_modules

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

_FRAGMENTS, _ROW = "common/code_fragments.cuh", "common/stored_row.cuh"
_SCALES, _PART_MERGE = "mma_sync_decode/cache_scales.cuh", "mma_sync_decode/part_merge.cuh"
_COPIES, _RUN = "mma_sync_decode/run_copies.cuh", "mma_sync_decode/decode_run.cuh"
_APPEND = "mma_sync_decode/append_kernel.cuh"
VICTIMS = {
    # Warps with 16 keys, tiles of more than eight rows, and codes of the instruction set.
    "e4m3": OperationVictim(
        config("(BF16, 64, 16, 64, 4): decode+stages_4+least_64+parts_2+cache_e4m3"),
        Semantics("causal"),
        (
            AskedDecode("b2 s3:300 h12:2 d64 causal page16 cache_e4m3", options={"append": True}),
            AskedDecode("b1 s1:90 h8:2 d64 causal cache_e4m3", "huge", {"append": True}),
        ),
        arch=90,
    ),
    # Codes by integer arithmetic, and columns that the rows of a stage have and keys have not.
    "before sm_89": OperationVictim(
        config("(FP16, 96, 16, 64, 4): decode+stages_3+least_64+parts_2+cache_e4m3"),
        Semantics("causal"),
        (
            AskedDecode("b2 s1:150 h4:2 d96 causal cache_e4m3", "far_scores", {"append": True}),
            AskedDecode("b1 s2:40 h4:2 d96 causal cache_e4m3", "nonfinite", {"append": True}),
            AskedDecode("b1 s2:40 h4:2 d96 causal cache_e4m3", "huge", {"append": True}),
        ),
        arch=80,
    ),
    "e5m2": OperationVictim(
        config("(BF16, 64, 16, 64, 4): decode+stages_4+least_64+parts_2+cache_e5m2"),
        Semantics("causal", softcap=True),
        (
            AskedDecode("b2 s1:150 h4:2 d64 causal softcap cache_e5m2", options={"append": True}),
            AskedDecode("b1 s2:40 h4:2 d64 causal softcap cache_e5m2", "huge", {"append": True}),
        ),
        arch=80,
    ),
    # Warps whose states are not merged through shared memory.
    "own rows": OperationVictim(
        config("(BF16, 64, 32, 32, 2): decode+stages_3+least_64+parts_2+own_rows+cache_e4m3"),
        Semantics("causal"),
        (AskedDecode("b1 s5:150 h12:2 d64 causal cache_e4m3"),),
        arch=90,
    ),
}
_WIDEN = "cursor.at(16 * pair + i / 2 * 8, step) + i % 2 * 8;"
MISTAKES = {
    "e4m3": (
        SourcePatch("the scale squared", _SCALES, "__fmul_rn(RowEnd::scaled(sum), v_scale)",
                    "__fmul_rn(__fmul_rn(RowEnd::scaled(sum), v_scale), v_scale)"),
        SourcePatch("no scale of values", _SCALES, "__fmul_rn(RowEnd::scaled(sum), v_scale)",
                    "RowEnd::scaled(sum)"),
        SourcePatch("queries in the order of 16 bits", _FRAGMENTS,
                    "kReadsQuads<kFormat>, QuadRowsA<Layout, kMTiles>,",
                    "kReadsQuads<kFormat>, RowsA<Layout, kMTiles>,"),
        SourcePatch("the columns of a query's first pair twice", _FRAGMENTS,
                    "2 * step) + i / 2 * 4", "2 * step)"),
        SourcePatch("the same row of queries twice", _FRAGMENTS, "i % 2 * 8, 2 * step)",
                    "0, 2 * step)"),
        SourcePatch("a key's first two elements twice", _FRAGMENTS,
                    "widen_two<value_t, kFormat>(codes.high);",
                    "widen_two<value_t, kFormat>(codes.low);"),
        SourcePatch("keys of a pair's first tile twice", _FRAGMENTS, "codes(of_tiles[i])",
                    "codes(of_tiles[0])"),
        SourcePatch("odd columns where even ones belong", _FRAGMENTS,
                    "even = pack_16bit<value_t>(first.x, second.x);",
                    "even = pack_16bit<value_t>(first.y, second.y);"),
        SourcePatch("two keys' values exchanged", _FRAGMENTS,
                    "odd = pack_16bit<value_t>(first.y, second.y);",
                    "odd = pack_16bit<value_t>(second.y, first.y);"),
        SourcePatch("columns as they come", _PART_MERGE,
                    "{bits(0, 0), bits(1, 0), bits(0, 1), bits(1, 1)}",
                    "{bits(0, 0), bits(0, 1), bits(1, 0), bits(1, 1)}"),
        SourcePatch("sums of other rows in the stage's", _PART_MERGE,
                    "return Kernel::other_sums_offset + of_warp * kBytes - Kernel::ring_offset -",
                    "return Kernel::other_sums_offset - Kernel::ring_offset -"),
        SourcePatch("no saturation", _ROW, "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;",
                    "{ .reg .f32 a, b; min.f32 a, %1, 0f43000000; min.f32 b, %2, 0f43000000; "
                    "cvt.rn.satfinite.e4m3x2.f32 %0, a, b; }"),
        SourcePatch("values by the keys' scale", _APPEND,
                    "kOfValues ? v_scale(args, head) : k_scale(args, head)",
                    "k_scale(args, head)"),
        SourcePatch("times the scale", _ROW,
                    "codes_of<kFormat>(__fdiv_rn(to_float(x), scale), 0.0f)",
                    "codes_of<kFormat>(__fmul_rn(to_float(x), scale), 0.0f)"),
        SourcePatch("rows of the cache as far apart as 16 bits", _APPEND,
                    "(cache) + block * strides.batch + slot * strides.row",
                    "(cache) + block * strides.batch + slot * 2 * strides.row"),
    ),
    "before sm_89": (
        SourcePatch("elements of a key's first half twice", _FRAGMENTS, _WIDEN,
                    "cursor.at(16 * pair + i / 2 * 8, step);"),
        SourcePatch("keys of a pair's first tile twice", _FRAGMENTS, _WIDEN,
                    "cursor.at(16 * pair, step) + i % 2 * 8;"),
        SourcePatch("a lane's pair is its neighbour's", _FRAGMENTS, "first_chunk, lane % 4 * 2)",
                    "first_chunk, (lane ^ 1) % 4 * 2)"),
        SourcePatch("the wrong half of the pair", _FRAGMENTS, "0x3120", "0x2031"),
        SourcePatch("the bias of fp16", _FRAGMENTS, "kOfBias = 256.0f", "kOfBias = 128.0f"),
        SourcePatch("NaN is 480", _FRAGMENTS, "fabsf(value) > kLargest ? NAN : value", "value"),
        SourcePatch("every key positive", _FRAGMENTS, "(x & 0x80008000u) | ", ""),
        SourcePatch("saturation left out", _ROW, "fminf(fabsf(x), Format::kLargest)", "fabsf(x)"),
        SourcePatch("codes towards zero", _ROW,
                    "bits += (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);", ""),
        SourcePatch("ties away from zero", _ROW,
                    "bits += (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);",
                    "bits += 1u << (kDropped - 1);"),
        SourcePatch("subnormal codes as normal ones", _ROW, "size < Format::kSmallestNormal",
                    "size < 0.0f"),
        SourcePatch("columns that keys have not", _COPIES,
                    "SEMANTICS.uneven || Kernel::CFG.key_bytes() > kKeyBytes",
                    "false"),
    ),
    "e5m2": (
        SourcePatch("codes are lower bytes", _FRAGMENTS,
                    "return __byte_perm(two_codes, 0, 0x1404);",
                    "return __byte_perm(two_codes, 0, 0x4140);"),
        SourcePatch("another largest number", _ROW, "448.0f : 57344.0f", "448.0f : 448.0f"),
    ),
    "own rows": (
        SourcePatch("columns as they come", _RUN,
                    "Kernel::has_codes && Kernel::shares_stages) restore_columns(o, lane);",
                    "false) {}"),
        SourcePatch("bits of columns in the other order", _FRAGMENTS,
                    "for (int bit = 1; bit <= 2; bit *= 2)",
                    "for (int bit = 2; bit > 0; bit /= 2)"),
    ),
}  # fmt: skip
QUICK = ("queries in the order of 16 bits",)
for name in ("e4m3",):
    victim = VICTIMS[name]
    shared_kernels.want([victim.config], victim.semantics, victim.arch)


def _cases() -> list[object]:
    return [
        pytest.param(name, mistake, id=f"{name}: {mistake}",
                     marks=[] if mistake.name in QUICK else pytest.mark.full)
        for name, mistakes in MISTAKES.items()
        for mistake in mistakes
    ]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(it, marks=[] if it == "e4m3" else pytest.mark.full)
                                  for it in VICTIMS])  # fmt: skip
def test_kernels_as_they_are_pass(name: str) -> None:
    noticed = VICTIMS[name].run()
    assert not noticed.kinds
    assert not noticed.wrong


@pytest.mark.parametrize(("name", "mistake"), _cases())
def test_mistakes_are_caught(name: str, mistake: SourcePatch) -> None:
    victim = VICTIMS[name]
    noticed = victim.run(patched_modules(victim, mistake))
    assert noticed.wrong or noticed.kinds


def test_mistakes_are_in_the_sources() -> None:
    """A change of the kernels' source has not made them void."""
    every = [mistake for mistakes in MISTAKES.values() for mistake in mistakes]
    assert [str(mistake) for mistake in every if mistake.times() != 1] == []
