"""Pairs of processes of which one is lost, for test_lost.py: what becomes of the other.

    python lost_ranks.py FOLDER CASES.json

All cases run at once. Each process is forked from this one, which has imported everything and made
no group. Standard errors are in FOLDER/CASE-RANK.err, and what rank 0 was told in FOLDER/CASE.said;
the exit statuses by case are printed as JSON.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from ranks import KERNELS, HostMemory, tensors

from flashsmith import parallel
from flashsmith.errors import GroupError
from flashsmith.integrations import traceable
from flashsmith.parallel import peers
from flashsmith.parallel import watch as module

# Calls that both ranks make, and the one in which, or after which, rank 1 is lost.
WORKING, LAST = 2, 4
NEVER = 10_000
LIMIT = 120.0
libc = ctypes.CDLL(None)


class Planted(Exception):
    """What a rank's own code raises."""


class UnreachedMarks:
    """A GPU that gets nowhere any more; asked, it may not answer either."""

    answers = True

    def __init__(self, device: Any) -> None: ...

    def set(self) -> None: ...

    def reached(self) -> bool:
        if not self.answers:
            wait_for_ever()
        return False


def wait_for_ever() -> None:
    """As in a call of CUDA: the interpreter's lock is free, and no exception gets in."""
    while True:
        libc.pause()


def get_lost(how: str) -> None:
    """What becomes of rank 1, within a call or between two."""
    if how in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    elif how == "ended":
        os._exit(0)
    elif how == "silent":
        time.sleep(NEVER)
    else:
        raise Planted(how)


def calls_of(case: dict[str, Any]) -> Callable[[], Any]:
    """A call of a schedule, forward and backward; or, without one, of what needs no kernel."""
    schedule = case.get("schedule")
    if schedule is None:
        return lambda: parallel.unshard(torch.zeros(1, 4))
    leaves = [it.requires_grad_(case.get("gradients", True)) for it in tensors(16)]

    def call() -> None:
        o = parallel.attention(*leaves, schedule=schedule, causal=True, **KERNELS)
        if case.get("gradients", True):
            torch.autograd.grad(o.float().sum(), leaves)

    return call


def plant(case: dict[str, Any], counted: list[int]) -> None:
    """Has rank 1 lost within its last call: in the backward pass, or the forward pass's kernel."""
    name = "backward" if case.get("gradients", True) else "attention"
    function = getattr(traceable, name)

    def lost(*given: Any, **keywords: Any) -> Any:
        if counted[0] == LAST:
            get_lost(case["how"])
        return function(*given, **keywords)

    setattr(traceable, name, lost)


def rank_of(case: dict[str, Any], rank: int, folder: Path) -> NoReturn:
    name, how, stuck = case["name"], case["how"], case.get("stuck", "")
    if stuck:
        module.MARKS["cpu"] = UnreachedMarks
        UnreachedMarks.answers = stuck != "asking"
    if case.get("copies"):
        peers.MEMORIES["cpu"], peers._STEP = HostMemory, 1
    if stuck == "exit" and rank == 0:
        atexit.register(wait_for_ever)
        # An interpreter that ends has no such thread.
        module.Watch.reason = lambda self, seconds: ""  # type: ignore[method-assign]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"{name}.store"), 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=case["timeout"]),
    )
    call, counted, within = calls_of(case), [0], "schedule" in case
    if rank and within:
        plant(case, counted)
    try:
        for counted[0] in range(1, NEVER):
            if counted[0] > LAST and rank and not within:
                get_lost(how)
            if counted[0] > LAST and not rank and stuck in ("synchronize", "asking"):
                wait_for_ever()
            call()
    except GroupError as error:
        (folder / f"{name}.said").write_text(f"{type(error).__name__}: {error}")
        if stuck == "exit":
            raise
    except Planted:
        if how == "caught":
            time.sleep(NEVER)
        raise
    os._exit(0)


def forked(case: dict[str, Any], rank: int, folder: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    err = os.open(folder / f"{case['name']}-{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(err, 2)
    try:
        rank_of(case, rank, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if case.get("stuck") == "exit" and rank == 0:
            sys.exit(1)  # as an interpreter ends
        os._exit(1)


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    pids = {case["name"]: [forked(case, rank, folder) for rank in range(2)] for case in cases}
    statuses: dict[str, int] = {}
    begin = time.monotonic()
    while len(statuses) < len(pids) and time.monotonic() - begin < LIMIT:
        time.sleep(0.1)
        for name, (zero, _) in pids.items():
            # Rank 1's end is left to be asked for: its parent may not look.
            if name not in statuses and (found := os.waitpid(zero, os.WNOHANG))[0]:
                statuses[name] = os.waitstatus_to_exitcode(found[1])
    for name, (zero, one) in pids.items():
        for pid in (one, *([] if name in statuses else [zero])):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
