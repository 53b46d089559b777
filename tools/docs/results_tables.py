#!/usr/bin/env python3
"""Writes the tables in docs/results.md and docs/log/results.md from the rows in the repository.

Usage: python tools/docs/results_tables.py [--check]

The rows are in benchmarks/h200 and benchmarks/h100. In both pages a table is between the lines
`<!-- table: NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit status is 1
if a table differs from its rows.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import io
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from flashsmith.benchmark.report.comparison import describe

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "results.md", ROOT / "docs" / "log" / "results.md")
ROWS = ROOT / "benchmarks" / "h200"
LETTERS = {"128": "A", "64": "B", "96": "C", "256": "D"}
# The profile begins with this many rows of kernels of an earlier version, which no measured problem
# chose.
PROFILED_BEFORE = 7
BEST_BACKWARD = "best-public-backward.csv"
# After this many steps, the times of a training are steady.
STEPS_BEFORE = 10

Row = dict[str, str]
Points = dict[tuple[str, ...], dict[str, Row]]


def read(name: str) -> list[Row]:
    """The rows of a CSV or JSON Lines file of ROWS, compressed or not."""
    data = (ROWS / name).read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    if ".jsonl" not in name:
        return list(csv.DictReader(io.StringIO(text)))
    rows = map(json.loads, text.splitlines())
    return [{key: "" if it is None else str(it) for key, it in row.items()} for row in rows]


@cache
def measured(name: str) -> Points:
    """The rows of a benchmark by problem and implementation, in the order of the file."""
    points: Points = {}
    for row in read(name):
        names = ("d", "dtype", "semantics", "batch", "seq_k", "heads_q", "heads_k")
        key = tuple(row[field] for field in names)
        points.setdefault(key, {})[row["contender"]] = row
    return points


def rate(rows: dict[str, Row], name: str) -> float | None:
    """The TFLOP/s of an implementation on a problem; None if it was not measured."""
    row = rows.get(name)
    return float(row["tflops"]) if row and row["verdict"] == "pass" and row["tflops"] else None


def ratio(rows: dict[str, Row], name: str) -> float | None:
    """The TFLOP/s of flashsmith divided by those of another implementation."""
    ours, other = rate(rows, "ours"), rate(rows, name)
    return ours / other if ours and other else None


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])


def shown(value: float | None, form: str = ".2f") -> str:
    """A formatted number, or '-' for None."""
    return "-" if value is None else format(value, form)


# --- speed ---------------------------------------------------------------------------------------

SPEED = "attention-speed.csv"
# Interleaved rounds, packed by tools/benchmark/verdict.py.
PUBLIC = "verdict-public.csv.gz"


@cache
def config_names() -> dict[str, str]:
    """A1, B1, ... by config without its dtype, numbered by head dimension in the table's order."""
    names: dict[str, str] = {}
    count: Counter[str] = Counter()
    chosen = [(key[0], rows["ours"]["config"]) for key, rows in measured(SPEED).items()]
    chosen += [(str(cell.row.d), cell.row.config) for cell in verdict_cells()]
    for d, form in chosen:
        config = plain_config(form)
        if config not in names:
            letter = LETTERS[d]
            count[letter] += 1
            names[config] = f"{letter}{count[letter]}"
    return names


def plain_config(config: str) -> str:
    """A short form without its dtype."""
    return re.sub(r"^\(\w+, ", "(", config)


def is_other_batch(key: tuple[str, ...]) -> bool:
    """Whether a problem has batch 1 or 2, heads 32:8 and d 128."""
    return key[0] == "128" and key[5] == "32"


def is_other_length(key: tuple[str, ...]) -> bool:
    """Whether a problem's length is not a power of two."""
    return key[4] in ("1536", "3000", "10000")


def kind(key: tuple[str, ...]) -> str:
    """The mask, heads and packing of a problem, in words."""
    _, _, semantics, batch, _, heads_q, heads_k = key
    words = ["causal" if "causal" in semantics else "full"]
    if is_other_batch(key):
        words.append(f"b{batch}")
    if heads_q != heads_k:
        words.append(f"heads {heads_q}:{heads_k}")
    if "packed" in semantics:
        words.append("packed")
    return ", ".join(words)


def speed() -> str:
    """The table of groups of problems: range of TFLOP/s, and mean and smallest ratios."""
    groups: dict[str, list[dict[str, Row]]] = {}
    for key, rows in measured(SPEED).items():
        if is_other_batch(key):
            name = "d 128, batch 1 and 2, heads 32:8"
        elif is_other_length(key):
            name = "d 128, lengths 1536, 3000, 10000"
        else:
            name = f"d {key[0]}, {kind(key)}"
        groups.setdefault(name, []).append(rows)
    order = sorted(groups, key=lambda name: ("lengths" in name, "batch" in name, place(name)))
    lines = []
    for name in order:
        rates = [rate(rows, "ours") or 0.0 for rows in groups[name]]
        lines.append(
            [
                name,
                str(len(rates)),
                f"{min(rates):.0f} to {max(rates):.0f}",
                *(mean_and_least(groups[name], other) for other in ("cudnn", "fa2")),
            ]
        )
    every = list(measured(SPEED).values())
    lines.append(
        ["all", str(len(every)), "", *(mean_and_least(every, o) for o in ("cudnn", "fa2"))]
    )
    over = [f"speed over {name}: mean (min)" for name in ("cuDNN", "FA2")]
    return table(["", "problems", "TFLOP/s", *over], lines)


