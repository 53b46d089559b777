#!/usr/bin/env python3
"""Checks that the ranks of flashsmith.parallel end in time if another rank is lost; one line per
case.

    python tools/gpu/parallel_lost.py rows.jsonl --warm    # builds the kernels, which takes minutes
    python tools/gpu/parallel_lost.py rows.jsonl           # two GPUs, some six minutes
    python tools/gpu/parallel_lost.py rows.jsonl --built   # the same without the first step

A case is a schedule, a length, and the way in which the last rank is lost. In the backward pass of
its fourth call, the last rank

    killed    is killed
    stopped   is stopped by a signal
    raised    raises an exception and ends
    silent    catches the exception, keeps running, and makes no more calls
    among     is killed, and every call is followed by an all_reduce of the caller's
    between   as 'among', but it is killed after the fourth call, before the all_reduce. All GPUs
              have completed the call by then, so the others wait in the all_reduce alone

The other ranks continue with calls, and synchronise with their GPU after every --flight calls. Rank
0 must fail within the --timeout of the group plus --slack (5 s). Its caller gets a GroupError. If
it waits in CUDA, the text of a GroupError must be on standard error instead, and the exit status
must not be zero. The process of rank 0 must end at most ten seconds after the error.

In 'between' no call of flashsmith is pending, and PyTorch must end rank 0, by an error or by its
watchdog, which takes up to a minute longer. Nothing of flashsmith may have ended it.

Several cases (--at-once) run at a time, since they mostly wait; one of 65,536 rows or more counts
as three. The dtype is bf16; the defaults are heads 32:8 and d 128. Rows are JSON lines with
what='lost'. The exit status is 1 if a case did not end in time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from parallel_bench import NO_MULTICAST, SCHEDULES, TIMEOUT, drawn, joined

from flashsmith import parallel
from flashsmith.errors import GroupError
from flashsmith.integrations import traceable

WAYS = ("killed", "stopped", "raised", "silent", "among", "between")
# Ways in which every call is followed by a collective.
WITH_COLLECTIVES = ("among", "between")
# The call in which a rank is lost, and the seconds in which a process must end after its error.
LAST, ENDING = 4, 10.0
# Seconds that PyTorch's watchdog may take beyond the timeout: first it writes what it knows.
WATCHDOG = 60.0
# Seconds until a rank is lost, for starting, connecting and the first calls.
STARTING = 300.0


class Case(NamedTuple):
    schedule: str
    seq: int
    way: str


class Planted(Exception):
    """An exception that the code of a rank raises, outside flashsmith."""


# --- a rank --------------------------------------------------------------------------------------


def get_lost(way: str, folder: Path) -> None:
    (folder / "lost").touch()
    if way in ("killed", *WITH_COLLECTIVES):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise Planted(way)


def plant(way: str, folder: Path, calls: list[int]) -> None:
    """Makes this rank get lost in the first backward kernel of its last call.

    Its kernels are not launched again as in earlier calls: such launches do not pass here.
    """
    traceable.may_repeat = lambda: False
    backward = traceable.backward

    def lost(*given: Any, **keywords: Any) -> Any:
        if calls[0] == LAST and way != "between":
            get_lost(way, folder)
        return backward(*given, **keywords)

    traceable.backward = lost


class Calls:
    """Calls of a schedule on the shards of this rank, forward and backward."""

    def __init__(self, seq: int, rank: int, options: Any) -> None:
        device = torch.device(options.device, rank if options.device == "cuda" else None)
        whole = drawn(seq, device, options)
        self._leaves = [parallel.shard(whole[name]).requires_grad_() for name in "qkv"]
        self._do = parallel.shard(whole["do"])
        self._ones = torch.ones(1 << 20, device=device)
        self._kernels = {"emulate": True} if options.device == "cpu" else {}

    def call(self, schedule: str) -> None:
        o = parallel.attention(*self._leaves, schedule=schedule, causal=True, **self._kernels)
        torch.autograd.grad(o, self._leaves, self._do)

    def reduce(self) -> None:
        dist.all_reduce(self._ones)

    def synchronize(self) -> None:
        if self._do.is_cuda:
            torch.cuda.synchronize()


def work(case: Case, rank: int, folder: Path, options: Any) -> None:
    """Makes calls until the last rank is lost in the way that the case names."""
    joined(rank, options.gpus, str(folder), options, options.timeout)
    calls, counted, is_last = Calls(case.seq, rank, options), [0], rank == options.gpus - 1
    if is_last:
        plant(case.way, folder, counted)
    try:
        for counted[0] in itertools.count(1):
            calls.call(case.schedule)
            is_between = case.way == "between" and counted[0] == LAST
            if is_between:
                calls.synchronize()
                if is_last:
                    get_lost(case.way, folder)
            if case.way in WITH_COLLECTIVES:
                calls.reduce()
            if is_between or counted[0] % options.flight == 0:
                calls.synchronize()
    except GroupError as error:
        (folder / f"said-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    except Planted:
        if case.way == "silent":
            time.sleep(TIMEOUT)
        raise


def warm(rank: int, folder: Path, options: Any) -> None:
    """Calls each schedule once, with enough time for building its kernels."""
    joined(rank, options.gpus, str(folder), options, TIMEOUT)
    for seq in options.seqs:
        calls = Calls(seq, rank, options)
        for schedule in options.schedules:
            calls.call(schedule)
        calls.synchronize()
    dist.barrier()
    dist.destroy_process_group()


# --- cases ---------------------------------------------------------------------------------------


class Running:
    """The processes of a case."""

    def __init__(self, case: Case | None, arguments: Sequence[str], options: Any) -> None:
        self.case, self._options = case, options
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        # When the case began, when the rank was lost, and when rank 0 got an error or ended.
        self._began, self._lost, self._over = time.monotonic(), 0.0, 0.0
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments, "--rank", str(rank),
                 "--folder", str(self.folder), "--case", json.dumps(case)],
                stderr=(self.folder / f"err-{rank}").open("w"),
            )
            for rank in range(options.gpus)
        ]  # fmt: skip

    def row(self) -> dict[str, Any] | None:
        """The row of the case, or None if it is not yet known what happened to rank 0.

        Ends all processes.
        """
        assert self.case is not None
        zero, now, options = self.processes[0], time.monotonic(), self._options
        by_pytorch = self.case.way == "between"
        most = options.limit + WATCHDOG * by_pytorch
        said, lost = self.folder / "said-0", self.folder / "lost"
        has_ended = zero.poll() is not None
        if not self._lost and lost.exists():
            self._lost = now
        if not self._over and (said.exists() or has_ended):
            self._over = now
        begins, limit = (self._began, STARTING) if not self._lost else (self._lost, most)
        if self._over:
            begins, limit = self._over, ENDING
        if not has_ended and now < begins + limit:
            return None
        written = (self.folder / "err-0").read_text()
        text = said.read_text() if said.exists() else _line(written)
        seconds = self._over - self._lost if self._lost and self._over else None
        row = {
            "what": "lost", **self.case._asdict(), "timeout": options.timeout, "seconds": seconds,
            "ended": now - self._lost if has_ended and self._lost else None,
            "status": zero.returncode, "raised": said.exists(), "said": text,
            "ok": bool(
                seconds is not None and seconds <= most and zero.returncode
                and ("GroupError" in text) != by_pytorch
            ),
        }  # fmt: skip
        self.end()
        return row

    def wait(self) -> bool:
        """Waits for all ranks, and prints the errors of those that failed.

        Returns whether none failed.
        """
        statuses = [process.wait() for process in self.processes]
        for rank, status in enumerate(statuses):
            if status:
                print((self.folder / f"err-{rank}").read_text(), file=sys.stderr)
        self.end()
        return not any(statuses)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def _line(written: str) -> str:
    """From what was written to standard error, the line with the error, or the last line."""
    lines = [line for line in written.splitlines() if line.strip()]
    named = [line for line in lines if "GroupError" in line]
    return (named or lines or [""])[-1]


def _weight(it: Case | Running) -> int:
    case = it.case if isinstance(it, Running) else it
    return 3 if case is not None and case.seq >= 1 << 16 else 1


def rows_of(cases: Sequence[Case], arguments: Sequence[str], options: Any) -> Iterator[Any]:
    waiting, running = list(cases), list[Running]()
    try:
        while waiting or running:
            while waiting and (
                not running or sum(map(_weight, [*running, waiting[0]])) <= options.at_once
            ):
                running.append(Running(waiting.pop(0), arguments, options))
            for one in list(running):
                if (row := one.row()) is not None:
                    running.remove(one)
                    yield row
            time.sleep(0.05)
    finally:
        for one in running:
            one.end()


def shown(row: dict[str, Any]) -> str:
    name = f"{row['schedule']:9} {row['seq']:6} {row['way']:7}"
    if row["seconds"] is None:
        return f"{name} BAD: {row['said'][:200] or 'nothing was lost, or it hung'}"
    how = "GroupError raised" if row["raised"] else f"process ended, status {row['status']}"
    ended = "did not end" if row["ended"] is None else f"ended after {row['ended']:.1f}"
    known = row["said"].partition("What is known here: ")[2] or row["said"]
    word = "over" if row["ok"] else "BAD:"
    after = f"after {row['seconds']:4.1f} of {row['timeout']:g} s, {ended}"
    return f"{name} {word} {after}: {how}: {known[:120]}"


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSON Lines file to append to")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--heads", default="32:8")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--seqs", default="8192,32768,131072")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--timeout", type=float, default=15.0, help="timeout of the group, seconds")
    parser.add_argument("--slack", type=float, default=5.0, help="seconds allowed beyond that")
    parser.add_argument("--flight", type=int, default=4, help="calls between synchronisations")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="only build the kernels")
    parser.add_argument("--built", action="store_true", help="the kernels are built")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: gloo processes in the emulator")  # fmt: skip
    for name in ("--rank", "--folder", "--case"):  # These are for the processes that it starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.heads = tuple(int(it) for it in options.heads.split(":"))
    options.seqs = [int(it) for it in options.seqs.split(",")]
    options.limit = options.timeout + options.slack
    options.schedules, options.ways = options.schedules.split(","), options.ways.split(",")
    return parser, options


def main(arguments: Sequence[str] | None = None) -> int:
    parser, options = parsed(arguments)
    os.environ.update(NO_MULTICAST)
    if options.rank is not None:
        rank, folder, case = int(options.rank), Path(options.folder), json.loads(options.case)
        if case is None:
            warm(rank, folder, options)
        else:
            work(Case(*case), rank, folder, options)
        return 0
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        parser.error(f"--gpus {options.gpus}: there are {torch.cuda.device_count()} here")
    given = list(sys.argv[1:] if arguments is None else arguments)
    began = time.monotonic()
    if not options.built:
        if not Running(None, given, options).wait():
            return 1
        print(f"warm after {time.monotonic() - began:.0f} s", flush=True)
    if options.warm:
        return 0
    cases = [Case(*it) for it in itertools.product(options.schedules, options.seqs, options.ways)]
    bad = 0
    for row in rows_of(cases, given, options):
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(shown(row), flush=True)
        bad += not row["ok"]
    spent = time.monotonic() - began
    print(f"{len(cases) - bad} of {len(cases)} ended in time, {spent:.0f} s in total")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
