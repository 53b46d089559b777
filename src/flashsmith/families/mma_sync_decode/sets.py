"""The config set of the mma_sync_decode family, and its candidates if nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashsmith.families.canonical import CHUNK, VERSION, canonical_tile
from flashsmith.families.device import DEFAULT_DEVICE, DeviceSpec
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_decode.config import (
    MIN_KEYS,
    MMA_ROWS,
    PARTS_PER_SM,
    FlashDecodeKernelConfig,
)
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType

# (B_r, B_c, n_warps, stages) by d_head, in order of preference. The last tile of each d_head fits
# in 101,376 bytes of shared memory. With the first tile, an SM with 233,472 bytes has room for two
# CTAs, which have 96 to 128 KiB of copies in flight. For the parts per SM see docs/log/decode.md.
_TILES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((16, 128, 4, 3), (32, 128, 4, 3), (16, 64, 4, 4)),
    96: ((16, 64, 4, 4), (32, 64, 4, 4), (16, 64, 4, 3)),
    128: ((16, 64, 4, 3), (32, 64, 4, 3), (16, 32, 2, 4)),
    192: ((16, 64, 4, 2), (16, 32, 2, 3)),
    256: ((16, 32, 2, 3), (16, 64, 4, 3), (16, 32, 2, 2)),
}
# Rows of a chunk tile, in order of preference; neither was measured.
_CHUNK_ROWS = (128, 64)
# Warpgroups of the kernel for chunks of a prompt: two, or three if there are at least
# _LEAST_TILES_PER_SM tiles of 192 rows per SM. Three compute faster, but leave SMs idle at the end.
# Measured at d 128 on an H200. The number affects no bit. Pages whose size is no multiple of
# _BOX_KEYS are copied row by row, and three warpgroups copy less.
_WARPGROUPS, _MOST_WARPGROUPS = 2, 3
_LEAST_TILES_PER_SM = 2.5
_BOX_KEYS = 8
# The d_head at which full_tiles was timed for several queries: large calls take 9% less time, and
# no call takes longer.
_FILLED_D_HEAD = 128


def get_decode_configs(
    dtypes: Sequence[DType] = tuple(DType), device: DeviceSpec = DEFAULT_DEVICE
) -> list[FlashDecodeKernelConfig]:
    """The set 'decode': a few kernels per dtype and d_head."""
    return [cfg for dtype in dtypes for d in _TILES for cfg in candidates(dtype, d, device)]


def candidates(dtype: DType, d_head: int, device: DeviceSpec) -> list[FlashDecodeKernelConfig]:
    """Kernels for d_head that are legal on a device, in order of preference."""
    made = (
        FlashDecodeKernelConfig(dtype, d_head, B_r, B_c, warps, stages, MIN_KEYS, PARTS_PER_SM)
        for B_r, B_c, warps, stages in _TILES.get(d_head, ())
    )
    return [cfg for cfg in made if is_legal(cfg, device)]


# The possible tile rows of canonical configs, and the stages in order of preference.
_CANONICAL_ROWS, _CANONICAL_STAGES = (16, 32), (4, 3, 2)


def canonical(cfg: FlashDecodeKernelConfig, device: DeviceSpec) -> FlashDecodeKernelConfig | None:
    """The canonical counterpart of `cfg`. A stage is a tile of the canonical order, of which each
    warp has 32 keys, or 16 if the tile has fewer than 128."""
    tile = canonical_tile(cfg.d_head, device.arch)
    warps = min(4, tile // MMA_ROWS)
    made = (
        FlashDecodeKernelConfig(
            cfg.dtype, cfg.d_head, cfg.B_r, tile, warps, stages, MIN_KEYS, PARTS_PER_SM,
            early=cfg.early, canonical=VERSION,
        )
        for stages in _CANONICAL_STAGES
    )  # fmt: skip
    return next((one for one in made if is_legal(one, device)), None)


# Where the CTAs of a cluster compute a chunk together, as measured on an H200: with fewer keys or
# more CTAs in all, one CTA computes it as fast. A cluster has no more CTAs than a sequence has
# tiles. See docs/log/bits.md.
_CLUSTERS, _CLUSTER_ROWS = (8, 4, 2), 8
_LEAST_CLUSTER_KEYS, _MOST_CLUSTER_CTAS = 512, 64


def _in_clusters(
    cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
) -> FlashDecodeKernelConfig | None:
    """The config whose clusters share the chunks, for a canonical problem with few chunks; None if
    it has enough chunks. The bits are the same."""
    if problem.seq_k < _LEAST_CLUSTER_KEYS:
        return None
    chunks = problem.batch * problem.heads_k * -(-problem.seq_k // CHUNK)
    made = (
        replace(cfg, B_r=MMA_ROWS, stages=stages, early=True, chunk_cluster=ctas)
        for ctas in _CLUSTERS
        if chunks * ctas <= _MOST_CLUSTER_CTAS and ctas * cfg.B_c <= problem.seq_k
        for stages in _CANONICAL_STAGES
    )
    return next((one for one in made if is_legal(one, device)), None)


def adapt_to_queries(
    cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
) -> FlashDecodeKernelConfig:
    """`cfg`, with separate kernels if the problem's sequences may have many rows; these kernels
    have the same tiles in every call on a device. If the rows fill two tiles, the config has
    full_tiles, which merges the states of several columns at once and does not affect the bits."""
    found = _adapt_tiles(cfg, problem, device)
    if problem.seq_q < WARPGROUP_ROWS or found.chunk_warpgroups or found.chunk_cluster:
        return found
    # Which sequences use this kernel is decided when a call is planned, in warpgroup_plan.cc.
    # In a packed call only one sequence is sure to have seq_q queries; others may be shorter.
    sequences = 1 if problem.semantics.packed else problem.batch
    tiles = -(-problem.seq_q // (WARPGROUP_ROWS * _MOST_WARPGROUPS)) * sequences * problem.heads_q
    small_pages = problem.page % _BOX_KEYS != 0
    many = tiles >= _LEAST_TILES_PER_SM * device.sm_count or small_pages
    counts = (_MOST_WARPGROUPS, _WARPGROUPS) if many else (_WARPGROUPS,)
    made = (replace(found, chunk_warpgroups=count) for count in counts)
    return next((one for one in made if is_legal(one, device)), found)


def _adapt_tiles(
    cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
) -> FlashDecodeKernelConfig:
    """`cfg` with the mma.sync kernels that suit the problem's number of rows."""
    rows = problem.seq_q * problem.heads_q // problem.heads_k
    if cfg.canonical:
        clusters = _in_clusters(cfg, problem, device) if rows <= _CLUSTER_ROWS else None
        if clusters is not None:
            return clusters
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