def place(name: str) -> tuple[int, int]:
    """The place of a group of problems in the table."""
    d = re.match(r"d (\d+)", name)
    words = ("full", "causal", "heads", "packed")
    return (
        ["128", "64", "96", "256"].index(d[1]) if d else 9,
        max(i for i, word in enumerate(words) if word in name or i == 0),
    )


def mean_and_least(points: Sequence[dict[str, Row]], name: str) -> str:
    """The geometric mean and the minimum of the ratios of flashsmith to an implementation."""
    ratios = [found for rows in points if (found := ratio(rows, name))]
    if not ratios:
        return "-"
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})"


def every_point() -> str:
    """The table of all problems: TFLOP/s and ratios."""
    lines = [
        [
            f"{key[0]}, {key[1]}",
            kind(key),
            key[4],
            *(shown(rate(rows, name), ".0f") for name in ("ours", "fa2", "cudnn")),
            *(shown(ratio(rows, name)) for name in ("fa2", "cudnn")),
            config_names()[plain_config(rows["ours"]["config"])],
        ]
        for key, rows in measured(SPEED).items()
    ]
    head = ["d, dtype", "problem", "seq", "flashsmith", "FA2", "cuDNN", "over FA2", "over cuDNN"]
    return table([*head, "config"], lines)


def configs() -> str:
    """The table of the configs that have names, with the number of problems that chose each."""
    count = Counter(plain_config(rows["ours"]["config"]) for rows in measured(SPEED).values())
    named = sorted(config_names().items(), key=lambda pair: (pair[1][0], int(pair[1][1:])))
    lines = [[name, config, str(count[config] or "-")] for config, name in named]
    return table(["", "config, without its dtype", "problems"], lines)


@cache
def verdict_cells() -> list[Any]:
    """The public problems, pooled over the rounds by tools/benchmark/verdict.py."""
    spec = importlib.util.spec_from_file_location("verdict", ROOT / "tools/benchmark/verdict.py")
    assert spec is not None
    assert spec.loader is not None
    verdict = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = verdict  # dataclasses look it up here
    spec.loader.exec_module(verdict)
    rounds = verdict.read_packed(ROWS / PUBLIC)
    best = verdict.read_best(verdict.BEST)
    # The rounds are of two revisions; their machine code was compared.
    found: list[Any] = verdict.make_cells(list(rounds.values()), best, same_code=True)
    return found


def public() -> str:
    """The table of public problems: medians over the rounds, with 95% intervals in brackets."""
    lines = []
    for cell in verdict_cells():
        row = cell.row
        lines.append(
            [
                describe(row),
                str(row.batch),
                str(row.seq_k),
                *(shown(cell.rate(name), ".0f") for name in ("ours", "cudnn", "flash_attn_4")),
                *(str(cell.over(name) or "-") for name in ("cudnn", "flash_attn_4")),
                str(cell.over_best or "-"),
                config_names().get(plain_config(row.config), "-"),
            ]
        )
    head = ["problem", "batch", "seq", "flashsmith", "cuDNN", "FA4", "over cuDNN", "over FA4"]
    return table([*head, "over the best", "config"], lines)


def spread(values: Sequence[float]) -> str:
    """The median, with the minimum and the maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def hand_written() -> str:
    """The table of flashsmith, the best hand-written kernel and cuDNN for d 128."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in read("hopper-probe.csv"):
        group = found.setdefault((row["dtype"], row["causal"]), {})
        group.setdefault(row["seq"], {})[row["contender"]] = float(row["tflops"])
    lines = []
    for dtype, causal in sorted(found, key=lambda pair: (pair[0] != "fp16", pair[1])):
        by_length = found[dtype, causal].values()
        cells = [
            f"{rates['ours']:.0f} / "
            f"{max(rate for name, rate in rates.items() if name not in ('ours', 'cudnn')):.0f} / "
            f"{rates['cudnn']:.0f}"
            for rates in by_length
        ]
        lines.append([f"{dtype}, {'causal' if causal == '1' else 'full'}", *cells])
    return table(["d 128", *next(iter(found.values()))], lines)


# --- the backward pass ---------------------------------------------------------------------------


