"""The rules of the mma_sync_decode family: for which configs kernels can be built.

Each rule has one predicate and one reason.
"""

from __future__ import annotations

from functools import partial

from flashsmith.families.canonical import canonical_rules
from flashsmith.families.head_dims import PAIRS, pair_rule
from flashsmith.families.mma_sync_decode.config import MIN_KEYS, MMA_ROWS, FlashDecodeKernelConfig
from flashsmith.families.rule import Rule, supported
from flashsmith.families.warpgroups import HOPPER_ARCH

# The maximum number of fp32 sums and scores per thread, keyed by the number of keys of a warp. With
# more, too few of the 255 registers would remain for fragments and addresses, which would spill.
MAX_ELEMENTS = {16: 144, 32: 128}
# The maximum number of fp32 sums and scores per thread of the chunk kernel, keyed by the number of
# keys of a stage. In this kernel, each warp computes 16 rows for all keys of a stage. With 64 keys
# and d_head 192, a kernel with window, softcap and pages spills.
_MAX_CHUNK_ELEMENTS = {32: 144}
_MAX_OTHER_CHUNK_ELEMENTS = 112
# The maximum number of fp32 sums and scores per thread with own_rows; with it, warps also keep sums
# over earlier keys.
MAX_OWN_ELEMENTS = 96
# The maximum number of warps of a canonical config. With more warps, the first columns of some
# warps would be outside the first panel.
MOST_CANONICAL_WARPS = 4


def _copies_whole_rows(cfg: FlashDecodeKernelConfig) -> bool:
    """Whether, in the chunk kernel, each copy instruction of a warp copies only keys of this warp,
    and each lane copies at most one key. A copy instruction copies 4 rows of a panel of 64 columns,
    or 8 rows of a panel of 32."""
    least = 4 if cfg.key_bytes % 128 == 0 == cfg.value_bytes % 128 else 8
    return not cfg.chunk_warps or least <= cfg.B_c // cfg.chunk_warps <= 32


def _is_tile_of_own_columns(cfg: FlashDecodeKernelConfig) -> bool:
    others = (cfg.chunk_rows, cfg.chunk_cluster, cfg.chunk_warpgroups)
    return (
        (cfg.B_r, cfg.B_c, cfg.n_warps) == (MMA_ROWS, 32, 4)
        and not any(others)
        and not (cfg.full_tiles or cfg.own_rows)
    )


_supported = partial(
    supported,
    FlashDecodeKernelConfig,
    must_be="{}: the mma_sync_decode family has kernels for these only",
)

