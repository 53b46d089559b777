"""Tiles out of sight are never loaded, tiles in full sight run no mask code; both are counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
import shared_kernels
from built_kernels import built

from flashsmith.families import DType, FlashForwardKernelConfig, Semantics
from flashsmith.families.mma_sync.sets import proof_configs
from flashsmith.runtime import run_forward
from flashsmith.verify.attention_semantics import Attention, offsets, row_slices
from flashsmith.verify.proof_inputs import numpy_dtype
from ptxlab.interface import Launch, MemoryAccess, Observer

D = 16


class RowsRead(Observer):
    """Counts, per CTA, the 16-byte chunks that are read of every row of q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[str, dict[int, Counter[int]]] = {
            name: defaultdict(Counter) for name in "qkv"
        }

    def begin(self, launch: Launch) -> None:
        self.threads = launch.threads_per_cta
        self.ranges = [r for r in launch.memory.ranges() if r.name in self.chunks]

    def memory(self, event: MemoryAccess) -> None:
        if event.space != "global" or event.kind not in ("read", "async_read"):
            return
        sizes = np.broadcast_to(event.sizes, event.addresses.shape)
        for tensor in self.ranges:
            inside = (event.addresses >= tensor.begin) & (event.addresses < tensor.end)
            inside &= sizes == 16
            rows = (event.addresses[inside] - tensor.begin) // (2 * D)
            for cta, row in zip(event.threads[inside] // self.threads, rows, strict=True):
                self.chunks[tensor.name][int(cta)][int(row)] += 1


def run(
    config: FlashForwardKernelConfig, lengths: tuple[int, int], packed: Any = None, **call: Any
) -> RowsRead:
    """One head of d 16, so that a row of a tensor is a row of a sequence."""
    seen = RowsRead()
    shape = () if packed else (1,)
    q, k, v = (
        np.zeros((*shape, rows, 1, D), numpy_dtype(config.dtype))
        for rows in (lengths[0], lengths[1], lengths[1])
    )
    if packed:
        call["cu_seqlens_q"], call["cu_seqlens_k"] = map(offsets, packed)
    run_forward(config, q, k, v, emulate=True, observers=[seen], **call)
    return seen


def expected_tiles(
    config: FlashForwardKernelConfig, attention: Attention, seq_q: int, seq_k: int
) -> dict[int, set[int]]:
    """By Q tile, the K/V tiles of which some row sees some key."""
    tiles = {}
    for tile in range(-(-seq_q // config.B_r)):
        rows = np.arange(tile * config.B_r, min((tile + 1) * config.B_r, seq_q))
        first, end = attention.visible_keys(rows, seq_q, seq_k)
        keys = [key for a, b in zip(first, end, strict=True) for key in range(a, b)]
        tiles[tile] = {key // config.B_c for key in keys}
    return tiles


def check(
    seen: RowsRead,
    config: FlashForwardKernelConfig,
    attention: Attention,
    sequences: list[tuple[slice, slice]],
) -> int:
    """Asserts what every CTA read; how many tiles were spared."""
    spared = 0
    ctas = {min(rows): cta for cta, rows in seen.chunks["q"].items()}
    for rows_q, rows_k in sequences:
        seq_q, seq_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        for tile, wanted in expected_tiles(config, attention, seq_q, seq_k).items():
            cta = ctas.pop(rows_q.start + tile * config.B_r, None)
            assert (cta is not None) is bool(wanted)
            if cta is None:
                continue
            rows = {
                rows_k.start + key
                for wanted_tile in wanted
                for key in range(wanted_tile * config.B_c, (wanted_tile + 1) * config.B_c)
                if key < seq_k
            }
            # Each row once, all of its chunks: nothing is loaded that is not used, or twice.
            once = dict.fromkeys(rows, D // 8)
            assert seen.chunks["k"][cta] == seen.chunks["v"][cta] == once
            spared += -(-seq_k // config.B_c) - len(wanted)
    assert not ctas
    return spared


LENGTHS = [(200, 200), (130, 300), (300, 130), (1, 300), (65, 64)]
WINDOWS = [(40, 9), (0, 0), (None, 3), (20, None), (300, 300)]


def configs_for(semantics: Semantics) -> list[FlashForwardKernelConfig]:
    """Those whose CTAs compute whole tiles."""
    return [c for c in built(semantics) if c.d_head <= 96 and not c.split_keys]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal_loads_what_is_in_sight_and_no_more(lengths: tuple[int, int]) -> None:
    for config in configs_for(Semantics("causal", uneven=True)):
        seen = run(config, lengths, causal=True)
        rows = [(slice(0, lengths[0]), slice(0, lengths[1]))]
        spared = check(seen, config, Attention(1.0, True), rows)
        if min(lengths) > 2 * config.B_r:
            assert spared > 0


def test_causal_blocks_that_see_most_keys_come_first() -> None:
    """Or the longest would begin when nothing else is left to do."""
    for config in configs_for(Semantics("causal", uneven=True)):
        rows = 3 * config.B_r - 7
        seen = run(config, (rows, rows), causal=True)
        first_rows = [min(seen.chunks["q"][cta]) for cta in range(3)]
        assert first_rows == [2 * config.B_r, config.B_r, 0]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_windows_load_what_is_in_sight_and_no_more(window: tuple, causal: bool) -> None:
    attention = Attention(1.0, causal, window)
    semantics = Semantics("window", uneven=True)
    if causal and window[0] is None:
        semantics = Semantics("causal", uneven=True)
    for config, lengths in product(configs_for(semantics), LENGTHS):
        seen = run(config, lengths, causal=causal, window=window)
        check(seen, config, attention, [(slice(0, lengths[0]), slice(0, lengths[1]))])


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_packed_sequences_load_their_own_rows_and_no_more(mask: str) -> None:
    lens_q, lens_k = (70, 0, 200, 5, 33), (90, 8, 64, 0, 300)
    window = (40, 9) if mask == "window" else (None, None)
    attention = Attention(1.0, mask == "causal", window, 0.0, lens_q, lens_k)
    rows = list(zip(row_slices(lens_q), row_slices(lens_k), strict=True))
    for config in configs_for(Semantics(mask, packed=True, uneven=True)):
        seen = run(
            config, (sum(lens_q), sum(lens_k)), (lens_q, lens_k),
            causal=mask == "causal", window=window,
        )  # fmt: skip
        check(seen, config, attention, rows)


# ---- mask code ----


def decisions(config: FlashForwardKernelConfig, seq_k: int, **call: Any) -> int:
    """Comparisons and selections, which masks are made of, of one Q tile against ``seq_k`` keys."""
    dtype = numpy_dtype(config.dtype)
    q = np.zeros((1, config.B_r, 1, config.d_head), dtype)
    k = np.zeros((1, seq_k, 1, config.d_head), dtype)
    result = run_forward(config, q, k, k.copy(), emulate=True, **call)
    assert result.emulation is not None
    counts = result.emulation.instructions.items()
    return sum(count for name, count in counts if name.startswith(("setp", "selp")))


COUNTED = [proof_configs(DType.FP16, 64)[i] for i in (0, 3)]
for _mask in ("none", "causal", "window"):
    shared_kernels.want(COUNTED, Semantics(_mask))
# Whether a tile's number is in the range in full sight; per warp and tile.
IN_SIGHT = 4
# Whether a row's maximum is -inf, and what to take exponents relative to then; per row of a lane.
EMPTY_ROW = 2


@pytest.mark.parametrize(
    ("mask", "call"),
    [("causal", {"causal": True}), ("window", {"causal": True, "window": (10**6, None)})],
)
def test_tiles_in_full_sight_run_no_mask_code(mask: str, call: dict[str, Any]) -> None:
    """Of one Q tile only the tiles at the diagonal need a mask, however many keys there are: each
    further tile costs what it costs a kernel that knows no mask."""
    for semantics in (Semantics(), Semantics(mask)):
        shared_kernels.load(COUNTED, semantics)
    for config in COUNTED:
        diagonal = max(config.B_r, config.B_c)
        few, many = diagonal + 2 * config.B_c, diagonal + 6 * config.B_c
        masked = decisions(config, many, **call) - decisions(config, few, **call)
        unmasked = decisions(config, many) - decisions(config, few)
        allowed = IN_SIGHT + EMPTY_ROW * config.rows_per_warp // 8
        assert 0 <= masked - unmasked <= 4 * config.n_warps * allowed
        # Where there is a mask it shows: a comparison and a selection a score.
        spent = decisions(config, few, **call) - decisions(config, few)
        scores_per_lane = config.rows_per_warp * config.B_c // 32
        assert spent >= 2 * scores_per_lane * config.n_warps
        assert scores_per_lane > allowed
