"""`flashsmith progression`: an ablation, in which each kernel is compared with the one before.

Costs and instruction counts are the same as in `flashsmith run`, from the emulator. Times and
shares of FlashAttention-2's speed are measured as by `flashsmith bench`, which needs a GPU. The
ablation is stored as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from flashsmith.benchmark.bench import BenchPlan, run_bench
from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.peers import BASELINE, get_peers
from flashsmith.benchmark.problems import default_problem
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.records import LARGEST, read_record
from flashsmith.benchmark.run import Options, Report, run_kernels
from flashsmith.benchmark.tasks import EMULATED, default_size
from flashsmith.benchmark.timing import CudaEvents
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig
from flashsmith.pluralize import pluralize
from flashsmith.printable import quoted
from flashsmith.runtime.target import Target

KIND = "flashsmith progression"
SCHEMA = 1
# The maximum number of steps; with more, the plot would be unreadable.
MOST_STEPS = 200
# The shortest time that is accepted, in milliseconds. No launch is shorter, and the limit keeps the
# ratio of any two accepted times finite.
SHORTEST = 1e-12


@dataclass(frozen=True)
class StepTime:
    """Statistics of the times of one step, in milliseconds; `peer_ms` is the time of the peer in
    the same run.

    `tflops` counts 4 b h s_q s_k d FLOP, as if there were no mask. `spread` is the interquartile
    range divided by the median.
    """

    ms: float
    best_ms: float
    spread: float
    tflops: float
    peer_ms: float | None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0.0 if name == "spread" else SHORTEST
            if value is not None and not least <= value <= LARGEST:
                raise ValueError(f"{name} is {value:g}, not finite and above 0")

    @property
    def share(self) -> float | None:
        """The throughput of the kernel divided by that of the peer; None without a peer."""
        return None if self.peer_ms is None else self.peer_ms / self.ms


@dataclass(frozen=True, kw_only=True)
class Step(KernelFacts):
    """One kernel of the ablation, with its facts.

    `problems` lists what is wrong with the kernel; it is empty if the kernel is correct.
    `counted_seq` is the length at which instructions and conflicts were counted; it is 0 in older
    files, which had a single length.
    """

    config: str
    family: str
    problems: tuple[str, ...]
    time: StepTime | None
    counted_seq: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < 0:
                raise ValueError(f"{name} is {value}, below 0")

    @property
    def ok(self) -> bool:
        """Whether the kernel's output is correct."""
        return not self.problems


