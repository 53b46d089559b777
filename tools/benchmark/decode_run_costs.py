#!/usr/bin/env python3
"""Fits RunCosts of the mma_sync_decode family, which say what each number of runs costs, to
measured times.

    python tools/benchmark/decode_run_costs.py                 # from the rows of an H200
    python tools/benchmark/decode_run_costs.py --gpu H100
    python tools/benchmark/decode_run_costs.py --gpu X --rows mine.jsonl.gz

The rows are JSON Lines, which may be compressed. Each is a call whose sequences all have the same
length. There is one row for each number of runs per tile, with these fields: 'cell' (the problem),
'how' ('flushed' or 'graph'), 'name' ('n4', or 'n4c' if CTAs take runs from a counter) and 'median'
(microseconds). Rows of the H100 also have the names 'base' for the earlier rule and 'F2' for the
current one.

The costs only have to rank the numbers of runs, so they need not be times. The loss for a call is
the time with the number of runs that costs least, divided by the fastest measured time. The losses
are printed for the current costs of the GPU, and for the costs that a search finds. The search
begins with the current costs, and changes one number at a time as long as the mean loss decreases.
At the end, the fitted numbers are printed in the form of families/mma_sync_decode/cost.py. The exit
status is 1 if the search reduces the mean by more than --most; the costs should then be updated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flashsmith.chooser.decode import CHOOSERS
from flashsmith.families import DeviceSpec, Problem, device_spec
from flashsmith.families.mma_sync_decode.config import FlashDecodeKernelConfig
from flashsmith.families.mma_sync_decode.cost import (
    RunCosts,
    parts_of,
    plan_costs,
    resident,
    runs_of,
)

ROWS = Path(__file__).parents[2] / "benchmarks"
FILES = {gpu: ROWS / gpu.lower() / "decode-even-runs.jsonl.gz" for gpu in ("H100", "H200")}
# The factors by which the search changes a number, large ones first.
FACTORS = (1.3, 1.1, 1.03)
BEFORE, NOW = "base", "F2"
# No GPU reads this many bytes per microsecond. If a row has more, its sequences have different
# lengths.
MOST_RATE = 5.5e6
MOST_TURNS = 7.0


@dataclass(frozen=True)
class EqualTiles:
    """The tiles of sequences of equal length, as csrc/mma_sync_decode/run_costs.cc computes them.

    A test in tests/csrc compares the two.
    """

    tiles: float
    rows: float
    slots: float
    unit_bytes: float
    min_units: float
    most_parts: float

    @classmethod
    def of(cls, problem: Problem, cfg: FlashDecodeKernelConfig, device: DeviceSpec) -> EqualTiles:
        """The tiles of a call that has few rows per K/V head."""
        group = problem.heads_q // problem.heads_k
        tiles = -(-problem.seq_q * group // cfg.B_r)
        most = device.sm_count * cfg.parts_per_sm // problem.heads_k
        return cls(
            problem.batch * problem.heads_k * tiles,
            min(cfg.B_r, problem.seq_q * group),
            resident(cfg, device) * device.sm_count,
            cfg.B_c * cfg.d_head * 2 * cfg.dtype.element_size,
            cfg.min_keys // cfg.B_c,
            max(1, (most - most % 8 if most > 8 else most) // tiles),
        )

    def runs(self, runs: int, units: float) -> float:
        """``runs``, but not more than there are parts in a tile."""
        parts = min(max(units / self.min_units, 1.0), self.most_parts)
        return min(float(runs), math.ceil(parts))

    def cost(self, costs: RunCosts, runs: int, units: float) -> float:
        """The cost, given as the bytes that the GPU could read in the same time."""
        of_tile = self.runs(runs, units)
        turns, full_tiles = of_tile * self.tiles / self.slots, self.rows > 8
        size = self.tiles * units * self.unit_bytes * (costs.full_tiles if full_tiles else 1.0)
        merge = costs.merge_bytes + self.tiles * self.rows * costs.merged_row_bytes
        return (
            size * time_over_bytes(costs, turns, full_tiles)
            + math.ceil(turns) * (2 if full_tiles else 1) * costs.turn_bytes
            + (merge if of_tile > 1 else 0.0)
        )

    def best_runs(self, costs: RunCosts, units: float) -> int:
        """The number of runs with which a call is planned, if tiles have ``units`` units."""
        most = min(self.most_parts, MOST_TURNS * self.slots / self.tiles)
        return self.cheapest(costs, [2**n for n in range(16) if n == 0 or 2**n <= most], units)

    def cheapest(self, costs: RunCosts, runs: Sequence[int], units: float) -> int:
        """The number of runs that costs least; if several do, the smallest."""
        return min(sorted(runs), key=lambda number: self.cost(costs, number, units))


def time_over_bytes(costs: RunCosts, turns: float, full_tiles: bool) -> float:
    """The time of a call with runs of equal length, divided by the time of reading its bytes."""
    if turns <= 1.0:
        uneven = costs.uneven_slope * (costs.uneven_from - turns)
        uneven = min(max(uneven, 0.0), costs.uneven_most)
        return max(costs.few_ctas / turns, costs.one_turn + uneven)
    full = math.floor(turns)
    rest = turns - full
    last = max(
        min(1.0, costs.last_slope * rest + costs.last_start),
        costs.last_least - costs.last_least_fall * full,
    )
    return (full + (0.0 if rest == 0.0 else 1.0 if full_tiles else last)) / turns


@dataclass(frozen=True)
class Call:
    """A call, and its microseconds for each number of runs per tile."""

    name: str
    tiles: EqualTiles
    units: float
    times: dict[int, float]

    def loss(self, costs: RunCosts) -> float:
        """The time with the number of runs that costs least, divided by the fastest time."""
        chosen = self.tiles.cheapest(costs, list(self.times), self.units)
        return self.times[chosen] / min(self.times.values())


def calls(path: Path, device: DeviceSpec) -> list[Call]:
    """Those calls in a file that were measured with several numbers of runs."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in map(json.loads, text.splitlines()):
        if row["what"] == "time" and is_of_equal_lengths(row["label"], row["cell"]):
            found[row["cell"], row["how"]][row["name"]] = row["median"]
    return list(_calls(found, device))


