"""FlashForwardKernelConfig: the knobs of the mma_sync family; a config names one kernel.

The C++ struct with this name (csrc/mma_sync/flash_attention.cuh) has the same fields in the same
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.canonical import canonical_knob
from flashsmith.families.config import THREADS_PER_WARP, ForwardConfig
from flashsmith.families.head_dims import d_v_knob, tile_columns
from flashsmith.families.knob import KnobGroup, knob
from flashsmith.families.mma_sync import describe
from flashsmith.families.pack_gqa import pack_gqa_knob
from flashsmith.families.split_keys import split_keys_knob
from flashsmith.semantics.dtype import DType

K_TILE_COLUMNS = 8
# The maximum number of K-tiles of a streamed operand that one step loads, because more would not
# fit in registers. At d_head 256, an operand has more K-tiles.
MAX_LOAD_COUNT = 16
LOAD_COUNTS = (0, 2, 4, 8, MAX_LOAD_COUNT)
LOAD_FIELDS = ("Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles")


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig(ForwardConfig):
    """A forward kernel of the mma_sync family (sm_80 and later).

    All positive tile sizes and all load counts from 0 are accepted here;
    flashsmith.families.legality decides whether a kernel can be built.

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "mma_sync"
    OLDEST_ARCH: ClassVar[int] = 80

    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "B_r", "B_c", "n_warps")
    GROUPS: ClassVar[tuple[KnobGroup, ...]] = (
        KnobGroup("load_{}_{}_{}_tiles", LOAD_FIELDS, ("Q", "K", "V"), "load counts", (0, 2, 2)),
    )

    dtype: DType = knob(
        "element type of q, k, v and o",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, k, v and o; sums are fp32",
        where="mma_m16n8k16",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=(32, 64, 72, 80, 96, 128, 192, 256),
        effect=lambda cfg: (
            f"S = Q K^T takes {cfg.QK_steps} k16-steps; O has {cfg.d_head_v // 8} tiles"
        ),
        where="ForwardKernelTileShapes",
    )
    B_r: int = knob(
        "rows of Q and O per CTA",
        values=(64, 128, 192, 256),
        effect=lambda cfg: f"a CTA owns {cfg.B_r} query rows, a warp {cfg.rows_per_warp}",
        where="ForwardKernelTileShapes",
    )
    B_c: int = knob(
        "rows of K and V per tile",
        values=(32, 48, 64, 96, 128),
        effect=lambda cfg: f"a loop step takes {cfg.B_c} keys",
        where="SingleStageLoop::step",
    )
    n_warps: int = knob(
        "warps per CTA",
        values=(2, 4, 6, 8, 12),
        effect=lambda cfg: f"{cfg.n_threads} threads per CTA",
        where="StaticForwardKernelConfig",
    )
    async_copy: bool = knob(
        "tiles arrive by cp.async instead of 16-byte loads",
        word="async",
        default=False,
        effect=lambda cfg: (
            "tiles go straight to shared memory by cp.async"
            if cfg.async_copy
            else "tiles go through registers, by 16-byte loads and stores"
        ),
        where="TileCopy",
    )
    eager_load_blocks: bool = knob(
        "the next K (V) tile is fetched once its buffer is free",
        word="eager",
        default=False,
        effect=describe.eager,
        where="SingleStageLoop::step",
    )
    swizzled: bool = knob(
        "16-byte chunks of shared memory are XOR-swizzled",
        word="swizzled",
        default=False,
        effect=describe.swizzle,
        where="SmemLayout",
    )
    Q_mma_load_K_tiles: int = knob(
        "K-tiles of Q fetched per step; 0: all in advance",
        values=LOAD_COUNTS,
        default=0,
        lowest=0,
        effect=describe.loads("Q", "d_head", "columns"),
        where="StreamedOperand",
    )
    K_mma_load_K_tiles: int = knob(
        "K-tiles of K fetched per step; 0: all in advance",
        values=LOAD_COUNTS,
        default=0,
        lowest=0,
        effect=describe.loads("K", "d_head", "columns"),
        where="StreamedOperand",
    )
    V_mma_load_K_tiles: int = knob(
        "K-tiles of V fetched per step; 0: all in advance",
        values=LOAD_COUNTS,
        default=0,
        lowest=0,
        effect=describe.loads("V", "B_c", "keys"),
        where="StreamedOperand",
    )
    mma_double_buffer_loads: bool = knob(
        "the next fragments are fetched before the current mma",
        word="buffer",
        default=False,
        effect=describe.buffer,
        where="WarpGemm::run",
    )
    optimized_softmax: bool = knob(
        "scale folded into one FMA before exp2, first tile peeled",
        word="opt_softmax",
        default=False,
        effect=lambda cfg: (
            "the scale is folded into the FMA before exp2; the first tile is peeled"
            if cfg.optimized_softmax
            else "scores are scaled first; every tile rescales O, including the first"
        ),
        where="OnlineSoftmax",
    )
    kv_stages: int = knob(
        "K/V tile pairs in a ring, filled ahead; 0: one pair, K and V each filled once free",
        values=(0, 2, 3, 4),
        word="stages",
        default=0,
        lowest=0,
        effect=describe.ring,
        where="MultiStageLoop",
    )
    lazy_rescale: bool = knob(
        "O is rescaled only if the new maximum has enough weight",
        word="lazy_rescale",
        default=False,
        effect=lambda cfg: (
            "O is rescaled only once a row's new maximum has a large share of its weight, or is "
            "2^8 times the old one"
            if cfg.lazy_rescale
            else "O is rescaled for every K/V block"
        ),
        where="OnlineSoftmax",
    )
    ping_pong: bool = knob(
        "two halves of the warps run half a K/V block apart",
        word="ping_pong",
        default=False,
        effect=lambda cfg: (
            "two halves of the warps alternate at the PV GEMM, half a K/V block apart"
            if cfg.ping_pong
            else "warps run in the order of the hardware's schedulers"
        ),
        where="PingPongLoop",
    )
    min_ctas_per_sm: int = knob(
        "CTAs per SM for which registers must suffice; 0: any",
        values=(0, 2, 3, 4),
        word="ctas",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"registers are capped for {cfg.min_ctas_per_sm} CTAs per SM"
            if cfg.min_ctas_per_sm
            else "the compiler chooses the registers, up to 255"
        ),
        where="flash_forward_kernel",
    )
    trim_masks: bool = knob(
        "masked blocks have separate code, which skips what a warp cannot see",
        word="trim",
        default=False,
        effect=lambda cfg: (
            "masked blocks run separate code, which skips what a warp cannot see"
            if cfg.trim_masks
            else "every block tests whether it needs its mask"
        ),
        where="ForwardBlock::sees",
    )
    l2_group_mib: int = knob(
        "MiB of K and V of the heads grouped for L2; 0: no grouping",
        values=(0, 16, 32),
        word="l2",
        default=0,
        lowest=0,
        effect=describe.group,
        where="TileCoord",
    )
    split_keys: int = split_keys_knob()
    pack_gqa: bool = pack_gqa_knob()
    canonical: int = canonical_knob()
    d_v: int = d_v_knob()

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def load_counts(self) -> tuple[int, int, int]:
        """The numbers of K-tiles of Q, of K and of V that are loaded per step."""
        return (self.Q_mma_load_K_tiles, self.K_mma_load_K_tiles, self.V_mma_load_K_tiles)

    @property
    def n_threads(self) -> int:
        """Threads of one CTA."""
        return self.n_warps * THREADS_PER_WARP

    @property
    def rows_per_warp(self) -> int:
        """The number of rows of Q that one warp computes."""
        return self.B_r // self.n_warps

    @property
    def kv_tiles(self) -> int:
        """The number of K tiles that are in shared memory at the same time, which is also the
        number of V tiles."""
        return self.kv_stages or 1

    def smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's dynamic shared memory, which holds a Q tile (later overwritten by O)
        and the K and V tiles.

        In a canonical config, shared memory also holds the rows' state over the finished chunks.
        """
        d, d_v = tile_columns(self.d_head), tile_columns(self.d_head_v)
        of_q, of_kv = self.B_r * max(d, d_v), self.B_c * self.kv_tiles * (d + d_v)
        tiles = (of_q + of_kv) * elem_size
        return tiles + (self.B_r * (self.d_head_v + 8) * 4 if self.canonical else 0)

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether these sizes consist of whole tiles, so that a kernel without bounds checks can
        compute the problem."""
        whole = seq_q % self.B_r == 0 and seq_k % self.B_c == 0
        return whole and d == self.d_head and seq_k > 0
