"""The mma_sync_decode family's cost models: the time of a call from the bytes that it reads, and
what numbers of runs cost.

Of the first, constants without a data sheet behind them are assumptions, not fits. Those of the
second, RunCosts, are fits.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from flashsmith.families.config import RESERVED_SMEM_PER_CTA
from flashsmith.families.device import DeviceSpec
from flashsmith.families.gpu_names import gpu_name
from flashsmith.families.mma_sync_decode.config import MMA_ROWS, FlashDecodeKernelConfig
from flashsmith.families.tile_work import QUARTERS, CallWork, rates_of
from flashsmith.operations.problem import Problem

# Cycles from a load to its data with all SMs reading, of a launch within a graph, and of a CTA's
# beginning and end around its part: lengths and queries before, states of warps after.
_LATENCY, _LAUNCH, _PART = 1600.0, 2400.0, 2500.0
# Instructions of a warp per m16n8k16 product, its fragments and copies, and per score of a lane.
_PER_PRODUCT, _PER_SCORE, _PER_STEP = 2.2, 9.0, 60.0
# A run may be longer than a CTA's share (csrc/mma_sync_decode/plan.cc).
_ROUNDING_UP = 1.125
# Cycles in which a warp takes one such step with nothing beside it.
_WARP_STEP = 900.0
_FLOAT_BYTES = 4
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class RunCosts:
    """What a call costs by the number of runs that its tiles are read in, of equal lengths; a plan
    takes the cheapest number (csrc/mma_sync_decode/plan.cc).

    A turn is a run in each CTA that the GPU holds. A call takes its bytes times a factor, of one
    turn or less ``few_ctas`` over the turns, at least ``one_turn`` and, where an SM may have two
    CTAs and another one, up to ``uneven_most`` more: ``uneven_slope`` times what the turns are
    below ``uneven_from``. Of more turns the last one, if it is not full, takes ``last_start`` and
    ``last_slope`` times its share of the CTAs, at most all of a turn, at least ``last_least`` and
    ``last_least_fall`` less for each full turn before: its CTAs have more of the memory each.
    With tiles of more than 8 rows it takes all of a turn, and bytes count ``full_tiles`` times.

    Besides, in bytes that the GPU reads meanwhile: ``turn_bytes`` for each turn, ``merge_bytes``
    for a merge, and ``merged_row_bytes`` for each of its rows.
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


# By GPU. tools/benchmark/decode_run_costs.py fits them to measured numbers of runs.
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
# Of GPUs without measurements of their own; an H100's are of two numbers of runs a call, too few to
# fit, and this one's take the faster of the two about as often as on an H200.
_FALLBACK = RUN_COSTS["H200"]


def plan_costs(gpu: str) -> tuple[float, ...]:
    """RunCosts of a GPU, in their order."""
    return astuple(RUN_COSTS.get(gpu_name(gpu), _FALLBACK))


def resident(cfg: FlashDecodeKernelConfig, device: DeviceSpec) -> int:
    """CTAs that one SM holds; 0: not even one."""
    limits = cfg.cta_limits(
        device.max_smem_per_sm,
        min(_MOST_REGISTERS, 100 + cfg.accumulators) if not cfg.own_rows else _MOST_REGISTERS,
        max_threads=device.max_threads_per_sm,
        max_ctas=device.max_ctas_per_sm,
    )
    limits["shared memory"] = device.max_smem_per_sm // (cfg.smem_bytes() + RESERVED_SMEM_PER_CTA)
    return min(limits.values())


def parts_of(cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
    """Parts of each sequence in the invariant split, and the keys of a part."""
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
    """Runs that the parts of each sequence are taken in, where all of a call are as long."""
    share = _ROUNDING_UP * all_parts / (ctas * cfg.rounds) if all_parts > ctas else 0.0
    length = 1
    while length < parts and 2 * length <= share:
        length *= 2
    return -(-parts // length)


# Of a chunk's part, in parts of other sequences, as the kernels have it.
_CHUNK_MIN_KEYS_FACTOR = 8


def _serving(cfg: FlashDecodeKernelConfig, problem: Problem) -> FlashDecodeKernelConfig:
    """The config whose main kernel has the work of the one that serves the problem's sequences: of
    those with many rows one with the tiles of chunks."""
    rows = problem.seq_q * problem.heads_q // problem.heads_k
    if not cfg.chunk_rows or rows <= cfg.most_rows_without_chunks:
        return cfg
    least = cfg.min_keys * _CHUNK_MIN_KEYS_FACTOR
    tile = replace(cfg, B_r=cfg.chunk_rows, n_warps=cfg.chunk_warps)
    return replace(tile, min_keys=least, parts_per_sm=1)


def call_work(cfg: FlashDecodeKernelConfig, problem: Problem, device: DeviceSpec) -> CallWork:
    """The work of a call's launches; infinitely long where no CTA fits."""
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
    per_item = keys * 2 * cfg.d_head * cfg.dtype.element_size
    # Tiles of the same keys find them in L2.
    dram = items / tiles * per_item / (rates.dram * device.sm_count)
    steps = -(-keys // cfg.B_c)
    row_tiles, key_tiles = cfg.rows_per_warp / MMA_ROWS, cfg.multiplied_keys / 8
    products = 2 * row_tiles * key_tiles * (cfg.d_head / MMA_ROWS)
    issue = products * _PER_PRODUCT + cfg.scores * _PER_SCORE + _PER_STEP
    issue *= cfg.n_warps / QUARTERS
    # An SM that has fewer bytes on their way than latency times its share waits for them.
    at_once = min(ctas, -(-items // device.sm_count))
    in_flight = at_once * min(cfg.bytes_in_flight, per_item)
    waited = cfg.stage_bytes * _LATENCY * at_once / max(in_flight, 1)
    step = max(issue * at_once, _WARP_STEP, waited)
    rounds = -(-items // (device.sm_count * at_once))
    cycles = max(dram, rounds * (steps * step + _PART + _LATENCY))
    states = 0.0
    if parts > 1:
        merged = problem.batch * problem.heads_q * problem.seq_q * (runs if runs > 1 else 0)
        states = 2 * merged * (cfg.d_head + 2) * _FLOAT_BYTES / (rates.l2 * device.sm_count)
        states += _LAUNCH + 2 * _LATENCY
    ms = (cycles + states + _LAUNCH) / rates.clock / 1e6
    return CallWork(ms, items, ctas, cfg.B_r, heads=problem.heads_q // problem.heads_k)


# --- compilation ---------------------------------------------------------------------------------

# Everything but the products, of four kernels, in products.
_FIXED_COST = 700.0


def compile_cost(cfg: FlashDecodeKernelConfig) -> float:
    """Relative compile time of one config (no unit): the m16n8k16 products of one step of a warp,
    whose bodies are unrolled, in the dense and in the paged kernels."""
    rows_by_keys = cfg.rows_per_warp * cfg.multiplied_keys + (
        MMA_ROWS * cfg.B_c if cfg.chunk_rows else 0
    )
    return _FIXED_COST + 2 * 2 * rows_by_keys * cfg.d_head / (MMA_ROWS * 8 * 16)
