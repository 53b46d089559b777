"""Cluster: an executor that uses Ray.

For each GPU, an actor runs the measurements on this GPU; compilations are Ray tasks.

As in the local executor, the actor or task does the work itself in a worker process. A kernel that
crashes or hangs ends only this worker process. Therefore, if an actor dies, the cause is the
cluster and not a kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import flashsmith
from flashsmith import env
from flashsmith.errors import ArgumentError, DependencyError, LaunchError, install_extra
from flashsmith.pluralize import pluralize
from flashsmith.printable import quoted
from flashsmith.tuning.executor import WorkerCall, WorkerGpu
from flashsmith.tuning.runner import Compiler, Libraries, LibraryGoneError, Runner
from flashsmith.tuning.worker import STARTUP_SECONDS, Failure, Worker, WorkerResult, wait_for_any

#: The address that stands for the cluster that this machine belongs to or, if there is none, for
#: this machine alone.
ANY_CLUSTER = "auto"
# The time to wait for an answer from the address; Ray itself would retry for minutes.
_CONNECT_SECONDS = 5.0
# The time to wait for a GPU that another user of the cluster holds.
_PATIENCE_SECONDS = 120.0
# The time that is added to the limit of a call, because Ray and the transfer of libraries take time
# too.
_DELIVERY_SECONDS = 120.0
# The time for which Ray may list a machine that its scheduler has not registered yet, or a machine
# that has left the cluster.
_NEWS_SECONDS = 30.0
_POLL_SECONDS = 1.0
_ATTEMPTS = 3
_SOURCES = (".py", ".cu", ".cuh", ".cc", ".h")


@dataclass(frozen=True)
class Cluster:
    """A cluster for tuning: its executor, its GPUs with their runners, and the number of compile
    jobs that it can run (``jobs``). ``gpus`` is never empty. ``notes`` list unusable GPUs and
    machines, with the reasons."""

    executor: RayExecutor
    gpus: tuple[tuple[WorkerGpu, Runner], ...]
    jobs: int
    notes: tuple[str, ...] = ()


def connect(address: str, make_runner: Callable[[], Runner]) -> Cluster:
    """Connects to the Ray cluster at 'host:port', or at ANY_CLUSTER, and reserves all its free
    GPUs.

    Each GPU has an actor to which no other GPU is visible; `make_runner` is called in this actor.

    Raises DependencyError without Ray, ArgumentError for a malformed address, and LaunchError if
    there is no cluster, if it has no usable GPU, or if its machines have different versions of
    flashsmith.
    """
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    executor = None
    try:
        nodes = _machines(ray)
        slots, cores = _slots(nodes)
        if not slots:
            raise LaunchError(
                f"cluster={quoted(address)}: none of its {pluralize(len(nodes), 'machine')} has a "
                "GPU that Ray knows of; start Ray there with: ray start --num-gpus N"
            )
        executor = RayExecutor(
            ray, make_runner, slots, compiler_cores=min(1, cores), shut_down=ours
        )
        gpus, notes = executor.gather()
        if not gpus:
            raise LaunchError(
                f"cluster={quoted(address)}: none of its {pluralize(len(slots), 'GPU')} can be "
                f"measured on: {'; '.join(dict.fromkeys(notes))}"
            )
        jobs = max(1, cores - len(slots))
        return Cluster(executor, tuple(gpus), jobs, tuple(notes))
    except BaseException:
        if executor is not None:
            executor.close()
        elif ours:
            ray.shutdown()
        raise


@cache
def version_here() -> str:
    """The version of flashsmith and a hash of its sources, as of the start of this process.

    This string must be the same on all machines of a cluster.
    """
    package = Path(flashsmith.__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in _SOURCES:
            found.update(path.relative_to(package).as_posix().encode())
            found.update(path.read_bytes())
    return f"{flashsmith.__version__} (sources {found.hexdigest()[:12]})"


def _ray() -> Any:
    env.keep_ray_quiet()
    try:
        import ray
    except ImportError as error:
        raise DependencyError(
            f"a sweep over a cluster needs Ray, not installed here; {install_extra('cluster')}"
        ) from error
    return ray


def _connect(ray: Any, address: str) -> None:
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    named = address if address != ANY_CLUSTER else env.ray_address()
    if named and named != ANY_CLUSTER:
        _check_address(named)
    try:
        try:
            ray.init(address=named or ANY_CLUSTER, **how)
        except ConnectionError:
            if named:
                raise
            ray.init(address="local", include_dashboard=False, **how)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"cluster={quoted(named or address)}: Ray does not connect: {error}"
        ) from error


def _check_address(address: str) -> None:
    """Raises ArgumentError unless the address is 'host:port', and LaunchError if nothing answers
    there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ArgumentError(
            f"cluster={quoted(address)}: give host:port, as 'ray start --head' prints it, or "
            "leave it out for the cluster that this machine is in"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise LaunchError(
            f"cluster={quoted(address)}: there is no Ray cluster ({error}); start one with: "
            "ray start --head"
        ) from error


def _machines(ray: Any) -> list[dict[str, Any]]:
    """The machines of the cluster.

    Raises LaunchError if a machine has another version of flashsmith.

    The list is requested repeatedly while Ray still lists a machine that has left, or while Ray's
    scheduler does not know a machine that has just joined.
    """
    patience = time.monotonic() + _NEWS_SECONDS
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        unknown = _check_versions(ray, nodes)
        if not unknown:
            return nodes
        if time.monotonic() > patience:
            raise LaunchError(f"cluster: {unknown}; end Ray there, or start it again")
        time.sleep(_POLL_SECONDS)


def _check_versions(ray: Any, nodes: list[dict[str, Any]]) -> str:
    """Raises LaunchError if a machine with cores or GPUs has a version of flashsmith that differs
    from this machine's.

    Returns a message about a machine that is listed but unknown to the scheduler, if there is one,
    otherwise ''.
    """

    # A nested function is pickled by value, so it can run on a machine without flashsmith.
    def probe() -> str:
        try:
            from flashsmith.tuning.cluster import version_here
        except ImportError as error:
            return f"in no usable version ({error})"
        return version_here()

    asked = [
        (
            _host_of(node),
            ray.remote(probe).options(num_cpus=0, scheduling_strategy=_on(node["NodeID"])).remote(),
        )
        for node in nodes
        if node["Resources"].get("CPU") or node["Resources"].get("GPU")
    ]
    here = version_here()
    for host, answer in asked:
        try:
            there = ray.get(answer, timeout=_PATIENCE_SECONDS)
        except ray.exceptions.TaskUnschedulableError:
            return f"{host} is listed, and Ray places nothing there"
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise LaunchError(f"cluster: {host} does not answer: {_first_line(error)}") from error
        if there != here:
            raise LaunchError(
                f"cluster: {host} has flashsmith {there}, and this machine {here}; install the "
                "same on all machines, and start Ray there again"
            )
    return ""


def _slots(nodes: Iterable[Mapping[str, Any]]) -> tuple[list[_Slot], int]:
    """Returns the GPUs of all machines, and the number of cores of all machines together.

    For each GPU, one core is reserved for timing. But on a machine that would then have no core
    left for compiling, no core is reserved, since compilations would wait forever.
    """
    slots, all_cores = list[_Slot](), 0
    for node in nodes:
        cores, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
        slots += [_Slot(node["NodeID"], int(cores > gpus)) for _ in range(gpus)]
        all_cores += cores
    return slots, all_cores


def _host_of(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _on(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".strip().partition("\n")[0]


# ---- in the driver ----


@dataclass
class _Slot:
    """A GPU: its machine (``node``), the cores reserved for it, and the actor that uses it."""

    node: str
    cores: int
    actor: Any = None


class RayExecutor:
    """Carries out calls on a cluster; implements Executor. An instance must be used from one thread
    only.

    Ray transfers libraries to the machine that measures them, unless they are in that machine's
    cache. If an actor has died, the next call starts another actor on the same machine. If the
    machine is gone, the next call is lost too.
    """

    def __init__(
        self,
        ray: Any,
        make_runner: Callable[[], Runner],
        slots: list[_Slot],
        *,
        compiler_cores: int,
        shut_down: bool,
    ) -> None:
        self._ray = ray
        self._make_runner = make_runner
        self._unnamed = slots
        self._shut_down = shut_down
        self._slots: dict[str, _Slot] = {}
        self._libraries: Libraries | None = None
        how = {"num_cpus": compiler_cores, "num_returns": 2, "max_retries": _ATTEMPTS}
        self._compile = ray.remote(**how)(_compile)
        self._actor = ray.remote(max_restarts=0, max_task_retries=0)(_GpuActor)
        self._version = version_here()
        self._running: dict[Any, WorkerCall] = {}
        self._deadlines: dict[Any, float] = {}
        # For each library, by its key, the Ray object that contains all packed libraries of the
        # library's batch.
        self._packed: dict[str, Any] = {}
        self._arriving: dict[WorkerCall, Any] = {}

    def gather(self) -> tuple[list[tuple[WorkerGpu, Runner]], list[str]]:
        """Starts the actors of all GPUs.

        Returns the GPUs that started, with their runners, and notes on the others.
        """
        ray, found, notes = self._ray, list[tuple[WorkerGpu, Runner]](), list[str]()
        asked = {}
        for slot in self._unnamed:
            self._start(slot)
            asked[slot.actor.describe.remote()] = slot
        _, late = ray.wait(list(asked), num_returns=len(asked), timeout=_PATIENCE_SECONDS)
        names: Counter[str] = Counter()
        for answer, slot in asked.items():
            try:
                if answer in late:
                    raise TimeoutError(f"a GPU was not free within {_PATIENCE_SECONDS:g} s")
                name, runner = ray.get(answer)
            except (ray.exceptions.RayError, TimeoutError) as error:
                notes.append(f"left out: {_first_line(error)}")
                ray.kill(slot.actor)
                continue
            names[name] += 1
            if names[name] > 1:
                name = f"{name} ({names[name]})"
            self._slots[name] = slot
            self._libraries = runner.libraries
            found.append((WorkerGpu(name, {**runner.origin, "worker": name}), runner))
        return found, notes

    def submit(self, call: WorkerCall) -> None:
        """See Executor."""
        if call.compiler is not None:
            ref, self._arriving[call] = self._compile.remote(
                self._version,
                call.compiler,
                self._libraries,
                call.method,
                call.arguments,
                call.seconds,
            )
        else:
            slot = self._slots[call.gpu]
            if slot.actor is None:
                self._start(slot)
            # If the object were passed directly, Ray would fetch it at once. In a list, it is
            # passed as a reference, and the actor fetches it when it is needed.
            packed = {key: [self._packed[key]] for key in call.libraries if key in self._packed}
            ref = slot.actor.call.remote(
                call.method, call.arguments, call.seconds, call.fresh, packed
            )
            patience = call.seconds + STARTUP_SECONDS + _PATIENCE_SECONDS + _DELIVERY_SECONDS
            self._deadlines[ref] = time.monotonic() + patience
        self._running[ref] = call

    def next_result(self, seconds: float) -> tuple[WorkerCall, WorkerResult] | None:
        """See Executor."""
        if not self._running:
            time.sleep(seconds)
            return None
        over, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        now = time.monotonic()
        late = [ref for ref, deadline in self._deadlines.items() if now > deadline]
        if over:
            ref, outcome = over[0], self._outcome(over[0])
        elif late:
            ref, outcome = late[0], _lost("its actor does not answer")
        else:
            return None
        call = self._running.pop(ref)
        self._deadlines.pop(ref, None)
        packed = self._arriving.pop(call, None)
        if outcome.failure is None and packed is not None:
            keys = {one.library for one in outcome.value if one.library}
            self._packed.update(dict.fromkeys(keys, packed))
        if outcome.failure is not None and outcome.failure.kind == "lost" and call.gpu:
            self._end(self._slots[call.gpu])
        return call, outcome

    def _outcome(self, ref: Any) -> WorkerResult:
        """The result of a call. An exception of Ray is never blamed on a kernel."""
        compiling = self._running[ref].compiler is not None
        try:
            outcome: WorkerResult = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            reason = _first_line(error)
            return WorkerResult(failure=Failure("error", reason)) if compiling else _lost(reason)
        except self._ray.exceptions.RayError as error:
            return _lost(_first_line(error))
        return outcome

    def close(self, calls: Iterable[WorkerCall] | None = None) -> None:
        """See Executor. With None, the cluster is restored to the state in which this executor
        found it."""
        dropped = set(self._running.values()) if calls is None else set(calls)
        for ref, call in list(self._running.items()):
            if call in dropped:
                del self._running[ref]
                self._deadlines.pop(ref, None)
                if self._arriving.pop(call, None) is not None:
                    with contextlib.suppress(self._ray.exceptions.RayError):
                        self._ray.cancel(ref, force=True)
                else:
                    self._end(self._slots[call.gpu])
        if calls is None and self._ray.is_initialized():
            for slot in self._unnamed:
                self._end(slot)
            self._packed.clear()
            if self._shut_down:
                self._ray.shutdown()

    def _start(self, slot: _Slot) -> None:
        options = {"num_gpus": 1, "num_cpus": slot.cores, "scheduling_strategy": _on(slot.node)}
        slot.actor = self._actor.options(**options).remote(self._make_runner)

    def _end(self, slot: _Slot) -> None:
        actor, slot.actor = slot.actor, None
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)


def _lost(reason: str) -> WorkerResult:
    return WorkerResult(failure=Failure("lost", reason))


# ---- on the cluster ----


class _GpuActor:
    """An actor that uses one GPU, the only one visible to it, through a process that measures on
    this GPU."""

    def __init__(self, make_runner: Callable[[], Runner]) -> None:
        self._runner = make_runner()
        self._worker = Worker(self._runner.bench, environment=self._runner.process_environment)

    def describe(self) -> tuple[str, Runner]:
        """The name of the GPU in the cluster, and the runner that measures on it."""
        import ray

        numbers = ", ".join(map(str, ray.get_gpu_ids()))
        name = f"{socket.gethostname()} GPU {numbers}"
        return name, replace(self._runner, process_environment=None)

    def call(
        self,
        method: str,
        arguments: tuple[Any, ...],
        seconds: float,
        fresh: bool,
        packed: Mapping[str, list[Any]],
    ) -> WorkerResult:
        """Fetches the ``packed`` libraries, then calls a method of the bench and returns the
        result."""
        try:
            self._receive(packed)
        except LibraryGoneError as error:
            failure = Failure("error", str(error), raised=LibraryGoneError.__name__)
            return WorkerResult(failure=failure)
        if fresh:
            self._worker.stop()
        return _asked(self._worker, method, arguments, seconds)

    def _receive(self, packed: Mapping[str, list[Any]]) -> None:
        import ray

        libraries = self._runner.libraries
        for key, (ref,) in packed.items() if libraries is not None else ():
            assert libraries is not None
            if not libraries.has(key):
                try:
                    batch = ray.get(ref, timeout=_DELIVERY_SECONDS)
                except (ray.exceptions.RayError, TimeoutError) as error:
                    raise LibraryGoneError(f"{key}: did not arrive: {error}") from error
                libraries.unpack(key, batch[key])


# The compile processes of this Ray worker, keyed by their pickled compilers.
_compilers: dict[bytes, Worker] = {}


def _compile(
    version: str,
    compiler: Compiler,
    libraries: Libraries | None,
    method: str,
    arguments: tuple[Any, ...],
    seconds: float,
) -> tuple[WorkerResult, dict[str, bytes]]:
    """Calls a method of a compiler. Returns the result, and the packed libraries that were built.

    Raises RuntimeError if this machine has joined with a version of flashsmith that differs from
    the driver's.
    """
    if version_here() != version:
        raise RuntimeError(
            f"{socket.gethostname()} has flashsmith {version_here()}, and the driver {version}"
        )
    made_from = pickle.dumps(compiler)
    worker = _compilers.setdefault(made_from, Worker(compiler, gentle=True))
    outcome = _asked(worker, method, arguments, seconds)
    keys = {one.library for one in outcome.value or () if one.library}
    try:
        return outcome, {key: libraries.pack(key) for key in keys} if libraries is not None else {}
    except LibraryGoneError as error:
        return _lost(str(error)), {}


def _asked(worker: Worker, method: str, arguments: tuple[Any, ...], seconds: float) -> WorkerResult:
    try:
        worker.request(method, *arguments, seconds=seconds)
        while (outcome := worker.outcome()) is None:
            wait_for_any([worker], _POLL_SECONDS)
        return outcome
    except BaseException:
        worker.stop()
        raise
