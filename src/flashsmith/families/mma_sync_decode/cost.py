"""The two cost models of the mma_sync_decode family.

The first estimates how long a call takes, mostly from the bytes that the call reads. The second,
RunCosts, estimates how this time depends on the number of runs.

Those constants of the first model that are not from data sheets are assumptions. The constants of
RunCosts are fitted to timings.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from flashsmith.families.config import RESERVED_SMEM_PER_CTA, THREADS_PER_WARP
from flashsmith.families.device import DeviceSpec
from flashsmith.families.gpu_names import gpu_name
from flashsmith.families.mma_sync_decode.config import MMA_ROWS, FlashDecodeKernelConfig
from flashsmith.families.tile_work import QUARTERS, CallWork, rates_of
from flashsmith.families.warpgroups import WARPGROUP_ROWS
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType

# Cycles from a load to the arrival of its data while all SMs read, and cycles that a launch in a
# graph takes. The last value is the number of cycles that a CTA takes before and after its part, to
# read lengths and queries and to merge the states of its warps.
_LATENCY, _LAUNCH, _PART = 1600.0, 2400.0, 2500.0
# Numbers of instructions of a warp: per MMA m16n8k16 (including its fragments and copies), per
# score of a lane, and per step.
_PER_PRODUCT, _PER_SCORE, _PER_STEP = 2.2, 9.0, 60.0
# The number of instructions with which a warp loads and widens a pair of 8-bit floats on sm_90 and
# later. With fp16, these are a quarter of a load, a conversion and half a permutation of values.
# With bf16, there are also two conversions to fp32 and one back, but there is no permutation.
_PER_PAIR = {DType.FP16: 1.5, DType.BF16: 4.25}
# The factor by which a run may be longer than a CTA's share of the parts
# (csrc/mma_sync_decode/plan.cc).
_ROUNDING_UP = 1.125
# The number of cycles of a step if a warp runs alone.
_WARP_STEP = 900.0
_FLOAT_BYTES = 4
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class RunCosts:
    """The constants that give the cost of a call, by the number of runs of equal length in which
    its tiles are read.

    The plan of a call uses the number of runs with the lowest cost
    (csrc/mma_sync_decode/run_costs.cc).

    A wave is one run in each CTA that the GPU can hold. The cost of a call is its bytes times a
    factor. Up to one wave, the factor is ``few_ctas`` divided by the waves, but at least
    ``one_turn``. Below ``uneven_from`` waves, ``one_turn`` increases by ``uneven_slope`` times the
    missing waves, but at most by ``uneven_most``, because one SM may then have two CTAs
    while another has one.

    With more than one wave, a last wave that is not full counts as ``last_start`` plus
    ``last_slope`` times its share of the CTAs, but at most as a whole wave. It counts as at least
    ``last_least`` minus ``last_least_fall`` for each full wave before it, because few CTAs do not
    use all memory bandwidth. If tiles have more than 8 rows, the last wave counts as a whole wave,
    and bytes count ``full_tiles`` times.

    Other costs are expressed by the number of bytes that the GPU reads in the same time:
    ``turn_bytes`` for each wave, ``merge_bytes`` for a merge, and ``merged_row_bytes`` for each row
    that is merged.
    """

    few_ctas: float
    one_turn: float
    uneven_slope: float
    uneven_from: float
    uneven_most: float
    last_slope: float
    last_start: float
    last_least: float
    last_least_fall: float
    full_tiles: float
    turn_bytes: float
    merge_bytes: float
    merged_row_bytes: float


# The RunCosts of the GPUs that were measured, keyed by the GPU's name.
# tools/benchmark/decode_run_costs.py fits them to timings with different numbers of runs.
RUN_COSTS = {
    "H200": RunCosts(
        few_ctas=0.568,
        one_turn=1.05,
        uneven_slope=0.845,
        uneven_from=0.864,
        uneven_most=0.22,
        last_slope=2.2,
        last_start=0.05,
        last_least=0.62,
        last_least_fall=0.17,
        full_tiles=1.35,
        turn_bytes=10e6,
        merge_bytes=9e6,
        merged_row_bytes=9e3,
    ),
}
# The RunCosts of all other GPUs. On an H100, each call was measured with only two numbers of runs,
# which are too few for a fit. With the values of the H200, the faster number is chosen on an H100
# about as often as on an H200.
_FALLBACK = RUN_COSTS["H200"]


def plan_costs(gpu: str) -> tuple[float, ...]:
    """The RunCosts for a GPU as a tuple, in the order of the fields."""
    return astuple(RUN_COSTS.get(gpu_name(gpu), _FALLBACK))


def resident(cfg: FlashDecodeKernelConfig, device: DeviceSpec) -> int:
    """The number of CTAs that an SM can hold; 0 if no CTA fits."""
    limits = cfg.cta_limits(
        device.max_smem_per_sm,
        min(_MOST_REGISTERS, 100 + cfg.accumulators) if not cfg.own_rows else _MOST_REGISTERS,
        max_threads=device.max_threads_per_sm,
        max_ctas=device.max_ctas_per_sm,
    )
    limits["shared memory"] = device.max_smem_per_sm // (cfg.smem_bytes() + RESERVED_SMEM_PER_CTA)
    return min(limits.values())


def parts_of(cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
    """The number of parts into which the invariant split divides each sequence, and the number of
    keys in a part."""
    keys = problem.seq_k
    if problem.window is not None:
        keys = min(keys, problem.window[0] + problem.seq_q)
    rows = problem.seq_q * problem.heads_q // problem.heads_k
    tiles = -(-rows // cfg.B_r)
    most = max(1, device.sm_count * cfg.parts_per_sm // problem.heads_k)
    most = max(1, (most - most % 8 if most > 8 else most) // max(1, tiles))
    units = -(-keys // cfg.B_c)
    chunk = max(-(-units // most), cfg.min_keys // cfg.B_c) * cfg.B_c
    return max(1, -(-keys // chunk)), min(chunk, max(keys, 1))


def runs_of(cfg: FlashDecodeKernelConfig, all_parts: int, parts: int, ctas: int) -> int:
    """The number of runs into which the parts of a sequence are grouped if all sequences have the
    same length."""
    share = _ROUNDING_UP * all_parts / (ctas * cfg.rounds) if all_parts > ctas else 0.0
    length = 1
    while length < parts and 2 * length <= share:
        length *= 2
    return -(-parts // length)


# The factor by which min_keys is multiplied in the kernel for chunks. The C++ code has the same
# constant.
_CHUNK_MIN_KEYS_FACTOR = 8


def _serving(cfg: FlashDecodeKernelConfig, problem: Problem) -> FlashDecodeKernelConfig:
    """Returns a config whose main kernel does the same work as the kernel of `cfg` that computes
    this problem. This is `cfg` itself or, for many rows, a config with the tiles of the chunk
    kernel."""
    rows = problem.seq_q * problem.heads_q // problem.heads_k
    if not cfg.chunk_rows or rows <= cfg.most_rows_without_chunks:
        return cfg
    least = cfg.min_keys * _CHUNK_MIN_KEYS_FACTOR
    tile = replace(cfg, B_r=cfg.chunk_rows, n_warps=cfg.chunk_warps)
    return replace(tile, min_keys=least, parts_per_sm=1)


# The share of the rate of wgmma that the kernel with warpgroups is assumed to reach.
_SHARE_OF_WGMMA = 0.75
# The kernel with warpgroups is used only if the tiles of a sequence fill at least this many tenths
# of the SMs. The key is True for canonical configs. csrc/mma_sync_decode/warpgroup_plan.cc has the
# same values.
_TENTHS_OF_SMS = {False: 6, True: 3}
_TILE_ROWS = 2 * WARPGROUP_ROWS


def most_rows_without_warpgroups(
    cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
) -> float:
    """The maximum number of rows per K/V head of the sequences that the mma.sync kernels compute,
    whatever the batch; infinite if the config has no kernel with warpgroups."""
    if not cfg.chunk_warpgroups:
        return float("inf")
    filled = device.sm_count * _TENTHS_OF_SMS[cfg.canonical > 0] // 10 * _TILE_ROWS
    group = problem.heads_q // problem.heads_k
    return max((WARPGROUP_ROWS - 1) * group, filled // problem.heads_k)


def _work_of_warpgroups(
    cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec
) -> CallWork:
    """The work of a call in which the kernel with warpgroups computes all sequences."""
    rates = rates_of(device)
    rows = WARPGROUP_ROWS * cfg.chunk_warpgroups
    tiles = problem.batch * problem.heads_q * -(-problem.seq_q // rows)
    keys = problem.seq_k
    if problem.window is not None:
        keys = min(keys, problem.window[0] + rows)
    elif problem.semantics.key_mask.is_triangular:
        keys -= min(problem.seq_q, keys) // 2
    columns = cfg.d_head + cfg.d_head_v
    of_tile = 2 * rows * keys * columns / (rates.wgmma * _SHARE_OF_WGMMA) + _PART
    cycles = max(tiles / device.sm_count, 1.0) * of_tile + _LAUNCH
    return CallWork(cycles / rates.wgmma_clock / 1e6, tiles, 1, rows)


def call_work(cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec) -> CallWork:
    """The work of all launches of a call, whose time is infinite if an SM cannot hold a CTA."""
    all_rows = problem.seq_q * problem.heads_q // problem.heads_k
    if all_rows > most_rows_without_warpgroups(cfg, problem, device):
        return _work_of_warpgroups(cfg, problem, device)
    chosen, cfg = cfg, _serving(cfg, problem)
    ctas = resident(cfg, device)
    if not ctas:
        return CallWork(float("inf"), 0, 0, cfg.B_r)
    rates = rates_of(device)
    parts, keys = parts_of(cfg, problem, device)
    rows = problem.seq_q * problem.heads_q // problem.heads_k
    tiles = -(-rows // cfg.B_r)
    heads = problem.batch * problem.heads_k * tiles
    if not heads * parts:
        return CallWork(0.0, 0, ctas, cfg.B_r)
    runs = parts
    if cfg is chosen:
        runs = runs_of(cfg, heads * parts, parts, device.sm_count * ctas)
    keys = min(keys * -(-parts // runs), max(problem.seq_k, 1))
    items = heads * runs
    columns = cfg.d_head + cfg.d_head_v
    per_item = keys * columns * cfg.cache_element_bytes
    # Of the tiles that share keys, all but the first read the keys from the L2.
    dram = items / tiles * per_item / (rates.dram * device.sm_count)
    steps = -(-keys // cfg.B_c)
    row_tiles, key_tiles = cfg.rows_per_warp / MMA_ROWS, cfg.multiplied_keys / 8
    products = row_tiles * key_tiles * (columns / MMA_ROWS)
    widened = 0.0
    if cfg.cache.is_8bit:
        # The number of pairs of K and V elements that a lane widens.
        pairs = cfg.multiplied_keys * columns // (2 * THREADS_PER_WARP)
        widened = pairs * _PER_PAIR[cfg.dtype]
    issue = products * _PER_PRODUCT + cfg.scores * _PER_SCORE + _PER_STEP + widened
    issue *= cfg.n_warps / QUARTERS
    # An SM stalls if it has fewer bytes in flight than the product of the latency and its share of
    # the bandwidth.
    at_once = min(ctas, -(-items // device.sm_count))
    in_flight = at_once * min(cfg.bytes_in_flight, per_item)
    waited = cfg.stage_bytes * _LATENCY * at_once / max(in_flight, 1)
    step = max(issue * at_once, _WARP_STEP, waited)
    rounds = -(-items // (device.sm_count * at_once))
    cycles = max(dram, rounds * (steps * step + _PART + _LATENCY))
    states = 0.0
    if parts > 1:
        merged = problem.batch * problem.heads_q * problem.seq_q * (runs if runs > 1 else 0)
        states = 2 * merged * (cfg.d_head_v + 2) * _FLOAT_BYTES / (rates.l2 * device.sm_count)
        states += _LAUNCH + 2 * _LATENCY
    ms = (cycles + states + _LAUNCH) / rates.clock / 1e6
    return CallWork(ms, items, ctas, cfg.B_r, heads=problem.heads_q // problem.heads_k)


# --- compilation ---------------------------------------------------------------------------------

# The compile time of everything except the MMAs, in the four kernels together, in units of one
# MMA's compile time.
_FIXED_COST = 700.0


def compile_cost(cfg: FlashDecodeKernelConfig) -> float:
    """The compile time of a config, relative to other configs: the number of m16n8k16 MMAs in one
    unrolled step of a warp, in the dense and the paged kernels together."""
    rows_by_keys = cfg.rows_per_warp * cfg.multiplied_keys + (
        MMA_ROWS * cfg.B_c if cfg.chunk_rows else 0
    )
    columns = cfg.d_head + cfg.d_head_v
    return _FIXED_COST + 2 * rows_by_keys * columns / (MMA_ROWS * 8 * 16)
