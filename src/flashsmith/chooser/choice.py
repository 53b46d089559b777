"""Chooses the kernel that serves a problem on a device, for attention(), for `flashsmith choose`
and for builds ahead of time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from flashsmith.builder import KernelLibrary, Progress, count_noted, library_for, note_slow
from flashsmith.chooser.batch_invariant import adapt_to_queries, without_batch
from flashsmith.chooser.cost_model import estimate
from flashsmith.chooser.evidence import (
    GAIN_UNMEASURED,
    Evidence,
    EvidenceKind,
    ExpectedTime,
    fastest_over_cache,
    gather,
)
from flashsmith.chooser.reasons import caveats, passed_over
from flashsmith.chooser.winners import WinnersTable, staleness
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    KNOWN_DEVICES,
    DeviceSpec,
    KernelConfig,
    Problem,
    d_head_for,
    device_spec,
)
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.order import order_name
from flashsmith.paused_collection import paused_collection
from flashsmith.printable import printable
from flashsmith.runtime import forget_cached_launches
from flashsmith.runtime.target import choose_target

_SHOWN = 4


@dataclass(frozen=True)
class RunnerUp:
    """A config that was considered but not chosen, with its expected time."""

    config: KernelConfig
    family: str
    ms: float

    def to_json(self) -> dict[str, Any]:
        return {"config": str(self.config), "family": self.family, "ms": self.ms}


@dataclass(frozen=True)
class Choice:
    """The kernel that was chosen for a problem on a device, and the reason.

    evidence: what the choice is based on: a measurement in the problem's bucket of sizes ('table'),
        in another bucket ('nearest') or for another mask, layout, dtype or GPU ('related'); the
        cost model, because there are no measurements ('cost model'); or neither ('offered').
    why: the evidence as a sentence.
    ms: the expected time; 0 if unknown.
    tflops: the problem's attn_flop() per expected time, in TFLOP/s; 0 if the time is unknown.
    repeatable: if the bits of the chosen config vary between runs, the best config whose bits do
        not vary. None if they do not vary, or if there is no such config.
    runners_up: the configs that were not chosen, fastest first.
    passed_over: for each family that was not chosen, the reason why not.
    notes: why the kernel is slow on this problem, and which table entries were ignored.
    """

    problem: Problem
    device: DeviceSpec
    config: KernelConfig
    evidence: EvidenceKind
    why: str
    ms: float
    runners_up: tuple[RunnerUp, ...]
    passed_over: Mapping[str, str]
    notes: tuple[str, ...]
    repeatable: RunnerUp | None = None

    @property
    def family(self) -> str:
        """The family of the chosen config."""
        return str(self.config.FAMILY)

    @property
    def order(self) -> str:
        """The name of the order in which rows are computed: 'canonical-1' or 'its own'; '' for
        operations other than attention."""
        has_order = self.config.family.order(self.config, self.device.arch) is not None
        return order_name(self.config) if has_order else ""

    @property
    def tflops(self) -> float:
        """The expected TFLOP/s, from 4 b h s_q s_k d FLOP, or half of that if causal."""
        return self.problem.attn_flop() / self.ms / 1e9 if self.ms else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.problem} on {self.device.name} (sm_{self.device.arch})",
            f"  kernel      {self.config}",
            f"  family      {self.family}",
            *([f"  order       {self.order}"] if self.order else []),
            f"  evidence    {self.evidence}: {self.why}",
        ]
        if self.evidence != "offered":
            lines.append(f"  expected    {_milliseconds(self.ms)}, {self.tflops:.0f} TFLOP/s")
        if "deterministic" in self.problem.computed.options:
            lines.append(f"  repeatable  {self._repeatable}")
        lines += [f"  runner-up   {self._beside(one)}" for one in self.runners_up[:_SHOWN]]
        lines += [f"  other       {family}: {why}" for family, why in self.passed_over.items()]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(map(printable, lines))

    @property
    def _is_deterministic(self) -> bool:
        """Whether the chosen config gives the same bits in every run."""
        return self.config.family.is_deterministic(self.config)

    @property
    def _repeatable(self) -> str:
        if self._is_deterministic:
            return "yes: the same bits in every run"
        if self.repeatable is None:
            return "no, and no other kernel of this d gives the same bits in every run"
        return f"no; with deterministic=True {self._beside(self.repeatable)}"

    def _beside(self, one: RunnerUp) -> str:
        """A config and its expected time as a string. This shows how much longer the time is than
        that of the chosen config if both times are known."""
        if self.evidence == "offered":
            return str(one.config)
        behind = f"{one.ms / self.ms - 1:+.1%}" if self.ms else ""
        return f"{one.config}  {_milliseconds(one.ms)} ({behind})"

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": str(self.problem),
            "device": self.device.name,
            "arch": f"sm_{self.device.arch}",
            "config": str(self.config),
            "family": self.family,
            "order": self.order,
            "evidence": self.evidence,
            "why": self.why,
            "ms": self.ms,
            "tflops": self.tflops,
            "deterministic": self._is_deterministic,
            "repeatable": None if self.repeatable is None else self.repeatable.to_json(),
            "runners_up": [one.to_json() for one in self.runners_up],
            "passed_over": dict(self.passed_over),
            "notes": list(self.notes),
        }


def _expected_here(
    evidence: Evidence, problem: Problem, device: DeviceSpec, winners: WinnersTable
) -> list[ExpectedTime]:
    """Returns the configs of the evidence and their expected times for the given problem.

    ``evidence`` may have been gathered for without_batch(problem), for which a kernel is chosen in
    the place of the given problem.
    """
    found: dict[Any, ExpectedTime] = {}
    for one in evidence.expected:
        config = adapt_to_queries(one.config, problem, device)
        config = fastest_over_cache(config, problem, device, winners)
        if config in found:
            continue
        is_another = without_batch(problem) != problem or config != one.config
        if is_another and config.family.has_cost_model:
            one = ExpectedTime(config, estimate(config, problem, device).ms)
        found[config] = replace(one, config=config)
    return [*found.values()]


def _milliseconds(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms:.0f} ms"


def choose(
    problem: Problem | str,
    device: DeviceSpec | str | int | None = None,
    *,
    table: WinnersTable | None = None,
    deterministic: bool = False,
) -> Choice:
    """Finds the kernel that attention() uses for a problem, the reason for it, and how long other
    kernels would take. For a problem of another operation, finds that operation's kernel in the
    same way.

    Args:
        problem: a Problem or its text, such as 'b16 s4096 h32:8 d128 bf16 causal'.
        device: a DeviceSpec, the name of a known GPU ('H200') or an architecture (90, 'sm_90');
            None is this machine's first GPU, or the A100 if there is none.
        table: the winners to use; None uses the shipped winners and the user's.
        deterministic: whether to consider only kernels that give the same bits in every run.

    Raises:
        ArgumentError: the text or the name is unknown, or no kernel serves the problem on the
            device.
    """
    problem = Problem.parse(problem) if isinstance(problem, str) else problem
    if device is None:
        device = choose_target().device
    elif not isinstance(device, DeviceSpec):
        device = device_spec(device)
    _check_d(problem, "problem")
    winners = _winners(problem, device) if table is None else table
    evidence = gather(without_batch(problem), device, winners, deterministic=deterministic)
    chosen, *others = _expected_here(evidence, problem, device, winners)
    over_cache = ""
    if chosen.config != adapt_to_queries(evidence.expected[0].config, problem, device):
        over_cache = f"; of the kernels with its bits the fastest over a cache of {problem.cache}"
    repeatable = None
    if not chosen.config.family.is_deterministic(chosen.config):
        repeatable = _repeatable(problem, device, winners)
    return Choice(
        problem=problem,
        device=device,
        config=chosen.config,
        evidence=evidence.kind,
        why=evidence.why + over_cache,
        ms=chosen.ms,
        runners_up=tuple(RunnerUp(one.config, one.config.FAMILY, one.ms) for one in others),
        passed_over=passed_over(
            problem, device, evidence.expected, measured=evidence.entry is not None
        ),
        notes=(
            *filter(None, [evidence.fallback]),
            *caveats(chosen.config, problem, device),
            *_shortened(evidence.notes),
            *staleness.remarks(filter(None, [evidence.entry])),
            *_shortened(winners.notes),
        ),
        repeatable=repeatable,
    )


def _repeatable(problem: Problem, device: DeviceSpec, winners: WinnersTable) -> RunnerUp | None:
    """The best kernel that gives the same bits in every run; None if there is no such kernel for
    the problem's d."""
    try:
        first = gather(problem, device, winners, deterministic=True).expected[0]
    except ArgumentError:
        return None
    return RunnerUp(first.config, first.config.FAMILY, first.ms)


