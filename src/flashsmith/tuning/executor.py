"""Executor: carries out a sweep's calls. LocalExecutor uses processes of this machine."""

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
    """A method call, either on the bench of the GPU `gpu` or on a `compiler` in any free process.

    seconds: how long the call may take before it counts as a hang. libraries: the keys of the
    libraries that the call loads. fresh: whether to replace the GPU's measuring process first.
    """

    method: str
    arguments: tuple[Any, ...]
    seconds: float
    gpu: str = ""
    compiler: Compiler | None = None
    libraries: frozenset[str] = frozenset()
    fresh: bool = False


class Executor(Protocol):
    """Carries out calls: one at a time per GPU, and any number of compiler calls in parallel.

    A call has one result. The kind of a failure is "crash", "hang" or "error" if the call is to
    blame, and "startup" if its process did not start. The kind is "lost" if the process or machine
    went away for another reason; such a call may be submitted again.
    """

    def submit(self, call: WorkerCall) -> None:
        """Starts a call."""

    def next_result(self, seconds: float) -> tuple[WorkerCall, WorkerResult] | None:
        """A finished call and its outcome; None when no call finishes within `seconds`."""

    def close(self, calls: Iterable[WorkerCall] | None = None) -> None:
        """Drops these calls without a result. None drops all calls and ends every process."""


@dataclass(frozen=True)
class WorkerGpu:
    """A GPU that an executor measures on: its name there, and the origin recorded with figures
    taken on it."""

    name: str
    origin: Mapping[str, Any] = field(default_factory=dict)


#: The name of LocalExecutor's GPU.
LOCAL_GPU = "GPU"


class LocalExecutor:
    """Uses processes of this machine: one that measures, and one for each running compile call.

    Use from one thread, which must outlive the executor.
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
        """An executor that measures with the runner's bench and environment."""
        return cls(runner.bench, runner.process_environment)

    def submit(self, call: WorkerCall) -> None:
        """As in Executor; all calls must use the same compiler."""
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
        """As in Executor."""
        deadline = time.monotonic() + seconds
        while not self._over:
            left = deadline - time.monotonic()
            # This also returns when a process has started, before any call is over.
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
        """As in Executor."""
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