# Three runs of all cells, each of which begins with another contender. Only the first has FA2 and
# FA4.
VERDICTS = tuple(f"verdict-backward-{run}.csv" for run in range(3))
WIDE, ENTRIES, FROZEN = "backward-wide.csv", "backward-entries.csv.gz", "backward-frozen.csv"
# Problems in ENTRIES and others, with the current order of key blocks and with other orders.
ORDERS = "backward-orders.csv.gz"
# If the launches of an implementation have a larger spread, something else was running on the GPU.
UNDISTURBED = 0.1
Key = tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A problem of the backward pass: medians of TFLOP/s and ratios over the rounds."""

    rates: dict[str, float]
    over_cudnn: list[float]
    over_best: list[float]
    over_fa4: float
    config: str


def key_of(problem: str) -> Key:
    """The key for the text of a problem, as the rows of a benchmark have it."""
    batch, seq, heads, d, dtype, *words = problem.split()
    queries, _, keys = heads[1:].partition(":")
    return d[1:], dtype, "+".join(words), batch[1:], seq[1:], queries, keys or queries


@cache
def cells() -> dict[Key, Cell]:
    """The 24 cells, pooled over the runs."""
    runs = [measured(name) for name in VERDICTS]
    best = {row["problem"]: float(row["best_over_cudnn"]) for row in read(BEST_BACKWARD)}
    found = {}
    for key in sorted(runs[0], key=lambda key: (-int(key[0]), key[1:3], int(key[4]))):
        rates = {
            name: statistics.median([it for run in runs if (it := rate(run[key], name))])
            for name in ("ours", "cudnn", "fa2")
        }
        over_cudnn = [float(ratio(run[key], "cudnn") or 0.0) for run in runs]
        over_best = [over / best[problem_of(key)] for over in over_cudnn]
        config = plain_config(runs[0][key]["ours"]["config"])
        over_fa4 = float(ratio(runs[0][key], "flash_attn_4") or 0.0)
        found[key] = Cell(rates, over_cudnn, over_best, over_fa4, config)
    return found


def problem_of(key: Key) -> str:
    """The text of a problem; for a backward pass, 'backward' comes before the mask."""
    d, dtype, semantics, batch, seq, heads, _ = key
    words = [word for word in semantics.split("+") if word != "plain"]
    return " ".join([f"b{batch} s{seq} h{heads} d{d} {dtype}", *words])


@cache
def wide_points() -> Points:
    """Problems that are not cells, and that were measured while nothing else ran on the GPU."""
    return {
        key: rows
        for key, rows in measured(WIDE).items()
        if all(float(row["spread"] or 0.0) <= UNDISTURBED for row in rows.values())
    }


@cache
def backward_names() -> dict[str, str]:
    """K1, K2, ... by config without its dtype, in the order of the tables."""
    wide = [plain_config(rows["ours"]["config"]) for rows in wide_points().values()]
    chosen = dict.fromkeys([cell.config for cell in cells().values()] + wide)
    return {config: f"K{number}" for number, config in enumerate(chosen, 1)}


def mean_least(ratios: Sequence[float]) -> str:
    """The geometric mean and the minimum; '-' if there are no ratios."""
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "-"


def group_of(key: Key) -> str:
    """The head dimension and mask of a cell."""
    return f"d {key[0]}, {'causal' if 'causal' in key[2] else 'full'}"


def grouped(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """The keys by head dimension and mask, followed by all."""
    groups: dict[str, list[Key]] = {}
    every = list(keys)
    for key in every:
        groups.setdefault(group_of(key), []).append(key)
    return {**groups, "all": every}


def backward() -> str:
    """The table of the 24 cells in groups: the mean and the smallest ratio of their medians."""
    lines = []
    for name, keys in grouped(cells()).items():
        group = [cells()[key] for key in keys]
        rates = [cell.rates["ours"] for cell in group]
        of_group = [
            mean_least([statistics.median(getattr(cell, field)) for cell in group])
            for field in ("over_cudnn", "over_best")
        ]
        of_group.append(mean_least([cell.over_fa4 for cell in group]))
        lines.append([name, str(len(group)), f"{min(rates):.0f} to {max(rates):.0f}", *of_group])
    over = ("cuDNN", "the best", "FA4, one run")
    head = ["", "problems", "TFLOP/s", *(f"speed over {name}: mean (min)" for name in over)]
    return table(head, lines)


def backward_cells() -> str:
    """The table of all cells: medians over the rounds, with the minimum and the maximum in
    brackets."""
    lines = [
        [
            f"d {key[0]}, {key[1]}, {kind(key)}",
            key[3],
            key[4],
            *(f"{cell.rates[name]:.0f}" for name in ("ours", "cudnn", "fa2")),
            spread(cell.over_cudnn),
            spread(cell.over_best),
            f"{cell.over_fa4:.3f}",
            backward_names()[cell.config],
        ]
        for key, cell in cells().items()
    ]
    head = ["problem", "batch", "seq", "flashsmith", "cuDNN", "FA2", "over cuDNN", "over the best"]
    return table([*head, "over FA4", "kernel"], lines)


def mask_and_heads(key: Key) -> str:
    """The mask and heads of a problem, in words."""
    words = [word for word in key[2].split("+") if word not in ("plain", "backward", "uneven")]
    heads = f"{key[5]} heads" if key[5] == key[6] else f"heads {key[5]}:{key[6]}"
    return ", ".join([*(words or ["full"]), heads])


def backward_wide() -> str:
    """The table of problems that are not cells: other d, grouped heads, packed batches, windows."""
    lines = [
        [
            f"d {key[0]}, {key[1]}, {mask_and_heads(key)}",
            key[3],
            key[4],
            *(shown(rate(rows, name), ".0f") for name in ("ours", "cudnn", "fa2")),
            *(shown(ratio(rows, name)) for name in ("cudnn", "fa2")),
            backward_names()[plain_config(rows["ours"]["config"])],
        ]
        for key, rows in wide_points().items()
    ]
    head = ["problem", "batch", "seq", "flashsmith", "cuDNN", "FA2", "over cuDNN", "over FA2"]
    return table([*head, "kernel"], lines)


def fastest(rows: Iterable[Row], kind: str) -> Row | None:
    """The fastest row of a kind that is correct."""
    timed = [row for row in rows if row["kind"] == kind and row["verdict"] == "pass"]
    return min(timed, key=lambda row: float(row["ms"]), default=None)


def backward_frozen() -> str:
    """The table of computing only dq, or only dk and dv, against all gradients; with our fastest
    kernels."""
    points, lines = measured(FROZEN), []
    for key, rows in points.items():
        whole, peer = fastest(rows.values(), "ours"), fastest(rows.values(), "peer")
        if key[2].endswith("_dq") or whole is None:
            continue
        line = [f"d {key[0]}, {mask_and_heads(key)}", f"{float(whole['ms']):.2f}"]
        for word in ("only_dq", "no_dq"):
            of_word = points.get((*key[:2], f"{key[2]}+{word}", *key[3:]), {}).values()
            ours, theirs = fastest(of_word, "ours"), fastest(of_word, "peer")
            if ours is None:
                line += ["-"] * 4
                continue
            share = float(ours["ms"]) / float(whole["ms"])
            over = None if theirs is None else float(theirs["ms"]) / float(ours["ms"])
            line += [f"{float(ours['ms']):.2f}", f"{share:.2f}", f"{float(ours['tflops']):.0f}"]
            line.append(shown(over))
        lines.append([*line, "-" if peer is None else f"{float(peer['ms']):.2f}"])
    head = ["problem", "all, ms"]
    for what in ("dq", "dk, dv"):
        head += [f"{what}, ms", "of all", "TFLOP/s", "over cuDNN"]
    return table([*head, "cuDNN, all, ms"], lines)


def backward_repeatable() -> str:
    """The table of the best deterministic kernel against the best kernel, measured interleaved."""
    best: dict[Key, dict[bool, float]] = {}
    points = measured(ENTRIES)
    for key, rows in measured(ORDERS).items():
        # In a row for another order, its name comes before the config.
        of_today = {name: row for name, row in rows.items() if name == row["config"]}
        points |= {key: of_today} if of_today else {}
    for key, rows in points.items():
        if "packed" in key[2]:
            continue
        for config, row in rows.items():
            rates = best.setdefault(key, {})
            ordered = "ordered_dq" in config
            rates[ordered] = max(float(row["tflops"]), rates.get(ordered, 0.0))
    lines = []
    for grouped_heads in (False, True):
        keys = [
            key
            for key, rates in best.items()
            if (key[5] != key[6]) == grouped_heads and len(rates) == 2
        ]
        for name, some in grouped(keys).items():
            if grouped_heads and name == "all":
                continue
            rates = [best[key][True] for key in some]
            shares = [best[key][True] / best[key][False] for key in some]
            spanned = f"{min(rates):.0f} to {max(rates):.0f}"
            heads = ", heads 32:8" if grouped_heads else ""
            lines.append([f"{name}{heads}", str(len(some)), spanned, mean_least(shares)])
    return table(["", "problems", "TFLOP/s", "over the fastest free kernel: mean (min)"], lines)


def backward_kernels() -> str:
    """The table of the configs K1, K2, ..."""
    return table(
        ["", "config, without its dtype"],
        ([name, config] for config, name in backward_names().items()),
    )


def backward_profile() -> str:
    """The table of the profiler's figures for single launches of the main kernels."""
    lines = [
        [
            f"`{plain_config(row['config'])}`" + ", causal" * row["problem"].endswith("causal"),
            *(f"{float(row[unit]):.0f}%" for unit in ("tensor_pct", "issue_pct", "shared_pct")),
            f"{float(row['l2_pct']):.0f}%",
            f"{float(row['l2_hit_pct']):.0f}%",
            f"{float(row['sm_clock_mhz']) / 1000:.2f} GHz",
            row["stall_reasons"].replace("_", " "),
        ]
        for row in read("ncu-backward.csv")
    ]
    head = ["kernel", "tensor pipe", "issue slots", "shared memory", "L2", "L2 hits", "SM clock"]
    return table([*head, "stalls, cycles per issue"], lines)


