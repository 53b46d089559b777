"""Descriptions of a kernel of the mma_sync_decode family, for `flashsmith explain`."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.family import Intensity, SmemRegion, smem_regions
from flashsmith.families.mma_sync_decode.config import FlashDecodeKernelConfig
from flashsmith.families.order import FIRST_TILE, ONE_STATE, Order

# The emulator's kinds of access, by what the kernels use them for.
CONFLICT_KINDS: dict[str, tuple[str, ...]] = {
    "ldmatrix": ("ldmatrix",),
    "copy st": ("cp.async",),
    "O st": ("st.shared.8B",),
    "O ld": ("ld.shared.16B",),
}


def smem_map(cfg: FlashDecodeKernelConfig) -> Sequence[SmemRegion]:
    """Where the tiles lie: each warp's stages one after another, which its sums take in the end.
    Warps with rows of their own share them, and Q, which has registers, goes by way of the last."""
    if cfg.own_rows:
        shared = [
            (f"{tile} of stage {stage + 1}", 1, cfg.B_c)
            for stage in range(cfg.stages)
            for tile in "KV"
        ]
        return smem_regions(cfg, shared, "a run's first subtree")
    warps = [
        (f"{tile} of warp {warp + 1}, stage {stage + 1}", 1, cfg.keys_per_warp)
        for warp in range(cfg.n_warps)
        for stage in range(cfg.stages)
        for tile in "KV"
    ]
    return smem_regions(cfg, [("Q", 1, cfg.B_r), *warps], "row statistics")


def order(cfg: FlashDecodeKernelConfig, arch: int) -> Order:
    """In which order a row is computed."""
    if cfg.canonical:
        return Order.canonical(arch, cfg.B_c)
    states, warps = ONE_STATE, ""
    if not cfg.own_rows:
        states = f"{cfg.n_warps}, each of {cfg.keys_per_warp} keys of a tile"
        warps = "of a part by warp, then "
        if cfg.chunk_rows:
            states += f"; of sequences of more than {cfg.most_rows_without_chunks} rows {ONE_STATE}"
    return Order.own(
        arch,
        cfg.B_c,
        direction=FIRST_TILE,
        states=states,
        chunks=(
            f"of {cfg.min_keys} keys at least, by the sequence's length {cfg.parts_per_sm} an SM "
            "at most, from the first tile that is seen on"
        ),
        merge=f"{warps}of parts as a binary tree",
    )


def intensity(cfg: FlashDecodeKernelConfig) -> Intensity:
    """FLOP per byte in the loop over keys of a tile whose rows all exist.

    A key costs 4 B_r d FLOP and is read once from global and once from shared memory, by every warp
    that has rows of its own; queries that have no registers are read again from shared memory for
    every warp_keys keys.
    """
    element = cfg.dtype.element_size
    flop = 4 * cfg.B_r * cfg.d_head
    streamed = 2 * cfg.d_head * element
    read = streamed * (cfg.n_warps if cfg.own_rows else 1)
    again = 0.0 if cfg.keeps_queries else cfg.B_r * cfg.d_head * element / cfg.keys_per_warp
    return Intensity(shared=flop / (read + again), global_memory=flop / streamed)
