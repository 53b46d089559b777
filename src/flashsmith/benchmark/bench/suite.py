"""run_bench(): problem by problem, every contender proven and then timed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flashsmith.benchmark.bench.kernels import BuiltKernels
from flashsmith.benchmark.bench.plan import BenchPlan, Entrant
from flashsmith.benchmark.contenders import (
    JudgedContender,
    attention_contender,
    kernel_contender,
)
from flashsmith.benchmark.peers import Peer
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.rows import BenchRow, now, problem_columns
from flashsmith.benchmark.timing import Clock, Environment, Samples, Telemetry, measure
from flashsmith.benchmark.usable_gpu import require_usable_gpu
from flashsmith.benchmark.workload import AnyWorkload, workload_of
from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, Problem

MakeWorkload = Callable[[Problem, int], AnyWorkload]


@dataclass
class Bench:
    """What the cells share."""

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
    environment: Environment,
    clock: Clock,
    telemetry: Telemetry,
    narrator: Narrator,
    write: Callable[[BenchRow], None] = lambda row: None,
    make_workload: MakeWorkload = workload_of,
) -> list[BenchRow]:
    """The rows of all cells, in the order of the problems, each given to ``write`` as it is made.

    A kernel that is wrong or cannot run is a row, and so is a peer that is absent.

    Raises ArgumentError for a plan without contenders, what building raises, and LaunchError when a
    kernel has left the GPU unusable to this process.
    """
    plan.check()
    bench = Bench(plan, device, BuiltKernels(device), environment, clock, telemetry, make_workload)
    uses = [
        (entrant.config, problem)
        for problem in plan.problems
        for entrant in plan.entrants(problem, device)
        if entrant.config is not None
    ]
    bench.kernels.build(uses, narrator.build)
    if telemetry.absence:
        narrator.say(telemetry.absence)
    rows: list[BenchRow] = []
    for done, problem in enumerate(plan.problems):
        narrator.step(f"measuring {problem}", done, len(plan.problems))
        cell = _Cell(bench, problem)
        try:
            made = cell.run()
        except BaseException:
            # What is known of the cell is kept, also when somebody stops the run.
            for row in cell.rows:
                write(row)
            raise
        for row in made:
            write(row)
        rows += made
        narrator.say(summary(problem, made))
    return rows


def summary(problem: Problem, rows: Sequence[BenchRow]) -> str:
    """A cell in one line, the quickest first."""
    timed = sorted((row for row in rows if row.tflops), key=lambda row: -(row.tflops or 0))
    said = [f"{row.contender} {row.tflops:.0f}" for row in timed]
    wrong = [f"{row.contender}: {row.verdict}" for row in rows if row.verdict in ("fail", "error")]
    return f"  {problem}: " + (", ".join(said + wrong) or "nobody could be measured")


@dataclass
class _Cell:
    """One problem. ``rows`` are those made so far, without times until all are timed."""

    bench: Bench
    problem: Problem
    rows: list[BenchRow] = field(default_factory=list)

    def run(self) -> list[BenchRow]:
        bench = self.bench
        try:
            workload = bench.make_workload(self.problem, bench.plan.seed)
        except ArgumentError:
            raise
        except Exception as error:  # PyTorch says with errors of its own that memory ran out
            return self._nobody(f"the tensors cannot be made: {_first_line(error)}")
        contenders: list[JudgedContender] = []
        for entrant in bench.plan.entrants(self.problem, bench.device):
            contenders += self._enter_ours(entrant, workload)
        for peer in bench.plan.peers_of(self.problem):
            contenders += self._enter_peer(peer, workload)
        first = bench.plan.rotation % max(1, len(contenders))
        contenders = [*contenders[first:], *contenders[:first]]
        try:
            samples = measure(
                contenders, bench.plan.protocol, clock=bench.clock, telemetry=bench.telemetry
            )
        except Exception as error:  # PyTorch's own errors too
            return self._untimed([c.name for c in contenders], _first_line(error))
        self.rows = [
            self._timed(row, samples[row.contender]) if row.contender in samples else row
            for row in self.rows
        ]
        return self.rows

    def _nobody(self, why: str) -> list[BenchRow]:
        """A row for each who would have taken part."""
        for entrant in self.bench.plan.entrants(self.problem, self.bench.device):
            columns: dict[str, Any] = {"family": "", "config": ""}
            if entrant.config is not None:
                columns = self.bench.kernels.columns(entrant.config, self.problem)
            self._add(entrant.name, "ours", "error", **columns, note=why)
        for peer in self.bench.plan.peers_of(self.problem):
            self._add(peer.name, "peer", "absent", family="", config="", note=why)
        self._check_gpu("making the tensors")
        return self.rows

    def _untimed(self, names: list[str], why: str) -> list[BenchRow]:
        """The rows of contenders whose outputs are right and whose timing failed: who it was that
        failed is not known."""
        self._check_gpu(f"one of {', '.join(names)}")
        self.rows = [
            replace(
                row,
                verdict="error" if row.kind == "ours" else "absent",
                note=f"timed together: {why}",
            )
            if row.contender in names
            else row
            for row in self.rows
        ]
        return self.rows

    def _enter_ours(self, entrant: Entrant, workload: AnyWorkload) -> list[JudgedContender]:
        kernels = self.bench.kernels
        if entrant.config is None:
            self._add(entrant.name, "ours", "error", family="", config="", note=entrant.note)
            return []
        columns = kernels.columns(entrant.config, self.problem)
        illegal = kernels.illegality(entrant.config)
        if illegal is not None:
            self._add(entrant.name, "ours", "error", **columns, note=illegal)
            return []
        try:
            make = attention_contender if entrant.attention else kernel_contender
            return self._judge(make(entrant.config, workload), workload, "ours", columns)
        except Exception as error:  # PyTorch says with errors of its own that a kernel failed
            self._add(entrant.name, "ours", "error", **columns, note=_first_line(error))
            self._check_gpu(entrant.name)
            return []

    def _enter_peer(self, peer: Peer, workload: AnyWorkload) -> list[JudgedContender]:
        columns: dict[str, Any] = {"family": "", "config": ""}
        absence = peer.absence(self.problem)
        if absence is not None:
            self._add(peer.name, "peer", "absent", **columns, note=absence)
            return []
        try:
            contender = peer.prepare(workload)
            columns["note"] = peer.version()
            return self._judge(contender, workload, "peer", columns)
        except Exception as error:  # whatever a peer raises, it is a peer that does not take part
            columns["note"] = f"refuses: {_first_line(error)}"
            self._add(peer.name, "peer", "absent", **columns)
            self._check_gpu(peer.name)
            return []

    def _judge(
        self, contender: JudgedContender, workload: AnyWorkload, kind: str, columns: dict[str, Any]
    ) -> list[JudgedContender]:
        """The contender if its output is right; its row says so in either case."""
        found = workload.judge(contender.output())
        columns = columns | {
            "max_error": found.max_error,
            "error_bound": found.bound,
            "rel_l2": found.rel_l2,
        }
        if not found.ok:
            columns["note"] = "; ".join(found.reasons)
        self._add(contender.name, kind, "pass" if found.ok else "fail", **columns)
        return [contender] if found.ok else []

    def _add(self, contender: str, kind: str, verdict: str, **columns: Any) -> None:
        known: dict[str, Any] = {
            "contender": contender,
            "kind": kind,
            "verdict": verdict,
            "protocol": str(self.bench.plan.protocol),
            "time": now(),
            **problem_columns(self.problem),
            **asdict(self.bench.environment),
        }
        self.rows.append(BenchRow(**known, **columns))

    def _timed(self, row: BenchRow, samples: Samples) -> BenchRow:
        return replace(
            row,
            ms=samples.median_ms,
            best_ms=samples.best_ms,
            spread=samples.spread,
            tflops=self.problem.attn_flop() / samples.median_ms / 1e9,
            sm_clock_mhz=samples.sm_clock_mhz,
            power_w=samples.power_w,
        )

    def _check_gpu(self, culprit: str) -> None:
        """Raises LaunchError when what failed has taken the GPU with it."""
        require_usable_gpu(self.bench.clock, f"{culprit} on '{self.problem}'")


def _first_line(error: Exception) -> str:
    text = str(error).strip() or traceback.format_exception_only(error)[-1].strip()
    return text.splitlines()[0]