def backward_host() -> str:
    """The table of calls with gradients: microseconds on the host, against cuDNN."""
    times = json.loads((ROWS / "backward-host.json").read_text(encoding="utf-8"))
    lines = [
        [call, f"{times[ours]:.0f}", f"{times[theirs]:.0f}" if theirs else "-"]
        for call, ours, theirs in (
            ("forward that keeps what gradients need", "forward", "cuDNN forward"),
            ("`flashsmith.backward()`", "backward()", ""),
            ("forward and `autograd.grad`", "both", "cuDNN both"),
            ("the same, `deterministic=True`", "both, repeatable", ""),
        )
    ]
    return table(["call", "flashsmith, µs", "PyTorch's cuDNN, µs"], lines)


def training() -> str:
    """The table of a training step with three implementations: median times, and losses."""
    steps = json.loads((ROWS / "training-step.json").read_text(encoding="utf-8"))
    theirs = steps["cudnn"]
    lines = []
    for name, said in (("flashsmith", "flashsmith"), ("cudnn", "cuDNN"), ("fa2", "FA2")):
        ms, losses = steps[name]["ms"][STEPS_BEFORE:], steps[name]["losses"]
        pairs = zip(theirs["ms"][STEPS_BEFORE:], ms, strict=True)
        ratio_of_times = statistics.median(other / mine for other, mine in pairs)
        apart = max(abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True))
        times = f"{statistics.median(ms):.1f}", f"{ratio_of_times:.3f}"
        lines.append([said, *times, f"{apart:.1e}" if name != "cudnn" else "-"])
    head = ["attention", "ms", "cuDNN's time over it", "largest difference of the losses"]
    return table(head, lines)


# --- over a KV cache ------------------------------------------------------------------------------

DECODE, DECODE_WIDE = "decode.jsonl.gz", "decode-wide.jsonl.gz"
# The output of `flashsmith roofline --json` for the same GPU, measured just before.
DECODE_ROOF = "decode-roofline.json"
ON_H100 = "../h100/"
NOT_MEASURED = "There are no rows of it yet."
CACHE_PEERS = ("cudnn", "fa2", "mem_efficient", "flash_attn_2", "flash_attn_3", "flashinfer")


