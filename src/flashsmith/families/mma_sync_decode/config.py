"""FlashDecodeKernelConfig: the knobs of the mma_sync_decode family; a config names the kernels of a
call.

The C++ struct with this name (csrc/mma_sync_decode/config.cuh) has the same fields in the same
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.canonical import canonical_knob
from flashsmith.families.config import THREADS_PER_WARP, KernelConfig
from flashsmith.families.head_dims import d_v_knob
from flashsmith.families.knob import knob
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.dtype import DType

# The default minimum number of keys in a part, and the default maximum number of parts per SM.
MIN_KEYS, PARTS_PER_SM = 128, 1
MMA_ROWS = 16  # Rows of one MMA m16n8k16, and also its depth k
_STATISTICS_BYTES = 8  # The maximum and the sum of a row in a warp
# The maximum number of columns of a row of which one warp has registers for the sums of 16 rows. If
# rows are wider, each warp sums only some of their columns.
_MOST_COLUMNS_OF_WARP = 256
_PANEL_BYTES = 64  # Bytes of a narrow panel's row in shared memory
_TARGET_BYTES = 80  # For the description of a CTA's run (RunInfo) and for the CTA's next searches


@dataclass(frozen=True, order=True)
class FlashDecodeKernelConfig(KernelConfig):
    """Attention over a cache, by the mma_sync_decode family (sm_80 and later).

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "mma_sync_decode"
    OLDEST_ARCH: ClassVar[int] = 80
    # For example '(BF16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "B_r", "B_c", "n_warps")
    LEADING_WORD: ClassVar[str] = "decode"

    dtype: DType = knob(
        "element type of q, the cache and o",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, the cache and o; sums are fp32",
        where="mma_m16n8k16",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=(64, 96, 128, 192, 256, 512),
        effect=lambda cfg: (
            f"scores take {cfg.d_head // MMA_ROWS} k16-steps; a lane sums {cfg.accumulators} "
            "elements of o" + (", whose columns warps share" if cfg.own_columns else "")
        ),
        where="StaticDecodeKernelConfig",
    )
    B_r: int = knob(
        "rows of a CTA's tile: the query heads of one K/V head, query after query",
        values=(16, 32),
        effect=lambda cfg: f"each key is read once for {cfg.B_r} rows of its K/V head",
        where="DecodeRun",
    )
    B_c: int = knob(
        "keys of a stage, over all warps",
        values=(32, 64, 128, 256),
        effect=lambda cfg: (
            f"a warp copies {cfg.keys_per_warp} keys and multiplies {cfg.multiplied_keys} at a time"
        ),
        where="RunCopies::start_step",
    )
    n_warps: int = knob(
        "warps per CTA; each has separate keys or separate rows",
        values=(2, 4, 8),
        effect=lambda cfg: (
            f"{cfg.n_threads} threads per CTA, whose warps share the stages"
            if cfg.shares_stages
            else f"{cfg.n_threads} threads per CTA; no warp waits for another's keys"
        ),
        where="StaticDecodeKernelConfig",
    )
    stages: int = knob(
        "stages of K and V in shared memory",
        values=(2, 3, 4, 5, 6, 8),
        word="stages",
        default=3,
        always=True,
        effect=lambda cfg: f"{cfg.bytes_in_flight} bytes of K and V are in flight per CTA",
        where="DecodeRun::run",
    )
    min_keys: int = knob(
        "minimum keys in a part of a sequence, except the last part",
        values=(64, 128, 256, 512, 1024),
        word="least",
        default=128,
        always=True,
        effect=lambda cfg: (
            "nothing: chunks are the parts"
            if cfg.canonical
            else f"sequences of {cfg.min_keys + 1} or more keys are split"
        ),
        where="sequence_of",
    )
    parts_per_sm: int = knob(
        "maximum parts per SM, over all K/V heads of a sequence",
        values=(1, 2, 3, 4, 6, 8),
        word="parts",
        default=2,
        always=True,
        effect=lambda cfg: (
            f"a long sequence alone has {cfg.parts_per_sm} parts per SM, over all K/V heads"
            if not cfg.canonical
            else "nothing: chunks are the parts"
        ),
        where="most_parts",
    )
    chunk_rows: int = knob(
        "rows of a CTA's tile in the kernel for sequences with more than half this many rows, such "
        "as chunks of a prompt; 0: no such kernel",
        values=(0, 64, 128),
        word="chunks",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"sequences with more than {cfg.most_rows_without_chunks} rows of a K/V head use a "
            f"separate kernel, of {cfg.chunk_warps} warps with {MMA_ROWS} rows each"
            if cfg.chunk_rows
            else "all sequences use the same kernel, in which each tile reads all keys"
        ),
        where="ChunkKernelConfig",
    )
    rounds: int = knob(
        "minimum runs of parts per CTA, if there are enough keys",
        values=(1, 2, 4, 8),
        word="rounds",
        default=1,
        effect=lambda cfg: (
            f"a CTA's share of all keys is split into {cfg.rounds} runs of parts; it merges each"
        ),
        where="share_of_cta",
    )
    early: bool = knob(
        "whether a call's first launch may begin before the previous launch ends (from sm_90)",
        word="early",
        default=False,
        effect=lambda cfg: (
            "the first launch overlaps the end of the previous work on the stream"
            if cfg.early
            else "the first launch starts after the previous work on the stream"
        ),
        where="wait_for_launch_before",
    )
    cluster: int = knob(
        "maximum cluster size for merging all parts of a row tile in shared memory (from sm_90), "
        "if these are few and short; 0: no clusters",
        values=(0, 8),
        word="cluster",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"up to {cfg.cluster} parts of a row tile are merged without global memory"
            if cfg.cluster
            else "parts are merged through global memory"
        ),
        where="ClusterMerge",
    )
    full_tiles: bool = knob(
        "whether a thread merges the states of several columns at once, for tiles whose rows are "
        "all used",
        word="full",
        default=False,
        effect=lambda cfg: (
            "the end of a part of 16 rows takes one pass of loads"
            if cfg.full_tiles
            else "the end of a part takes one pass of loads for every row or few rows"
        ),
        where="PartMerge::finish_several",
    )
    own_rows: bool = knob(
        "whether each warp has 16 rows of a full tile and all keys of a stage, not some of them",
        word="own_rows",
        default=False,
        effect=lambda cfg: (
            "warps share the stages, and exchange nothing at the end of a part"
            if cfg.own_rows
            else "warps exchange their rows' sums at the end of a part"
        ),
        where="OwnRowsMerge::finish_part",
    )
    canonical: int = canonical_knob()
    chunk_cluster: int = knob(
        "CTAs of a cluster that compute each canonical chunk together (from sm_90), for sequences "
        "of at most 8 rows per K/V head; 0: one CTA computes a chunk",
        values=(0, 2, 4, 8),
        word="chunk_cluster",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"{cfg.chunk_cluster} CTAs share the keys of a chunk's scores and its columns of P V"
            if cfg.chunk_cluster
            else "a CTA computes the scores and P V of its keys alone"
        ),
        where="ChunkCluster",
    )
    chunk_warpgroups: int = knob(
        "consumer warpgroups of the kernel for chunks of a prompt that fill a GPU with tiles of 64 "
        "rows per warpgroup (sm_90); 0: no such kernel",
        values=(0, 2, 3),
        word="chunk_warpgroups",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"chunks of a prompt whose tiles fill most SMs use wgmma, with {cfg.chunk_warpgroups} "
            "warpgroups of 64 rows each"
            if cfg.chunk_warpgroups
            else "no sequence is computed by wgmma"
        ),
        where="CacheProducer",
    )
    cache: CacheFormat = knob(
        "elements of the cache: q's dtype without (plain) or with scales, or 8-bit floats with "
        "scales",
        values=tuple(CacheFormat),
        word="cache_",
        default=CacheFormat.PLAIN,
        effect=lambda cfg: (
            f"keys and values are {cfg.cache.name.lower()} codes, which warps widen as they "
            "multiply them"
            if cfg.cache.is_8bit
            else "keys and values are used as they are stored"
        ),
        where="key_operand",
    )
    d_v: int = d_v_knob()
    keys_first: bool = knob(
        "whether a cluster that computes a chunk together copies its first keys before any values, "
        "and P V loads its operands ahead of the MMAs",
        word="keys_first",
        default=False,
        effect=lambda cfg: (
            "copies of V begin behind the first keys, and scores do not wait for them"
            if cfg.keys_first
            else "copies of V begin with those of the first keys"
            if cfg.chunk_cluster
            else "nothing without chunk_cluster"
        ),
        where="ChunkCluster::start",
    )

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def n_threads(self) -> int:
        """Threads of a CTA.

        If a cluster computes a chunk, n_warps warps compute scores. Additional warps compute
        probabilities, multiply P by V, copy V or send scores.
        """
        warps = self.n_warps
        if self.chunk_cluster:
            warps += self.probability_warps + self.column_warps + self.value_warps + 1
        return warps * THREADS_PER_WARP

    @property
    def column_warps(self) -> int:
        """The number of warps that multiply P by V if a cluster computes a chunk; each multiplies 8
        columns. Otherwise 0."""
        return self.d_head // (8 * self.chunk_cluster) if self.chunk_cluster else 0

    @property
    def value_warps(self) -> int:
        """The number of warps that copy V if a cluster computes a chunk; otherwise 0.

        Every stage has the same number of these warps. There are four in total if the stages allow
        this.
        """
        return self.stages * max(1, 4 // self.stages) if self.chunk_cluster else 0

    @property
    def probability_warps(self) -> int:
        """The number of warps that compute probabilities if a cluster computes a chunk; otherwise
        0."""
        return min(self.n_warps, self.chunk_cluster)

    @property
    def cluster_waves(self) -> int:
        """The number of tiles for which each of the probability_warps computes probabilities in a
        round; 0 unless a cluster computes a chunk."""
        return -(-self.chunk_cluster // self.probability_warps) if self.chunk_cluster else 0

    @property
    def own_columns(self) -> bool:
        """Whether each warp computes its own columns of o, for all keys of a stage. This is
        necessary if the sums of a row do not fit in the registers of one warp."""
        return self.d_head > _MOST_COLUMNS_OF_WARP

    @property
    def shares_stages(self) -> bool:
        """Whether warps multiply all keys of a stage, rather than only the keys that they copy."""
        return self.own_rows or self.own_columns

    @property
    def keys_per_warp(self) -> int:
        """The number of keys of a stage that one warp copies."""
        return self.B_c // self.n_warps

    @property
    def multiplied_keys(self) -> int:
        """The number of keys of a stage that one warp multiplies: all keys if warps share the
        stages, otherwise the keys that the warp copies."""
        return self.B_c if self.shares_stages else self.keys_per_warp

    @property
    def rows_per_warp(self) -> int:
        """The number of the tile's rows that one warp computes."""
        return MMA_ROWS if self.own_rows else self.B_r

    @property
    def accumulators(self) -> int:
        """The number of fp32 sums for o that a lane keeps.

        In a canonical config, a warp sums some columns over all keys and keeps two sums for each
        element: one over the chunk and one over all chunks.
        """
        if self.canonical:
            groups = -(-self.d_head_v // MMA_ROWS // self.n_warps)
            return 2 * self.B_r * groups * MMA_ROWS // THREADS_PER_WARP
        columns = self.d_head_v // (self.n_warps if self.own_columns else 1)
        return self.rows_per_warp * columns // THREADS_PER_WARP

    @property
    def scores(self) -> int:
        """The number of fp32 scores that a lane computes per step."""
        return self.rows_per_warp * self.multiplied_keys // THREADS_PER_WARP

    @property
    def cache_element_bytes(self) -> int:
        """The number of bytes of an element of the cache."""
        return 1 if self.cache.is_8bit else self.dtype.element_size

    @property
    def key_bytes(self) -> int:
        """The number of bytes that a key takes in shared memory. Rows of 8-bit floats are padded to
        a whole number of panels of 64 or 128 bytes."""
        return self._row_bytes(self.d_head)

    @property
    def value_bytes(self) -> int:
        """The number of bytes that a value takes in shared memory."""
        return self._row_bytes(self.d_head_v)

    def _row_bytes(self, columns: int) -> int:
        if self.cache.is_8bit:
            return -(-columns // _PANEL_BYTES) * _PANEL_BYTES
        return columns * self.dtype.element_size

    @property
    def other_sums_bytes(self) -> int:
        """The bytes, for all warps together, of the sums that do not fit in the stages when warps
        merge their states. These are the rows of sums of each warp beyond its rows_in_stage."""
        if self.shares_stages or self.canonical:
            return 0
        return self.n_warps * (MMA_ROWS - self.rows_in_stage) * self.d_head_v * 4

    @property
    def rows_in_stage(self) -> int:
        """How many of a warp's 16 rows of sums fit in the warp's part of the stages when warps
        merge their states."""
        if self.own_columns or MMA_ROWS * self.d_head_v * 4 <= self.warp_stage_bytes:
            return MMA_ROWS
        return MMA_ROWS // 2

    @property
    def warp_stage_bytes(self) -> int:
        """The bytes of the keys and values that one warp copies per stage."""
        return self.keys_per_warp * (self.key_bytes + self.value_bytes)

    @property
    def stage_bytes(self) -> int:
        """The bytes of K and V in one stage of a CTA, without padding."""
        return self.B_c * (self.d_head + self.d_head_v) * self.cache_element_bytes

    @property
    def own_tiles(self) -> int:
        """The number of tiles into which o is divided, each of eight columns. With own_rows, a lane
        has two rows of each tile."""
        return self.d_head_v // 8

    @property
    def own_tiles_in_registers(self) -> int:
        """How many of the own_tiles keep their sums over the first subtree of a run in
        registers."""
        most = (25 if self.B_c == 32 else 16) - self.own_tiles
        return min(max(most, 0), self.own_tiles)

    @property
    def most_ctas(self) -> int:
        """The maximum number of CTAs per SM that the registers allow; 0 means that only shared
        memory limits this number."""
        return 256 // self.n_threads if self.own_rows else 0

    @property
    def bytes_in_flight(self) -> int:
        """The number of bytes that a CTA's copies have in flight while the CTA multiplies."""
        return (self.stages - 1) * self.stage_bytes

    @property
    def chunk_warps(self) -> int:
        """The number of warps of a CTA in the kernel for sequences with many rows."""
        return self.chunk_rows // MMA_ROWS

    @property
    def most_rows_without_chunks(self) -> int:
        """The maximum number of rows per K/V head of the sequences that the main kernel computes.
        The kernel for many rows computes sequences with more rows."""
        return self.chunk_rows // 2

    @property
    def has_arrivals(self) -> bool:
        """Whether the config also has a merge kernel for few parts, which reads the state of each
        part as soon as this state arrives."""
        return bool(self.cluster) and not self.chunk_rows and not self.own_rows

    @property
    def keeps_queries(self) -> bool:
        """Whether a warp keeps the fragments of its queries in registers."""
        return self.rows_per_warp * max(self.d_head, self.d_v) <= MMA_ROWS * 128

    def smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's dynamic shared memory: for the queries, the stages of K and V, the
        row statistics of the warps, and the description of the CTA's run. With own_rows, the row
        statistics are those of the first subtree of a run, and the sums that do not fit in
        registers are there too. If warps have their own columns, there are also two shares of the
        scores."""
        # With own_rows, queries are copied to registers through the last stage and need no separate
        # shared memory.
        queries = 0 if self.own_rows else self.B_r * self.d_head * elem_size
        streamed = self._streamed_bytes + self.other_sums_bytes
        statistics = self.n_warps * self.B_r * _STATISTICS_BYTES
        if self.own_rows:
            in_shared = self.own_tiles - self.own_tiles_in_registers
            statistics = self.B_r * _STATISTICS_BYTES + in_shared * self.n_threads * 16
        elif self.own_columns and not self.canonical:
            statistics = self.B_r * (_STATISTICS_BYTES + 2 * 4 * self.B_c)
        elif self.chunk_cluster:
            # The data that CTAs and warps exchange in a round: the scores of eight rows with their
            # maxima, in one or two buffers; P with its sums, factors and maxima, in two buffers;
            # and barriers. The padding between the columns of V is included.
            keys = self.chunk_cluster * self.B_c
            statistics = (
                (2 if keys <= 512 else 1) * 32 * (keys + self.chunk_cluster * self.n_warps)
                + 2 * (keys * 16 + self.chunk_cluster * 192)
                + 64 * self.stages * self.column_warps
                + 16 * (1 + self.cluster_waves + self.stages)
            )
        elif self.canonical:
            # The data that warps exchange per tile: maxima, sums over 16 keys, and P.
            statistics = self.B_r * (4 * self.n_warps + self.B_c + elem_size * self.B_c)
        return queries + streamed + statistics + _TARGET_BYTES

    def chunk_smem_bytes(self) -> int:
        """The bytes of a CTA's dynamic shared memory in the kernel for many rows: for the queries
        and the stages."""
        queries = self.chunk_rows * self.d_head * self.dtype.element_size
        return queries + self._streamed_bytes

    @property
    def _streamed_bytes(self) -> int:
        """The bytes of shared memory that all stages take."""
        return self.stages * self.B_c * (self.key_bytes + self.value_bytes)
