"""The table of `flashsmith bench`: for each problem, the implementations, sorted by speed, and
their speed relative to FA2 and to the best peer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from flashsmith.benchmark.implementations import OURS
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.peers import BASELINE
from flashsmith.benchmark.table import Cell, make_columns, print_table, print_text
from flashsmith.benchmark.timing import CALLS_IN_GRAPH, IN_GRAPHS, SETS_BYTES
from flashsmith.operations import BACKWARD, DEFAULT
from flashsmith.operations.backward import n_products

_COLUMNS = make_columns(
    "problem | implementation | verdict | ms> | us> | spread> | TB/s> | TFLOP/s> | % of\nFA2> | "
    "% of\nbest peer> | error> | bound> | regs> | spilled\nbytes> | smem\nKiB> | CTAs\n/SM> | "
    "MHz> | W> | kernel, version, or why not~"
)
_STYLES = {"pass": "green", "fail": "bold red", "error": "bold red", "absent": "dim"}


def print_rows(console: Console, rows: Sequence[Measurement]) -> None:
    """Prints the environment, then one table of all rows, with the problems in their original
    order."""
    for line in header(rows):
        print_text(console, line)
    cells: list[tuple[Cell, ...]] = []
    for _, group in itertools.groupby(rows, key=lambda row: row.problem):
        cells += _cells(sort_rows(list(group)))
    # Empty columns are left out.
    kept = [n for n in range(len(_COLUMNS)) if any(str(row[n]) != "-" for row in cells)]
    print_table(
        console, [_COLUMNS[n] for n in kept], [tuple(row[n] for n in kept) for row in cells]
    )


def header(rows: Sequence[Measurement]) -> list[str]:
    """The lines above the table: the environment and the timing protocol."""
    if not rows:
        return []
    row = rows[0]
    parts = [f"{row.gpu} (sm_{row.arch})", f"driver {row.driver}", f"CUDA {row.cuda}"]
    parts += [f"torch {row.torch}"] if row.torch else []
    parts += [f"flashsmith {row.flashsmith} ({row.revision})"]
    protocols = " or ".join(dict.fromkeys(row.protocol for row in rows))
    return [
        ", ".join(parts),
        *_typical_options(rows),
        f"timed {protocols}; median, and interquartile range over it; TFLOP/s from "
        f"{flop_formula(rows)}, halved if causal, a window's visible scores only; "
        "errors against float64",
        *_caches(rows),
    ]


def _caches(rows: Sequence[Measurement]) -> list[str]:
    """Explains how TB/s are counted for memory-bound problems, and how small caches are kept out of
    the L2."""
    if not any(row.is_memory_bound for row in rows):
        return []
    return [
        f"TB/s count the bytes that must be read and written; '{IN_GRAPHS}': time per call in a "
        f"CUDA graph of at least {CALLS_IN_GRAPH} calls, which cycle through "
        f"{SETS_BYTES // 10**6} MB of caches"
    ]


def flop_formula(rows: Sequence[Measurement]) -> str:
    """Returns the formula by which FLOP are counted without a mask, such as '4 b h s_q s_k d'.

    The factor is 10 for all gradients, 6 for dq alone and 8 for dk and dv alone.
    """
    forward, factors = False, set()
    for problem in {row.problem for row in rows}:
        forward |= problem.operation == DEFAULT
        if problem.operation == BACKWARD.name:
            factors.add((2 * n_products(problem.gradients), problem.gradients or BACKWARD.name))
    named = [f"{factor} ({name})" for factor, name in sorted(factors, reverse=True)]
    return f"{' or '.join([*['4'] * (forward or not named), *named])} b h s_q s_k d"


def _typical_options(rows: Sequence[Measurement]) -> list[str]:
    """The measured window sizes and softcaps, which the names of problems do not contain."""
    problems = dict.fromkeys(row.problem for row in rows)
    windows = sorted({problem.window[0] for problem in problems if problem.window is not None})
    caps = sorted({problem.softcap for problem in problems} - {0.0})
    notes = []
    if windows:
        notes.append(f"window: the last {', '.join(map(str, windows))} keys before a query's own")
    if caps:
        notes.append(f"softcap: {caps[0]:g}")
    return ["; ".join(notes)] if notes else []


def sort_rows(rows: Sequence[Measurement]) -> list[Measurement]:
    """Sorts rows: first the rows with a time, fastest to slowest, then failures, then absent
    peers."""
    order = {"pass": 0, "fail": 1, "error": 1, "absent": 2}
    return sorted(rows, key=lambda row: (order[row.verdict], row.ms or 0.0))


def shares(rows: Sequence[Measurement]) -> list[tuple[float | None, float | None]]:
    """Returns, for each row of one problem, its speed relative to FA2 and to the best peer."""
    peers = [row.tflops for row in rows if row.kind == "peer" and row.tflops]
    best = max(peers, default=None)
    fa2 = next((row.tflops for row in rows if row.implementation == BASELINE), None)
    return [(_share(row.tflops, fa2), _share(row.tflops, best)) for row in rows]


def _share(speed: float | None, of: float | None) -> float | None:
    return speed / of if speed and of else None


def _cells(rows: Sequence[Measurement]) -> list[tuple[Cell, ...]]:
    return [
        (
            str(row.problem),
            Text(row.implementation, "bold" if row.implementation == OURS else ""),
            Text(row.verdict, _STYLES[row.verdict]),
            _number(None if row.is_memory_bound else row.ms, ".4g"),
            _number(row.ms * 1e3 if row.ms and row.is_memory_bound else None, ".2f"),
            _number(row.spread, ".1%"),
            _number(row.tb_per_s if row.ms and row.is_memory_bound else None, ".2f"),
            _number(row.tflops, ".1f"),
            _number(of_fa2, ".1%"),
            _number(of_best, ".1%"),
            _number(row.max_error, ".1e"),
            _number(row.error_bound, ".1e"),
            _number(row.registers, "d"),
            Text(_number(row.spill_bytes, "d"), "yellow" if row.spill_bytes else ""),
            _number(None if row.smem_bytes is None else row.smem_bytes / 1024, "g"),
            _number(row.ctas_per_sm, "d"),
            _number(row.sm_clock_mhz, ".0f"),
            _number(row.power_w, ".0f"),
            _remark(row),
        )
        for row, (of_fa2, of_best) in zip(rows, shares(rows), strict=True)
    ]


def _remark(row: Measurement) -> str:
    config = row.config if row.config and row.config != row.implementation else ""
    notes = [config] if row.verdict == "pass" or not row.note else []
    return ", ".join(filter(None, [*notes, *row.note.splitlines()[:1]])) or "-"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
