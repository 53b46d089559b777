"""Executor: where a sweep's calls are carried out. Here: processes of this machine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashsmith.tuning.runner import Compiler, Runner, TrialRunner
from flashsmith.tuning.worker import Outcome, Worker, wait_for_any


@dataclass(frozen=True, eq=False)
class WorkerCall:
    """One call of a method: of the bench of the GPU `gpu`, or of a `compiler`, whichever process is
    free.

    seconds: how long it may take before it counts as a hang. libraries: the keys of those that it
    loads. fresh: whether the GPU's measuring process is to be replaced before.
    """

    method: str
    arguments: tuple[Any, ...]
    seconds: float
    gpu: str = ""
    compiler: Compiler | None = None
    libraries: frozenset[str] = frozenset()
    fresh: bool = False


class Executor(Protocol):
    """Carries out calls: of each GPU one at a time, of compilers as many as are submitted.

    A call has one result. Its failure is of the kind "crash", "hang" or "error" where the call is
    to blame, "startup" where the process for it did not come up, and "lost" where process or
    machine went away for another reason: it may then be submitted again.
    """

    def submit(self, call: WorkerCall) -> None:
        """Has a call carried out."""

    def next_result(self, seconds: float) -> tuple[WorkerCall, Outcome] | None:
        """A call that is over, and what became of it; None when none is after so many seconds."""

    def close(self, calls: Iterable[WorkerCall] | None = None) -> None:
        """Drops these calls; None: all of them, and ends every process. Without a result both."""


@dataclass(frozen=True)
class WorkerGpu:
    """A GPU that an executor measures on: its name there, and what figures taken on it say of their
    origin."""

    name: str
    origin: Mapping[str, Any] = field(default_factory=dict)


#: The one that LocalExecutor has.
LOCAL_GPU = "GPU"


class LocalExecutor:
    """Processes of this machine: one that measures, and as many that compile as are called.

    Use from one thread, which must outlive it.
    """

    def __init__(
        self, bench: TrialRunner | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self._bench = None if bench is None else Worker(bench, environment=environment)
        self._running: dict[Worker, WorkerCall] = {}
        self._idle: list[Worker] = []
        self._over: deque[tuple[WorkerCall, Outcome]] = deque()

    @classmethod
    def of(cls, runner: Runner) -> LocalExecutor:
        """One that measures as the runner does."""
        return cls(runner.bench, runner.process_environment)

    def submit(self, call: WorkerCall) -> None:
        """As Executor has it; all compilers are one."""
        if call.gpu:
            assert self._bench is not None
            worker = self._bench
            if call.fresh:
                worker.stop()
        else:
            worker = self._idle.pop() if self._idle else Worker(call.compiler, gentle=True)
        worker.request(call.method, *call.arguments, seconds=call.seconds)
        self._running[worker] = call

    def next_result(self, seconds: float) -> tuple[WorkerCall, Outcome] | None:
        """As Executor has it."""
        deadline = time.monotonic() + seconds
        while not self._over:
            left = deadline - time.monotonic()
            # Ends early for a process that came up.
            wait_for_any(self._running, max(0.0, left))
            for worker in list(self._running):
                outcome = worker.outcome()
                if outcome is not None:
                    self._over.append((self._running.pop(worker), outcome))
                    self._rest(worker)
            if left <= 0:
                break
        return self._over.popleft() if self._over else None

    def close(self, calls: Iterable[WorkerCall] | None = None) -> None:
        """As Executor has it."""
        dropped = None if calls is None else set(calls)
        for worker, call in list(self._running.items()):
            if dropped is None or call in dropped:
                del self._running[worker]
                worker.stop()
                self._rest(worker)
        kept = () if dropped is None else (one for one in self._over if one[0] not in dropped)
        self._over = deque(kept)
        if dropped is None:
            for worker in [*self._idle, *([self._bench] if self._bench else [])]:
                worker.stop()

    def _rest(self, worker: Worker) -> None:
        if worker is not self._bench:
            self._idle.append(worker)
