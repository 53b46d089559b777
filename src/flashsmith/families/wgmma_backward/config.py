"""WgmmaBackwardKernelConfig: the knobs of the wgmma_backward family; a config names the kernels of
a backward pass.

The C++ struct with this name (csrc/wgmma_backward/config.cuh) has the same fields in the same
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from flashsmith.families.earlier_names import getter
from flashsmith.families.family import family_named
from flashsmith.families.head_dims import d_v_knob, step_columns, tile_columns
from flashsmith.families.knob import KnobGroup, knob
from flashsmith.families.warpgroups import (
    REGISTERS_WORD,
    WARPGROUP_ROWS,
    WarpgroupBackwardConfig,
    pingpong_knob,
    registers_knob,
    ring_knob,
)
from flashsmith.families.wgmma_backward import describe
from flashsmith.semantics.dtype import DType


class StepOrder(IntEnum):
    """The order in which a warpgroup issues the GEMMs of a step."""

    DV_FIRST = 0
    LATE_DQ = 1
    SCORES_TOGETHER = 2
    SCORES_AHEAD = 3


class DqSums(IntEnum):
    """The time at which the dq of a step is added to the sums in global memory."""

    BESIDE_SCORES = 0
    SUMS_AT_ONCE = 1
    SUMS_UNDER_DK = 2


# The bytes of shared memory for barriers, in addition to the tiles; and the further bytes that
# ordered_dq needs.
BARRIER_PAGE = 256
ORDER_BYTES = 64
D_HEADS = (64, 72, 80, 96, 128, 192, 256, 512)
# The largest d_head at which a warpgroup has registers for both dk and dv.
WIDEST_WHOLE = 128
# The largest d_head at which a CTA has registers for dk and dv of 64 keys, and shared memory for
# the tiles.
WIDEST_IN_ONE_CTA = 256
# The number of columns of dQ that a warpgroup computes is a multiple of this.
DQ_COLUMNS = 16
_FLOAT_BYTES = 4
_PANEL_BYTES = 128  # Bytes of a row of a panel
_WARPGROUPS = (1, 2, 3)


@dataclass(frozen=True, order=True)
class WgmmaBackwardKernelConfig(WarpgroupBackwardConfig):
    """A backward pass by the wgmma_backward family (sm_90a).

    Raises:
        ArgumentError: a field has the wrong type or is out of range.
    """

    FAMILY: ClassVar[str] = "wgmma_backward"
    OLDEST_ARCH: ClassVar[int] = 90
    # For example '(FP16, 128, 64, 128, 2):
    # tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240+late_dq'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "B_r", "B_c", "n_warpgroups")
    LEADING_WORD: ClassVar[str] = "tma_backward"
    GROUPS: ClassVar[tuple[KnobGroup, ...]] = (REGISTERS_WORD,)

    dtype: DType = knob(
        "element type of the tensors",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, k, v, o and the gradients; sums are fp32",
        where="Wgmma",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=D_HEADS,
        effect=lambda cfg: (
            f"S takes {step_columns(cfg.columns) // 16} k16-steps and dP "
            f"{step_columns(cfg.v_columns) // 16}; dk and dv have "
            f"{(cfg.columns + cfg.v_columns) // 2} registers a thread"
        ),
        where="StaticHopperBackwardKernelConfig",
    )
    B_r: int = knob(
        "query rows of a loop step",
        values=(64, 128),
        effect=lambda cfg: f"a loop step takes {cfg.B_r} queries: S has {cfg.B_r // 2} registers",
        where="ScoresTogether::step",
    )
    B_c: int = knob(
        "rows of K and V that a CTA keeps",
        values=tuple(WARPGROUP_ROWS * count for count in _WARPGROUPS),
        effect=lambda cfg: f"a CTA owns {cfg.B_c} keys",
        where="KeyBlock",
    )
    n_warpgroups: int = knob(
        "consumer warpgroups, with 64 keys each or sharing 64; one more is the producer",
        values=_WARPGROUPS,
        effect=lambda cfg: (
            f"{cfg.n_warpgroups} consumer warpgroups, 64 keys each; with the producer "
            f"{cfg.n_threads} threads per CTA"
        ),
        where="BackwardConsumer",
    )
    q_stages: int = ring_knob("Q", "q_stages", "BackwardProducer::load_queries")
    do_stages: int = ring_knob("do", "do_stages", "BackwardProducer::load_queries")
    ds_stages: int = knob(
        "dS tiles held at once",
        values=(1, 2, 3),
        word="ds_stages",
        default=2,
        always=True,
        effect=lambda cfg: describe.of_dq(
            cfg,
            "dS is stored once the previous step's dQ is done"
            if cfg.ds_stages == 1
            else f"warpgroups may be {cfg.ds_stages - 1} steps apart in storing dS",
        ),
        where="dSStages",
    )
    producer_registers: int = registers_knob(
        "producer", default=24, kernel="hopper_backward_kernel"
    )
    consumer_registers: int = registers_knob(
        "consumer", default=240, kernel="hopper_backward_kernel"
    )
    order: StepOrder = knob(
        "order of a step's GEMMs",
        values=tuple(StepOrder),
        word="",
        default=StepOrder.DV_FIRST,
        effect=describe.order,
        where="BackwardConsumer::compute",
    )

    early_exp: bool = knob(
        "no exponential waits for the concurrent GEMM",
        word="early_exp",
        default=False,
        effect=describe.early,
        where="ConsumerScores::pin_exponentials",
    )
    split_roles: bool = knob(
        "two warpgroups have the same 64 keys: one computes P and dv, the other dS and dk",
        word="split_roles",
        default=False,
        effect=describe.roles,
        where="SplitBackwardConsumer",
    )
    lagged_dq: bool = knob(
        "a step computes dq of the step before it",
        word="lagged_dq",
        default=False,
        effect=lambda cfg: describe.of_dq(
            cfg,
            "a step computes the previous step's dq, whose dS all warpgroups have already stored"
            if cfg.lagged_dq
            else "a step's dq waits until all warpgroups have stored the step's dS",
        ),
        where="dQPart::start_dq",
    )
    pingpong: bool = pingpong_knob()
    persistent: bool = knob(
        "one CTA per SM computes several blocks of keys in sequence",
        word="persistent",
        default=False,
        effect=lambda cfg: (
            "one CTA per SM: the next block's first tiles arrive while dk and dv are stored"
            if cfg.persistent
            else "one CTA per block of keys"
        ),
        where="BackwardProducer::run",
    )
    dq_sums: DqSums = knob(
        "when a step's dq is added to its sums",
        values=tuple(DqSums),
        word="",
        default=DqSums.BESIDE_SCORES,
        effect=describe.sums,
        where="dQPart::add_dq",
    )
    ordered_dq: bool = knob(
        "blocks of keys add to dq in a fixed order: the same bits in every run",
        word="ordered_dq",
        default=False,
        effect=lambda cfg: describe.of_dq(
            cfg,
            f"{'pairs of ' * cfg.shared_dq}blocks of keys add to a block of dq in launch order, "
            "each after the previous one: the same bits in every run"
            if cfg.ordered_dq
            else "blocks of keys add to dq in no fixed order",
        ),
        where="dQTurns",
    )
    wide_stores: bool = knob(
        "dk and dv are stored with 16 bytes per lane",
        word="wide_stores",
        default=False,
        effect=lambda cfg: (
            "four lanes store 64 bytes of a row of dk or dv, after two rounds of shuffles"
            if cfg.wide_stores
            else "four lanes store 32 bytes of a row of dk or dv, after one round of shuffles"
        ),
        where="store_gradient",
    )
    bulk_sums: bool = knob(
        "dq goes through shared memory, and TMA adds it to its sums",
        word="bulk_sums",
        default=False,
        effect=lambda cfg: describe.of_dq(
            cfg,
            "dq goes through shared memory, and TMA adds it to its sums"
            if cfg.bulk_sums
            else "lanes add dq to its sums from their registers",
        ),
        where="dQPart::add_dq_by_tma",
    )
    early_rows: bool = knob(
        "a step's lse and D are read before its GEMMs are issued",
        word="early_rows",
        default=False,
        effect=lambda cfg: (
            "a step's lse, and D if enough registers are free, are read before its GEMMs start"
            if cfg.early_rows
            else "a step's lse and D are read after its GEMMs are issued, which delays the loads"
        ),
        where="ConsumerScores::load_rows",
    )
    without_dq: bool = knob(
        "dk and dv alone, for frozen q",
        word="without_dq",
        default=False,
        effect=lambda cfg: (
            "dk and dv alone: four GEMMs, no dS in shared memory, no sums of dq"
            if cfg.without_dq
            else "all gradients: five GEMMs"
        ),
        where="ScoresTogether::step",
    )
    d_v: int = d_v_knob()
    cta_pair: bool = knob(
        "the two CTAs of a cluster have the same keys, and half of the columns each",
        word="cta_pair",
        default=False,
        effect=lambda cfg: (
            "two CTAs have the same keys and half of d_head each; they exchange S and dP"
            if cfg.cta_pair
            else "a CTA has all columns of its keys"
        ),
        where="PeerScores",
    )
    separate_dq: bool = knob(
        "dq by CTAs that keep queries, in another launch: the same bits in every run",
        word="separate_dq",
        default=False,
        effect=lambda cfg: (
            "another launch computes S, dP and dq again, with queries kept and no sums in memory: "
            "the same bits in every run, for seven GEMMs instead of five"
            if cfg.separate_dq
            else "CTAs that keep keys compute all gradients"
        ),
        where="hopper_dq_kernel",
    )
    shared_dq: bool = knob(
        "two CTAs of a cluster exchange dS; each sums half of dq's columns for the keys of both",
        word="shared_dq",
        default=False,
        effect=lambda cfg: describe.of_dq(
            cfg,
            "two CTAs with neighbouring keys exchange dS, and each adds half of the columns of dq "
            "for both: half as many sums in global memory"
            if cfg.shared_dq
            else "a CTA adds dq of its own keys",
        ),
        where="dSSender",
    )
    multicast: bool = knob(
        "with shared_dq: each CTA copies half of the panels of Q and do, to both CTAs",
        word="multicast",
        default=False,
        effect=lambda cfg: (
            "each CTA copies every second panel of Q and do to both: half as many reads of the L2"
            if cfg.multicast
            else "a CTA copies its own Q and do"
        ),
        where="BackwardProducer::load_panels",
    )

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def sums_dq(self) -> bool:
        """Whether the main kernel adds dq to its sums in global memory."""
        return not (self.without_dq or self.separate_dq)

    @property
    def dq_kernel(self) -> WarpgroupBackwardConfig:
        """The config of the kernel that computes dq if the config has separate_dq; it has as many K
        and V stages as fit."""
        stages = 3 if self.d_head in (64, 128) else 2
        return family_named("wgmma_dq").config_class(
            self.dtype,
            self.d_head,
            B_r=2 * WARPGROUP_ROWS,
            B_c=128 if self.d_head <= 96 else 64,
            n_warpgroups=2,
            k_stages=stages,
            v_stages=1 if self.d_head > 192 else stages,
            late_dq=True,
            pingpong=True,
            d_v=self.d_v,
        )

    @property
    def dq_smem_bytes(self) -> int:
        """The bytes of dynamic shared memory that a CTA needs in the kernel that computes dq; 0
        without separate_dq."""
        return self.dq_kernel.smem_bytes() if self.separate_dq else 0

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        whole = super().fills_tiles(seq_q, seq_k, d) and seq_k % self.cluster_keys == 0
        return whole and (not self.separate_dq or self.dq_kernel.fills_tiles(seq_q, seq_k, d))

    @property
    def key_groups(self) -> int:
        """The number of groups of 64 keys in a CTA."""
        return 1 if self.split_roles else self.n_warpgroups

    @property
    def n_ctas(self) -> int:
        """The number of CTAs that share a block of keys."""
        return 2 if self.cta_pair else 1

    @property
    def cluster_keys(self) -> int:
        """The number of rows of K and V that the CTAs of a cluster keep together."""
        return 2 * self.B_c if self.shared_dq else self.B_c

    @property
    def peer_k_bytes(self) -> int:
        """The bytes of the part of the other CTA's K that a CTA keeps with shared_dq: two panels of
        64 columns. 0 without shared_dq."""
        return 2 * self.B_c * _PANEL_BYTES if self.shared_dq else 0

    @property
    def columns(self) -> int:
        """The number of columns of Q, K, dq and dk that a CTA has."""
        return self.d_head // self.n_ctas

    @property
    def v_columns(self) -> int:
        """The number of columns of V, do and dv that a CTA has."""
        return self.d_head_v // self.n_ctas

    @property
    def shares_rows(self) -> bool:
        """Whether the warpgroups divide dQ by rows."""
        return self.B_r == WARPGROUP_ROWS * self.n_warpgroups

    @property
    def shares_columns(self) -> bool:
        """Whether the warpgroups divide dQ by columns, in multiples of 16 columns."""
        whole = tile_columns(self.d_head) % (DQ_COLUMNS * self.n_warpgroups) == 0
        return self.B_r == WARPGROUP_ROWS and self.n_warpgroups > 1 and whole

    @property
    def takes_turns(self) -> bool:
        """Whether the warpgroups alternate: a single warpgroup computes the whole dQ of a step."""
        return not (self.shares_rows or self.shares_columns)

    @property
    def dq_columns(self) -> int:
        """The number of columns that a warpgroup computes of 64 rows of dQ."""
        return self.dq_sum_columns // self.n_warpgroups if self.shares_columns else self.d_head

    @property
    def dq_sum_columns(self) -> int:
        """The number of columns of dQ that the warpgroups of a CTA compute together. If they divide
        dQ by columns, this is the number of columns of a tile (96 at d_head 72 and 80)."""
        return tile_columns(self.columns) if self.shares_columns else self.columns

    @property
    def accumulators(self) -> int:
        """The number of registers that a thread needs for dk and dv, for S and dP, and for P and dS
        if these do not overwrite S and dP. With split roles, a thread has only dk or dv. If S and
        dP are not computed together, dq needs registers too, both in a persistent CTA and if the dq
        of a step is added to the sums during the next step."""
        if self.split_roles:
            return max(self.columns, self.v_columns) // 2 + self.B_r + self.B_r // 4
        beside = 0 if self.order == StepOrder.SCORES_TOGETHER else 1
        if self.order == StepOrder.SCORES_AHEAD and self.early_exp:
            beside = 2
        waits = self.dq_sums == DqSums.BESIDE_SCORES and not self.lagged_dq
        kept_dq = self.dq_columns // 2 if beside and (self.persistent or waits) else 0
        sums = (self.d_head + self.d_head_v) // 2
        return sums + self.B_r + beside * self.B_r // 4 + kept_dq

    def tile_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's K and V, of the stages of Q and do, and of the dS from which dq is
        computed.

        These also include P with split_roles, the other CTA's S and dP with cta_pair, half of the
        other CTA's K and all of its dS with shared_dq, and with bulk_sums the dq that TMA adds to
        the sums.
        """
        of_qk = (self.B_c + self.q_stages * self.B_r) * tile_columns(self.columns)
        of_v = (self.B_c + self.do_stages * self.B_r) * tile_columns(self.v_columns)
        scores = self.split_roles + 2 * self.cta_pair
        scores_bytes = scores * self.B_r * self.B_c * _FLOAT_BYTES
        ds_tiles = self.ds_stages if self.sums_dq else 0
        return (
            (of_qk + of_v + ds_tiles * self.B_r * self.cluster_keys) * elem_size
            + self.peer_k_bytes
            + scores_bytes
            + (self.bulk_sums * self.n_warpgroups * WARPGROUP_ROWS * self.dq_columns * _FLOAT_BYTES)
        )

    def smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's dynamic shared memory: for the tiles, row statistics and
        barriers."""
        statistics = (self.q_stages + self.do_stages) * self.B_r * _FLOAT_BYTES
        barriers = BARRIER_PAGE + self.ordered_dq * ORDER_BYTES
        return self.tile_bytes(elem_size) + statistics + barriers


if not TYPE_CHECKING:  # A type checker would otherwise accept any attribute
    __getattr__ = getter(__name__)
