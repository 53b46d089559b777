"""A race: finds the fastest of many kernels on a problem by successive halving.

follow() computes the state of a race, and what to measure next, from the known trials. follow() is
stateless: the same trials give the same answer in any order. So when a kernel turns out to be wrong
late, the kernels that it displaced come back without any correction.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem
from flashsmith.tuning.trial import (
    ALONE,
    CHECK,
    FINAL,
    PROVE,
    Build,
    Record,
    Status,
    Trial,
    Trials,
    rung_stage,
)

# A failed final is retried once, after each of its kernels has been timed alone.
FINAL_ATTEMPTS = 2
# With fewer launches per kernel, the final's ranking would be no better than the rungs' ranking.
MIN_FINAL_LAUNCHES = 3
#: Warm-up before steady timing, in milliseconds: under load the GPU's clock settles at the power
#: limit.
STEADY_WARMUP_MS = 100.0
# For the estimate of the time left. The other launches of a kernel are the proof, the first launch
# and the estimate of the run time.
_NOMINAL_FLOP_PER_MS = 3e11
_OTHER_LAUNCHES = 3
_OVERHEAD_MS = 10.0


# ---- the rules ----


@dataclass(frozen=True)
class Rung:
    """One round: a kernel is launched at least `least` times, and for `ms` milliseconds in all.

    Short kernels are launched more often, since the noise does not shrink with the run time.
    margin: a kernel stays, at any rank, if its time exceeds the best time by at most this share.
    steady: whether the GPU is warmed up first; without a warm-up, kernels timed after a pause run
    at a clock up to a quarter higher.
    """

    least: int
    ms: float
    margin: float
    steady: bool = False


@dataclass(frozen=True)
class Halving:
    """The rules of a race.

    Every rung keeps 1/eta of the active kernels, at least `finalists` kernels, and all kernels
    within its margin. The final then times the race's incumbents and at most `finalists` kernels
    within the last rung's margin. It times them interleaved, for `final_ms` each and at least
    `final_least` launches. A long problem only tries kernels that would survive its reference
    problem's first rung with `entry_margin` as the margin. Refinement tries the neighbours of the
    first `leaders` kernels. If some kernels are not deterministic, the others are also ranked among
    themselves, since the table needs the best kernel and the best deterministic kernel.

    The margins are several times the spread of these few launches, so that noise cannot eliminate
    the best kernel.
    """

    rungs: tuple[Rung, ...] = (Rung(1, 5.0, 0.15), Rung(3, 40.0, 0.06, True))
    eta: int = 3
    finalists: int = 6
    final_least: int = 10
    final_ms: float = 200.0
    entry_margin: float = 0.15
    leaders: int = 3

    def __post_init__(self) -> None:
        if not self.rungs or self.eta < 2 or self.finalists < 1 or self.final_least < 1:
            raise ArgumentError(
                f"halving={self}: give at least one rung, eta from 2, finalists and final_least "
                "from 1"
            )

    def of_few(self) -> Halving:
        """The rules for kernels that are all about equally fast: only the first rung, since the
        final decides."""
        return replace(self, rungs=self.rungs[:1])

    def survivors(self, times: Mapping[str, float], margin: float) -> list[str]:
        """The kernels that go on, fastest first. `times` maps names to milliseconds.

        Equal times are ordered by name.
        """
        ranked = _ranked(times)
        kept = max(-(-len(ranked) // self.eta), self.finalists)
        near = _near_the_best(times, ranked, margin)
        return [name for place, name in enumerate(ranked) if place < kept or name in near]

    def final_of(self, times: Mapping[str, float]) -> list[str]:
        """The kernels in the final, fastest first: all that could still be the best."""
        ranked = _ranked(times)
        near = _near_the_best(times, ranked, self.rungs[-1].margin)
        return [name for name in ranked if name in near][: self.finalists]


def _ranked(times: Mapping[str, float]) -> list[str]:
    return sorted(times, key=lambda name: (times[name], name))


def _near_the_best(times: Mapping[str, float], ranked: list[str], margin: float) -> set[str]:
    limit = times[ranked[0]] * (1 + margin) if ranked else 0.0
    return {name for name in ranked if times[name] <= limit}


DEFAULT_HALVING = Halving()


@dataclass(frozen=True)
class Race:
    """A problem and the kernels that compete on it.

    builds: the kernels that begin. reference: the race for a shorter problem; kernels far behind in
    that race's first rung do not enter this race. When all rungs are complete, neighbours of the
    best join and run the rungs; this happens `refinements` times. incumbents: the builds that the
    race may replace; they reach the final even if they were slow in the rungs.
    """

    problem: Problem
    builds: tuple[Build, ...]
    halving: Halving = DEFAULT_HALVING
    reference: Race | None = None
    refinements: int = 0
    incumbents: tuple[Build, ...] = ()


# ---- the state of a race ----


@dataclass(frozen=True)
class Task:
    """One request to the bench: prove a kernel, check it thoroughly, time it on a rung or alone, or
    time the finalists interleaved. Timed kernels are launched at least `least` times and for `ms`
    milliseconds each."""

    stage: str
    problem: Problem
    builds: tuple[Build, ...]
    least: int = 1
    ms: float = 0.0
    steady: bool = False


@dataclass(frozen=True)
class RaceState:
    """The state of a race.

    joined: the trials of all kernels that joined, by short form. active: the trials that may still
    win. dropped: for the other trials, why the race dropped them; the reason of a failed kernel is
    in its trial.
    rung: the current rung, counted from 0, or the number of rungs when all are complete. pending:
    the trials to prove or time before the rung is complete, in this order. waiting: whether the
    race waits until the reference's first rung is complete; no kernel has entered yet. searched:
    whether all rungs are complete and no neighbours are left to join. closed: whether the search
    ended early.
    decided: whether the final of the current finalists is complete. failed_finals: how often that
    final failed.
    """

    race: Race
    joined: Mapping[str, Trial]
    active: tuple[Trial, ...] = ()
    dropped: Mapping[str, tuple[Status, str]] = field(default_factory=dict)
    rung: int = 0
    pending: tuple[Trial, ...] = ()
    waiting: bool = False
    first_rung_complete: bool = False
    searched: bool = False
    closed: bool = False
    finalists: tuple[Trial, ...] = ()
    decided: bool = False
    failed_finals: int = 0

    @property
    def problem(self) -> Problem:
        """The problem of the race."""
        return self.race.problem

    def is_incumbent(self, trial: Trial) -> bool:
        """Whether the trial's kernel is one of the race's incumbents."""
        return trial.build in self.race.incumbents

    @cached_property
    def trials(self) -> dict[str, Trial]:
        """The trials of all kernels that joined, each with its status in the race."""
        return {
            name: replace(trial, status=self.dropped[name][0], reason=self.dropped[name][1])
            if name in self.dropped
            else trial
            for name, trial in self.joined.items()
        }

    @cached_property
    def survived(self) -> list[Trial]:
        """The trials of kernels that did not fail: they may still win, or were slower."""
        out = {name for name, (status, _) in self.dropped.items() if status == "not reached"}
        return [t for name, t in self.joined.items() if t.active and name not in out]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to measure."""
        if self.active and not (self.searched or self.closed):
            return False
        return not self.finalists or self._final_is_over

    @property
    def _final_is_over(self) -> bool:
        return self.decided or self.failed_finals >= FINAL_ATTEMPTS

    @property
    def wanted(self) -> list[Build]:
        """Kernels that may have to be measured; slower kernels are included, because they may come
        back."""
        return [] if self.finished else [trial.build for trial in self.survived]

    @cached_property
    def measurements(self) -> int:
        """The number of timings so far."""
        return sum(len(trial.samples) for trial in self.joined.values())

    # ---- the next task ----

    def search_task(self, ready: Container[Build]) -> Task | None:
        """The next measurement of the search, among the kernels that are `ready`; None if there is
        no such kernel.

        A kernel is proven before it is timed. A rung begins when the previous rung is complete, and
        ends as soon as all active kernels have been timed on it.
        """
        for trial in () if self.closed else self.pending:
            if trial.build in ready:
                stage = PROVE if trial.proof is None else rung_stage(self.rung)
                return self._task(stage, trial, self.race.halving.rungs[self.rung])
        return None

    def final_task(self, ready: Container[Build], seconds: float) -> Task | None:
        """The next task of the final; None if the final is over or does not fit into `seconds`.

        Each finalist is checked thoroughly first.
        """
        finalists, halving = self.finalists, self.race.halving
        if not finalists or self._final_is_over or not all(t.build in ready for t in finalists):
            return None
        for trial in finalists if self.failed_finals else ():
            # Timing each kernel alone finds the kernel that broke the final.
            if ALONE not in trial.samples:
                return self._task(ALONE, trial, halving.rungs[-1])
        for trial in finalists:
            if not trial.checked:
                return Task(CHECK, self.problem, (trial.build,))
        # Only half of the time is for launches, because the clock settles first.
        ms = min(halving.final_ms, 1e3 * seconds / (2 * len(finalists)))
        least = halving.final_least
        if ms < halving.final_ms:
            slowest = max(trial.medians[self.last_stage] for trial in finalists)
            least = int(min(least, ms / max(slowest, 1e-6)))
            if least < MIN_FINAL_LAUNCHES:
                return None
        builds = tuple(trial.build for trial in finalists)
        return Task(FINAL, self.problem, builds, least, ms, steady=True)

    def _task(self, stage: str, trial: Trial, rung: Rung) -> Task:
        return Task(stage, self.problem, (trial.build,), rung.least, rung.ms, rung.steady)

    @cached_property
    def work(self) -> tuple[float, float]:
        """Milliseconds of work done, and expected in total, to estimate the time left. Both assume
        a fixed rate for the problem's FLOP."""
        halving = self.race.halving
        launch = self.problem.attn_flop() / _NOMINAL_FLOP_PER_MS
        running = [t for t in self.survived if t.samples or t.name not in self.dropped]
        number, total, done = len(running), 0.0, 0.0
        for place, rung in enumerate(halving.rungs):
            each = max(rung.ms, rung.least * launch) + _OTHER_LAUNCHES * launch + _OVERHEAD_MS
            each += STEADY_WARMUP_MS if rung.steady else 0.0
            total += number * each
            done += each * sum(rung_stage(place) in trial.samples for trial in running)
            number = min(number, max(-(-number // halving.eta), halving.finalists))
        finalists = min(number, halving.finalists)
        total += finalists * max(halving.final_ms, halving.final_least * launch)
        return (total, total) if self.finished else (min(done, total), total)

    # ---- the results ----

    @property
    def last_stage(self) -> str:
        """The stage of the last complete rung."""
        return rung_stage(max(0, self.rung - 1))

    @property
    def first_times(self) -> dict[str, float]:
        """Milliseconds on the first rung, for the kernels that began the race."""
        began = {build.name for build in self.race.builds}
        return _times((t for t in self.survived if t.name in began), rung_stage(0))

    @cached_property
    def ranked(self) -> list[Trial]:
        """The trials with a time, fastest first.

        Times of the decisive stage (the final, or without one the last complete rung) are as
        measured. Times of other rungs are scaled by the ratio of the best kernel's times in both
        stages, since the GPU clock differed.
        """
        decisive = FINAL if self.decided else self.last_stage
        times = _times(self.trials.values() if self.decided else self.active, decisive)
        if not times:
            return []
        best = self.trials[_ranked(times)[0]].medians
        stages = [*map(rung_stage, range(len(self.race.halving.rungs))), FINAL]
        found = []
        for trial in self.trials.values():
            timed = [stage for stage in stages if stage in trial.medians]
            if trial.survived and timed:
                shared = [stage for stage in timed if stage in best]
                last = (shared or timed)[-1]
                ratio = best[decisive] / best[last] if shared else 1.0
                found.append(replace(trial, ms=trial.medians[last] * ratio, stage=last))
        return sorted(found, key=lambda trial: (trial.ms, trial.name))

    def tflops(self, trial: Trial) -> float:
        """TFLOP/s of a ranked trial."""
        return self.problem.attn_flop() / trial.ms / 1e9


def follow(
    race: Race,
    known: Trials,
    reference: RaceState | None = None,
    *,
    early: bool = False,
    closed: bool = False,
) -> RaceState:
    """The state of a race, from the known trials.

    reference: the state of the race's reference, if it has one. early: whether kernels enter by
    the reference's times so far, the fastest first. closed: whether the search ends early; this
    drops kernels that were not timed at all.
    """
    course = _Course(race, known, closed)
    if race.problem in known.unprepared:
        reason = f"the problem cannot be set up: {known.unprepared[race.problem]}"
        course.drop(list(course.active), "not reached", reason)
    order: dict[str, float] = {}
    if reference is not None:
        if not (reference.first_rung_complete or reference.closed or early or closed):
            return course.state(waiting=True)
        if reference.first_rung_complete or reference.closed or early:
            margin, where = race.halving.entry_margin, f"on {reference.problem}"
            course.keep(reference.first_times, margin, where, reference.joined)
        if early:
            order = _times(reference.joined.values(), rung_stage(0))
    for refined in range(race.refinements + 1):
        pending = course.run_rungs()
        if pending:
            pending.sort(key=lambda t: (t.proof is None, order.get(t.name, math.inf)))
            return course.state(pending=tuple(pending))
        if refined == race.refinements or not course.refine():
            break
    return course.state(searched=True)


class _Course:
    """The working state of follow(), rung by rung: which kernels have ``joined`` the race, which
    are still ``active``, and why the others were ``dropped``."""

    def __init__(self, race: Race, known: Trials, closed: bool) -> None:
        self.race, self.known, self.closed = race, known, closed
        self.joined = known.of(race.problem, race.builds)
        self.active = {name: trial for name, trial in self.joined.items() if trial.active}
        self.dropped: dict[str, tuple[Status, str]] = {}
        self._incumbents = [build.name for build in race.incumbents]
        self._rung, self._first_rung_complete = 0, False

    def drop(self, names: Iterable[str], status: Status, reason: str) -> None:
        """Drops the named kernels that are still active."""
        for name in names:
            if self.active.pop(name, None) is not None:
                self.dropped[name] = status, reason

    def keep(
        self, times: Mapping[str, float], margin: float, where: str, trials: Mapping[str, Trial]
    ) -> None:
        """Drops the kernels that do not survive these times."""
        best = min(times.values(), default=0.0)
        kept = {
            name
            for group in (times, _of_deterministic(times, trials))
            for name in self.race.halving.survivors(group, margin)
        }
        kept.update(self._incumbents)
        for name in times.keys() - kept:
            self.drop([name], "slower", f"{times[name] / best - 1:.1%} behind the best {where}")

    def run_rungs(self) -> list[Trial]:
        """Runs all rungs that are timed completely; returns the trials that the next rung lacks."""
        if self.closed:
            untimed = [name for name, trial in self.active.items() if not trial.samples]
            self.drop(untimed, "not reached", "the budget ended before it was timed")
        rungs = self.race.halving.rungs
        for self._rung, rule in enumerate(rungs):
            stage, active = rung_stage(self._rung), self.active.values()
            pending = [t for t in active if t.proof is None or stage not in t.samples]
            if pending:
                return pending
            self.keep(_times(active, stage), rule.margin, f"of {stage}", self.joined)
            self._first_rung_complete = True
        self._rung = len(rungs)
        return []

    def refine(self) -> bool:
        """Adds the leaders' neighbours to the race; False if no neighbour may be timed."""
        problem, joined = self.race.problem, self.joined
        times = _times(self.active.values(), rung_stage(self._rung - 1))
        leaders = _ranked(times)[: self.race.halving.leaders]
        near = (_builds_beside(problem, joined[name].build.config) for name in leaders)
        new = [build for builds in near for build in builds if build.name not in joined]
        joining = self.known.of(problem, new)
        if not joining or (self.closed and not any(t.samples for t in joining.values())):
            return False
        self.joined |= joining
        self.active |= {name: trial for name, trial in joining.items() if trial.active}
        return True

    def state(self, **facts: Any) -> RaceState:
        """The state of the race."""
        timed = _times(self.active.values(), rung_stage(max(0, self._rung - 1)))
        groups = timed, _of_deterministic(timed, self.active)
        of_groups = (name for group in groups for name in self.race.halving.final_of(group))
        standing = (name for name in self._incumbents if name in timed)
        finalists = list(dict.fromkeys((*of_groups, *standing)))
        ran = self.race.problem, frozenset(finalists)
        final = self.known.finals.get(ran)
        return RaceState(
            self.race,
            self.joined | _timed_in(final, self.joined),
            tuple(self.active.values()),
            self.dropped,
            self._rung,
            first_rung_complete=self._first_rung_complete,
            closed=self.closed,
            finalists=tuple(self.joined[name] for name in finalists),
            decided=final is not None,
            failed_finals=self.known.failed_finals[ran],
            **facts,
        )


def _of_deterministic(times: Mapping[str, float], trials: Mapping[str, Trial]) -> dict[str, float]:
    """The times of the kernels that give the same bits in every run."""
    configs = {name: trials[name].build.config for name in times}
    return {
        name: ms
        for name, ms in times.items()
        if configs[name].family.is_deterministic(configs[name])
    }


def _times(trials: Iterable[Trial], stage: str) -> dict[str, float]:
    return {trial.name: trial.medians[stage] for trial in trials if stage in trial.samples}


def _timed_in(final: Record | None, trials: Mapping[str, Trial]) -> dict[str, Trial]:
    """The trials of a final, including its times."""
    if final is None:
        return {}
    pairs = zip((trials[b.name] for b in final.builds), final.samples, strict=True)
    return {trial.name: trial.after(FINAL, samples, final.origin) for trial, samples in pairs}


@lru_cache(maxsize=4096)
def _builds_beside(problem: Problem, config: KernelConfig) -> tuple[Build, ...]:
    """Builds of the configs one move away."""
    return tuple(Build.of(problem, other) for other in config.family.neighbours(config))


def states_of(races: Sequence[Race], known: Trials) -> list[RaceState]:
    """The states of races, in their order."""
    found: dict[Problem, RaceState] = {}

    def state(race: Race) -> RaceState:
        if race.problem not in found:
            reference = state(race.reference) if race.reference is not None else None
            found[race.problem] = follow(race, known, reference)
        return found[race.problem]

    return [state(race) for race in races]
