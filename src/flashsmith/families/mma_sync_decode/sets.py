"""The config set of the mma_sync_decode family, and the candidate configs to use when there are no
measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from flashsmith.families.canonical import CHUNK, VERSION, tile_of
from flashsmith.families.device import DEFAULT_DEVICE, DeviceSpec
from flashsmith.families.head_dims import HeadDims, HeadPair, split_dims
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_decode.config import (
    MIN_KEYS,
    MMA_ROWS,
    PARTS_PER_SM,
    FlashDecodeKernelConfig,
)
from flashsmith.families.warpgroups import HOPPER_ARCH, WARPGROUP_ROWS
from flashsmith.operations.problem import Problem
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.dtype import DType

# For each width or pair of widths, its tiles (B_r, B_c, n_warps, stages) in order of preference. Up
# to width 256, the last tile fits in 101,376 bytes of shared memory. The tiles of d 512 were not
# compared with others and need at least 151,760 bytes. Up to d 256, an SM with 233,472 bytes can
# hold two CTAs with the first tile, whose copies together have 96 to 128 KiB in flight.
# docs/log/decode.md explains the number of parts per SM.
_TILES: dict[HeadDims, tuple[tuple[int, int, int, int], ...]] = {
    64: ((16, 128, 4, 3), (32, 128, 4, 3), (16, 64, 4, 4)),
    96: ((16, 64, 4, 4), (32, 64, 4, 4), (16, 64, 4, 3)),
    128: ((16, 64, 4, 3), (32, 64, 4, 3), (16, 32, 2, 4)),
    192: ((16, 64, 4, 2), (16, 32, 2, 3)),
    256: ((16, 32, 2, 3), (16, 64, 4, 3), (16, 32, 2, 2)),
    512: ((16, 32, 4, 3), (16, 32, 4, 2)),
    HeadPair(64, 128): ((16, 128, 4, 2), (16, 64, 2, 3)),
    HeadPair(128, 64): ((16, 64, 4, 4), (32, 64, 4, 4), (16, 64, 4, 3)),
    HeadPair(192, 128): ((16, 64, 4, 2), (32, 64, 4, 2), (16, 32, 2, 3)),
    HeadPair(256, 128): ((16, 64, 4, 2), (16, 32, 2, 3)),
    HeadPair(256, 256): ((16, 32, 2, 3), (16, 64, 4, 3), (16, 32, 2, 2)),
}
# The numbers of rows that a tile for chunks may have, in order of preference. They were not
# measured.
_CHUNK_ROWS = (128, 64)
# The number of warpgroups of the kernel for chunks of a prompt: three if there are at least
# _LEAST_TILES_PER_SM tiles of 192 rows per SM, else two. Three warpgroups are faster, but if there
# are few tiles, they leave SMs idle at the end. This was measured for d 128 on an H200. The number
# does not affect the bits. Pages whose size is not a multiple of _BOX_KEYS are copied row by row;
# with three warpgroups there are fewer copies.
_WARPGROUPS, _MOST_WARPGROUPS = 2, 3
_LEAST_TILES_PER_SM = 2.5
_BOX_KEYS = 8
# The d_head for which full_tiles was timed with several queries: large calls took 9% less time, and
# no call took longer.
_FILLED_D_HEAD = 128
# The numbers of stages that a kernel may have.
_STAGES: tuple[int, ...] = FlashDecodeKernelConfig.__dataclass_fields__["stages"].metadata["values"]


def get_decode_configs(
    dtypes: Sequence[DType] = tuple(DType), device: DeviceSpec = DEFAULT_DEVICE
) -> list[FlashDecodeKernelConfig]:
    """Returns the set 'decode': a few configs for each dtype and d_head."""
    d_heads = [d for d in _TILES if not isinstance(d, HeadPair)]
    return [cfg for dtype in dtypes for d in d_heads for cfg in candidates(dtype, d, device)]


def candidates(dtype: DType, d_head: HeadDims, device: DeviceSpec) -> list[FlashDecodeKernelConfig]:
    """Returns the legal candidates for d_head or a pair of widths on a device, in order of
    preference."""
    widths = split_dims({"dtype": dtype, "d_head": d_head})
    made = (
        FlashDecodeKernelConfig(
            **widths, B_r=B_r, B_c=B_c, n_warps=warps, stages=stages, min_keys=MIN_KEYS,
            parts_per_sm=PARTS_PER_SM,
        )
        for B_r, B_c, warps, stages in _TILES.get(d_head, ())
    )  # fmt: skip
    return [cfg for cfg in made if is_legal(cfg, device)]


# For canonical configs: the numbers of rows that a tile may have, and the numbers of stages in
# order of preference.
_CANONICAL_ROWS, _CANONICAL_STAGES = (16, 32), (4, 3, 2)


def canonical(cfg: FlashDecodeKernelConfig, device: DeviceSpec) -> FlashDecodeKernelConfig | None:
    """Returns the canonical counterpart of `cfg`; None if it is not legal on the device.

    A stage holds one tile of the canonical order. Each warp copies 32 keys of the tile, or 16 if
    the tile has fewer than 128 keys. At d 512, four warps divide the columns, but only two of them
    copy keys.
    """
    tile = tile_of(cfg, device.arch)
    warps = cfg.n_warps if cfg.own_columns else min(4, tile // MMA_ROWS)
    made = (
        FlashDecodeKernelConfig(
            cfg.dtype, cfg.d_head, cfg.B_r, tile, warps, stages, MIN_KEYS, PARTS_PER_SM,
            early=cfg.early, canonical=VERSION, d_v=cfg.d_v,
        )
        for stages in _CANONICAL_STAGES
    )  # fmt: skip
    return next((one for one in made if is_legal(one, device)), None)


# The limits within which all CTAs of a cluster compute a chunk together, measured on an H200. With
# fewer keys or more CTAs, a single CTA per chunk is as fast. A cluster has at most as many CTAs as
# a sequence has tiles. See docs/log/bits.md. The kernel for this supports tiles of at most
# CLUSTER_ROWS rows.
_CLUSTERS, CLUSTER_ROWS = (8, 4, 2), 8
# The d_head and the minimum cluster size for which keys_first was measured; it shortened every
# call.
_KEYS_FIRST_D, _KEYS_FIRST_CTAS = 128, 4
_LEAST_CLUSTER_KEYS, _MOST_CLUSTER_CTAS = 512, 64
# The d_head for which canonical calls with few rows were measured with an early launch: each call
# took 0.5 to 11% less time.
_EARLY_D = 128


def _in_clusters(
    cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
) -> FlashDecodeKernelConfig | None:
    """Returns the config in which the CTAs of a cluster share a chunk, for a canonical problem with
    few chunks; None if the problem has enough chunks. The config gives the same bits as `cfg`."""
    if problem.seq_k < _LEAST_CLUSTER_KEYS:
        return None
    chunks = problem.batch * problem.heads_k * -(-problem.seq_k // CHUNK)
    made = (
        replace(
            cfg,
            B_r=MMA_ROWS,
            stages=stages,
            early=True,
            chunk_cluster=ctas,
            keys_first=cfg.d_head == _KEYS_FIRST_D and ctas >= _KEYS_FIRST_CTAS,
        )
        for ctas in _CLUSTERS
        if chunks * ctas <= _MOST_CLUSTER_CTAS and ctas * cfg.B_c <= problem.seq_k
        for stages in _CANONICAL_STAGES
    )
    return next((one for one in made if is_legal(one, device)), None)


def adapt_to_queries(
    cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
) -> FlashDecodeKernelConfig:
    """Returns `cfg`, with kernels for many rows added if sequences of the problem may have many
    rows.

    On one device, these kernels have the same tiles in all calls. If the rows fill two tiles, the
    config gets full_tiles, with which the states of several columns are merged at once. This does
    not affect the bits.
    """
    if problem.cache:
        plain = _adapt_tiles(cfg, replace(problem, cache=""), device, with_clusters=False)
        return over_cache(plain, problem.cache_format, device)
    found = _adapt_tiles(cfg, problem, device)
    if problem.seq_q < WARPGROUP_ROWS or found.chunk_warpgroups or found.chunk_cluster:
        return found
    if problem.semantics.program:
        return found  # kernels with warpgroups support no programs
    # When a call is planned, warpgroup_plan.cc decides which sequences the kernel with warpgroups
    # computes. In a packed call, at least one sequence has seq_q queries; the others may have
    # fewer.
    sequences = 1 if problem.semantics.packed else problem.batch
    tiles = -(-problem.seq_q // (WARPGROUP_ROWS * _MOST_WARPGROUPS)) * sequences * problem.heads_q
    small_pages = problem.page % _BOX_KEYS != 0
    many = tiles >= _LEAST_TILES_PER_SM * device.sm_count or small_pages
    counts = (_MOST_WARPGROUPS, _WARPGROUPS) if many else (_WARPGROUPS,)
    made = (replace(found, chunk_warpgroups=count) for count in counts)
    return next((one for one in made if is_legal(one, device)), found)


def over_cache(
    cfg: FlashDecodeKernelConfig, cache: CacheFormat, device: DeviceSpec
) -> FlashDecodeKernelConfig:
    """Returns the config to use instead of `cfg` for a cache of this format. Its outputs have the
    bits that `cfg` without wgmma would give for the same cache in q's dtype.

    Keys of 8-bit floats take half the shared memory, so the config has one more stage than `cfg` if
    the stage fits in the shared memory of `cfg`. More stages did not make calls faster on an H200.
    Canonical configs, for which this was not measured, have as many stages as fit. If the tiles for
    chunks cannot copy such keys, the config has smaller tiles for chunks, which change the bits of
    chunks. If `cfg` is already for this format, it is returned unchanged.
    """
    if cfg.cache == cache:
        return cfg
    plain = replace(cfg, chunk_cluster=0, chunk_warpgroups=0, keys_first=False)
    rows_of_chunks = (rows for rows in (*_CHUNK_ROWS, 0) if rows <= plain.chunk_rows)
    most = max(_STAGES) if cfg.canonical else cfg.stages + 1
    stages = sorted((count for count in _STAGES if count <= most), reverse=True)
    made = (
        replace(plain, cache=cache, chunk_rows=rows, stages=count)
        for rows, count in product(rows_of_chunks, stages)
    )
    fitting = (
        one
        for one in made
        if one.smem_bytes() <= plain.smem_bytes()
        and one.chunk_smem_bytes() <= plain.chunk_smem_bytes()
        and is_legal(one, device)
    )
    return next(fitting, replace(plain, cache=cache))


def _adapt_tiles(
    cfg: FlashDecodeKernelConfig,
    problem: Problem,
    device: DeviceSpec,
    *,
    with_clusters: bool = True,
) -> FlashDecodeKernelConfig:
    """Returns `cfg`, with mma.sync kernels whose tiles fit the problem's number of rows."""
    rows = problem.seq_q * problem.heads_q // problem.heads_k
    if cfg.canonical:
        if with_clusters and rows <= CLUSTER_ROWS:
            clusters = _in_clusters(cfg, problem, device)
            if clusters is not None:
                return clusters
            if (cfg.d_head, device.arch) == (_EARLY_D, HOPPER_ARCH):
                cfg = replace(cfg, early=True)
        # The number of rows of a tile does not affect the bits.
        made = (replace(cfg, B_r=B_r) for B_r in _CANONICAL_ROWS if rows > B_r - MMA_ROWS)
        fitting = [one for one in made if is_legal(one, device)]
        return fitting[-1] if fitting else cfg
    if not cfg.chunk_rows:
        made = (replace(cfg, chunk_rows=rows) for rows in _CHUNK_ROWS)
        best = next((other for other in made if is_legal(other, device)), cfg)
        if rows > best.most_rows_without_chunks:
            return best
    fills = cfg.B_r == MMA_ROWS and rows >= 2 * cfg.B_r and cfg.d_head == _FILLED_D_HEAD
    full = replace(cfg, full_tiles=True)
    return full if fills and not cfg.chunk_rows and is_legal(full, device) else cfg
