"""Describes the kernels of the mma_sync_decode family, for `flashsmith explain`."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.families.family import Intensity, SmemRegion
from flashsmith.families.mma_sync_decode.config import FlashDecodeKernelConfig
from flashsmith.families.order import FIRST_TILE, ONE_STATE, Order

# For each use that the kernels make of shared memory, the kinds of access that the emulator counts
# as this use.
CONFLICT_KINDS: dict[str, tuple[str, ...]] = {
    "ldmatrix": ("ldmatrix",),
    "copy st": ("cp.async",),
    "O st": ("st.shared.8B",),
    "O ld": ("ld.shared.16B",),
}


def smem_map(cfg: FlashDecodeKernelConfig) -> Sequence[SmemRegion]:
    """The layout of a CTA's dynamic shared memory.

    The stages of each warp are contiguous; at the end, the sums of a warp overwrite its stages. If
    each warp has its own rows or columns, all warps share the stages. With own_rows, Q is copied to
    registers through the last stage. If a cluster computes a chunk, each CTA has some columns of
    all values of a round."""
    if cfg.chunk_cluster:
        return _regions_in_cluster(cfg)
    if cfg.shares_stages:
        shared = [
            (f"{tile} of stage {stage + 1}", 1, cfg.B_c)
            for stage in range(cfg.stages)
            for tile in "KV"
        ]
        if cfg.own_rows:
            return _regions(cfg, shared, "a run's first subtree")
        return _regions(cfg, [("Q", 1, cfg.B_r), *shared], "row statistics, shares of scores")
    warps = [
        (f"{tile} of warp {warp + 1}, stage {stage + 1}", 1, cfg.keys_per_warp)
        for warp in range(cfg.n_warps)
        for stage in range(cfg.stages)
        for tile in "KV"
    ]
    return _regions(cfg, [("Q", 1, cfg.B_r), *warps], "row statistics")


def _regions_in_cluster(cfg: FlashDecodeKernelConfig) -> Sequence[SmemRegion]:
    """The layout of a CTA's dynamic shared memory if a cluster computes a chunk."""
    keys, columns = cfg.chunk_cluster * cfg.B_c, cfg.d_head // cfg.chunk_cluster
    element = cfg.dtype.element_size
    padding = 64 * cfg.column_warps
    tiles = [
        ("Q", cfg.B_r, cfg.d_head, 0),
        *(
            (f"K of warp {warp + 1}, stage {stage + 1}", cfg.keys_per_warp, cfg.d_head, 0)
            for warp in range(cfg.n_warps)
            for stage in range(cfg.stages)
        ),
        *(
            (f"V of stage {i + 1}, the CTA's columns", keys, columns, padding)
            for i in range(cfg.stages)
        ),
    ]
    regions, begin = [], 0
    for name, rows, width, more in tiles:
        end = begin + rows * width * element + more
        regions.append(SmemRegion(name, begin, end, rows, width))
        begin = end
    return (*regions, SmemRegion("scores, P and barriers", begin, cfg.smem_bytes(), 0, 0))


def _regions(
    cfg: FlashDecodeKernelConfig, tiles: list[tuple[str, int, int]], rest: str
) -> Sequence[SmemRegion]:
    """Returns the same as smem_regions(), but with the actual sizes of keys and values in bytes."""
    regions, begin = [], 0
    for name, _, rows in tiles:
        is_value = name.startswith("V")
        columns = cfg.d_head_v if is_value else cfg.d_head
        of_row = cfg.value_bytes if is_value else cfg.key_bytes
        if name == "Q":
            of_row = cfg.d_head * cfg.dtype.element_size
        regions.append(SmemRegion(name, begin, begin + rows * of_row, rows, columns))
        begin += rows * of_row
    return (*regions, SmemRegion(rest, begin, cfg.smem_bytes(), 0, 0))


def order(cfg: FlashDecodeKernelConfig, arch: int) -> Order:
    """The order of operations in which a kernel computes a row."""
    if cfg.canonical:
        return Order.canonical(arch, cfg.B_c)
    states, warps = ONE_STATE, ""
    if not cfg.shares_stages:
        states = f"{cfg.n_warps}, each of {cfg.keys_per_warp} keys of a tile"
        warps = "of a part by warp, then "
        if cfg.chunk_rows:
            states += f"; of sequences of more than {cfg.most_rows_without_chunks} rows {ONE_STATE}"
    # All tiles of a sequence share its parts.
    rows = f"{cfg.B_r} rows"
    if cfg.chunk_rows:
        rows += f", of more than {cfg.most_rows_without_chunks} rows {cfg.chunk_rows}"
    return Order.own(
        arch,
        cfg.B_c,
        direction=FIRST_TILE,
        states=states,
        chunks=(
            f"of at least {cfg.min_keys} keys, at most {cfg.parts_per_sm} per SM by the sequence's "
            f"length and its tiles of {rows}, from the first visible tile on"
        ),
        merge=f"{warps}of parts as a binary tree",
    )


def intensity(cfg: FlashDecodeKernelConfig) -> Intensity:
    """The FLOP per byte of the loop over keys, for a full tile.

    Each key costs 2 B_r (d + d_v) FLOP. A key is read once from global memory and once from shared
    memory, but with own_rows every warp reads it from shared memory. Queries that do not fit in
    registers are read from shared memory again for every keys_per_warp keys or, if warps have their
    own columns, for every half stage.
    """
    element = cfg.dtype.element_size
    columns = cfg.d_head + cfg.d_head_v
    flop = 2 * cfg.B_r * columns
    streamed = columns * cfg.cache_element_bytes
    read = streamed * (cfg.n_warps if cfg.own_rows else 1)
    keys = cfg.B_c // 2 if cfg.own_columns else cfg.keys_per_warp
    again = 0.0 if cfg.keeps_queries else cfg.B_r * cfg.d_head * element / keys
    return Intensity(shared=flop / (read + again), global_memory=flop / streamed)
