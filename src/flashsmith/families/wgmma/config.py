"""WgmmaForwardKernelConfig: the knobs of the wgmma family; a config names one kernel.

The C++ struct with this name (csrc/sm90_forward/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from flashsmith.families.canonical import canonical_knob
from flashsmith.families.config import THREADS_PER_WARP, ForwardConfig
from flashsmith.families.earlier_names import getter
from flashsmith.families.head_dims import d_v_knob, tile_columns
from flashsmith.families.knob import KnobGroup, knob
from flashsmith.families.pack_gqa import pack_gqa_knob
from flashsmith.families.split_keys import split_keys_knob
from flashsmith.families.warpgroups import (
    REGISTER_COUNTS,
    REGISTERS_BESIDE_TILES,
    REGISTERS_WORD,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    registers_knob,
)
from flashsmith.families.wgmma import describe
from flashsmith.semantics.dtype import DType

# The bytes of shared memory for barriers and work-tile info, in addition to the tiles.
BARRIER_PAGE = 1024


class PingPong(IntEnum):
    """The code around which a kernel has the warpgroup order barrier (ping-pong): none, the issue
    of GEMMs, or the exponentials."""

    NONE = 0
    GEMM = 1
    EXP = 2


class Schedule(IntEnum):
    """The tiles that a CTA computes: only one, every n-th one, or repeatedly the next one that no
    CTA has begun."""

    ONE_TILE = 0
    STATIC_PERSISTENT = 1
    DYNAMIC = 2


class TileOrder(IntEnum):
    """The order in which the tiles of a launch begin: head by head, or the longest tiles first
    within groups of heads that fit in the L2."""

    BY_HEAD = 0
    LONGEST_FIRST = 1


# A wgmma has M = 64. In S = Q K^T, N is B_c, which must be a multiple of 16 in these kernels.
D_HEADS = (32, 64, 72, 80, 96, 128, 192, 256, 512)
# The maximum number of columns of O that a warpgroup holds in registers. If O is wider, two
# warpgroups hold half of its columns each.
MOST_COLUMNS_OF_O = 256
MAX_WARPGROUPS = 4
MAX_KV_STAGES = 8
B_C_STEP, MIN_B_C, MAX_B_C = 16, 32, 256
MAX_RESCALE_THRESHOLD = 8
DEFAULT_SECTION_MIB = 32
MAX_CTAS = 4
MAX_EXP2_FMA_SHARE = 50

_WARPGROUPS = tuple(range(1, MAX_WARPGROUPS + 1))
# The number of registers per thread that the smallest tiles need: for the columns of O, for the
# columns of S, and for everything else.
_LEAST_TO_COMPUTE = D_HEADS[0] // 2 + MIN_B_C // 2 + REGISTERS_BESIDE_TILES


@dataclass(frozen=True, order=True)
class WgmmaForwardKernelConfig(ForwardConfig):
    """A forward kernel of the wgmma family (sm_90a).

    All positive sizes are accepted here; flashsmith.families.legality decides whether a kernel can
    be built.

    Raises:
        ArgumentError: a field has the wrong type or is out of range.
    """

    FAMILY: ClassVar[str] = "wgmma"
    OLDEST_ARCH: ClassVar[int] = 90

    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "B_r", "B_c", "n_warpgroups")
    SHAPE_SUFFIX: ClassVar[str] = "wg"
    LEADING_WORD: ClassVar[str] = "tma"
    GROUPS: ClassVar[tuple[KnobGroup, ...]] = (REGISTERS_WORD,)

    dtype: DType = knob(
        "element type of q, k, v and o",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, k, v and o; sums are fp32",
        where="Wgmma",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=D_HEADS,
        effect=lambda cfg: (
            f"S = Q K^T takes {cfg.QK_steps} k16-steps; O has {cfg.O_columns // 2} "
            "registers a thread" + describe.halves(cfg)
        ),
        where="StaticHopperKernelConfig",
    )
    B_r: int = knob(
        "rows of Q and O per CTA",
        values=tuple(WARPGROUP_ROWS * count for count in _WARPGROUPS),
        effect=lambda cfg: f"a CTA owns {cfg.B_r} query rows",
        where="StaticHopperKernelConfig",
    )
    B_c: int = knob(
        "rows of K and V per tile",
        values=tuple(range(MIN_B_C, MAX_B_C + 1, B_C_STEP)),
        effect=describe.keys,
        where="Consumer::main_loop",
    )
    n_warpgroups: int = knob(
        "consumer warpgroups, 64 rows each; one more is the producer",
        values=_WARPGROUPS,
        effect=lambda cfg: (
            f"{cfg.n_warpgroups} consumer warpgroups, 64 rows each; with the producer "
            f"{cfg.n_threads} threads per CTA"
        ),
        where="Consumer",
    )
    kv_stages: int = knob(
        "K tiles, and V tiles, held at once",
        values=tuple(range(1, MAX_KV_STAGES + 1)),
        word="stages",
        default=2,
        always=True,
        effect=describe.ring,
        where="TilePipeline",
    )
    q_buffers: int = knob(
        "Q tiles held at once",
        values=(1, 2),
        word="q_buffers",
        default=1,
        always=True,
        effect=describe.q,
        where="Producer::load_Q",
    )
    producer_registers: int = registers_knob("producer", default=24, kernel="hopper_forward_kernel")
    consumer_registers: int = registers_knob(
        "consumer",
        default=240,
        kernel="hopper_forward_kernel",
        values=[count for count in REGISTER_COUNTS if count >= _LEAST_TO_COMPUTE],
    )
    overlap: bool = knob(
        "a warpgroup's next QK GEMM overlaps its softmax",
        word="overlap",
        default=False,
        effect=describe.overlap,
        where="Consumer::main_loop",
    )
    pingpong: PingPong = knob(
        "the warpgroup order barrier: around GEMMs, or exponentials",
        values=tuple(PingPong),
        word="pingpong_",
        default=PingPong.NONE,
        effect=lambda cfg: describe.TURNS[cfg.pingpong.name],
        where="WarpgroupOrder",
    )
    cluster_size: int = knob(
        "CTAs that share the copies of K and V",
        values=(1, 2),
        word="cluster",
        default=1,
        effect=describe.cluster,
        where="Producer::load",
    )
    schedule: Schedule = knob(
        "the tile scheduler: how many tiles a CTA computes, and which",
        values=tuple(Schedule),
        word="",
        default=Schedule.ONE_TILE,
        effect=lambda cfg: describe.SCHEDULES[cfg.schedule.name],
        where="TileScheduler",
    )
    tile_order: TileOrder = knob(
        "which tiles begin first",
        values=tuple(TileOrder),
        word="",
        default=TileOrder.BY_HEAD,
        effect=lambda cfg: describe.ORDERS[cfg.tile_order.name],
        where="TileScheduler::info_of",
    )
    separate_O: bool = knob(
        "O is stored through a separate buffer in shared memory, not through Q's",
        word="separate_O",
        default=False,
        effect=describe.way_of_O,
        where="OutputStore::start",
    )
    rescale_threshold: int = knob(
        "O is rescaled if the new maximum has enough weight or grew above 2^this",
        values=tuple(range(MAX_RESCALE_THRESHOLD + 1)),
        word="rescale",
        default=0,
        lowest=0,
        effect=describe.rescale,
        where="RowSoftmax::update_max",
    )
    section_mib: int = knob(
        "longest first: MiB of K and V of the heads grouped for L2",
        values=(1, 2, 4, 8, 16, DEFAULT_SECTION_MIB, 64),
        word="section",
        default=DEFAULT_SECTION_MIB,
        effect=describe.section,
        where="TileScheduler::info_of",
    )
    ctas_per_sm: int = knob(
        "CTAs that share an SM",
        values=tuple(range(1, MAX_CTAS + 1)),
        word="ctas",
        default=1,
        effect=describe.ctas,
        where="hopper_forward_kernel",
    )
    exp2_fma_share: int = knob(
        "percent of the exponentials that the FMA pipe computes",
        values=tuple(range(MAX_EXP2_FMA_SHARE + 1)),
        word="exp2_fma",
        default=0,
        lowest=0,
        effect=describe.exp2,
        where="exp2_shared_out",
    )
    early_exp: bool = knob(
        "with overlap: no exponential waits for the concurrent PV GEMM",
        word="early_exp",
        default=False,
        effect=describe.early,
        where="Consumer::end_basic_block_after",
    )
    stale_max: bool = knob(
        "later blocks compute no maximum: their sums show when it is stale",
        word="stale_max",
        default=False,
        effect=describe.stale,
        where="StaleMax::resolve_stale_max",
    )
    direct_O: bool = knob(
        "O is stored from registers, so that Q's buffer is free before O is done",
        word="direct_O",
        default=False,
        effect=describe.direct,
        where="OutputStore::store_directly",
    )
    short_block: int = knob(
        "a warpgroup's last block ends at a multiple of this many keys, if no row needs more",
        values=(0, 16, 32, 48, 64),
        word="short",
        default=0,
        lowest=0,
        effect=describe.short,
        where="Consumer::run_QK_gemm_of",
    )
    split_keys: int = split_keys_knob()
    pack_gqa: bool = pack_gqa_knob()
    register_Q: int = knob(
        "steps of 16 columns of Q that a tile's GEMMs read from registers",
        values=(0, 4, 8),
        word="register_Q",
        default=0,
        lowest=0,
        effect=describe.register_Q,
        where="Consumer::load_register_Q",
    )
    canonical: int = canonical_knob()
    d_v: int = d_v_knob()

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def n_threads(self) -> int:
        """The number of threads of a CTA."""
        return WARPGROUP_THREADS * (self.consumers + 1)

    @property
    def halves_O(self) -> bool:
        """Whether each warpgroup has a partner warpgroup that computes the right half of O's
        columns."""
        return self.d_head_v > MOST_COLUMNS_OF_O

    @property
    def consumers(self) -> int:
        """The number of consumer warpgroups, including partners."""
        return self.n_warpgroups * (2 if self.halves_O else 1)

    @property
    def O_columns(self) -> int:
        """The number of columns of O that one warpgroup computes."""
        return self.d_head_v // 2 if self.halves_O else self.d_head_v

    @property
    def n_warps(self) -> int:
        """The number of warps of a CTA, including the warps of the producer."""
        return self.n_threads // THREADS_PER_WARP

    @property
    def rows_per_warp(self) -> int:
        """The number of rows of Q that one warp computes."""
        return WARPGROUP_ROWS * THREADS_PER_WARP // WARPGROUP_THREADS

    def tile_bytes(self, elem_size: int = 2) -> int:
        """The bytes of the Q, K and V tiles that a CTA has at the same time and, with separate_O,
        of the O tile."""
        of_qk = self.B_r * self.q_buffers + self.kv_stages * self.B_c
        of_v = self.B_r * self.separate_O + self.kv_stages * self.B_c
        columns = of_qk * tile_columns(self.d_head) + of_v * tile_columns(self.d_head_v)
        return columns * elem_size

    def smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's dynamic shared memory: for the tiles, a page of barriers, and the P
        that a warpgroup sends to its partner."""
        # Each thread sends to the partner its elements of P, of 16 bits each, and two floats.
        message = WARPGROUP_THREADS * (self.B_c + 8) if self.halves_O else 0
        return self.tile_bytes(elem_size) + BARRIER_PAGE + message

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether these sizes consist of whole tiles, so that a kernel without bounds checks can
        compute the problem.

        Rows need not fill a tile, because TMA skips rows of Q and O beyond the tensor.
        """
        return d == self.d_head and seq_k % self.B_c == 0 and seq_k > 0


if not TYPE_CHECKING:  # A type checker would otherwise accept any attribute
    __getattr__ = getter(__name__)
