"""Times the ladder's kernels on the GPU, with FlashAttention-2 in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flashsmith.benchmark.bench import BenchPlan, run_bench
from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.peers import BASELINE, Peer, get_peers
from flashsmith.benchmark.problems import default_problem
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.progression.climb import Times
from flashsmith.benchmark.progression.ladder import StepTime
from flashsmith.benchmark.timing import INTERLEAVED, Clock, CudaEvents, Protocol
from flashsmith.benchmark.workload import Workload
from flashsmith.families import DeviceSpec, KernelConfig, Problem


@dataclass(frozen=True)
class LadderTimer:
    """Times kernels at a length, the yardstick's shapes and batch; all of a dtype take turns.

    `clock` None is GPU 0's; then calling it raises LaunchError where there is none.
    """

    device: DeviceSpec
    seq: int
    narrator: Narrator
    seed: int = 0
    protocol: Protocol = INTERLEAVED
    peers: tuple[Peer, ...] = get_peers(BASELINE)
    clock: Clock | None = None
    telemetry: Telemetry | None = None
    environment: Environment | None = None
    make_workload: Callable[[Problem, int], Workload] = Workload

    def problems(self, configs: Iterable[KernelConfig]) -> tuple[Problem, ...]:
        """One problem for each head dimension and dtype."""
        kinds = dict.fromkeys((cfg.d_head, cfg.dtype) for cfg in configs)
        return tuple(default_problem(d, self.seq, dtype) for d, dtype in kinds)

    def __call__(self, configs: Sequence[KernelConfig]) -> Times:
        """What was measured of each config, or was wrong with it."""
        problems = self.problems(configs)
        rows = run_bench(
            BenchPlan(
                problems, tuple(configs), peers=self.peers, protocol=self.protocol, seed=self.seed
            ),
            self.device,
            environment=self.environment or Environment.collect(),
            clock=self.clock or CudaEvents(),
            telemetry=self.telemetry or Telemetry(),
            narrator=self.narrator,
            make_workload=self.make_workload,
        )
        return times_of(rows, problems, str(self.protocol))


def times_of(rows: Sequence[Measurement], problems: Sequence[Problem], protocol: str) -> Times:
    """The rows as the ladder's times: a peer's time goes to the steps of its problem."""
    peers = [row for row in rows if row.kind == "peer"]
    peer_ms = {row.problem: row.ms for row in peers if row.ms is not None}
    ours = [row for row in rows if row.kind == "ours"]
    return Times(
        problem="; ".join(map(str, problems)),
        protocol=protocol,
        peer=peers[0].contender if peers else "",
        peer_note="; ".join(dict.fromkeys(map(_gap, filter(_is_gap, peers)))),
        by_config={
            row.config: StepTime(
                row.ms, row.best_ms or row.ms, row.spread or 0.0, row.tflops or 0.0,
                peer_ms.get(row.problem),
            )
            for row in ours
            if row.ms is not None
        },
        problems={
            row.config: [f"on the GPU: {row.note or row.verdict}"]
            for row in ours
            if row.verdict != "pass"
        },
    )  # fmt: skip


def _is_gap(row: Measurement) -> bool:
    return row.ms is None


def _gap(row: Measurement) -> str:
    return f"no share of {row.contender}: {row.note or row.verdict}"