def is_of_equal_lengths(label: str, cell: str) -> bool:
    """Whether all sequences fill the cache: the label is 'explore' or gives the lengths of the
    cell."""
    problem = Problem.parse(cell)
    return label in ("explore", f"{problem.batch}x{problem.seq_k}")


def _calls(found: dict[tuple[str, str], dict[str, float]], device: DeviceSpec) -> Iterator[Call]:
    for (cell, how), by_name in found.items():
        problem = Problem.parse(cell)
        cfg = CHOOSERS["invariant"](problem, device)
        assert isinstance(cfg, FlashDecodeKernelConfig)
        tiles, units = EqualTiles.of(problem, cfg, device), problem.seq_k / cfg.B_c
        times = numbers_of_runs(by_name, tiles)
        if not times and BEFORE in by_name and NOW in by_name:
            parts, _ = parts_of(cfg, problem, device)
            every = int(tiles.tiles) * parts
            before = runs_of(cfg, every, parts, int(tiles.slots))
            now = tiles.best_runs(RunCosts(*plan_costs("H200")), units)
            times = {before: by_name[BEFORE], now: by_name[NOW]}
        size = tiles.tiles * units * tiles.unit_bytes
        if len(times) > 1 and size / min(times.values()) < MOST_RATE:
            yield Call(f"{cell}, {how}", tiles, units, times)


def numbers_of_runs(by_name: dict[str, float], tiles: EqualTiles) -> dict[int, float]:
    """The time for each number of runs. As in a plan, more runs than CTAs use a counter."""
    found: dict[int, float] = {}
    for name, microseconds in by_name.items():
        match = re.fullmatch(r"n(\d+)(c?)", name)
        if match is None:
            continue
        runs, counts = int(match[1]), bool(match[2])
        if runs not in found or counts == (runs * tiles.tiles > tiles.slots):
            found[runs] = microseconds
    return found


def mean_loss(every: Sequence[Call], costs: RunCosts) -> float:
    return statistics.fmean(call.loss(costs) for call in every)


def fitted(every: Sequence[Call], costs: RunCosts) -> RunCosts:
    """The costs that a search finds: beginning with ``costs``, it tries some multiples of each
    number."""
    least, names = mean_loss(every, costs), list(asdict(costs))
    for factor in FACTORS:
        gained = True
        while gained:
            gained = False
            for name in names:
                for times in (factor, 1 / factor):
                    other = replace(costs, **{name: getattr(costs, name) * times})
                    loss = mean_loss(every, other)
                    if loss < least - 1e-6:
                        costs, least, gained = other, loss, True
    return costs


def said(name: str, every: Sequence[Call], costs: RunCosts) -> str:
    losses = {call.name: call.loss(costs) for call in every}
    worst = max(losses, key=lambda call: losses[call])
    right = sum(loss == 1.0 for loss in losses.values())
    return (
        f"{name}: {mean_loss(every, costs):.4f} of the fastest time on average, the fastest in "
        f"{right} of {len(every)} calls, at most {losses[worst]:.3f} ({worst})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="H200", help="the GPU whose costs to fit; default: H200")
    parser.add_argument("--rows", type=Path, help="a file to use instead of benchmarks/")
    parser.add_argument("--most", type=float, default=0.01, help="the most that a search may gain")
    options = parser.parse_args(arguments)
    path = options.rows or FILES.get(options.gpu)
    if path is None or not path.is_file():
        parser.error(f"--rows: there are none for {options.gpu}; give a file")
    every = calls(path, device_spec(options.gpu))
    if not every:
        parser.error(f"--rows {path}: no call has several numbers of runs")
    costs = RunCosts(*plan_costs(options.gpu))
    found = fitted(every, costs)
    print(said(f"{options.gpu}, current", every, costs))
    print(said(f"{options.gpu}, fitted", every, found))
    for name, value in asdict(found).items():
        now = getattr(costs, name)
        print(f"    {name}={value:.6g}," + (f"  # now {now:g}" if value != now else ""))
    return int(mean_loss(every, costs) - mean_loss(every, found) > options.most)


if __name__ == "__main__":
    sys.exit(main())
