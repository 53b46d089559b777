"""Race: all candidates for one problem, and what is to be measured next to find the fastest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flashsmith.benchmark.timing import Samples
from flashsmith.families import Problem
from flashsmith.tuning.candidate import Candidate, Status, samples_from_json
from flashsmith.tuning.halving import STEADY_WARMUP_MS, Halving
from flashsmith.tuning.runner import Build

TaskKind = Literal["prove", "check", "time", "final"]
# A final that breaks down is tried once more, after each of its kernels was timed alone.
FINAL_ATTEMPTS = 2
# Fewer launches each would rank no better than the rungs did.
MIN_FINAL_LAUNCHES = 3
# For the estimate: beside the timed launches those of the proof, the first and the estimate.
_NOMINAL_FLOP_PER_MS = 3e11
_OTHER_LAUNCHES = 3
_OVERHEAD_MS = 10.0
# The rung of times that were taken to find out who broke the final.
ALONE = -1


@dataclass(frozen=True)
class Task:
    """One request to the bench: prove a kernel, check it thoroughly, time it on a rung, or time the
    finalists interleaved; each is launched `least` times at least, and for `ms` milliseconds."""

    kind: TaskKind
    race: Race
    candidates: tuple[Candidate, ...]
    rung: int = 0
    least: int = 1
    ms: float = 0.0
    steady: bool = False


@dataclass(frozen=True)
class Standing:
    """A candidate's time, milliseconds, what it was measured by, on which stage, where and when."""

    candidate: Candidate
    ms: float
    samples: Samples
    stage: str
    origin: Mapping[str, Any] = field(default_factory=dict)


