"""`flashsmith bench`: times flashsmith's kernels and the attention of other libraries on the same
problems.

All implementations that are compared on a problem get the same tensors. Every output is checked,
and the implementations whose outputs are correct are timed together.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flashsmith import env
from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.benchmark.implementations import (
    OURS,
    OURS_FREE,
    KernelImplementation,
    ProvableImplementation,
    attention_implementation,
    captured,
    gradient_implementation,
    kernel_implementation,
)
from flashsmith.benchmark.kernel_facts import BuiltKernels, KernelUse
from flashsmith.benchmark.measurement import (
    Kind,
    Measurement,
    Part,
    Proof,
    Times,
    Verdict,
    now,
)
from flashsmith.benchmark.peers import Peer, peers_of
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.rounds import rotated
from flashsmith.benchmark.timing import (
    INTERLEAVED,
    Clock,
    Implementation,
    Protocol,
    measure,
    num_sets,
    require_usable_gpu,
)
from flashsmith.benchmark.workload import AnyWorkload, BackwardWorkload, workload_of
from flashsmith.chooser import choose_config
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.errors import ArgumentError, FlashsmithError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    d_head_for,
    get_kernel_configs,
    serves_gradients,
)
from flashsmith.operations import BACKWARD, DEFAULT
from flashsmith.verify import Comparison


def select_implementations(kernels: str | None) -> tuple[tuple[KernelConfig, ...], bool]:
    """Returns the configs that ``kernels`` selects, and whether attention() is measured.

    If ``kernels`` is None, the environment variable KERNELS applies. The word 'ours' selects
    attention(); it may be combined with other words. Without any selection, attention() is
    measured.

    Raises SelectionError if a key is unknown.
    """
    text = env.KERNELS.raw() if kernels is None else kernels
    if text is None:
        return (), True
    words = [word.strip() for word in text.split(";")]
    others = [word for word in words if word and word != OURS]
    if not others and OURS in words:
        return (), True
    configs = get_kernel_configs(";".join(others))
    return tuple(dict.fromkeys(configs)), OURS in words


@dataclass(frozen=True)
class BenchEntry:
    """An implementation of flashsmith that is to be measured on a problem, before its tensors
    exist.

    ``config`` is None if no kernel can be chosen; ``note`` then gives the reason. ``attention``:
    whether the public function is measured, which chooses ``config`` itself: attention(), or
    attention_with_cache() for problems over a cache. If ``attention`` is false, the kernel is
    called directly. If PyTorch holds the tensors, gradients are computed by its autograd through
    attention().
    """

    name: str
    config: KernelConfig | None
    attention: bool = False
    note: str = ""

    def implementation(self, workload: AnyWorkload) -> KernelImplementation:
        """Returns the implementation with the tensors of a workload; ``config`` must not be
        None."""
        assert self.config is not None
        if isinstance(workload, BackwardWorkload):
            if workload.has_autograd:
                named = None if self.attention else self.config
                return gradient_implementation(self.name, self.config, workload, named)
        elif self.attention:
            return attention_implementation(self.config, workload, self.name)
        return replace(kernel_implementation(self.config, workload), name=self.name)


@dataclass(frozen=True)
class BenchPlan:
    """The subjects of a benchmark: ``configs``, ``peers`` and, if ``ours``, attention().

    ``rotation`` is the index of the implementation that is measured first on each problem. The
    remaining implementations follow in cyclic order.
    """

    problems: tuple[Problem, ...]
    configs: tuple[KernelConfig, ...] = ()
    ours: bool = False
    peers: tuple[Peer, ...] = ()
    protocol: Protocol = INTERLEAVED
    seed: int = 0
    rotation: int = 0

    def check(self) -> None:
        """Raises ArgumentError if there are no problems or no implementations, or if no config
        serves any problem."""
        if not self.problems:
            raise ArgumentError("problems: none; give at least one")
        if not (self.configs or self.ours or self.peers):
            raise ArgumentError("kernels: none, and no peers; give at least one")
        unserved = [cfg for cfg in self.configs if not any(serves(cfg, p) for p in self.problems)]
        if self.configs and len(unserved) == len(self.configs) and not self.ours:
            raise ArgumentError(
                f"kernels: none of the {len(unserved)} serves any of the problems (the first is "
                f"{self.configs[0]}, the first problem '{self.problems[0]}'); "
                "give --d_heads and --dtypes that the kernels support"
            )

    def entries(self, problem: Problem, device: DeviceSpec) -> Iterator[BenchEntry]:
        """The flashsmith implementations that serve a problem."""
        for name, choose in _choosers(problem).items() if self.ours else ():
            try:
                chosen = choose(problem, device)
            except FlashsmithError as error:
                yield BenchEntry(name, None, note=str(error))
            else:
                yield BenchEntry(name, chosen, attention=True)
        yield from (BenchEntry(str(cfg), cfg) for cfg in self.configs if serves(cfg, problem))

    def uses(self, device: DeviceSpec) -> Iterator[KernelUse]:
        """Yields the kernels to build, with their problems. A backward problem also needs the
        forward kernel that computes its o and lse."""
        for problem in self.problems:
            for entry in self.entries(problem, device):
                if entry.config is not None:
                    yield entry.config, problem
            if problem.operation == BACKWARD.name:
                forward = problem.of_operation(DEFAULT)
                with suppress(FlashsmithError):  # Reported when this problem is measured
                    yield choose_config(forward, device), forward

    def peers_of(self, problem: Problem) -> tuple[Peer, ...]:
        """The implementations among ``peers`` that apply to a problem; see ``peers.peers_of``."""
        return peers_of(problem, self.peers)


def _choosers(problem: Problem) -> dict[str, Callable[[Problem, DeviceSpec], KernelConfig]]:
    """Returns the names of the public functions that compute a problem; each maps to the function
    that chooses the kernel."""
    if problem.computed.has_pages:
        return {OURS: CHOOSERS["invariant"], OURS_FREE: CHOOSERS["free"]}
    return {OURS: choose_config} if problem.operation in (DEFAULT, BACKWARD.name) else {}


def serves(cfg: KernelConfig, problem: Problem) -> bool:
    """Whether the kernel of a config is for the problem's operation, gradients, dtype and head
    dimension."""
    if cfg.family.operation != problem.operation or cfg.dtype != problem.dtype:
        return False
    if not serves_gradients(cfg, problem):
        return False
    return cfg.head_dims == d_head_for(problem)


MakeWorkload = Callable[[Problem, int], AnyWorkload]
_Makers = dict[str, Callable[[Any], ProvableImplementation]]


@dataclass
class BenchState:
    """The state shared by all problems of a benchmark."""

    plan: BenchPlan
    device: DeviceSpec
    kernels: BuiltKernels
    environment: Environment
    clock: Clock
    telemetry: Telemetry
    make_workload: MakeWorkload = workload_of


def run_bench(
    plan: BenchPlan,
    device: DeviceSpec,
    *,
    clock: Clock,
    reporter: ProgressReporter,
    environment: Environment | None = None,
    telemetry: Telemetry | None = None,
    write: Callable[[Measurement], None] = lambda row: None,
    make_workload: MakeWorkload = workload_of,
) -> list[Measurement]:
    """Measures all problems in order and returns the rows.

    The rows of a problem are passed to ``write`` as soon as the problem is done.

    Kernels that are wrong or cannot run, and peers that are absent, get rows too.

    Raises ArgumentError if the plan has no implementations, LaunchError if a kernel has left the
    GPU unusable to this process, and any error of building.
    """
    plan.check()
    environment, telemetry = environment or Environment.collect(), telemetry or Telemetry()
    bench = BenchState(
        plan, device, BuiltKernels(device), environment, clock, telemetry, make_workload
    )
    bench.kernels.build(plan.uses(device), reporter.build)
    if telemetry.absence:
        reporter.say(telemetry.absence)
    rows: list[Measurement] = []
    for done, problem in enumerate(plan.problems):
        reporter.step(f"measuring {problem}", done, len(plan.problems))
        point = _Point(bench, problem)
        try:
            made = point.run()
        except BaseException:
            # The rows made so far are written even if the run is interrupted.
            for row in point.rows:
                write(row)
            raise
        for row in made:
            write(row)
        rows += made
        reporter.say(summary(problem, made))
    return rows


def summary(problem: Problem, rows: Sequence[Measurement]) -> str:
    """Returns one line that summarises the rows of a problem, with the fastest implementation
    first."""
    timed = sorted((row for row in rows if row.tflops), key=lambda row: -(row.tflops or 0))
    said = [
        f"{row.implementation} {row.tb_per_s:.2f} TB/s"
        if row.is_memory_bound
        else f"{row.implementation} {row.tflops:.0f}"
        for row in timed
    ]
    wrong = [f"{row.implementation}: {row.verdict}" for row in rows if row.is_failure]
    return f"  {problem}: " + (", ".join(said + wrong) or "nothing could be measured")


@dataclass
class _Point:
    """The measurement of one problem.

    ``rows`` are the problem's rows so far; their times are filled in when all implementations are
    timed.
    """

    bench: BenchState
    problem: Problem
    rows: list[Measurement] = field(default_factory=list)
    # The comparison of flashsmith's first correct implementation; the errors of peers are compared
    # with its errors.
    ours: Comparison | None = None

    @property
    def protocol(self) -> Protocol:
        """The plan's protocol, changed to use CUDA graphs if the problem has a small cache."""
        protocol = self.bench.plan.protocol
        if not self.problem.computed.has_pages or not self.bench.clock.can_capture:
            return protocol
        return protocol.over_cache(self.problem.computed.bytes(self.problem))

    def run(self) -> list[Measurement]:
        bench = self.bench
        entries = list(bench.plan.entries(self.problem, bench.device))
        peers = bench.plan.peers_of(self.problem)
        try:
            workload = bench.make_workload(self.problem, bench.plan.seed)
        except ArgumentError:
            raise
        except Exception as error:  # PyTorch raises its own errors when memory runs out
            why = f"the tensors cannot be made: {_first_line(error)}"
            for entry in entries:
                self._add(entry.name, "ours", Proof("error", why), *self._kernel(entry))
            for peer in peers:
                self._add(peer.name, "peer", Proof("absent", why))
            self._check_gpu("making the tensors")
            return self.rows
        right = [found for entry in entries if (found := self._prove_ours(entry, workload))]
        right += [found for peer in peers if (found := self._prove_peer(peer, workload))]
        timed: list[Implementation] = [*rotated(right, bench.plan.rotation)]
        try:
            if self.protocol.in_graphs:
                makers: _Makers = {entry.name: entry.implementation for entry in entries}
                makers |= {peer.name: peer.prepare for peer in peers}
                timed = self._replays(timed, makers, workload)
            samples = measure(timed, self.protocol, clock=bench.clock, telemetry=bench.telemetry)
        except Exception as error:  # This includes PyTorch's own errors
            names = [found.name for found in timed]
            return self._untimed(names, f"timed together: {_first_line(error)}")
        self.rows = [
            replace(row, **asdict(Times.of(samples[row.implementation], self.problem)))
            if row.implementation in samples
            else row
            for row in self.rows
        ]
        return self.rows

    def _replays(
        self, right: Sequence[Implementation], makers: _Makers, workload: AnyWorkload
    ) -> list[Implementation]:
        """Captures the calls of each implementation in a CUDA graph, and returns the
        implementations that can be timed.

        The calls rotate through several sets of tensors (the tensors of ``workload``, and further
        sets), which all implementations share.

        An implementation is not timed if its calls cannot be captured or if a replay gives a wrong
        output.
        """
        bench, sets = self.bench, [workload]
        for number in range(1, num_sets(self.problem.computed.bytes(self.problem))):
            sets.append(bench.make_workload(self.problem, bench.plan.seed + number))
        found: list[Implementation] = []
        peers = {peer.name for peer in bench.plan.peers_of(self.problem)}
        for name in [implementation.name for implementation in right]:
            try:
                made = [makers[name](each) for each in sets]
                replay, output = captured(name, made, bench.clock, workload.memory)
                proof = Proof.of(self._check(workload, output, is_peer=name in peers))
            except Exception as error:  # This includes PyTorch's own errors
                self._untimed([name], f"in a graph: {_first_line(error)}")
                continue
            if proof.verdict == "pass":
                found.append(replay)
            else:
                self._untimed([name], f"in a graph: {proof.note}", verdict="fail")
        return found

    def _untimed(
        self, names: list[str], why: str, verdict: Verdict | None = None
    ) -> list[Measurement]:
        """Marks the rows of ``names`` as failed, because timing them raised an error although their
        outputs were correct. When several implementations are timed together, it is unknown which
        one caused the error."""
        self._check_gpu(f"one of {', '.join(names)}")
        self.rows = [
            replace(
                row,
                verdict=verdict or ("error" if row.kind == "ours" else "absent"),
                note=why,
            )
            if row.implementation in names
            else row
            for row in self.rows
        ]
        return self.rows

    def _prove_ours(
        self, entry: BenchEntry, workload: AnyWorkload
    ) -> ProvableImplementation | None:
        """Adds the row of a flashsmith implementation.

        Returns the implementation, or None if its output is wrong.
        """
        kernel = self._kernel(entry)
        wrong = entry.note if entry.config is None else self.bench.kernels.illegality(entry.config)
        if entry.config is None or wrong:
            self._add(entry.name, "ours", Proof("error", wrong or ""), *kernel)
            return None
        try:
            made = entry.implementation(workload)
            comparison = workload.check(made.output())
            proof = Proof.of(comparison, note=made.note)
        except Exception as error:  # PyTorch raises its own errors when a kernel has failed
            self._add(entry.name, "ours", Proof("error", _first_line(error)), *kernel)
            self._check_gpu(entry.name)
            return None
        self._add(entry.name, "ours", proof, *kernel)
        if proof.verdict != "pass":
            return None
        self.ours = self.ours or comparison
        return made

    def _prove_peer(self, peer: Peer, workload: AnyWorkload) -> ProvableImplementation | None:
        """Adds the row of a peer.

        Returns the peer's implementation, or None if its output is wrong. Any exception makes the
        peer absent.
        """
        if (absence := peer.absence(self.problem)) is not None:
            self._add(peer.name, "peer", Proof("absent", absence))
            return None
        try:
            made = peer.prepare(workload)
            comparison = self._check(workload, made.output(), is_peer=True)
            proof = Proof.of(comparison, note=peer.version())
        except Exception as error:
            self._add(peer.name, "peer", Proof("absent", f"refuses: {_first_line(error)}"))
            self._check_gpu(peer.name)
            return None
        self._add(peer.name, "peer", proof)
        return made if proof.verdict == "pass" else None

    def _check(self, workload: AnyWorkload, output: Any, *, is_peer: bool) -> Comparison:
        """Checks an output. The error of a peer is compared with the error of flashsmith's output
        if flashsmith's output is correct."""
        if is_peer and self.ours is not None:
            return workload.check(output, ours=self.ours)
        return workload.check(output)

    def _kernel(self, entry: BenchEntry) -> tuple[Mapping[str, Any] | Part | None, ...]:
        """The columns of a row that describe the entry's kernel: its config and its resources."""
        if entry.config is None:
            return ()
        named = {"family": entry.config.FAMILY, "config": str(entry.config)}
        return named, self.bench.kernels.facts(entry.config, self.problem)

    def _add(
        self, name: str, kind: Kind, proof: Proof, *parts: Mapping[str, Any] | Part | None
    ) -> None:
        made = Measurement.of(
            name,
            kind,
            self.problem,
            proof,
            *parts,
            self.bench.environment,
            protocol=str(self.protocol),
            time=now(),
        )
        self.rows.append(made)

    def _check_gpu(self, culprit: str) -> None:
        """Raises LaunchError if the failure has left the GPU unusable."""
        require_usable_gpu(self.bench.clock, f"{culprit} on '{self.problem}'")


def _first_line(error: Exception) -> str:
    text = str(error).strip() or traceback.format_exception_only(error)[-1].strip()
    return text.splitlines()[0]
