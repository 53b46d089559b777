#!/usr/bin/env python3
"""Predict flashsmith.parallel's ring over more GPUs from parts that were measured on two.

Usage: python tools/gpu/parallel_model.py ROWS

ROWS is a file of JSON lines, each with what it is of (`what`), ms, and seq and direction, 'forward'
or 'both' with the backward pass:

    link     bytes                 a message there and one back, over the link alone
    compute  ranks, rank, bytes    a rank's kernels alone, and the bytes of its K and V
    alone                          the call on one GPU
    parts    ranks, compute, both  the call on two, as kernels alone and as it is (no ms)

Transfers are beside the kernels, but take a share of the GPU while they last: a pass with kernels
of C and transfers of M ms takes max(M, C + share M). The share is the median over the measured
calls of two GPUs, of all others where such a call itself is predicted: so the error on two is that
of a prediction.
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
    def __init__(self, rows: Iterable[Row]) -> None:
        self._link: list[tuple[int, float]] = []
        self._alone: dict[tuple[int, str], float] = {}
        self._measured: dict[tuple[int, str], tuple[float, float]] = {}
        self._kernels: dict[tuple[int, str, int], float] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        for row in rows:
            at = row.get("seq", 0), row.get("direction", "")
            if row["what"] == "link":
                self._link.append((row["bytes"], row["ms"]))
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
        """Milliseconds of a message over the link; between measured sizes on a straight line."""
        place = min(max(bisect_left(self._link, (size,)), 1), len(self._link) - 1)
        (a, at_a), (b, at_b) = self._link[place - 1 : place + 1]
        return at_a + (at_b - at_a) * (size - a) / (b - a)

    def transfers(self, seq: int, direction: str, ranks: int) -> float:
        """Milliseconds of all messages of a rank."""
        block = self._bytes[seq, ranks]
        once = self.message(block)
        if direction == "both":
            # K and V once more, and their gradients in fp32.
            once += self.message(block) + self.message(2 * block)
        return (ranks - 1) * once

    def share(self, but: tuple[int, str] | None = None) -> float:
        """What transfers take of a GPU while they last."""
        found = [
            max(0.0, (both - compute) / self.transfers(*at, 2))
            for at, (compute, both) in self._measured.items()
            if at != but
        ]
        return statistics.median(found) if found else 0.0

    def predictions(self) -> list[Prediction]:
        found = []
        for seq, direction, ranks in sorted(self._kernels):
            at = seq, direction
            measured = self._measured.get(at, (0.0, None))[1] if ranks == 2 else None
            share = self.share(at if measured is not None else None)
            kernels = self._kernels[seq, direction, ranks]
            messages = self.transfers(seq, direction, ranks)
            ms = max(messages, kernels + share * messages)
            alone = self._alone[at]
            found.append(Prediction(seq, direction, ranks, ms, measured, alone / (ranks * ms)))
        return found


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="JSON lines")
    model = Model(read(parser.parse_args(arguments).rows))
    print(f"transfers take {model.share():.2f} of a GPU while they last")
    print("| seq | direction | GPUs | predicted ms | measured ms | error | t1 / (P tP) |")
    print("|---|---|---|---|---|---|---|")
    for it in model.predictions():
        measured, error = "-", "-"
        if it.measured is not None:
            measured, error = f"{it.measured:.3f}", f"{it.ms / it.measured - 1:+.1%}"
        print(
            f"| {it.seq} | {it.direction} | {it.ranks} | {it.ms:.3f} | {measured} | {error} "
            f"| {it.efficiency:.2f} |"
        )


if __name__ == "__main__":
    main()
