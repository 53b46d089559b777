"""Compiling: a pool of compile processes that turns builds into libraries, a batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from flashsmith.errors import CompileError
from flashsmith.tuning.runner import Compiled, Compiler
from flashsmith.tuning.trial import Build
from flashsmith.tuning.worker import Worker

Batch = tuple[Build, ...]
# A library's fixed cost (host code, linking) is that of three configs: this many hide most of it,
# and are still one shard.
MAX_BATCH = 10
_MIN_BATCH = 3


class Compiling:
    """`jobs` processes, each with a batch; use from one thread.

    A batch whose process dies or hangs (for `patience` seconds) is split and tried again, so that
    in the end one build is at fault: it comes back with an error. What a process raises is not the
    fault of one build (no compiler, a full disk) and is raised here.
    """

    def __init__(self, compiler: Compiler, jobs: int, patience: float) -> None:
        self._compiler = compiler
        self._jobs = jobs
        self._patience = patience
        self._queue: deque[Batch] = deque()
        self._running: dict[Worker, Batch] = {}
        self._idle: list[Worker] = []

    def add(self, builds: Iterable[Build]) -> None:
        """Queues builds, alternating between those that cannot share a library, so that every
        problem gets some of its kernels early."""
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
        """Whether something is being compiled, or waits for it."""
        return bool(self._queue or self._running)

    @property
    def workers(self) -> list[Worker]:
        """The processes at work."""
        return list(self._running)

    def dispatch(self) -> None:
        """Gives every idle process a batch."""
        while self._queue and len(self._running) < self._jobs:
            worker = self._idle.pop() if self._idle else Worker(self._compiler, gentle=True)
            batch = self._queue.popleft()
            worker.request("compile", batch, seconds=self._patience)
            self._running[worker] = batch

    def collect(self) -> list[tuple[Build, Compiled]]:
        """What became of builds since the last call; does not wait.

        Raises CompileError when a process did not start, or raised.
        """
        done: list[tuple[Build, Compiled]] = []
        for worker in self.workers:
            outcome = worker.outcome()
            if outcome is None:
                continue
            batch = self._running.pop(worker)
            self._idle.append(worker)
            if outcome.failure is None:
                done += zip(batch, outcome.value, strict=True)
            elif outcome.failure.kind in ("startup", "error"):
                raise CompileError(f"a compile process failed: {outcome.failure.reason}")
            elif len(batch) > 1:
                half = len(batch) // 2
                self._queue.extendleft((batch[half:], batch[:half]))
            else:
                failure = f"{outcome.failure.kind}: {outcome.failure.reason}"
                done.append((batch[0], Compiled(error=failure)))
        return done

    def stop(self) -> None:
        """Ends the processes; what is queued or being compiled is dropped."""
        self._queue.clear()
        for worker in [*self.workers, *self._idle]:
            worker.stop()
        self._running, self._idle = {}, []


def _split(group: Sequence[Build], size: int) -> list[Batch]:
    """Batches of about `size`, each a sample of the whole group."""
    n_batches = -(-len(group) // size)
    return [tuple(group[first::n_batches]) for first in range(n_batches)]