@dataclass(frozen=True, order=True)
class Cache:
    """A KV cache, which ``queries`` tokens of each sequence read. If page is 0, it is dense."""

    batch: int
    keys: int
    queries: int
    heads_q: int
    heads_k: int
    d: int
    page: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of its keys and values, which have 16 bits."""
        return 2 * 2 * self.batch * self.keys * self.heads_k * self.d


def over_caches(name: str) -> dict[Cache, dict[str, float]]:
    """Microseconds by cache and implementation: medians over all rounds, in the order of the file.

    Raises SystemExit if a kernel of ours is wrong, because its times must not be shown.
    """
    rounds: dict[Cache, dict[str, list[float]]] = {}
    for row in read(name):
        sizes = ("batch", "seq_k", "seq_q", "heads_q", "heads_k", "d")
        page = re.search(r"page(\d+)", row["semantics"])
        of = Cache(*(int(row[size]) for size in sizes), int(page[1]) if page else 0)
        if row["kind"] == "ours" and row["verdict"] != "pass":
            raise SystemExit(f"{name}: {row['contender']} on {of}: {row['verdict']}")
        times = rounds.setdefault(of, {})
        if row["verdict"] == "pass" and row["ms"]:
            times.setdefault(row["contender"], []).append(1e3 * float(row["ms"]))
    return {
        of: {who: statistics.median(us) for who, us in times.items()}
        for of, times in rounds.items()
    }


def dram_read(folder: str = "") -> float | None:
    """The TB/s that the roofline's kernel reads; None if it was not measured."""
    path = ROWS / folder / DECODE_ROOF
    if not path.exists():
        return None
    ceilings = json.loads(path.read_text(encoding="utf-8"))["ceilings"]
    found = [float(one["rate"]) for one in ceilings if one["key"] == "dram_read"]
    return found[0] if found else None


def best_peer(us: dict[str, float]) -> tuple[str, float] | None:
    """The fastest peer, with its microseconds."""
    timed = [(us[name], name) for name in CACHE_PEERS if name in us]
    return (min(timed)[1], min(timed)[0]) if timed else None


def over(us: float | None, other: float | None) -> float | None:
    """How much faster the first time is than the second: the second divided by the first."""
    return other / us if us and other else None


def mean_of(ratios: Iterable[float | None]) -> str:
    """The geometric mean of those ratios that are not None."""
    found = [ratio for ratio in ratios if ratio]
    return shown(statistics.geometric_mean(found) if found else None, ".3f")


def cache_cells(of: Cache, us: dict[str, float], roof: float | None) -> list[str]:
    """The cells of a row: size of the cache; microseconds of our kernel, of cuDNN and of the best
    peer; share of the roof."""
    ours, best = us.get("ours"), best_peer(us)
    rate = of.bytes / ours / 1e6 if ours else None
    return [
        f"{of.bytes / 1e6:.0f}",
        *(shown(us.get(name), ".1f") for name in ("ours", "cudnn")),
        f"{best[0]} {best[1]:.1f}" if best else "-",
        *(shown(over(ours, other)) for other in (us.get("cudnn"), best[1] if best else None)),
        shown(rate),
        shown(rate / roof if rate and roof else None, ".0%"),
    ]


CACHE_HEAD = ("MB", "ours", "cuDNN", "best peer", "over cuDNN", "over the best", "TB/s", "of DRAM")


def decode(folder: str = "") -> str:
    """The table of one token over a KV cache that is dense or in pages, with heads 32:8, d 128,
    bf16.

    ``folder`` is where the rows are, relative to the folder with the rows of the H200.
    """
    if not (ROWS / folder / DECODE).exists():
        return NOT_MEASURED
    found, roof = over_caches(folder + DECODE), dram_read(folder)
    lines, paged_over_dense, invariant_over_free = [], [], []
    for one, us in found.items():
        if one.page:
            continue
        paged = found.get(replace(one, page=16), {}).get("ours")
        paged_over_dense.append(over(paged, us.get("ours")))
        invariant_over_free.append(over(us.get("ours"), us.get("ours_free")))
        lines.append(
            [
                f"{one.batch} x {one.keys}",
                *cache_cells(one, us, roof),
                shown(paged, ".1f"),
                shown(paged_over_dense[-1], ".3f"),
                shown(us.get("ours_free"), ".1f"),
                shown(invariant_over_free[-1], ".3f"),
            ]
        )
    means = mean_of(paged_over_dense), mean_of(invariant_over_free)
    lines.append(["geometric mean", *[""] * (len(CACHE_HEAD) + 1), means[0], "", means[1]])
    further = ["page 16", "its speed over dense", "free", "invariant over free"]
    return table(["batch x keys", *CACHE_HEAD, *further], lines)


def decode_in_short(folder: str = "") -> str:
    """A part of the table of :func:`decode`, with what users compare."""
    if not (ROWS / folder / DECODE).exists():
        return NOT_MEASURED
    found, roof = over_caches(folder + DECODE), dram_read(folder)
    lines = []
    for one, us in found.items():
        if one.page:
            continue
        _, ours, cudnn, _, over_cudnn, _, _, of_dram = cache_cells(one, us, roof)
        paged = found.get(replace(one, page=16), {}).get("ours")
        further = (shown(value, ".1f") for value in (paged, us.get("ours_free")))
        lines.append(
            [f"{one.batch} x {one.keys}", ours, cudnn, over_cudnn, of_dram, *further],
        )
    head = ["batch x keys", "flashsmith", "cuDNN", "speed over cuDNN", "of DRAM's rate"]
    return table([*head, "pages of 16 keys", '`split="free"`'], lines)