def choose_config(
    problem: Problem,
    device: DeviceSpec,
    family: str | None = None,
    among: tuple[KernelConfig, ...] | None = None,
    deterministic: bool = False,
    tolerance: float = 0.0,
) -> Any:
    """Returns the config that choose(problem, device) chooses. The results are cached, since
    attention() calls this function for each problem.

    ``family``: consider only kernels of this family, because kernels of other families cannot read
        the tensors of the call.
    ``among``: consider only these configs, because no other configs are built. The first of these
        whose expected time is at most (1 + ``tolerance``) times the shortest is chosen. The times
        come from the evidence if it has the config, otherwise from estimates. Configs of families
        that have no cost model come last.
    ``deterministic``: consider only kernels that give the same bits in every run.

    Warns once if there are no measurements for this machine's GPU, and once if a part of a table
    had to be ignored.

    Raises ArgumentError if no kernel serves the problem on the device, or if a deterministic kernel
    is required and no config in ``among`` is deterministic.
    """
    noted = count_noted()
    return _choose_config(problem, device, family, among, deterministic, tolerance, noted)


# ``noted`` is only a part of the cache key. It is the number of kernels that are known to compile
# to slow code, each of which may change a choice.
@lru_cache(maxsize=4096)
@paused_collection()
def _choose_config(
    problem: Problem,
    device: DeviceSpec,
    family: str | None,
    among: tuple[KernelConfig, ...] | None,
    deterministic: bool,
    tolerance: float,
    noted: int,
) -> Any:
    _check_d(problem, "q")
    winners = _winners(problem, device)
    evidence = gather(problem, device, winners, family, deterministic)
    _warn(evidence, device, winners)
    if among is None:
        return evidence.expected[0].config
    allowed = [cfg for cfg in among if not deterministic or cfg.family.is_deterministic(cfg)]
    if not allowed:
        raise ArgumentError(
            f"deterministic=True: no kernel for '{problem}' that is built gives the same bits in "
            f"every run; build {evidence.expected[0].config}"
        )
    times = Expectation(problem, device, evidence)
    fastest = min(map(times.ms, allowed))
    return next(cfg for cfg in allowed if times.ms(cfg) <= fastest * (1 + tolerance))


