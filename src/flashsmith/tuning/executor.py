"""Executor: carries out the calls of a sweep. LocalExecutor uses processes on this machine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashsmith.tuning.runner import Compiler, Runner, TrialRunner
from flashsmith.tuning.worker import Worker, WorkerResult, wait_for_any


@dataclass(frozen=True, eq=False)
class WorkerCall:
    """A call to a method: either of the bench of GPU `gpu`, or of `compiler`, which any free
    process may run.

    seconds: the time after which the call counts as hanging.
    libraries: the keys of the libraries that the call loads.
    fresh: whether to replace the GPU's measuring process by a new process before the call.
    """

    method: str
    arguments: tuple[Any, ...]
    seconds: float
    gpu: str = ""
    compiler: Compiler | None = None
    libraries: frozenset[str] = frozenset()
    fresh: bool = False


class Executor(Protocol):
    """Carries out calls: one at a time on each GPU, and any number of compiler calls at once.

    Each call has one result. If the call itself causes a failure, the kind of the failure is
    "crash", "hang" or "error". The kind is "startup" if the process of the call did not start. It
    is "lost" if the process or machine disappeared for a reason other than the call, which may then
    be submitted again.
    """

    def submit(self, call: WorkerCall) -> None:
        """Starts a call."""

    def next_result(self, seconds: float) -> tuple[WorkerCall, WorkerResult] | None:
        """Returns a finished call and its result; None if no call finishes within `seconds`."""

    def close(self, calls: Iterable[WorkerCall] | None = None) -> None:
        """Drops the given calls, which then get no result.

        None drops all calls and ends every process.
        """


@dataclass(frozen=True)
class WorkerGpu:
    """A GPU on which an executor measures. `origin` says where and when this is done, and is stored
    with the measured figures."""

    name: str
    origin: Mapping[str, Any] = field(default_factory=dict)


#: The name that LocalExecutor gives to its only GPU.
LOCAL_GPU = "GPU"


class LocalExecutor:
    """Uses processes on this machine: one that measures, and one for each compilation.

    The executor must be used from one thread only, and that thread must outlive it.
    """

    def __init__(
        self, bench: TrialRunner | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self._bench = None if bench is None else Worker(bench, environment=environment)
        self._running: dict[Worker, WorkerCall] = {}
        self._idle: list[Worker] = []
        self._over: deque[tuple[WorkerCall, WorkerResult]] = deque()

    @classmethod
    def of(cls, runner: Runner) -> LocalExecutor:
        """An executor that uses the bench and the environment of a runner."""
        return cls(runner.bench, runner.process_environment)

    def submit(self, call: WorkerCall) -> None:
        """See Executor; all calls must have the same compiler."""
        if call.gpu:
            assert self._bench is not None
            worker = self._bench
            if call.fresh:
                worker.stop()
        else:
            worker = self._idle.pop() if self._idle else Worker(call.compiler, gentle=True)
        worker.request(call.method, *call.arguments, seconds=call.seconds)
        self._running[worker] = call

    def next_result(self, seconds: float) -> tuple[WorkerCall, WorkerResult] | None:
        """See Executor."""
        deadline = time.monotonic() + seconds
        while not self._over:
            left = deadline - time.monotonic()
            # The wait also ends when a process has only started and no call has finished.
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
        """See Executor."""
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