def decode_wide(folder: str = "") -> str:
    """The table of other heads, other head dimensions and several tokens over a cache."""
    if not (ROWS / folder / DECODE_WIDE).exists():
        return NOT_MEASURED
    roof = dram_read(folder)
    lines = [
        [
            f"heads {one.heads_q}:{one.heads_k}, d {one.d}"
            + f", {one.queries} tokens" * (one.queries > 1),
            f"{one.batch} x {one.keys}",
            *cache_cells(one, us, roof),
        ]
        for one, us in over_caches(folder + DECODE_WIDE).items()
    ]
    return table(["", "batch x keys", *CACHE_HEAD], lines)


# The profiler's counters for single launches; for some of them also samples over time.
DECODE_PROFILE = "decode-profile.jsonl.gz"
# Thresholds for samples: above this percentage of the DRAM rate, a launch counts as reading; above
# this share of the SMs' clocks, it counts as running.
READS_PCT, RUNS = 20.0, 0.01


def call_of(problem: str) -> str:
    """A text such as '64 x 1024', with everything that differs from heads 32:8, d 128, one token
    and a dense cache."""
    batch, keys, heads, d, *words = problem.split()
    queries, _, capacity = keys[1:].partition(":")
    heads_q, _, heads_k = heads[1:].partition(":")
    more = [
        f"heads {heads_q}:{heads_k or heads_q}" * (heads != "h32:8"),
        f"d {d[1:]}" * (d != "d128"),
        f"{queries} tokens" * (queries != "1"),
        *(f"page {word[4:]}" for word in words if word.startswith("page")),
    ]
    return ", ".join([f"{batch[1:]} x {capacity}", *filter(None, more)])


def decode_profile() -> str:
    """The table of profiler counters for calls over a cache, one line for each implementation."""
    calls: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read(DECODE_PROFILE):
        if row["what"] == "counters":
            calls.setdefault((row["problem"], row["who"]), {})[row["launch"]] = row
    lines = []
    for (problem, who), launches in calls.items():
        keys = launches["keys"]
        of_clocks = float(keys["sm__cycles_active.avg"]) / float(keys["sm__cycles_elapsed.max"])
        lines.append(
            [
                call_of(problem),
                {"cudnn": "cuDNN"}.get(who, who),
                " + ".join(
                    f"{float(launches[name]['duration_us']):.1f}"
                    for name in ("keys", "merge")
                    if name in launches
                ),
                f"{float(keys['dram_read_bytes']) / 1e6:.0f}",
                f"{float(keys['dram__throughput.avg.pct_of_peak_sustained_elapsed']):.0f}%",
                f"{of_clocks:.0%}",
                f"{float(keys['issue_pct']):.0f}%",
                f"{float(keys['smsp__inst_executed.sum']) / 1e6:.1f}",
                f"{float(keys['l2_hit_pct']):.0f}%",
                f"{float(keys['occupancy_pct']):.0f}%",
                f"{float(keys['registers']):.0f}",
                keys["stalls"].replace("_", " "),
            ]
        )
    head = ["call", "", "µs", "MB read", "of DRAM", "SMs run", "issue slots", "M instructions"]
    further = ["L2 hits", "occupancy", "registers", "stalls, cycles per issue"]
    return table([*head, *further], lines)


def decode_samples() -> str:
    """The table of when launches read, from samples of the DRAM rate and of the clocks of the
    SMs."""
    lines = []
    for row in read(DECODE_PROFILE):
        if row["what"] != "samples" or row["launch"] != "keys":
            continue
        interval = float(row["interval_us"])
        rates = [rate / 100 for rate in json.loads(row["dram_read_pct"])]
        clocks = json.loads(row["sm_cycles_active"])
        shares = [clock / max(clocks) for clock in clocks]
        ran = [number for number, share in enumerate(shares) if share > RUNS]
        read_in = [number for number, rate in enumerate(rates) if rate > READS_PCT / 100]
        # Reading begins or ends within a sample, which is then only partly full.
        starts = ran[0] + 1 - shares[ran[0]]
        begins = read_in[0] + 1 - min(1.0, rates[read_in[0]])
        ends = read_in[-1] + min(1.0, rates[read_in[-1]])
        spans = begins - starts, ends - begins, ran[-1] + 1 - ends
        lines.append(
            [
                call_of(row["problem"]),
                {"cudnn": "cuDNN"}.get(row["who"], row["who"]),
                f"{float(row['duration_us']):.1f}",
                *(f"{span * interval:.1f}" for span in spans[:2]),
                f"{sum(rates) / spans[1]:.0%}",
                f"{spans[2] * interval:.1f}",
            ]
        )
    head = ["call", "", "µs", "until bytes flow", "while they flow", "at", "behind them"]
    return table(head, lines)


def host_over_caches() -> str:
    """The table of repeated calls over a cache: microseconds on the host."""
    lines = [
        [row["call"], *(f"{float(row[it]):.1f}" for it in ("median", "bare", "overhead", "first"))]
        for row in read("host-overhead-decode.csv")
    ]
    head = ["call", "attention_with_cache()", "bare launches", "overhead", "first call"]
    return table(head, lines)


# --- what limits the kernels, the host, the progression ------------------------------------------


@cache
def profiled_before() -> dict[str, str]:
    """P1, P2, ... by config without its dtype, for configs that no measured problem chose."""
    names: dict[str, str] = {}
    for row in read("ncu-hopper.csv")[:PROFILED_BEFORE]:
        names.setdefault(plain_config(row["config"]), f"P{len(names) + 1}")
    return names