class Expectation(NamedTuple):
    """The measurements that bear on a problem, and the time that they predict for any config."""

    problem: Problem
    device: DeviceSpec
    evidence: Evidence

    @property
    def chosen(self) -> ExpectedTime:
        """The chosen config and its expected time."""
        return self.evidence.expected[0]

    def ms(self, config: KernelConfig) -> float:
        """Returns the expected time of a config, from the evidence if the evidence contains the
        config.

        Otherwise, the cost model estimates the time. The estimate is scaled by the factor with
        which the estimate of the chosen config equals the expected time of the chosen config. The
        result is at least the time of the chosen config, and infinite if the family has no cost
        model. Configs of a family that is not in the evidence get a longer time, since an estimate
        is less certain than a measurement.
        """
        for one in self.evidence.expected:
            if one.config == config:
                return one.ms
        if not config.family.has_cost_model:
            return math.inf
        on_paper = estimate(config, self.problem, self.device).ms
        chosen = self.chosen
        if not chosen.ms or not chosen.config.family.has_cost_model:
            return on_paper
        beside = estimate(chosen.config, self.problem, self.device).ms
        relative = on_paper * chosen.ms / beside if beside else on_paper
        in_evidence = any(one.config.FAMILY == config.FAMILY for one in self.evidence.expected)
        return max(relative, chosen.ms * (1.0 if in_evidence else 1 + GAIN_UNMEASURED))


def expectation(
    problem: Problem, device: DeviceSpec, *, deterministic: bool = False
) -> Expectation:
    """Returns the evidence by which choose_config() chooses a config for the problem.

    Raises ArgumentError if no kernel serves the problem on the device.
    """
    _check_d(problem, "q")
    evidence = gather(problem, device, _winners(problem, device), deterministic=deterministic)
    return Expectation(problem, device, evidence)