@dataclass(frozen=True)
class Ablation:
    """All steps of an ablation.

    `counted` is the problem on which instructions and conflicts were counted. `timed` is the
    problem that was timed; None without a GPU. `peer` is the name of the implementation with which
    speeds are compared; if there is no such implementation, `peer_note` says why. `environment` has
    the same facts as a row of a benchmark: GPU, driver, versions, revision.
    """

    arch: str
    device: str
    counted: str
    timed: str | None
    peer: str
    peer_note: str
    protocol: str
    environment: dict[str, Any]
    steps: tuple[Step, ...]

    @property
    def ok(self) -> bool:
        """Whether every kernel's output is correct."""
        return all(step.ok for step in self.steps)

    @property
    def has_times(self) -> bool:
        """Whether any step was timed."""
        return any(step.time for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ablation:
        """Reads an ablation from the JSON that to_json() writes.

        Raises ArgumentError if the schema is a different one, or if a field is missing or unusable.
        """
        if data.get("kind") != KIND or data.get("schema") != SCHEMA:
            raise ArgumentError(
                f"kind={quoted(data.get('kind'))}, schema={quoted(data.get('schema'))}: this "
                "version reads "
                f"{KIND!r}, schema {SCHEMA}; run 'flashsmith progression' again"
            )
        listed = data.get("steps")
        if not isinstance(listed, list) or not 0 < len(listed) <= MOST_STEPS:
            raise ArgumentError(f"the ablation: steps must be a list of 1 to {MOST_STEPS}")
        try:
            return read_record(cls, data)
        except ValueError as error:
            raise ArgumentError(f"the ablation: {error}") from error


# --- differences ----------------------------------------------------------------------------------

Costs = Mapping[str, float | None]
Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Change:
    """The differences between two steps; unchanged values are left out.

    `conflicts` and `costs` (registers, spilled bytes, ...) are pairs (before, after).
    `instructions` maps each class to the number of warp instructions executed after the step minus
    the number before. `speedup` is the time before divided by the time after; None unless both
    steps were timed.
    """

    instructions: dict[str, int]
    instructions_ratio: float | None
    conflicts: dict[str, Pair]
    costs: dict[str, Pair]
    speedup: float | None


COSTS = {
    "registers": "registers",
    "spill_store_bytes": "spilled bytes",
    "smem_bytes": "smem bytes",
    "ctas_per_sm": "CTAs/SM",
}


def change_between(before: Step, after: Step) -> Change:
    """Returns the differences between one step and the next.

    Instruction counts are compared only if both were counted at the same length.
    """
    same_length = before.counted_seq == after.counted_seq
    return Change(
        instructions=_differences(before.instructions, after.instructions)
        if before.instructions and after.instructions and same_length
        else {},
        instructions_ratio=_ratio(after.total_instructions, before.total_instructions)
        if same_length
        else None,
        conflicts=_pairs(_rounded(before.conflicts), _rounded(after.conflicts)),
        costs=_pairs(
            {text: getattr(before, name) for name, text in COSTS.items()},
            {text: getattr(after, name) for name, text in COSTS.items()},
        ),
        speedup=before.time.ms / after.time.ms if before.time and after.time else None,
    )


def _pairs(before: Costs, after: Costs) -> dict[str, Pair]:
    names = [*before, *(name for name in after if name not in before)]
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _rounded(conflicts: dict[str, float | None]) -> dict[str, float | None]:
    # Tables show one decimal. For a smaller difference, they would show '1.0 -> 1.0'.
    return {use: None if factor is None else round(factor, 1) for use, factor in conflicts.items()}


def _differences(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """The differences of counts by class, the largest first, without unchanged classes."""
    classes = {**before, **after}
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in classes}
    changed = [(name, count) for name, count in counts.items() if count]
    return dict(sorted(changed, key=lambda item: (-abs(item[1]), item[0])))


def _ratio(after: int | None, before: int | None) -> float | None:
    return after / before if after is not None and before else None


# The maximum number of classes that a change names; the other classes are summed up.
_CLASSES_NAMED = 4


def step_names(ablation: Ablation) -> list[str]:
    """Returns a short name for each step: the short form of the first step, and the changes of
    every other step."""
    configs = [step.config for step in ablation.steps]
    return configs[:1] + [
        config_words(before, after) or after for before, after in pairwise(configs)
    ]


def config_words(before: str, after: str) -> str:
    """Returns the differences between two short forms: '+ swizzled', '- buffer', 'stages_2 ->
    stages_3'.

    Two words that are the same up to their first digit are values of one knob, and are written as
    'old -> new'. The result is empty if nothing differs.
    """
    (old_tile, old), (new_tile, new) = _parts(before), _parts(after)
    phrases = [f"{old_tile} -> {new_tile}"] if old_tile != new_tile else []
    gone = {_stem(word): word for word in old if word not in new}
    for word in new:
        if word not in old:
            was = gone.pop(_stem(word), None)
            phrases.append(f"+ {word}" if was is None else f"{was} -> {word}")
    return ", ".join(phrases + [f"- {word}" for word in gone.values()])


def _parts(config: str) -> tuple[str, list[str]]:
    """The tile and the words of a short form."""
    tile, _, words = config.rpartition(": ")
    return tile, words.split("+")


def _stem(word: str) -> str:
    return re.match(r"\D*", word).group()  # type: ignore[union-attr]


def change_words(change: Change) -> list[str]:
    """A phrase for the change in time and for each kind of difference; empty if nothing changed."""
    phrases = []
    if change.speedup is not None:
        phrases.append(f"time x {1 / change.speedup:.2f}")
    phrases += [f"{name} {_arrow(pair)}" for name, pair in change.costs.items()]
    phrases += [f"{use} conflicts {_arrow(pair)}" for use, pair in change.conflicts.items()]
    if change.instructions:
        phrases.append(_instructions(change))
    return phrases


def _instructions(change: Change) -> str:
    total = sum(change.instructions.values())
    share = "" if change.instructions_ratio is None else f" ({change.instructions_ratio - 1:+.1%})"
    named = list(change.instructions.items())
    rest = sum(count for _, count in named[_CLASSES_NAMED:])
    parts = [f"{name} {count:+,}" for name, count in named[:_CLASSES_NAMED]]
    if len(named) > _CLASSES_NAMED:
        parts.append(f"others {rest:+,}")
    return f"instructions {total:+,}{share}: {', '.join(parts)}"


def _arrow(pair: Pair) -> str:
    before, after = pair
    return f"{_plain(before)} -> {_plain(after)}"


def _plain(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def conflict_words(step: Step) -> str:
    """The uses of shared memory that have bank conflicts, such as 'ldmatrix x8, O st x8'; 'none' if
    there are none."""
    found = [f"{use} x{factor:.3g}" for use, factor in step.conflicts.items() if _bad(factor)]
    return ", ".join(found) or "none"


def _bad(factor: float | None) -> bool:
    return factor is not None and factor > 1.05


# --- running --------------------------------------------------------------------------------------

NO_TIMES = "no times: a GPU is needed, and this run used the emulator"


def run_ablation(
    configs: Sequence[KernelConfig],
    target: Target,
    *,
    seq: int = 4096,
    seed: int = 0,
    reporter: ProgressReporter,
    write: Callable[[Measurement], None] | None = None,
) -> Ablation:
    """Runs the ablation of `configs`, in this order.

    On a GPU the kernels are also timed at length `seq`, together with the baseline. Kernels of the
    same dtype are interleaved. `write` receives every measurement.

    A kernel that is wrong or does not finish becomes a step with `problems`. Raises
    IllegalConfigError, and any error of building and timing.
    """
    on_gpu = target.backend == "gpu"
    emulator = replace(target, backend="emulator")
    report = run_kernels(
        configs,
        emulator,
        task=default_size(emulator),
        options=Options(seed=seed),
        reporter=reporter,
        write=None if on_gpu else write,
    )
    if not on_gpu:
        return ablation_of(report, ())
    reporter.say(f"timing {pluralize(len(configs), 'kernel')}")
    kinds = dict.fromkeys((cfg.d_head, cfg.dtype) for cfg in configs)
    problems = tuple(default_problem(d, seq, dtype) for d, dtype in kinds)
    rows = run_bench(
        BenchPlan(problems, tuple(configs), peers=get_peers(BASELINE), seed=seed),
        target.device,
        clock=CudaEvents(),
        reporter=reporter,
        write=write or (lambda row: None),
    )
    return ablation_of(report, rows)


def ablation_of(report: Report, rows: Sequence[Measurement]) -> Ablation:
    """Returns the ablation of a run, with the times in `rows`.

    All steps with the same problem get the same peer time.
    """
    peers = [row for row in rows if row.kind == "peer"]
    gaps = [f"no share of {row.implementation}: {_why(row)}" for row in peers if row.ms is None]
    steps = tuple(
        Step(
            config=str(run.config),
            family=run.config.FAMILY,
            problems=(
                *run.problems,
                *(f"on the GPU: {_why(row)}" for row in own if row.verdict != "pass"),
            ),
            time=next((_step_time(row, peers) for row in own if row.ms is not None), None),
            counted_seq=run.emulated.seq_q,
            **vars(run.facts),
        )
        for run in report.rows
        for own in [[row for row in rows if row.config == str(run.config)]]
    )
    lengths = sorted({step.counted_seq for step in steps})
    counted_seq = " to ".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
    return Ablation(
        arch=report.target.arch,
        device=report.target.device.name,
        counted=f"batch {EMULATED.batch}, seq {counted_seq}, heads {EMULATED.heads}",
        timed="; ".join(dict.fromkeys(str(row.problem) for row in rows)) or None,
        peer=peers[0].implementation if peers else "",
        peer_note="; ".join(dict.fromkeys(gaps)) if rows else NO_TIMES,
        protocol=rows[0].protocol if rows else "",
        environment=asdict(rows[0].environment) if rows else {},
        steps=steps,
    )


def _why(row: Measurement) -> str:
    return row.note or row.verdict


def _step_time(row: Measurement, peers: Sequence[Measurement]) -> StepTime:
    ms = row.ms or 0.0
    peer_ms = next((peer.ms for peer in peers if peer.problem == row.problem), None)
    return StepTime(ms, row.best_ms or ms, row.spread or 0.0, row.tflops or 0.0, peer_ms)
