"""The common parts of the families for attention over a latent cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.family import Family
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.knob import knob
from flashsmith.families.order import FIRST_TILE, Order, outgrown
from flashsmith.families.rule import Rule
from flashsmith.families.search_steps import with_neighbours
from flashsmith.families.tile_work import CallWork, rates_of
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType

# The pairs of widths for which kernels exist: the width of a cache row, and the number of the row's
# columns that are the value.
PAIRS = (HeadPair(320, 256), HeadPair(576, 512))

# --- knobs ---------------------------------------------------------------------------------------


def dtype_knob(static_config: str) -> Any:
    """Declares the field for the dtype; `static_config` is the C++ struct that contains the
    dtype."""
    return knob(
        "element type of q, the cache and o",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, the cache and o; sums are fp32",
        where=static_config,
    )


def d_head_knob(static_config: str, effect: Callable[[Any], str]) -> Any:
    """Declares the field for the number of q's columns; `effect` describes how the kernels multiply
    these columns."""
    return knob(
        "columns of q and of the cache",
        values=tuple(pair.d_head for pair in PAIRS),
        effect=effect,
        where=static_config,
    )


def d_v_knob(static_config: str, effect: Callable[[Any], str]) -> Any:
    """Declares the field for the number of v's columns; `effect` describes how the kernels sum
    these columns."""
    return knob(
        "columns of v and o, the first ones of a row of the cache",
        values=tuple(pair.d_v for pair in PAIRS),
        default=0,
        lowest=0,
        effect=effect,
        where=static_config,
    )


def min_keys_knob(values: tuple[int, ...]) -> Any:
    """Declares the field for the minimum number of keys in a part."""
    return knob(
        "minimum keys in a part of a sequence",
        values=values,
        word="least",
        default=512,
        always=True,
        effect=lambda cfg: f"sequences of {2 * cfg.min_keys} or more keys are split",
        where="MlaTile",
    )


def most_parts_knob() -> Any:
    """Declares the field for the maximum number of parts of a sequence."""
    return knob(
        "maximum parts of a sequence; each needs workspace for its rows of o",
        values=(1, 2, 4, 8, 16, 32, 64),
        word="parts",
        default=16,
        always=True,
        effect=lambda cfg: f"up to {cfg.most_parts} CTAs share the keys of {cfg.B_r} rows",
        where="MlaTile",
    )


@dataclass(frozen=True, order=True)
class LatentConfig(KernelConfig):
    """The base class of the configs of these families; the functions above declare their common
    knobs."""

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Returns True: the kernels accept any lengths, so one kernel serves all sizes."""
        return True


# --- rules ---------------------------------------------------------------------------------------

WIDTHS_SUPPORTED = Rule(
    "widths_supported",
    f"d_head and d_v must be {' or '.join(map(str, PAIRS))}: there are kernels for these only",
    lambda cfg, device: (cfg.d_head, cfg.d_v) in PAIRS,
    ("d_head", "d_v"),
)


def smem_rule(what: str, knobs: tuple[str, ...]) -> Rule:
    """Returns the rule that a CTA's data must fit in shared memory. Messages call the data `what`;
    the size of the data depends on `knobs`."""
    return Rule(
        "smem_within_limit",
        f"{what} must fit in the shared memory that the device gives one CTA",
        lambda cfg, device: cfg.smem_bytes() <= device.max_smem_per_block,
        knobs,
        lambda cfg, device: (
            f"{cfg.smem_bytes()} of {device.max_smem_per_block} bytes on {device.name}"
        ),
    )


# --- descriptions --------------------------------------------------------------------------------


def order_of_rows(cfg: Any, arch: int, log2_growth: int, **own: str) -> Order:
    """The order of operations in which a kernel computes a row.

    log2_growth: log2 of the factor by which the exponential of a row's maximum may grow before the
        row's sums are rescaled; 0 means that every new maximum rescales the sums.
    own: values of further fields of the Order.
    """
    if log2_growth:
        own["offset"] = outgrown(log2_growth)
    return Order.own(
        arch,
        cfg.B_c,
        direction=FIRST_TILE,
        chunks=f"up to {cfg.most_parts}, each at least {cfg.min_keys} keys of the row's tile",
        merge="from the first part on, by natural log-sum-exps",
        **own,
    )


# --- costs ---------------------------------------------------------------------------------------

# The compile time of any config, relative to configs of other families; 1,000 is about 1.4 s.
COMPILE_COST = 3000.0
# Seconds that the emulator takes to translate a kernel, on one core.
TRANSLATION_SECONDS = 0.5
# Cycles from a load to the arrival of its data while all SMs read, cycles that a launch in a graph
# takes, and cycles that a CTA takes outside its loop. The values are those of mma_sync_decode,
# because nothing was measured for these families.
_LATENCY, _LAUNCH, _PART = 1600.0, 2400.0, 2500.0
_FLOAT_BYTES = 4
# The fixed cost of a CTA, as the number of keys that a CTA processes in the same time
# (wgmma_mla/plan.cc).
_KEYS_PER_CTA = 192


