"""Our kernels against the ceilings of their GPU: what is drawn, and what the table says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.charts.roofline import Trace
from flashsmith.benchmark.report.cells import Group, describe
from flashsmith.benchmark.roofline import Bound, Roofline, bounds, intensity
from flashsmith.benchmark.rows import BenchRow
from flashsmith.errors import ArgumentError, ConfigParseError
from flashsmith.families import parse_kernel_name_into_config

# A bound this far above what is shown would press the rest together.
_IN_SIGHT = 2.5


@dataclass(frozen=True)
class Placed:
    """One kernel on one problem: its FLOP per byte, and what each ceiling allows it."""

    row: BenchRow
    flop_per_byte: float
    bounds: tuple[Bound, ...]

    @property
    def tightest(self) -> Bound | None:
        """The ceiling that allows least."""
        return self.bounds[0] if self.bounds else None


@dataclass(frozen=True)
class Placing:
    """All placed kernels of one GPU, dtype and head dimension."""

    heading: str
    dram_tb_per_s: float | None
    ceilings: tuple[tuple[str, float], ...]
    traces: tuple[Trace, ...]
    placed: tuple[Placed, ...]


def place(groups: Iterable[Group], rooflines: Sequence[Roofline]) -> list[Placing]:
    """The groups whose GPU has a roofline and whose kernels are known by their configs."""
    by_gpu = {roofline.gpu: roofline for roofline in rooflines}
    found: dict[Any, list[tuple[str, list[Placed]]]] = {}
    for group in groups:
        row = group.first
        roofline = by_gpu.get(row.gpu)
        placed = _placed(group, roofline) if roofline else []
        if placed:
            traces = found.setdefault((row.gpu, row.dtype, row.d), [])
            name = describe(row)
            if any(name == used for used, _ in traces):
                name += f", batch {row.batch}"
            traces.append((name, placed))
    return [_placing(by_gpu[key[0]], key, traces) for key, traces in found.items()]


def _placed(group: Group, roofline: Roofline) -> list[Placed]:
    placed = []
    for row in (cell.ours for cell in group.cells):
        if row is None or not row.config or row.tflops is None:
            continue
        try:
            cfg, problem = parse_kernel_name_into_config(row.config), row.problem
        except (ConfigParseError, ArgumentError):
            # A kernel of another version: its figures stand, its ceilings are not known.
            continue
        if problem.attn_flop() == 0:
            continue
        allowed = bounds(roofline, problem, cfg)
        placed.append(Placed(row, intensity(problem, cfg).dram, allowed))
    return placed


def _placing(
    roofline: Roofline, key: tuple[str, str, int], traces: Sequence[tuple[str, list[Placed]]]
) -> Placing:
    gpu, dtype, d = key
    everything = tuple(one for _, placed in traces for one in placed)
    highest = max(one.row.tflops or 0.0 for one in everything)
    level: dict[str, float] = {}
    for bound in (bound for one in everything for bound in one.bounds):
        # What L2 allows depends on the config's tile: it stands in the table.
        if bound.ceiling not in ("dram_read", "l2_read"):
            level[bound.ceiling] = bound.tflops
    shown = [(_plain(name), rate) for name, rate in level.items() if rate < _IN_SIGHT * highest]
    return Placing(
        heading=f"{gpu}, {dtype}, d {d}",
        dram_tb_per_s=roofline.rate("dram_read"),
        ceilings=tuple(shown),
        traces=tuple(
            Trace(
                name.removeprefix(f"d {d}, {dtype}, "),
                tuple((one.flop_per_byte, one.row.tflops or 0.0) for one in placed),
            )
            for name, placed in traces
        ),
        placed=everything,
    )


def _plain(ceiling: str) -> str:
    """A ceiling's key without the dtype, which the heading has."""
    return ceiling.removesuffix("_fp16").removesuffix("_bf16").replace("_", " ")