def profile() -> str:
    """The table of the profiler's figures for single launches."""
    lines = []
    for place, row in enumerate(read("ncu-hopper.csv")):
        config = plain_config(row["config"])
        if place < PROFILED_BEFORE:
            name = profiled_before()[config]
        elif config in config_names():
            name = config_names()[config]
        else:
            name = config_names()[config.replace("+stale_max", "")] + " with `stale_max`"
        terabytes_per_second = float(row["l2_bytes"]) / float(row["duration_us"]) / 1e6
        lines.append(
            [
                name,
                row["seq_k"],
                *(f"{float(row[unit]):.0f}%" for unit in ("tensor_pct", "mufu_pct", "issue_pct")),
                f"{float(row['l2_hit_pct']):.0f}%",
                f"{terabytes_per_second:.1f}",
                f"{float(row['sm_clock_mhz']) / 1000:.2f} GHz",
                row["stalls"].replace("_", " "),
            ]
        )
    head = ["kernel", "seq", "tensor pipe", "MUFU", "issue slots", "L2 hits", "L2, TB/s"]
    return table([*head, "SM clock", "stalls, cycles per issue"], lines)


def profiled() -> str:
    """The table of the configs P1, P2, ..."""
    return table(
        ["", "config, without its dtype"],
        ([name, config] for config, name in profiled_before().items()),
    )


def host() -> str:
    """The table of repeated calls: microseconds on the host."""
    others = {row["call"]: row for row in read("host-overhead-mma-sync.csv")}
    lines = [
        [
            row["call"],
            *(f"{float(row[field]):.1f}" for field in ("median", "bare", "overhead")),
            f"{float(others[row['call']]['overhead']):.1f}",
            f"{float(row['first']):.0f}",
        ]
        for row in read("host-overhead.csv")
    ]
    head = ["call", "attention()", "bare launch", "overhead", "overhead with mma.sync"]
    return table([*head, "first call"], lines)


def progression() -> str:
    """The table of the seven steps of the set prog."""
    kernels = json.loads((ROWS / "run-prog.json").read_text(encoding="utf-8"))["kernels"]
    lines = []
    for kernel in kernels:
        lines.append(
            [
                kernel["config"],
                str(kernel["registers"]),
                f"{kernel['conflicts']['ldmatrix']:g}",
                f"{kernel['timing']['ms']:.2f}",
                f"{kernel['timing']['tflops']:.0f}",
            ]
        )
    return table(["kernel", "registers", "`ldmatrix` conflict factor", "ms", "TFLOP/s"], lines)


# Alternatives whose ratio is at least this count as equally fast.
LEVEL = 0.995


def spills() -> str:
    """By d and semantics, the table of chosen kernels that spill, and of the best kernels that do
    not."""
    ratios: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    spilled: dict[tuple[str, str], set[int]] = {}
    for row in read("spills.csv.gz"):
        words = [word for word in row["semantics"].split("+") if word != "uneven"]
        d = re.search(r" d(\d+) ", row["problem"])
        group = (d[1] if d else "", " ".join(words))
        of_choice = ratios.setdefault((*group, row["problem"]), {})
        of_choice.setdefault(row["other"], []).append(float(row["ratio"]))
        spilled.setdefault(group, set()).add(int(row["spill"]))
    lines = []
    for group in sorted(spilled, key=lambda group: (int(group[0]), len(group[1]))):
        best = [
            max(statistics.median(found) for found in others.values())
            for key, others in ratios.items()
            if key[:2] == group
        ]
        stored = " or ".join(map(str, sorted(spilled[group])))
        taken = sum(ratio >= LEVEL for ratio in best)
        lines.append(
            [*group, str(len(best)), stored, f"{min(best):.3f} to {max(best):.3f}", str(taken)]
        )
    head = ["d", "semantics", "choices", "bytes a thread", "time over the best other's"]
    return table([*head, "replaced"], lines)


# --- on an H100 ----------------------------------------------------------------------------------

ON_H100 = "../h100/"


def h100_rounds() -> dict[tuple[str, ...], list[float]]:
    """For each round, the time of the config chosen for the H200 divided by that of the config
    chosen for the H100.

    The keys are the problem, whether it is deterministic, its split, and both configs. (The H200's
    table has changed since.)
    """
    rounds: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read(f"{ON_H100}tables-in-turns.csv.gz"):
        place = row["problem"], row["deterministic"], row["split"], row["round"]
        rounds.setdefault(place, {})[row["kernel"]] = row
    cells: dict[tuple[str, ...], list[float]] = {}
    for (*cell, _), of in rounds.items():
        before, after = of["without the table"], of["with the table"]
        ratio = float(before["ms"]) / float(after["ms"])
        cells.setdefault((*cell, before["config"], after["config"]), []).append(ratio)
    return cells


def h100_turns() -> str:
    """The table of problems for which the H100's table chooses other configs than the H200's,
    measured interleaved."""
    lines = []
    for (problem, deterministic, split, *_), found in h100_rounds().items():
        if split == "invariant":
            continue
        middle = statistics.median(found)
        words = ", repeatable" * (deterministic == "True") + ", `split='free'`" * (split == "free")
        lines.append(
            [
                problem.removesuffix(" uneven") + words,
                f"{middle:.3f} ({min(found):.3f} to {max(found):.3f})",
                str(len(found)),
                "the H100's" if middle >= 1 else "the H200's",
            ]
        )
    return table(["problem", "over the H200's choice", "rounds", "the table has"], lines)


