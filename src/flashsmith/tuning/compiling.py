"""Compiling: turns builds into libraries, in batches that are compiled in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from flashsmith.errors import CompileError
from flashsmith.tuning.executor import Executor, WorkerCall
from flashsmith.tuning.runner import BuildResult, Compiler
from flashsmith.tuning.trial import Build
from flashsmith.tuning.worker import WorkerResult

Batch = tuple[Build, ...]
# The maximum number of configs in a batch. The fixed cost of a library (host code, linking) is
# about the cost of compiling three configs. In a batch of MAX_BATCH configs, this cost matters
# little, and the batch is still a single shard.
MAX_BATCH = 10
_MIN_BATCH = 3
# The number of batches lost in a row after which the queue assumes that no machine is left.
_LOST_ATTEMPTS = 8


class CompileQueue:
    """Compiles batches with an executor, at most `jobs` at a time. An instance must be used from
    one thread only.

    If the process of a batch dies or hangs (for `patience` seconds), the batch is split and
    compiled again, until the build at fault is found; its result is an error. If a process raises
    an exception (no compiler, a full disk), no build is at fault, and CompileError is raised here.
    A batch that was lost together with its machine is compiled on another machine.
    """

    def __init__(self, compiler: Compiler, executor: Executor, jobs: int, patience: float) -> None:
        self._compiler = compiler
        self._executor = executor
        self._jobs = jobs
        self._patience = patience
        self._queue: deque[Batch] = deque()
        self._running: dict[WorkerCall, Batch] = {}
        self._lost = 0  # consecutive batches

    def add(self, builds: Iterable[Build]) -> None:
        """Queues builds.

        Builds that cannot share a library are in separate groups. Batches come alternately from
        these groups, so that every problem soon has some kernels.
        """
        groups: dict[tuple[object, ...], list[Build]] = {}
        for build in builds:
            cfg = build.config
            key = (cfg.FAMILY, cfg.dtype, cfg.head_dims, build.semantics)
            groups.setdefault(key, []).append(build)
        share = -(-sum(map(len, groups.values())) // (2 * self._jobs))
        size = max(_MIN_BATCH, min(MAX_BATCH, share))
        batches = [_split(group, size) for group in groups.values()]
        alternating = chain.from_iterable(zip_longest(*batches))
        self._queue.extend(batch for batch in alternating if batch is not None)

    @property
    def busy(self) -> bool:
        """Whether a batch is waiting or being compiled."""
        return bool(self._queue or self._running)

    def dispatch(self) -> None:
        """Submits waiting batches until `jobs` are being compiled."""
        while self._queue and len(self._running) < self._jobs:
            batch = self._queue.popleft()
            call = WorkerCall("compile", (batch,), self._patience, compiler=self._compiler)
            self._executor.submit(call)
            self._running[call] = batch

    def take(
        self, call: WorkerCall, outcome: WorkerResult
    ) -> list[tuple[Build, BuildResult]] | None:
        """The results of all builds of a finished call; None if the call is not from this queue.

        Raises CompileError if a process did not start or raised an exception, or if too many
        batches in a row were lost.
        """
        batch = self._running.pop(call, None)
        if batch is None:
            return None
        failure = outcome.failure
        self._lost = self._lost + 1 if failure is not None and failure.kind == "lost" else 0
        if failure is None:
            return list(zip(batch, outcome.value, strict=True))
        if failure.kind in ("startup", "error") or self._lost > _LOST_ATTEMPTS:
            raise CompileError(f"a compile process failed: {failure.reason}")
        if failure.kind == "lost":
            self._queue.appendleft(batch)
        elif len(batch) > 1:
            half = len(batch) // 2
            self._queue.extendleft((batch[half:], batch[:half]))
        else:
            return [(batch[0], BuildResult(error=f"{failure.kind}: {failure.reason}"))]
        return []

    def stop(self) -> None:
        """Drops all batches that are waiting or being compiled."""
        self._queue.clear()
        self._executor.close(self._running)
        self._running.clear()


def _split(group: Sequence[Build], size: int) -> list[Batch]:
    """Divides a group into batches of about `size` builds; each batch is a sample of the whole
    group."""
    n_batches = -(-len(group) // size)
    return [tuple(group[first::n_batches]) for first in range(n_batches)]
