"""A race: finds the fastest of many kernels for a problem by successive halving.

follow() computes the state of a race, and the next measurements, from the known trials. It keeps no
state: the same trials, in any order, give the same result. Therefore, if a kernel is found to be
wrong late in the race, the kernels that it had displaced come back automatically.
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

# The maximum number of attempts at a final. If the first one fails, each of its kernels is timed
# alone before the second.
FINAL_ATTEMPTS = 2
# The minimum number of launches per kernel in a final; with fewer, it would rank kernels no better
# than the rungs do.
MIN_FINAL_LAUNCHES = 3
#: The time for which the GPU warms up before steady timing, in milliseconds. Under load, its clock
#: settles at the power limit.
STEADY_WARMUP_MS = 100.0
# Constants with which the remaining time is estimated. _OTHER_LAUNCHES is the number of launches
# with which a kernel is checked and loaded and its time is estimated.
_NOMINAL_FLOP_PER_MS = 3e11
_OTHER_LAUNCHES = 3
_OVERHEAD_MS = 10.0


# ---- the rules ----


@dataclass(frozen=True)
class Rung:
    """One round of a race, in which each kernel is launched at least `least` times and for at least
    `ms` milliseconds in total.

    So short kernels are launched more often. They need this, because the noise of a launch does not
    depend on the length of the launch, and is therefore a larger share of a short time.

    margin: a kernel stays, whatever its rank, if its time exceeds the best time by at most this
        share.
    steady: whether the GPU is warmed up first. Without the warm-up, kernels that are timed after a
        pause run at a clock rate that is up to a quarter higher.
    """

    least: int
    ms: float
    margin: float
    steady: bool = False


@dataclass(frozen=True)
class Halving:
    """The rules of a race.

    Each rung keeps 1/eta of the active kernels, but at least `finalists` of them, and also all
    kernels within the rung's margin. Then the final times the incumbents and at most `finalists`
    kernels that are within the margin of the last rung. The launches of these kernels are
    interleaved; each kernel is launched for `final_ms` and at least `final_least` times. A long
    problem has a reference problem: only those kernels are tried on the long problem that would
    survive the first rung of the reference problem with the margin `entry_margin`. A refinement
    tries the neighbours of the `leaders` best kernels. If some kernels are not deterministic, the
    deterministic ones are also ranked separately, since the table needs the best kernel and the
    best deterministic kernel.

    The margins are several times as large as the noise of these few launches, so that noise does
    not eliminate the best kernel.
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
        """Returns these rules for a race between a few kernels of about the same speed. Such a race
        has only one rung, because the final decides."""
        return replace(self, rungs=self.rungs[:1])

    def survivors(self, times: Mapping[str, float], margin: float) -> list[str]:
        """The kernels that stay, fastest first.

        `times` maps each kernel's name to its milliseconds.

        Kernels with equal times are sorted by name.
        """
        ranked = _ranked(times)
        kept = max(-(-len(ranked) // self.eta), self.finalists)
        near = _near_the_best(times, ranked, margin)
        return [name for place, name in enumerate(ranked) if place < kept or name in near]

    def final_of(self, times: Mapping[str, float]) -> list[str]:
        """The kernels that enter the final, fastest first. These are all kernels that might still
        be the best."""
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
    """A problem, and the kernels that compete for it.

    builds: the kernels at the beginning.
    reference: the race for a shorter problem. Kernels that are far behind in its first rung do not
        take part in this race.
    refinements: the number of times that, after all rungs, neighbours of the best kernels join and
        run the rungs.
    incumbents: the builds that the race may replace. They are in the final even if they were slow
        in the rungs.
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
    """A task for the bench: to check a kernel quickly or thoroughly, to time a kernel in a rung or
    alone, or to time all finalists interleaved. Kernels are launched at least `least` times and for
    at least `ms` milliseconds each."""

    stage: str
    problem: Problem
    builds: tuple[Build, ...]
    least: int = 1
    ms: float = 0.0
    steady: bool = False


@dataclass(frozen=True)
class RaceState:
    """The state of a race.

    joined: the trials of all kernels that have joined the race, by short form.
    active: the trials of the kernels that may still win.
    dropped: for each kernel that the race dropped, its status and the reason. The trial of a kernel
        that failed has its own reason.
    rung: the current rung, counted from 0; the number of rungs if all are complete.
    pending: the trials of the kernels that must still be checked or timed to complete the rung, in
        order.
    waiting: whether no kernel has entered yet because the first rung of the reference is not
        complete.
    searched: whether all rungs are complete and no neighbour is left.
    closed: whether the search was ended early.
    decided: whether there was a final with the current finalists.
    failed_finals: how often a final with these finalists failed.
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
        """Whether the kernel of the trial is one of the incumbents of the race."""
        return trial.build in self.race.incumbents

    @cached_property
    def trials(self) -> dict[str, Trial]:
        """The trials of all kernels that joined, with their status in this race."""
        return {
            name: replace(trial, status=self.dropped[name][0], reason=self.dropped[name][1])
            if name in self.dropped
            else trial
            for name, trial in self.joined.items()
        }

    @cached_property
    def survived(self) -> list[Trial]:
        """The trials of the kernels that did not fail: those that may still win, and those that
        were slower."""
        out = {name for name, (status, _) in self.dropped.items() if status == "not reached"}
        return [t for name, t in self.joined.items() if t.active and name not in out]

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to measure."""
        if self.active and not (self.searched or self.closed):
            return False
        return not self.finalists or self._final_is_over

    @property
    def _final_is_over(self) -> bool:
        return self.decided or self.failed_finals >= FINAL_ATTEMPTS

    @property
    def wanted(self) -> list[Build]:
        """The kernels that may still have to be measured.

        Kernels that were dropped as slower are included, because they may come back.
        """
        return [] if self.finished else [trial.build for trial in self.survived]

    @cached_property
    def measurements(self) -> int:
        """The number of timings so far."""
        return sum(len(trial.samples) for trial in self.joined.values())

    # ---- the next task ----

    def search_task(self, ready: Container[Build]) -> Task | None:
        """Returns the next task of the search for a kernel in `ready`; None if there is none.

        A kernel's results are checked before it is timed. A rung begins when the one before it is
        complete, and ends when all active kernels have been timed.
        """
        for trial in () if self.closed else self.pending:
            if trial.build in ready:
                stage = PROVE if trial.proof is None else rung_stage(self.rung)
                return self._task(stage, trial, self.race.halving.rungs[self.rung])
        return None

    def final_task(self, ready: Container[Build], seconds: float) -> Task | None:
        """Returns the next task of the final; None if the final is over, or if the task would take
        more than `seconds`.

        Each finalist is checked thoroughly first.
        """
        finalists, halving = self.finalists, self.race.halving
        if not finalists or self._final_is_over or not all(t.build in ready for t in finalists):
            return None
        for trial in finalists if self.failed_finals else ():
            # Each finalist is timed alone, to find the kernel that made the final fail.
            if ALONE not in trial.samples:
                return self._task(ALONE, trial, halving.rungs[-1])
        for trial in finalists:
            if not trial.checked:
                return Task(CHECK, self.problem, (trial.build,))
        # Launches get half of the time; the other half is for the warm-up in which the clock
        # settles.
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
        """The work done so far and the total work, in milliseconds, to estimate the remaining time.
        Both assume a fixed rate of FLOP."""
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
        """The stage of the last rung that is complete."""
        return rung_stage(max(0, self.rung - 1))

    @property
    def first_times(self) -> dict[str, float]:
        """The times in the first rung, in milliseconds, of the kernels that were in the race from
        the beginning."""
        began = {build.name for build in self.race.builds}
        return _times((t for t in self.survived if t.name in began), rung_stage(0))

    @cached_property
    def ranked(self) -> list[Trial]:
        """The trials that have a time, fastest first.

        The times of the last stage (the final or, if there was none, the last complete rung) are as
        measured. Times of earlier rungs are scaled by the ratio of the best kernel's times in the
        two stages, since the clock of the GPU was different in them.
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
        """The TFLOP/s of a trial that has a time."""
        return self.problem.attn_flop() / trial.ms / 1e9


def follow(
    race: Race,
    known: Trials,
    reference: RaceState | None = None,
    *,
    early: bool = False,
    closed: bool = False,
) -> RaceState:
    """Computes the state of a race from the known trials.

    reference: the state of the race for the reference problem, if there is one.
    early: whether kernels enter before the first rung of the reference is complete. They then enter
        in the order of their times in the reference so far, fastest first.
    closed: whether the search ends early; kernels that were never timed are then dropped.
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
    """The progress of follow() from rung to rung: the kernels that ``joined``, the kernels that are
    still ``active``, and the reasons for which the other kernels were ``dropped``."""

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
        """Drops the kernels that are eliminated by ``times`` with the given margin."""
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
        """Evaluates all rungs whose timings are complete.

        Returns the trials that the next rung still needs.
        """
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
        """Adds the neighbours of the leaders.

        Returns False if no neighbour may be timed.
        """
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
        """The final state."""
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
    """The trials of the kernels in a final, with the times of the final added."""
    if final is None:
        return {}
    pairs = zip((trials[b.name] for b in final.builds), final.samples, strict=True)
    return {trial.name: trial.after(FINAL, samples, final.origin) for trial, samples in pairs}


@lru_cache(maxsize=4096)
def _builds_beside(problem: Problem, config: KernelConfig) -> tuple[Build, ...]:
    """The builds of the config's neighbours, which are all configs that are one move away from
    it."""
    return tuple(Build.of(problem, other) for other in config.family.neighbours(config))


def states_of(races: Sequence[Race], known: Trials) -> list[RaceState]:
    """The states of several races, in their order."""
    found: dict[Problem, RaceState] = {}

    def state(race: Race) -> RaceState:
        if race.problem not in found:
            reference = state(race.reference) if race.reference is not None else None
            found[race.problem] = follow(race, known, reference)
        return found[race.problem]

    return [state(race) for race in races]