def forget_choices() -> None:
    """Makes every choice read the tables again, also for calls that were made before."""
    # With this order, no outdated choice is cached again.
    _relevant_winners.cache_clear()
    _choose_config.cache_clear()
    forget_cached_launches()


def build_for(
    problem: Problem,
    *,
    arch: int = 80,
    device: DeviceSpec | None = None,
    deterministic: bool = False,
    progress: Progress | None = None,
) -> list[KernelLibrary]:
    """Builds the kernels that attention() uses for ``problem`` and returns their libraries, which
    may be in the cache already.

    The libraries are for ``device``, or for the first known GPU of ``arch`` (80 is sm_80).
    ``deterministic``: whether calls will have deterministic=True. If the chosen kernel compiles to
    slow code, the next best kernel is built too, and attention() uses the latter.

    Raises what ``choose_config`` and ``flashsmith.builder.build`` raise.
    """
    device = device or device_spec(arch)
    libraries: dict[KernelConfig, KernelLibrary] = {}
    while True:
        chosen = choose_config(without_batch(problem), device, deterministic=deterministic)
        config = adapt_to_problem(chosen, problem, device)
        if config in libraries:
            return list(libraries.values())
        semantics = problem.required_semantics(config)
        library = library_for([config], arch=device.arch, semantics=semantics, progress=progress)
        libraries[config] = library
        note_slow(library)


def adapt_to_problem(config: KernelConfig, problem: Problem, device: DeviceSpec) -> Any:
    """Returns a config that was chosen independently of the batch, adapted to the queries and the
    cache of the problem.

    Measurements over caches of the problem's format decide which of the configs with the same bits
    is used.
    """
    config = adapt_to_queries(config, problem, device)
    return fastest_over_cache(config, problem, device, _winners(problem, device))


def _winners(problem: Problem, device: DeviceSpec) -> WinnersTable:
    return _relevant_winners(device.arch, d_head_for(problem))


@lru_cache(maxsize=64)
def _relevant_winners(arch: int, d_head: HeadDims) -> WinnersTable:
    """The winners that WinnersTable.lookup() may find for problems of a d_head on an architecture.
    Shipped winners for another d_head are left out, because most processes use only one d_head, and
    reading all winners would double the time of a first call. For each architecture, one winner is
    kept in any case, because messages say whether any winner is known."""
    seen: set[int] = set()
    wanted = d_head if isinstance(d_head, HeadPair) else (d_head, 0)

    def is_wanted(record: Any) -> bool:
        its_arch = record.get("arch") if isinstance(record, dict) else None
        if not isinstance(its_arch, int):
            return True  # the record is unusable, which a note will report
        is_first = its_arch not in seen
        seen.add(its_arch)
        widths = record.get("d_head"), record.get("d_v", 0)
        return is_first or (its_arch == arch and widths == wanted)

    return WinnersTable.merged(is_wanted)


def _check_d(problem: Problem, argument: str) -> None:
    try:
        d_head_for(problem)
    except ArgumentError as error:
        raise ArgumentError(f"{argument}: {error}") from None


# The maximum number of notes on a table that are shown; further notes are only counted.
_NOTES = 3
_said: set[tuple[Hashable, str]] = set()


def _warn(evidence: Evidence, device: DeviceSpec, winners: WinnersTable) -> None:
    for note in (*_shortened(winners.notes), *_shortened(evidence.notes)):
        _warn_once(note, winners.versions)
    # There is no warning in the emulator, whose device is one of KNOWN_DEVICES: speed does not
    # matter there.
    if evidence.fallback and device not in KNOWN_DEVICES:
        _warn_once(f"{evidence.fallback} (`flashsmith tune` measures and remembers)")


def _shortened(notes: Sequence[str]) -> list[str]:
    """Returns the first notes on unusable table entries, and a sentence with the number of further
    notes."""
    more = len(notes) - _NOTES
    if more <= 1:
        return list(notes)
    return [*notes[:_NOTES], f"so are {more:,} more; `flashsmith winners validate` lists them"]


def _warn_once(note: str, versions: Hashable = None) -> None:
    """Shows a warning, but only once per process. If the files that the note is about have changed
    since then, the warning is shown again."""
    if (versions, note) not in _said:
        _said.add((versions, note))
        warnings.warn(f"flashsmith: {printable(note)}", stacklevel=2)
