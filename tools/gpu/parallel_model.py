#!/usr/bin/env python3
"""Predicts causal calls of flashsmith.parallel on more GPUs, from measurements on two GPUs.

Usage: python tools/gpu/parallel_model.py ROWS

ROWS is a file of JSON lines. Each line has its kind (`what`), ms, seq and direction: 'forward', or
'both' if the backward pass is included. The kinds and their further fields are:

    link     bytes                 A message in each direction, without kernels.
    alone                          The call on one GPU.
    compute  ranks, rank, bytes    A rank's kernels alone, and the bytes of its K and V.
    parts    ranks, compute, both  The call on two GPUs: kernels alone, and complete (no ms).
    kept     us                    The host time of the call on two GPUs.

The last three kinds are for one schedule: 'zigzag', unless the row says 'allgather'. A link with
the name of a schedule is used only for that schedule, which then uses no other link.

While a transfer overlaps kernels, it takes a share of the GPU. If kernels take C ms, transfers that
overlap take M ms and other transfers take N ms, a pass takes N + max(M, C + share M), but at least
its time on the host. The share is the median over those calls of a schedule on two GPUs that do not
wait for the host. If one of these calls is predicted, only the others are used, so that the error
is that of a real prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Prediction(NamedTuple):
    seq: int
    direction: str
    ranks: int
    ms: float
    measured: float | None
    efficiency: float


class Model:
    """The model for one schedule."""

    def __init__(self, rows: Iterable[Row], schedule: str = "zigzag") -> None:
        self._schedule = schedule
        self._link: list[tuple[int, float]] = []
        self._kept: dict[tuple[int, str], float] = {}
        self._alone: dict[tuple[int, str], float] = {}
        self._measured: dict[tuple[int, str], tuple[float, float]] = {}
        self._kernels: dict[tuple[int, str, int], float] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        rows = list(rows)
        links = [row for row in rows if row["what"] == "link"]
        own = [row for row in links if row.get("schedule") == schedule]
        for row in own or [row for row in links if "schedule" not in row]:
            self._link.append((row["bytes"], row["ms"]))
        for row in rows:
            if row["what"] in ("parts", "compute", "kept") and _schedule_of(row) != schedule:
                continue
            at = row.get("seq", 0), row.get("direction", "")
            if row["what"] == "kept":
                self._kept[at] = row["us"] / 1e3
            elif row["what"] == "alone":
                self._alone[at] = row["ms"]
            elif row["what"] == "parts":
                self._measured[at] = row["compute"], row["both"]
            elif row["what"] == "compute":
                # All ranks wait for the slowest.
                key = *at, row["ranks"]
                self._kernels[key] = max(row["ms"], self._kernels.get(key, 0.0))
                self._bytes[at[0], row["ranks"]] = row["bytes"]
        self._link.sort()
        have = {"link": len(self._link) > 1, "alone": self._alone, "compute": self._kernels}
        missing = [name for name, rows in have.items() if not rows]
        missing += [
            f"compute of {seq} on 2" for seq, _ in self._measured if (seq, 2) not in self._bytes
        ]
        missing += [f"alone of {at}" for *at, _ in self._kernels if tuple(at) not in self._alone]
        if missing:
            raise SystemExit(f"rows are missing: {', '.join(dict.fromkeys(missing))}; measure them")

    def message(self, size: int) -> float:
        """The milliseconds of a message over the link, interpolated linearly between the sizes that
        were measured."""
        place = min(max(bisect_left(self._link, (size,)), 1), len(self._link) - 1)
        (a, at_a), (b, at_b) = self._link[place - 1 : place + 1]
        return at_a + (at_b - at_a) * (size - a) / (b - a)

    def transfers(self, seq: int, direction: str, ranks: int) -> tuple[float, float]:
        """For a rank, the milliseconds of messages that overlap nothing, and of those that overlap
        kernels."""
        block, others = self._bytes[seq, ranks], ranks - 1
        if self._schedule == "zigzag":
            once = self.message(block)
            if direction == "both":
                # K and V once more, and their gradients in fp32.
                once += self.message(block) + self.message(2 * block)
            return 0.0, others * once
        half = self.message(others * block // 2)
        if direction == "forward":
            return half, half
        # Both halves come before the first kernel. The gradients in fp32 follow, in two halves.
        gradients = self.message(others * block)
        return 3 * half + gradients, half + gradients

    def share(self, but: tuple[int, str] | None = None) -> float:
        """Which share of a GPU transfers take while they overlap kernels."""
        found = []
        for at, (compute, both) in self._measured.items():
            if at != but and both > 1.05 * self._kept.get(at, 0.0):
                alone, beside = self.transfers(*at, 2)
                found.append(max(0.0, (both - compute - alone) / beside))
        return statistics.median(found) if found else 0.0

    def predictions(self) -> list[Prediction]:
        found = []
        for seq, direction, ranks in sorted(self._kernels):
            at = seq, direction
            measured = self._measured.get(at, (0.0, None))[1] if ranks == 2 else None
            share = self.share(at if measured is not None else None)
            kernels = self._kernels[seq, direction, ranks]
            before, beside = self.transfers(seq, direction, ranks)
            ms = before + max(beside, kernels + share * beside)
            ms = max(ms, self._kept.get(at, 0.0))
            alone = self._alone[at]
            found.append(Prediction(seq, direction, ranks, ms, measured, alone / (ranks * ms)))
        return found


def _schedule_of(row: Row) -> str:
    return str(row.get("schedule", "zigzag"))


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="JSON lines")
    rows = read(parser.parse_args(arguments).rows)
    measured = {_schedule_of(row) for row in rows if row["what"] == "compute"}
    for schedule in sorted(measured) or ["zigzag"]:
        model = Model(rows, schedule)
        print(f"{schedule}: transfers take {model.share():.2f} of a GPU while they last")
        print("| seq | direction | GPUs | predicted ms | measured ms | error | t1 / (P tP) |")
        print("|---|---|---|---|---|---|---|")
        for it in model.predictions():
            ms, error = "-", "-"
            if it.measured is not None:
                ms, error = f"{it.measured:.3f}", f"{it.ms / it.measured - 1:+.1%}"
            print(
                f"| {it.seq} | {it.direction} | {it.ranks} | {it.ms:.3f} | {ms} | {error} "
                f"| {it.efficiency:.2f} |"
            )


if __name__ == "__main__":
    main()