def h100_decode() -> str:
    """The table of attention over a cache, where one kernel serves all batches; measured with five
    batches."""
    kinds: dict[str, dict[str, float]] = {}
    for (problem, _, split, *_), found in h100_rounds().items():
        if split == "invariant":
            batch, lengths, *words = problem.split()
            place = f"{batch[1:]} x {lengths.partition(':')[2]}"
            kinds.setdefault(" ".join(words), {})[place] = statistics.median(found)
    places = list(dict.fromkeys(place for of in kinds.values() for place in of))
    lines = []
    for kind, of in kinds.items():
        whole = len(of) == len(places) and min(of.values()) >= 1
        ratios = [shown(of.get(place), ".3f") for place in places]
        lines.append([kind, *ratios, "the H100's" if whole else "the H200's"])
    return table(["heads, d, mask", *places, "the table has"], lines)


def h100_replays() -> str:
    """The table of the kernels that rank first on the H100 for 512 causal keys, against replays of
    cuDNN."""
    entries = json.loads((ROOT / "src/flashsmith/chooser/tables/h100.json").read_text())["entries"]
    first = {one["problem"]: one["ranked"][0]["config"] for one in entries}
    runs: dict[str, list[dict[str, float]]] = {}
    for row in read(f"{ON_H100}graph-replays.csv.gz"):
        rounds = runs.setdefault(row["problem"], [])
        name = row["config"] or row["kernel"]
        # The later of the two runs repeats the rounds of the earlier one.
        if not rounds or name in rounds[-1]:
            rounds.append({})
        rounds[-1][name] = float(row["ms"])
    lines = []
    for problem, rounds in runs.items():
        both = [(of[first[problem]], of["cudnn"]) for of in rounds if first[problem] in of]
        ratios = [other / ours for ours, other in both]
        lines.append(
            [
                problem,
                *(f"{1e3 * statistics.median(times):.1f}" for times in zip(*both, strict=True)),
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                str(len(both)),
            ]
        )
    return table(["problem", "flashsmith, µs", "cuDNN, µs", "over cuDNN", "rounds"], lines)


# --- correctness ---------------------------------------------------------------------------------

# Files with rows, and how the names of their cases begin.
PROOFS = {
    "`tools/gpu/prove_grid.py`": ("semantics-grid.csv.gz", ""),
    "`tools/gpu/prove_grid.py --family wgmma`": ("hopper-grid.csv.gz", ""),
    **{
        f"`tools/gpu/prove_grid.py --family {family}`": ("backward-grid.csv.gz", f"{family}, ")
        for family in ("mma_sync_backward", "wgmma_backward")
    },
    "`tools/gpu/prove_grid.py --family mma_sync_decode`": ("decode-grid.csv.gz", ""),
    "`tools/gpu/prove_sets.py` over `tune`, `prog-all`, `cover`, 128 to 4096": (
        "factory-sets.csv",
        "",
    ),
}


def proofs() -> str:
    """The table of proofs: how many problems were proven and how many were wrong, and the largest
    error relative to its bound."""
    lines = []
    for command, (name, prefix) in PROOFS.items():
        rows = [row for row in read(name) if row.get("case", "").startswith(prefix)]
        proven = [row for row in rows if row.get("bound")]
        wrong = sum(row["ok"] != "True" for row in proven)
        shares = [
            max(
                float(row["max_error"]) / float(row["bound"])
                for row in proven
                if f"({dtype}, " in row["config"]
            )
            for dtype in ("FP16", "BF16")
        ]
        refused = len(rows) - len(proven)
        problems = f"{len(proven):,}" + (f", and {refused} refused" if refused else "")
        largest = " / ".join(f"{share:.2f}" for share in shares)
        lines.append([command, f"`{name}`", problems, str(wrong), largest])
    head = ["command", "rows", "problems", "wrong"]
    return table([*head, "largest share of the error bound, fp16 / bf16"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "public": public,
    "backward": backward,
    "backward-cells": backward_cells,
    "backward-wide": backward_wide,
    "backward-frozen": backward_frozen,
    "backward-repeatable": backward_repeatable,
    "backward-kernels": backward_kernels,
    "backward-profile": backward_profile,
    "backward-host": backward_host,
    "training": training,
    "decode": decode,
    "decode-wide": decode_wide,
    "decode-on-h100": partial(decode, ON_H100),
    "decode-wide-on-h100": partial(decode_wide, ON_H100),
    "decode-in-short-on-h100": partial(decode_in_short, ON_H100),
    "decode-profile": decode_profile,
    "decode-samples": decode_samples,
    "host-over-caches": host_over_caches,
    "hand-written": hand_written,
    "profile": profile,
    "profiled": profiled,
    "host": host,
    "progression": progression,
    "spills": spills,
    "h100-turns": h100_turns,
    "h100-decode": h100_decode,
    "h100-replays": h100_replays,
    "proofs": proofs,
    "every-point": every_point,
    "configs": configs,
}


def filled(text: str) -> str:
    """The page with its tables made from the rows."""

    def written(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", written, text, flags=re.DOTALL)


def main() -> int:
    """Writes the tables, or compares them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    differ = 0
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if check and new != old:
            place = page.relative_to(ROOT)
            print(f"{place}: tables differ; run python tools/docs/results_tables.py")
            differ = 1
        elif new != old:
            page.write_text(new, encoding="utf-8")
    return differ


if __name__ == "__main__":
    sys.exit(main())
