"""What each knob of a wgmma kernel does, in words, and where in the source it acts."""

from __future__ import annotations

from collections.abc import Callable

from flashsmith.families import (
    HopperForwardKernelConfig,
    PingPong,
    Schedule,
    TileOrder,
)

Effect = Callable[[HopperForwardKernelConfig], str]

_TURNS = {
    PingPong.NONE: "warpgroups run as the schedulers have it",
    PingPong.GEMM: "warpgroups issue their products one after the other, in a ring",
    PingPong.EXP: "warpgroups exponentiate one after the other, in a ring",
}
_SCHEDULES = {
    Schedule.ONE_TILE: "a CTA computes one tile",
    Schedule.STATIC_PERSISTENT: "as many CTAs as run at once; each takes every so manyth tile",
    Schedule.DYNAMIC: "as many CTAs as run at once; each takes the next tile that nobody has begun",
}
_ORDERS = {
    TileOrder.BY_HEAD: "tiles begin head by head, first rows first",
    TileOrder.LONGEST_FIRST: "last rows first, side by side for the heads whose K and V fit L2",
}


def _keys(cfg: HopperForwardKernelConfig) -> str:
    return f"a loop step takes {cfg.B_c} keys: S has {cfg.B_c // 2} registers a thread"


def _ring(cfg: HopperForwardKernelConfig) -> str:
    if cfg.kv_stages == 1:
        return "one K and one V tile, each copied once its last product is over"
    return f"rings of {cfg.kv_stages} K and {cfg.kv_stages} V tiles, copied ahead by TMA"


def _q(cfg: HopperForwardKernelConfig) -> str:
    if cfg.q_buffers == 1 and (cfg.separate_O or cfg.direct_O):
        return "the next tile's Q is copied once this one's last Q K^T is over"
    if cfg.q_buffers == 1:
        return "the next tile's Q is copied once this one's O has left its place"
    return "the next tile's Q is copied during this tile's work"


def _registers(cfg: HopperForwardKernelConfig) -> str:
    return (
        f"setmaxnreg leaves the warpgroup that copies {cfg.producer_registers} a thread, and gives "
        f"those that compute {cfg.consumer_registers}"
    )


def _overlap(cfg: HopperForwardKernelConfig) -> str:
    if cfg.overlap:
        return "Q K^T of the next block and P V of this one run under a block's softmax"
    return "a warpgroup's products and its softmax follow one another"


def _cluster(cfg: HopperForwardKernelConfig) -> str:
    if cfg.cluster_size == 1:
        return "every CTA copies its own K and V"
    return f"{cfg.cluster_size} CTAs copy a part of K and V each, for all of them"


def _rescale(cfg: HopperForwardKernelConfig) -> str:
    if cfg.rescale_threshold == 0:
        return "O is rescaled for every K/V block"
    return (
        "O is rescaled only once some row's maximum has grown by a factor of "
        f"2^{cfg.rescale_threshold}"
    )


def _way_of_O(cfg: HopperForwardKernelConfig) -> str:
    if cfg.separate_O:
        return "O leaves through shared memory of its own, by TMA"
    if cfg.direct_O:
        return "O does not leave through shared memory"
    return "O leaves through the place of its Q, by TMA"


def _section(cfg: HopperForwardKernelConfig) -> str:
    if cfg.tile_order == TileOrder.LONGEST_FIRST:
        return f"heads whose K and V take {cfg.section_mib} MiB together run side by side"
    return "nothing: tiles begin head by head"


def _ctas(cfg: HopperForwardKernelConfig) -> str:
    if cfg.ctas_per_sm == 1:
        return "a CTA has an SM to itself: its threads start with all registers"
    return f"{cfg.ctas_per_sm} CTAs share an SM, and its registers"


def _exp2(cfg: HopperForwardKernelConfig) -> str:
    if cfg.exp2_fma_share == 0:
        return "all exponentials are the special function unit's"
    return (
        f"of 100 exponentials {cfg.exp2_fma_share} are a cubic on the FMA pipe, the others the "
        "special function unit's"
    )


def _early(cfg: HopperForwardKernelConfig) -> str:
    if cfg.early_exp:
        return "a block's exponentials end before the wait for the P V beside them"
    if cfg.overlap:
        return "the compiler may put exponentials off until the P V beside them is over"
    return "nothing: no product runs beside the exponentials"


def _stale(cfg: HopperForwardKernelConfig) -> str:
    if not cfg.stale_max:
        return "every block's maximum is found before its exponentials"
    return (
        "from the third block that all rows see on, exponents are relative to the maximum so far; "
        "a warp whose sums show that some row has outgrown it scales its P down, or computes the "
        "block's scores again"
    )


def _direct(cfg: HopperForwardKernelConfig) -> str:
    if cfg.direct_O:
        return "O goes from registers to global memory, and Q's place is free after the last Q K^T"
    return "O goes to global memory by TMA, through shared memory"


# In the order of the fields.
HOPPER_EFFECTS: dict[str, tuple[Effect, str]] = {
    "dtype": (lambda cfg: "element type of q, k, v and o; sums are fp32", "Wgmma"),
    "d_head": (
        lambda cfg: (
            f"S = Q K^T takes {cfg.d_head // 16} k16-steps; O has {cfg.d_head // 2} "
            "registers a thread"
        ),
        "StaticHopperKernelConfig",
    ),
    "B_r": (lambda cfg: f"a CTA owns {cfg.B_r} query rows", "StaticHopperKernelConfig"),
    "B_c": (_keys, "Consumer::attend"),
    "n_warpgroups": (
        lambda cfg: (
            f"{cfg.n_warpgroups} compute, 64 rows each; with the one that copies "
            f"{cfg.n_threads} threads per CTA"
        ),
        "Consumer",
    ),
    "kv_stages": (_ring, "TileRing"),
    "q_buffers": (_q, "Producer::load_Q"),
    "producer_registers": (_registers, "hopper_forward_kernel"),
    "consumer_registers": (_registers, "hopper_forward_kernel"),
    "overlap": (_overlap, "Consumer::attend"),
    "pingpong": (lambda cfg: _TURNS[cfg.pingpong], "Turns"),
    "cluster_size": (_cluster, "Producer::load"),
    "schedule": (lambda cfg: _SCHEDULES[cfg.schedule], "TileScheduler"),
    "tile_order": (lambda cfg: _ORDERS[cfg.tile_order], "TileScheduler::work_of"),
    "separate_O": (_way_of_O, "OutputStore::start"),
    "rescale_threshold": (_rescale, "RowSoftmax::raise_maximum"),
    "section_mib": (_section, "TileScheduler::work_of"),
    "ctas_per_sm": (_ctas, "hopper_forward_kernel"),
    "exp2_fma_share": (_exp2, "exp2_shared_out"),
    "early_exp": (_early, "Consumer::end_block_after"),
    "stale_max": (_stale, "Consumer::settle"),
    "direct_O": (_direct, "OutputStore::store_directly"),
}