class Race:
    """The state of one problem's search: what was measured decides, in whatever order it came.

    `mentor` is the race for a shorter problem: who is far behind in its first rung does not enter.
    When all rungs are complete, neighbours of the best may join, and the rungs are run for them;
    `refinements` times.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        halving: Halving,
        mentor: Race | None = None,
        refinements: int = 0,
    ) -> None:
        self.problem = problem
        self.halving = halving
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.mentor = mentor
        self.refinements = refinements
        self.refined = 0
        self.rung = 0
        self._first = tuple(self.candidates)
        self._first_rung_is_over = False
        self._entered = mentor is None
        self._early = False
        self._records: dict[str, list[dict[str, Any]]] = {}
        self.seconds = 0.0  # of the bench
        self.closed = False
        # By who ran: how often their final broke down.
        self.final_failures: Counter[frozenset[str]] = Counter()
        self.finals: dict[frozenset[str], dict[str, Samples]] = {}
        self._final_origins: dict[frozenset[str], dict[str, Any]] = {}

    @property
    def field(self) -> list[Candidate]:
        """Who is still in the race."""
        return [c for c in self.candidates.values() if c.racing]

    @property
    def survived(self) -> list[Candidate]:
        """Who did nothing wrong."""
        return [c for c in self.candidates.values() if c.survived]

    @property
    def searched(self) -> bool:
        """Whether every rung is complete, and no more neighbours join."""
        return self._rungs_are_over and self.refined == self.refinements

    @property
    def refinable(self) -> bool:
        """Whether it is time for neighbours of the best to join."""
        return self._rungs_are_over and self.refined < self.refinements and not self.closed

    @property
    def _rungs_are_over(self) -> bool:
        return self.rung == len(self.halving.rungs)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to be measured."""
        if self.field and not (self.searched or self.closed):
            return False
        return not self.finalists() or self._final_is_over()

    # ---- the search ----

    def search_task(self, ready: Collection[Build]) -> Task | None:
        """What to measure next with the kernels that are `ready`; None: nothing now.

        A kernel is proven before it is timed; a rung begins when the one before is complete, and
        ends as soon as everybody has been timed on it.
        """
        if not self._entered and not self._enter():
            return None
        while not self._rungs_are_over:
            pending = [c for c in self.field if c.proof is None or self.rung not in c.times]
            for candidate in sorted(pending, key=lambda c: (c.proof is None, self._promise(c))):
                if candidate.build in ready and not self.closed:
                    kind: TaskKind = "prove" if candidate.proof is None else "time"
                    rung = self.halving.rungs[self.rung]
                    figures = (rung.least, rung.ms, rung.steady)
                    return Task(kind, self, (candidate,), self.rung, *figures)
            if pending:
                return None
            self._end_rung()
        return None

    @property
    def waiting(self) -> bool:
        """Whether nobody may enter before the mentor's first rung is complete."""
        return not (self._entered or self._early)

    @property
    def trials(self) -> int:
        """How often something was timed."""
        return sum(len(candidate.times) for candidate in self.candidates.values())

    def enter_early(self) -> None:
        """Lets candidates in by what the mentor has timed so far, the best of that first."""
        self._early = True

    def _promise(self, candidate: Candidate) -> float:
        """For a place in the order of those who entered early: the mentor's time."""
        if self.mentor is None or not self._early:
            return 0.0
        there = self.mentor.candidates.get(candidate.name)
        return there.times[0].median_ms if there and 0 in there.times else math.inf

    def _enter(self) -> bool:
        """Lets in who did well on the mentor's first rung, as soon as that is complete."""
        mentor = self.mentor
        if mentor is not None:
            mentor.search_task(())  # ends its rung, if nobody else did
            if not (mentor._first_rung_is_over or mentor.closed or self._early):
                return False
            first = (mentor.candidates[name] for name in mentor._first)
            times = {c.name: c.times[0].median_ms for c in first if c.survived and 0 in c.times}
            self._keep(times, self.halving.entry_margin, f"on {mentor.problem}")
        self._entered = True
        return True

    def _end_rung(self) -> None:
        """Ends the rung: whoever is too slow is out."""
        margin = self.halving.rungs[self.rung].margin
        self._keep(self._times(self.rung), margin, f"of rung {self.rung + 1}")
        self.rung += 1
        self._first_rung_is_over = True

    def _keep(self, times: dict[str, float], margin: float, where: str) -> None:
        survivors = set(self.halving.survivors(times, margin))
        best = min(times.values(), default=0.0)
        for candidate in self.field:
            if candidate.name in times and candidate.name not in survivors:
                slower = times[candidate.name] / best - 1
                candidate.drop("slower", f"{slower:.1%} behind the best {where}")

    def close_search(self) -> None:
        """Ends the search early: what was not timed at all is out."""
        self.closed = True
        for candidate in self.field:
            if not candidate.times:
                candidate.drop("not reached", "the budget ended before it was timed")

    def condemn(self, build: Build, status: Status, reason: str) -> bool:
        """Takes a build's candidate out for what its kernel did, and reopens the search.

        False: it is not in this race, or out already.
        """
        candidate = self.candidates.get(str(build.config))
        if candidate is None or candidate.build != build or not candidate.survived:
            return False
        candidate.drop(status, reason)
        self.reopen()
        return True

    def reopen(self) -> None:
        """Begins anew: kernels that do wrong are often the fastest, and throw out others.

        What was measured counts as before.
        """
        self.candidates = {name: self.candidates[name] for name in self._first}
        self.refined = self.rung = 0
        self._first_rung_is_over = False
        self._entered = self.mentor is None
        for other in self.candidates.values():
            if other.status == "slower":
                other.status, other.reason = "racing", ""

    def leaders(self) -> list[Candidate]:
        """The best by the last complete rung, fastest first: whose neighbours may join."""
        times = self._times(self.last_rung)
        ranked = sorted(times, key=lambda name: (times[name], name))
        return [self.candidates[name] for name in ranked[: self.halving.leaders]]

    def join(self, neighbours: Sequence[Candidate]) -> None:
        """Candidates join, and what is known of them counts; the rungs are run for those who are in
        the race. Nobody: the race is as refined as it can be."""
        if not neighbours:
            self.refined = self.refinements
            return
        self.refined += 1
        self.rung = 0
        for candidate in neighbours:
            self.candidates[candidate.name] = candidate
            for record in self._records.get(candidate.name, ()):
                candidate.take(record)

    def _times(self, rung: int) -> dict[str, float]:
        return {c.name: c.times[rung].median_ms for c in self.field if rung in c.times}

    @property
    def last_rung(self) -> int:
        """The last rung that everybody in the race has run."""
        return max(0, self.rung - 1)

    # ---- the final ----

    def finalists(self) -> list[Candidate]:
        """Who can still be the best, fastest first by the last complete rung."""
        times = self._times(self.last_rung)
        return [self.candidates[name] for name in self.halving.final_field(times)]

    def final_task(self, ready: Collection[Build], seconds: float) -> Task | None:
        """What the final needs next; None: it is over, or does not fit into so many seconds.

        Whoever is in it is checked thoroughly first.
        """
        finalists = self.finalists()
        if not finalists or self._final_is_over() or not all(c.build in ready for c in finalists):
            return None
        if self.final_failures[_names(finalists)]:
            # Who broke it? Timed alone, the culprit fails alone.
            rung = self.halving.rungs[-1]
            for candidate in finalists:
                if ALONE not in candidate.times:
                    return Task("time", self, (candidate,), ALONE, rung.least, rung.ms, rung.steady)
        unchecked = [c for c in finalists if not c.checked]
        if unchecked:
            return Task("check", self, (unchecked[0],))
        # Half of it: the clock settles first.
        ms = min(self.halving.final_ms, 1e3 * seconds / (2 * len(finalists)))
        slowest = max(c.times[self.last_rung].median_ms for c in finalists)
        least = int(min(self.halving.final_least, ms / max(slowest, 1e-6)))
        if ms < self.halving.final_ms:
            if least < MIN_FINAL_LAUNCHES:
                return None
        else:
            least = self.halving.final_least
        return Task("final", self, tuple(finalists), least=least, ms=ms, steady=True)

    @property
    def decided(self) -> bool:
        """Whether there was a final between those who can still be the best."""
        return self._final() is not None

    def _final_is_over(self) -> bool:
        failures = self.final_failures[_names(self.finalists())]
        return self._final() is not None or failures >= FINAL_ATTEMPTS

    def _final(self) -> dict[str, Samples] | None:
        """The final's times, if those who are in it now are those who ran it."""
        return self.finals.get(_names(self.finalists()))

    def work(self) -> tuple[float, float]:
        """Milliseconds of work done and expected in all, as far as they are for an estimate of the
        time that is left: by the problem's FLOP at a fixed rate."""
        launch = self.problem.attn_flop() / _NOMINAL_FLOP_PER_MS
        running = [c for c in self.survived if c.racing or c.times]
        field, total, done = len(running), 0.0, 0.0
        for number, rung in enumerate(self.halving.rungs):
            each = max(rung.ms, rung.least * launch) + _OTHER_LAUNCHES * launch + _OVERHEAD_MS
            each += STEADY_WARMUP_MS if rung.steady else 0.0
            total += field * each
            done += each * sum(number in c.times for c in running)
            field = min(field, max(-(-field // self.halving.eta), self.halving.finalists))
        finalists = min(field, self.halving.finalists)
        total += finalists * max(self.halving.final_ms, self.halving.final_least * launch)
        return (total, total) if self.finished else (min(done, total), total)

    # ---- what came out ----

    def apply(self, record: dict[str, Any]) -> None:
        """Takes over what a journal's record says about this problem."""
        if record["kind"] == "final":
            samples = {name: samples_from_json(found) for name, found in record["times"].items()}
            self.finals[frozenset(samples)] = samples
            self._final_origins[frozenset(samples)] = record.get("origin", {})
            return
        if record["kind"] == "final failed":
            self.final_failures[frozenset(record["configs"])] += 1
            return
        # Of another space, or a neighbour that will be found again.
        self._records.setdefault(record["config"], []).append(record)
        if candidate := self.candidates.get(record["config"]):
            candidate.take(record)

    def standings(self) -> list[Standing]:
        """Everybody with a time, fastest first.

        Times of the final, or without one of the last complete rung, stand as they are. Those of
        another rung are scaled by what the best of these took on both: the GPU's clock was another
        then.
        """
        final = self._final() or {}
        times = {name: samples.median_ms for name, samples in final.items()}
        leaders = times or self._times(self.last_rung)
        if not leaders:
            return []
        best = self.candidates[min(leaders, key=lambda name: (leaders[name], name))]
        reference = leaders[best.name]
        origin = self._final_origins.get(frozenset(final), {})
        standings = [
            Standing(self.candidates[name], samples.median_ms, samples, "final", origin)
            for name, samples in final.items()
        ]
        for candidate in self.candidates.values():
            rungs = [rung for rung in candidate.times if rung != ALONE]
            if candidate.name in final or not candidate.survived or not rungs:
                continue
            shared = [rung for rung in rungs if rung in best.times]
            rung = max(shared or rungs)
            samples = candidate.times[rung]
            ms = samples.median_ms
            if shared:
                ms *= reference / best.times[rung].median_ms
            origin = candidate.origins.get(rung, {})
            standings.append(Standing(candidate, ms, samples, f"rung {rung + 1}", origin))
        return sorted(standings, key=lambda s: (s.ms, s.candidate.name))


def _names(candidates: Sequence[Candidate]) -> frozenset[str]:
    return frozenset(candidate.name for candidate in candidates)
