#!/usr/bin/env python3
"""Runs the calls that a sanitizer is to watch (prove_grid.py --handful) under a tool of
compute-sanitizer, each in a process of its own and several at once, and says which it has seen.

    tools/gpu/sanitized_calls.py seen.csv --tool memcheck --family mma_sync_decode --kernels decode
    tools/gpu/sanitized_calls.py seen.csv --tool racecheck ... --seconds 300
    tools/gpu/sanitized_calls.py seen.csv --tool racecheck ... -- --racecheck-num-workers 2

Kernels must be built before. A call that takes longer than --seconds is ended, and keeps no other
from being seen. Calls that the file says are seen and clean are not run again, so that others may
be given more time, or further options of the tool, behind '--'. Each call's report is beside the
file. The exit status is 0 when all calls are seen and nothing is reported, 9 when something is, 2
when one is not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from prove_grid import finished_rows, handful

from flashsmith.families import FAMILIES

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
HERE = Path(__file__).parent
# What compute-sanitizer exits with when it has something to report.
REPORTED = 9
# Each instance talks to its program by ports from here on, at most so many.
FIRST_PORT, PORTS = 49152, 16
_SUMMARY = re.compile(r"=+ ((?:ERROR|RACECHECK) SUMMARY: (\d+).*)")


@dataclass(frozen=True)
class Seen:
    """What a tool said of one call: ``outcome`` is 'clean', 'reported', 'out of time', or how the
    process ended otherwise, its call not proven."""

    number: int
    case: str
    outcome: str
    seconds: float
    summary: str = ""

    @property
    def is_seen(self) -> bool:
        return self.outcome in ("clean", "reported")


COLUMNS = tuple(field.name for field in fields(Seen))


def command(options: argparse.Namespace, number: int, count: int, rows: Path) -> list[str]:
    """One call under the tool."""
    return [
        *("compute-sanitizer", "--tool", options.tool, "--report-api-errors", "no"),
        *(
            "--error-exitcode",
            str(REPORTED),
            "--kernel-name",
            f"kernel_substring={options.kernels}",
        ),
        *("--port", str(FIRST_PORT + PORTS * (number % 512)), *options.more),
        *(sys.executable, str(HERE / "without_torch.py"), str(HERE / "prove_grid.py"), str(rows)),
        *("--family", options.family, "--handful", "--part", f"{number}/{count}"),
        *("--workers", "1"),
    ]


def watch(options: argparse.Namespace, number: int, count: int, case: str) -> Seen:
    """Runs one call and reads what became of it."""
    log = options.out.with_name(f"{options.out.stem}-{number:02}.log")
    rows = log.with_suffix(".rows.csv")
    rows.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        # A session of its own: the tool's child ends with it.
        process = subprocess.Popen(
            command(options, number, count, rows),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = round(time.monotonic() - start, 1)
    found = _SUMMARY.search(log.read_text(errors="replace"))
    proven = finished_rows(rows).get(case, {}).get("ok") == "True"
    rows.unlink(missing_ok=True)
    if status is None:
        outcome = "out of time"
    elif found is None or not proven:
        outcome = f"exit {status}"
    else:
        outcome = "clean" if status == 0 and found[2] == "0" else "reported"
    return Seen(number, case, outcome, seconds, found[1] if found else "")


def seen_before(path: Path) -> dict[str, Seen]:
    """The file's calls, by case."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            row["case"]: Seen(
                *(int(row["number"]), row["case"], row["outcome"], float(row["seconds"])),
                row["summary"],
            )
            for row in csv.DictReader(file)
        }


def write(path: Path, calls: Sequence[Seen]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(asdict(call) for call in sorted(calls, key=lambda call: call.number))


def watched(
    options: argparse.Namespace, cases: Sequence[str], open_: Sequence[int]
) -> Iterator[Seen]:
    """The calls of these numbers, as they end. The last cases of a handful are the longest, and
    begin first."""
    with ThreadPoolExecutor(options.at_once) as pool:
        pending = [
            pool.submit(watch, options, number, len(cases), cases[number - 1])
            for number in reversed(open_)
        ]
        for done in as_completed(pending):
            yield done.result()


def parsed(words: Sequence[str]) -> argparse.Namespace:
    words = [*words, "--"]
    end = words.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the CSV file to write, or to go on with")
    parser.add_argument("--tool", choices=TOOLS, required=True)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--kernels", required=True, help="what the names of those to watch hold")
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    parser.add_argument("--at-once", type=int, default=min(8, half))
    parser.add_argument("--seconds", type=float, default=120.0, help="of one call, at most")
    more = words[end + 1 : -1]
    return parser.parse_args(words[:end], argparse.Namespace(more=more))


def main() -> int:
    options = parsed(sys.argv[1:])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    cases = [str(case) for case in handful(options.family)]
    before = seen_before(options.out)
    calls = {case: before[case] for case in cases if case in before}
    open_ = [
        number
        for number, case in enumerate(cases, 1)
        if case not in calls or calls[case].outcome != "clean"
    ]
    print(f"{len(cases)} calls, {len(cases) - len(open_)} seen before", flush=True)
    start = time.monotonic()
    for call in watched(options, cases, open_):
        calls[call.case] = call
        write(options.out, list(calls.values()))
        if call.outcome != "clean":
            print(f"{call.number:2} {call.outcome}, {call.seconds} s: {call.case}", flush=True)
            if call.summary:
                print(f"   {call.summary}", flush=True)
    seen = [call for call in calls.values() if call.is_seen]
    reported = [call for call in seen if call.outcome == "reported"]
    print(
        f"{options.tool}: {len(seen)} of {len(cases)} calls seen, {len(reported)} reported, "
        f"{time.monotonic() - start:.0f} s"
    )
    return REPORTED if reported else 2 if len(seen) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