class LatentRates(NamedTuple):
    """The speed of a config on a device.

    resident: the number of CTAs that an SM holds.
    step_cycles: a function that takes the number of CTAs on an SM and returns the number of cycles
        in which each CTA processes a block of keys.
    clock: the clock in GHz.
    run_keys: how many keys the parts have together that one CTA computes one after another; 0 means
        that a CTA computes one part.
    """

    resident: int
    step_cycles: Callable[[int], float]
    clock: float
    run_keys: int = 0

    def runs(self, keys: int, parts: int, tiles: int, at_once: int) -> int:
        """The number of CTAs that compute the parts of a tile if the GPU runs `at_once` CTAs at the
        same time. The host code of the kernels computes the same number."""
        if not self.run_keys:
            return parts

        def time_of(runs: int) -> int:
            return -(-tiles * runs // at_once) * (-(-keys // runs) + _KEYS_PER_CTA)

        return min(parts, max(-(-keys // self.run_keys), min(range(1, parts + 1), key=time_of)))


def parts_of(cfg: Any, keys: int) -> int:
    """The number of parts into which the invariant split divides a tile's keys."""
    return max(1, min(-(-keys // cfg.B_c) * cfg.B_c // cfg.min_keys, cfg.most_parts))


def call_work(cfg: Any, problem: Problem, device: DeviceSpec, rates: LatentRates) -> CallWork:
    """The work of all launches of a call, whose time is infinite if an SM cannot hold a CTA."""
    if not rates.resident:
        return CallWork(float("inf"), 0, 0, cfg.B_r)
    keys = problem.seq_k
    if problem.window is not None:
        keys = min(keys, problem.window[0] + problem.seq_q)
    rows = problem.seq_q * problem.heads_q
    tiles = problem.batch * -(-rows // cfg.B_r)
    parts = parts_of(cfg, keys)
    runs = rates.runs(keys, parts, tiles, device.sm_count)
    ctas = tiles * runs
    if not ctas * keys:
        return CallWork(0.0, 0, rates.resident, cfg.B_r)
    per_sm = rates_of(device)
    size = 1 if problem.cache_format.is_8bit else problem.dtype.element_size
    row_bytes = problem.d * size
    # Of the tiles that share keys, all but the first read the keys from the L2.
    dram = problem.batch * keys * row_bytes / (per_sm.dram * device.sm_count)
    l2 = tiles * keys * row_bytes / (per_sm.l2 * device.sm_count)
    at_once = min(rates.resident, -(-ctas // device.sm_count))
    blocks = -(-keys // (cfg.B_c * runs))
    rounds = max(ctas / (device.sm_count * at_once), 1.0)
    computed = rounds * (blocks * rates.step_cycles(at_once) + _PART * parts / runs + _LATENCY)
    read = max(dram, l2) / per_sm.clock
    merged = 0.0
    if parts > 1:
        states = 2 * problem.batch * rows * parts * (problem.d_v + 1) * _FLOAT_BYTES
        merged = states / (per_sm.l2 * device.sm_count) + _LAUNCH + 2 * _LATENCY
    ms = (max(read, computed / rates.clock) + (merged + _LAUNCH) / per_sm.clock) / 1e6
    return CallWork(ms, ctas, rates.resident, cfg.B_r, heads=problem.heads_q)


# --- the families --------------------------------------------------------------------------------


class LatentFamily(Family):
    """A family for attention over a latent cache; it has kernels for the widths in PAIRS."""

    operation = "latent_decode"
    must_not_spill = True
    has_cost_model = True
    pairs = PAIRS
    # Whether the family has kernels for caches with a scale, which include caches of 8-bit floats.
    serves_scales = False
    translation_seconds = TRANSLATION_SECONDS

    @property
    def covered_values(self) -> Mapping[str, tuple[Any, ...]]:
        # Here, the values of d_v other than 0 are not left out, because every kernel of these
        # families has a d_v.
        return self.knob_values

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        return {"main": self.cpp.kernel, "merge": "mla_merge_kernel", "append": "mla_append_kernel"}

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        if reason := super().unsupported_reason(problem, device):
            return reason
        if (problem.d, problem.d_v) not in PAIRS:
            served = " and ".join(map(str, PAIRS))
            return f"it has kernels of d {served}, and the problem's is {problem.d}:{problem.d_v}"
        if problem.cache and not self.serves_scales:
            return "its kernels read caches of q's dtype without scales"
        if problem.heads_k != 1:
            return f"all query heads share one head of the cache, and it has {problem.heads_k}"
        return None

    def search_space(self, dtype: DType, d_head: HeadDims, masked: bool) -> Sequence[Any]:
        device = device_spec("H200")
        first = self.candidates(dtype, d_head, device, masked)
        return with_neighbours(first, self.moves, device)

    def compile_cost(self, cfg: Any) -> float:
        return COMPILE_COST
