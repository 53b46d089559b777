"""Mistakes in what docs/bits.md specifies, one for each clause: all must be caught, by bits that
are not the specification's, or as arithmetic that names no rounding.

The default run takes the mistakes that come first to mind; ``-m full`` takes all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import oracle
import pytest
from bit_kernels import Kernels
from operation_victims import OperationVictim, SourcePatch, patched_modules
from oracle import CHUNK
from rounding import unrounded
from sequence import Sequence

from flashsmith.errors import EmulatorError
from flashsmith.families import DType, KernelConfig
from flashsmith.runtime.libraries import loaded_kernels

KERNELS, WIDE_KERNELS = Kernels(DType.FP16, 64), Kernels(DType.FP16, 512)

#: Causal rows of one and several chunks, and windows that begin in the middle of a chunk.
CAUSAL = (
    Sequence(70, 300),
    Sequence(3, CHUNK + 176, kind="outliers"),
    Sequence(5, 2 * CHUNK + 252, sinks=(0.5,)),
    Sequence(3, CHUNK + 176, kind="fading"),
    Sequence(3, CHUNK + 176, kind="lost"),
    Sequence(9, 2 * CHUNK + 252, kind="cancelling"),
)
WINDOW = (Sequence(9, 2 * CHUNK + 252, window=(CHUNK + 376, 0), softcap=9.0, packed=True),)
# A chunk without keys for the last rows, too.
WIDE = (
    Sequence(70, 100, d=512, group=2),
    Sequence(3, 2 * CHUNK + 76, d=512, kind="outliers"),
    Sequence(3, CHUNK + 76, d=512, kind="lost"),
)


@dataclass(frozen=True)
class Victim:
    """A kernel, and sequences that its mistakes are to show in."""

    config: KernelConfig
    sequences: tuple[Sequence, ...]

    @property
    def is_decode(self) -> bool:
        return self.config in (KERNELS.decode, WIDE_KERNELS.decode)

    @property
    def kernel(self) -> OperationVictim:
        first = self.sequences[0]
        of_cache = first.semantics_of_cache(self.config) if self.is_decode else first.semantics
        return OperationVictim(self.config, of_cache, (), arch=90)

    def notices(self, mistake: SourcePatch | None) -> bool:
        """Whether a mistake, or none, changes bits, leaves a rounding to ptxas or deadlocks."""
        kernel = self.kernel
        modules = kernel.kernel.modules
        if mistake is not None:
            modules = {**modules, **patched_modules(kernel, mistake)}
        if any(found for entry, ptx in modules.items() for found in unrounded(ptx, entry)):
            return True
        changed = replace(kernel.kernel)
        changed.__dict__["modules"] = modules
        key = kernel.config, kernel.arch, kernel.semantics
        with patch.dict(loaded_kernels.kernels, {key: changed}):
            try:
                return any(self._differing(sequence) for sequence in self.sequences)
            except EmulatorError as error:
                if mistake is None or "deadlock" not in str(error):
                    raise
                return True

    def _differing(self, sequence: Sequence) -> int:
        rows = slice(0, sequence.queries)
        if self.is_decode:
            return sequence.differing(sequence.cached(self.config, rows), rows)
        return sequence.differing(sequence.forward(self.config))


VICTIMS = {
    "mma_sync": Victim(KERNELS.mma_sync, CAUSAL),
    "mma_sync window": Victim(KERNELS.mma_sync_of_groups, WINDOW),
    "wgmma window": Victim(KERNELS.wgmma, WINDOW),
    "decode": Victim(KERNELS.decode, CAUSAL),
    "decode window": Victim(KERNELS.decode, WINDOW),
    "wgmma wide": Victim(WIDE_KERNELS.wgmma, WIDE),
    "decode wide": Victim(WIDE_KERNELS.decode, WIDE),
}

_SHARED, _LOOPS = "common/canonical.cuh", "mma_sync/main_loops.cuh"
_WGMMA, _SPLIT = "sm90_forward/consumer.cuh", "mma_sync_decode/split.cuh"
_PARTNER = "sm90_forward/partner.cuh"
_RUN, _MERGE = "mma_sync_decode/canonical_run.cuh", "mma_sync_decode/merge_kernel.cuh"
QUICK = (
    ("mma_sync", SourcePatch("no + 0 at the end", _SHARED,
                             "__fadd_rn(__fmul_rn(o, factor), 0.0f);", "__fmul_rn(o, factor);")),
    ("mma_sync", SourcePatch("a product without its rounding", _SHARED,
                             "o[m][n][e] = __fmul_rn(o[m][n][e], factors[m][e / 2]);",
                             "o[m][n][e] = o[m][n][e] * factors[m][e / 2];")),
)  # fmt: skip
MISTAKES: dict[str, tuple[SourcePatch, ...]] = {
    "mma_sync": (
        SourcePatch("a maximum of eight rows", _SHARED,
                    "maxima[m][r] = quad_max(largest(scores, m, r));",
                    "maxima[m][r] = quad_max(largest(scores, m, r)), maxima[m][r] = "
                    "fmaxf(maxima[m][r], __shfl_xor_sync(~0u, maxima[m][r], 4));"),
        SourcePatch("a tile's own maximum", _SHARED,
                    "row_max[m][r] = fmaxf(row_max[m][r], maxima[m][r]);",
                    "row_max[m][r] = maxima[m][r];"),
        SourcePatch("rows that have hardly grown keep their sums", _SHARED,
                    "const bool row_grows = maxima[m][r] > row_max[m][r];",
                    "const bool row_grows = __fmul_rn(__fsub_rn(maxima[m][r], "
                    "row_max[m][r]), scale_log2) > 1.0f;"),
        SourcePatch("sums without the factor", _SHARED,
                    "row_sum[m][r] = __fmul_rn(row_sum[m][r], factors[m][r]);", ";"),
        SourcePatch("a tile's sum from its last keys on", _SHARED,
                    "exponentiate_16_keys(scores[m][n], scores[m][n + 1], m, r));",
                    "exponentiate_16_keys(scores[m][kNTiles - n], scores[m][kNTiles - n + 1], "
                    "m, r));"),
        SourcePatch("one sum over all tiles", _SHARED,
                    "float sum = exponentiate_16_keys(scores[m][0], scores[m][1], m, r);",
                    "float sum = __fadd_rn(row_sum[m][r], exponentiate_16_keys("
                    "scores[m][0], scores[m][1], m, r));\nrow_sum[m][r] = 0.0f;"),
        SourcePatch("of 16 keys neighbours first", _SHARED,
                    "__fadd_rn(__fadd_rn(left[2 * r], right[2 * r]),\n                         "
                    "__fadd_rn(left[2 * r + 1], right[2 * r + 1]));",
                    "__fadd_rn(__fadd_rn(left[2 * r], left[2 * r + 1]),\n"
                    "__fadd_rn(right[2 * r], right[2 * r + 1]));"),
        SourcePatch("lanes of a row crosswise", _SHARED,
                    "x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));\n                "
                    "x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));",
                    "x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));\n"
                    "x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));"),
        SourcePatch("the earlier state is multiplied last", _SHARED,
                    "__fmaf_rn(weight_next, next, __fmul_rn(weight, x));",
                    "__fmaf_rn(weight, x, __fmul_rn(weight_next, next));"),
        SourcePatch("weights relative to the next state", _SHARED,
                    "const float offset = fmaxf(row.offset, next.offset);",
                    "const float offset = next.offset;"),
        SourcePatch("a maximum without a sum stands", _SHARED,
                    "merge.none_next ? running_max : merge.none ? row_max[m][r] : joined;",
                    "joined;"),
        SourcePatch("a rounded product in the log-sum-exp", _SHARED,
                    "lse = __fmaf_rn(log2_approx(total), kLn2, base_ln);",
                    "lse = __fadd_rn(__fmul_rn(log2_approx(total), kLn2), base_ln);"),
        SourcePatch("sinks in natural units", _SHARED,
                    "float log2 = __fmul_rn(ln, kLog2E);", "float log2 = ln;"),
        SourcePatch("a sum without its rounding", _SHARED,
                    "row_sum[m][r] = __fadd_rn(row_sum[m][r], sum_of_tile);",
                    "row_sum[m][r] = row_sum[m][r] + sum_of_tile;"),
        SourcePatch("chunks of half as many keys", _LOOPS,
                    "kChunkBlocks = kCanonicalChunk / Kernel::B_c;",
                    "kChunkBlocks = kCanonicalChunk / 2 / Kernel::B_c;"),
    ),
    "mma_sync window": (
        SourcePatch("chunks from the window's start", _LOOPS,
                    "(blocks.begin / kChunkBlocks + 1) * kChunkBlocks;",
                    "blocks.begin + kChunkBlocks;"),
    ),
    "wgmma window": (
        SourcePatch("chunks from the window's start", _WGMMA,
                    "(block / Kernel::chunk_blocks + 1) * Kernel::chunk_blocks);",
                    "block + Kernel::chunk_blocks);"),
        SourcePatch("the next chunk keeps the last one's maximum", _WGMMA,
                    "O_is_begun = false;\n        softmax.reset();",
                    "O_is_begun = false;\n        for (int r = 0; r < 2; ++r) "
                    "softmax.row_sum[0][r] = 0.0f;"),
    ),
    "decode": (
        SourcePatch("a tile's sum from its last keys on", _RUN,
                    "load_shared_float(sum_of(g, row)));",
                    "load_shared_float(sum_of(Kernel::B_c / 16 - g, row)));"),
        SourcePatch("values from the last keys on", _RUN,
                    "for (int step = 0; step < Kernel::B_c / 16; ++step) {",
                    "for (int step = Kernel::B_c / 16 - 1; step >= 0; --step) {"),
        SourcePatch("chunks are merged from the last on", _MERGE,
                    "for (int i = 0; i < kAhead; ++i) {\n                const StateMerge",
                    "for (int i = kAhead - 1; i >= 0; --i) {\n                const StateMerge"),
        SourcePatch("maxima of one warp", _RUN, "for (int w = 0; w < kScoringWarps; ++w)",
                    "for (int w = warp; w < warp + 1; ++w)"),
        SourcePatch("no + 0 at the end", _SHARED,
                    "__fadd_rn(__fmul_rn(o, factor), 0.0f);", "__fmul_rn(o, factor);"),
    ),
    "decode window": (
        SourcePatch("chunks from the window's start", _SPLIT,
                    "~((Kernel::canonical ? kCanonicalChunk : Kernel::B_c) - 1)) -",
                    "~(Kernel::B_c - 1)) -"),
    ),
    "wgmma wide": (
        SourcePatch("the partner's columns are one chunk", _PARTNER,
                    "const int end = this->end_of_chunk(block, mine);",
                    "const int end = mine.end;"),
        SourcePatch("the partner keeps no state", _PARTNER,
                    "if (end < mine.end) running_state().store(O);", ""),
        SourcePatch("the partner's state is the consumer's", _PARTNER,
                    "opaque(Kernel::n_warpgroups));", "opaque(0));"),
        SourcePatch("the partner's rows change places", _PARTNER,
                    "{StateMerge(weights[0]), StateMerge(weights[1])};",
                    "{StateMerge(weights[1]), StateMerge(weights[0])};"),
        SourcePatch("the partner adds chunks to the sums before", _PARTNER,
                    "O_is_begun = false;\n#pragma unroll 1\n            for (; block < end;",
                    "O_is_begun = !is_first;\n#pragma unroll 1\n            for (; block < end;"),
        SourcePatch("the partner has no first block", _WGMMA,
                    "pack_P();\n        send_P();\n#pragma unroll 1",
                    "pack_P();\n#pragma unroll 1"),
        SourcePatch("weights in the other order", _SHARED,
                    "weight(weights[0]),\n          weight_next(weights[1]),",
                    "weight(weights[1]),\n          weight_next(weights[0]),"),
    ),
    "decode wide": (
        SourcePatch("the first keys of a stage alone", _RUN,
                    "warp * kOwnKeys * Panel::kRowBytes", "0"),
        SourcePatch("keys at the copies' positions", _RUN,
                    "return this->run_begin + step * Kernel::B_c + warp * kOwnKeys;",
                    "return first_key(step);"),
        SourcePatch("values of the first keys", _RUN, "step % kCopiedGroups, t);", "0, t);"),
        SourcePatch("a merge of the first columns alone", _MERGE,
                    "if (warp == 0) merge_chunks(first,", "if (warp < 0) merge_chunks(first,"),
        SourcePatch("a merge of the first columns' states", _MERGE,
                    "leaves(*this, first, first_column);", "leaves(*this, first);"),
    ),
}  # fmt: skip


def _params() -> Iterator[object]:
    for name, mistakes in MISTAKES.items():
        for mistake in mistakes:
            yield pytest.param(name, mistake, id=f"{name}: {mistake}")


@pytest.mark.parametrize(("name", "mistake"), QUICK, ids=str)
def test_mistakes_are_noticed(name: str, mistake: SourcePatch) -> None:
    assert VICTIMS[name].notices(mistake)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mistake"), list(_params()))
def test_all_mistakes_are_noticed(name: str, mistake: SourcePatch) -> None:
    assert VICTIMS[name].notices(mistake)


@pytest.mark.full
@pytest.mark.parametrize("name", VICTIMS)
def test_kernels_without_a_mistake_are_right(name: str) -> None:
    assert not VICTIMS[name].notices(None)


def test_every_mistake_is_one_of_todays_sources() -> None:
    every = [mistake for _, mistake in QUICK]
    every += [mistake for mistakes in MISTAKES.values() for mistake in mistakes]
    assert [str(mistake) for mistake in every if mistake.times() != 1] == []


def test_another_tile_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no kernel can have by mistake: the host, and its compiler, refuse another B_c."""
    sequence = Sequence(9, 400)
    assert sequence.differing(sequence.expected) == 0
    monkeypatch.setattr(oracle.Rows, "tile", 64)
    other = oracle.attention(*sequence.tensors, **sequence.keywords)
    assert sequence.differing(other) > 0
    assert not np.isnan(other[1]).any()