RULES: tuple[Rule, ...] = (
    *map(
        _supported,
        (
            *("d_head", "B_r", "B_c", "n_warps", "stages", "min_keys", "parts_per_sm"),
            *("chunk_rows", "rounds", "cluster", "chunk_cluster"),
            "chunk_warpgroups",
        ),
    ),
    Rule(
        "warp_keys_in_mma_steps",
        "up to d_head 256, B_c / n_warps, the keys of one warp, must be 16 or 32: an mma works on "
        "16, and each lane reads one number of the page table",
        lambda cfg, device: (
            cfg.own_columns or cfg.B_c in (MMA_ROWS * cfg.n_warps, 2 * MMA_ROWS * cfg.n_warps)
        ),
        ("B_c", "n_warps", "d_head"),
    ),
    Rule(
        "own_columns_of_four_warps",
        "with d_head 512, whose columns warps share, B_r must be 16, B_c 32 and n_warps 4, without "
        "chunk_rows, full_tiles, own_rows, chunk_cluster and chunk_warpgroups: there is code for "
        "this tile only",
        lambda cfg, device: not cfg.own_columns or _is_tile_of_own_columns(cfg),
        (
            *("d_head", "B_r", "B_c", "n_warps", "chunk_rows", "full_tiles", "own_rows"),
            *("chunk_cluster", "chunk_warpgroups"),
        ),
    ),
    Rule(
        "rows_fit_registers",
        "up to d_head 256, B_r (d_v + B_c / n_warps) / 32, a thread's sums and scores, where a d_v "
        "of 0 is d_head, must be at most 144, or 128 with 32 keys per warp; with own_rows "
        "(d_v + B_c) / 2 must be at most 96. With canonical, B_r (2 columns of a warp + B_c / "
        "n_warps) / 32 must be at most 128: a thread has 255 registers",
        lambda cfg, device: (
            cfg.own_columns
            or cfg.accumulators + cfg.scores
            <= (MAX_OWN_ELEMENTS if cfg.own_rows else MAX_ELEMENTS.get(cfg.keys_per_warp, 0))
        ),
        ("B_r", "B_c", "n_warps", "d_head", "d_v", "own_rows", "canonical"),
    ),
    Rule(
        "own_rows_of_all_warps",
        "own_rows needs B_r = 16 n_warps: each warp has 16 rows",
        lambda cfg, device: not cfg.own_rows or cfg.B_r == MMA_ROWS * cfg.n_warps,
        ("B_r", "n_warps", "own_rows"),
    ),
    Rule(
        "own_rows_keep_queries",
        "own_rows needs a d_head and d_v of at most 128: a warp keeps the queries of its rows in "
        "registers, next to their sums",
        lambda cfg, device: not cfg.own_rows or cfg.keeps_queries,
        ("d_head", "d_v", "B_r", "own_rows"),
    ),
    Rule(
        "own_rows_without_exchange",
        "own_rows and full_tiles exclude each other: with own_rows warps exchange nothing",
        lambda cfg, device: not (cfg.own_rows and cfg.full_tiles),
        ("full_tiles", "own_rows"),
    ),
    Rule(
        "parts_of_whole_stages",
        "min_keys must be a multiple of B_c: a part begins with a whole stage",
        lambda cfg, device: cfg.min_keys % cfg.B_c == 0,
        ("min_keys", "B_c"),
    ),
    Rule(
        "chunk_keys_in_copies",
        "16 B_c / chunk_rows, the keys that a warp copies for all, must be 4 to 32, or 8 to 32 if "
        "a key does not have whole lines of 128 bytes: one instruction copies 4 or 8 rows",
        lambda cfg, device: _copies_whole_rows(cfg),
        ("d_head", "d_v", "B_c", "chunk_rows", "cache"),
    ),
    Rule(
        "chunk_rows_fit_registers",
        "(d_v + B_c) / 2, a thread's sums and scores of chunks, where a d_v of 0 is d_head, must "
        "be at most 112, or 144 with B_c 32: it has 255 registers",
        lambda cfg, device: (
            not cfg.chunk_rows
            or cfg.d_head_v + cfg.B_c
            <= 2 * _MAX_CHUNK_ELEMENTS.get(cfg.B_c, _MAX_OTHER_CHUNK_ELEMENTS)
        ),
        ("d_head", "d_v", "B_c", "chunk_rows"),
    ),
    Rule(
        "smem_within_limit",
        "the queries and the stages must fit in the shared memory that the device gives one CTA",
        lambda cfg, device: (
            max(cfg.smem_bytes(), cfg.chunk_smem_bytes()) <= device.max_smem_per_block
        ),
        (
            *("d_head", "B_r", "B_c", "n_warps", "stages", "chunk_rows", "own_rows", "canonical"),
            *("chunk_cluster", "cache", "d_v"),
        ),
        lambda cfg, device: (
            f"{max(cfg.smem_bytes(), cfg.chunk_smem_bytes())} of {device.max_smem_per_block} bytes "
            f"on {device.name}"
        ),
    ),
    Rule(
        "chunk_cluster_is_canonical",
        "chunk_cluster needs canonical: other configs split keys into parts instead",
        lambda cfg, device: not cfg.chunk_cluster or cfg.canonical > 0,
        ("chunk_cluster", "canonical"),
    ),
    Rule(
        "chunk_cluster_on_hopper",
        "chunk_cluster needs a GPU with clusters, of compute capability 9.0 or later",
        lambda cfg, device: not cfg.chunk_cluster or device.arch >= 90,
        ("chunk_cluster",),
    ),
    Rule(
        "chunk_cluster_columns",
        "chunk_cluster needs B_r = 16 and d_head as a multiple of 16 chunk_cluster: each CTA has "
        "groups of 16 columns",
        lambda cfg, device: (
            not cfg.chunk_cluster
            or (cfg.B_r == MMA_ROWS and cfg.d_head % (MMA_ROWS * cfg.chunk_cluster) == 0)
        ),
        ("chunk_cluster", "B_r", "d_head"),
    ),
    Rule(
        "keys_first_in_a_cluster",
        "keys_first needs chunk_cluster: it is the order of such a cluster's copies",
        lambda cfg, device: not cfg.keys_first or cfg.chunk_cluster > 0,
        ("keys_first", "chunk_cluster"),
    ),
    Rule(
        "chunk_warpgroups_on_hopper",
        "chunk_warpgroups needs a GPU of compute capability 9.0: only sm_90a has wgmma",
        lambda cfg, device: not cfg.chunk_warpgroups or device.arch == HOPPER_ARCH,
        ("chunk_warpgroups",),
    ),
    Rule(
        "chunk_warpgroups_fit_registers",
        "chunk_warpgroups must be at most 2 above d_head 128: three warpgroups have 160 registers "
        "a thread each, too few for wider sums",
        lambda cfg, device: cfg.chunk_warpgroups <= 2 or cfg.d_head <= 128,
        ("chunk_warpgroups", "d_head"),
    ),
    Rule(
        "chunk_warpgroups_without_cluster",
        "chunk_warpgroups and chunk_cluster exclude each other: the cluster is for sequences of at "
        "most 8 rows",
        lambda cfg, device: not (cfg.chunk_warpgroups and cfg.chunk_cluster),
        ("chunk_warpgroups", "chunk_cluster"),
    ),
    Rule(
        "d_v_without_cluster",
        "d_v needs chunk_cluster 0: the kernel of such a cluster has one width",
        lambda cfg, device: not (cfg.d_v and cfg.chunk_cluster),
        ("d_v", "chunk_cluster"),
    ),
    Rule(
        "sums_fit_in_a_stage",
        "without own_rows and canonical, eight rows of a warp's sums, 32 d_v bytes, must fit where "
        "its keys and values of a stage were: with 8-bit v wider than k it needs 32 keys",
        lambda cfg, device: (
            cfg.shares_stages
            or cfg.canonical > 0
            or cfg.rows_in_stage * cfg.d_head_v * 4 <= cfg.warp_stage_bytes
        ),
        ("d_head", "d_v", "B_c", "n_warps", "cache", "own_rows", "canonical"),
    ),
    Rule(
        "cache_of_mma_sync",
        "cache needs chunk_cluster 0 and chunk_warpgroups 0: their kernels apply no scales",
        lambda cfg, device: not cfg.cache or not (cfg.chunk_cluster or cfg.chunk_warpgroups),
        ("cache", "chunk_cluster", "chunk_warpgroups"),
    ),
    *canonical_rules(
        (
            "min_keys",
            f"min_keys {MIN_KEYS}, which has no effect: parts are chunks",
            lambda cfg: cfg.min_keys == MIN_KEYS,
        ),
        (
            "parts_per_sm",
            "parts_per_sm 1, which has no effect: a sequence has as many parts as chunks",
            lambda cfg: cfg.parts_per_sm == 1,
        ),
        (
            "chunk_rows",
            "chunk_rows 0: all tiles use one kernel",
            lambda cfg: cfg.chunk_rows == 0,
        ),
        (
            "n_warps",
            "n_warps of at most 4: of each 64 columns of P V a warp has every n_warps-th 16; or "
            "chunk_cluster, whose other warps have the columns",
            lambda cfg: cfg.n_warps <= MOST_CANONICAL_WARPS or cfg.chunk_cluster > 0,
        ),
        ("rounds", "rounds 1: each chunk, or all of them, is a run", lambda cfg: cfg.rounds == 1),
        ("cluster", "cluster 0: chunks are merged in their order", lambda cfg: not cfg.cluster),
        ("full_tiles", "no full_tiles: warps merge no states", lambda cfg: not cfg.full_tiles),
        ("own_rows", "no own_rows: a warp has keys and columns", lambda cfg: not cfg.own_rows),
    ),
    pair_rule(PAIRS),
)
