#!/usr/bin/env python3
"""Runs the calls of prove_grid.py --handful under a tool of compute-sanitizer.

Each call has its own process; several run at the same time. The output file says which calls have
completed.

    tools/gpu/sanitized_calls.py seen.csv --tool memcheck --family mma_sync_decode --kernels decode
    tools/gpu/sanitized_calls.py seen.csv --tool racecheck ... --seconds 300
    tools/gpu/sanitized_calls.py seen.csv --tool racecheck ... -- --racecheck-num-workers 2

Kernels must be built before. If a call takes longer than --seconds, it is ended; the other calls
are not affected. Calls that are clean according to the file are not run again. So the others can be
given more time, or further options of the tool after '--'. The report on each call is in a file
next to it. The exit status is 0 if all calls have completed without a report, 9 if there is a
report, and 2 if a call did not complete.
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
# The exit status of compute-sanitizer if it reports something.
REPORTED = 9
# An instance of the tool and its program communicate through one of PORTS ports from FIRST_PORT on.
FIRST_PORT, PORTS = 49152, 16
_SUMMARY = re.compile(r"=+ ((?:ERROR|RACECHECK) SUMMARY: (\d+).*)")


@dataclass(frozen=True)
class Seen:
    """What the tool found in one call.

    ``outcome`` is 'clean', 'reported' or 'out of time', or says how the process ended without a
    proof.
    """

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
    """The command that runs one call under the tool."""
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
    """Runs one call and reads its result."""
    log = options.out.with_name(f"{options.out.stem}-{number:02}.log")
    rows = log.with_suffix(".rows.csv")
    rows.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("w") as file:
        # It has its own session, so that the child process of the tool is ended too.
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
    """The calls in the file, by case."""
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
    """Runs the calls with these numbers, and yields them in the order in which they end.

    The last cases of a handful are the longest, so they begin first.
    """
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
    parser.add_argument("out", type=Path, help="the CSV file to write or continue")
    parser.add_argument("--tool", choices=TOOLS, required=True)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--kernels", required=True, help="part of the names of kernels to check")
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    parser.add_argument("--at-once", type=int, default=min(8, half))
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of a call")
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
