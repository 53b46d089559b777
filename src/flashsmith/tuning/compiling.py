"""Compiling: turns builds into libraries, in batches that compile in parallel."""

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
# A library's fixed cost (host code, linking) equals compiling three configs. A batch of this size
# hides most of the fixed cost and is still one shard.
MAX_BATCH = 10
_MIN_BATCH = 3
# After this many consecutive batches lost to failed machines, no machine is assumed to be left.
_LOST_ATTEMPTS = 8


class CompileQueue:
    """Compiles at most `jobs` batches at a time on an executor; use from one thread.

    A batch whose process dies or hangs (for `patience` seconds) is split and retried until the
    build at fault is found. That build then returns an error. An exception from a process (no
    compiler, a full disk) is not the fault of one build, so it is raised here. A batch that was
    lost with its machine is compiled on another machine.
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
        """Queues builds. Batches alternate between groups that cannot share a library, so that
        every problem gets some of its kernels early."""
        groups: dict[tuple[object, ...], list[Build]] = {}
        for build in builds:
            cfg = build.config
            key = (cfg.FAMILY, cfg.dtype, cfg.d_head, build.semantics)
            groups.setdefault(key, []).append(build)
        share = -(-sum(map(len, groups.values())) // (2 * self._jobs))
        size = max(_MIN_BATCH, min(MAX_BATCH, share))
        batches = [_split(group, size) for group in groups.values()]
        alternating = chain.from_iterable(zip_longest(*batches))
        self._queue.extend(batch for batch in alternating if batch is not None)

    @property
    def busy(self) -> bool:
        """Whether a batch is queued or being compiled."""
        return bool(self._queue or self._running)

    def dispatch(self) -> None:
        """Submits queued batches until `jobs` are running."""
        while self._queue and len(self._running) < self._jobs:
            batch = self._queue.popleft()
            call = WorkerCall("compile", (batch,), self._patience, compiler=self._compiler)
            self._executor.submit(call)
            self._running[call] = batch

    def take(
        self, call: WorkerCall, outcome: WorkerResult
    ) -> list[tuple[Build, BuildResult]] | None:
        """The results of a finished call's builds; None when the call is not one of this object's.

        Raises CompileError when a process did not start or raised, or was lost too often in a row.
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
        """Drops all batches that are queued or being compiled."""
        self._queue.clear()
        self._executor.close(self._running)
        self._running.clear()


def _split(group: Sequence[Build], size: int) -> list[Batch]:
    """Batches of about `size`, each a sample of the whole group."""
    n_batches = -(-len(group) // size)
    return [tuple(group[first::n_batches]) for first in range(n_batches)]
