"""Race: all candidates for one problem, and what is to be measured next to find the fastest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flashsmith.benchmark.timing import Samples
from flashsmith.configs import Problem
from flashsmith.tuning.sweep.candidate import Candidate
from flashsmith.tuning.sweep.halving import Halving
from flashsmith.tuning.sweep.runner import Build, Proof

TaskKind = Literal["prove", "check", "time", "final"]
# A final that breaks down is tried once more, after each of its kernels was timed alone.
FINAL_ATTEMPTS = 2
# Fewer launches each would rank no better than the rungs did.
MIN_FINAL_RUNS = 5
# What a proof, the first launch and its estimate cost beside the timed ones.
_PROOF_LAUNCHES = 4
# The rung of times that were taken to find out who broke the final.
ALONE = -1


@dataclass(frozen=True)
class Task:
    """One request to the bench: prove a kernel, check it thoroughly, time it on a rung, or time the
    finalists interleaved."""

    kind: TaskKind
    race: Race
    candidates: tuple[Candidate, ...]
    rung: int = 0
    runs: int = 0


@dataclass(frozen=True)
class Standing:
    """A candidate's time, milliseconds, what it was measured by, and on which stage."""

    candidate: Candidate
    ms: float
    samples: Samples
    stage: str


class Race:
    """The state of one problem's search. Deterministic: equal measurements give equal results,
    whatever order they come in."""

    def __init__(self, problem: Problem, candidates: Sequence[Candidate], halving: Halving) -> None:
        self.problem = problem
        self.halving = halving
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.rung = 0
        self.seconds = 0.0  # of the bench
        self.closed = False
        self.final_failures: list[str] = []
        self.finals: dict[frozenset[str], dict[str, Samples]] = {}

    @property
    def field(self) -> list[Candidate]:
        """Who is still in the race."""
        return [c for c in self.candidates.values() if c.racing]

    @property
    def searched(self) -> bool:
        """Whether every rung is complete."""
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

        A kernel is proven before it is timed; a rung begins when the one before is complete.
        """
        while not self.searched:
            pending = [c for c in self.field if c.proof is None or self.rung not in c.times]
            for candidate in sorted(pending, key=lambda c: c.proof is None):
                if candidate.build in ready:
                    kind: TaskKind = "prove" if candidate.proof is None else "time"
                    runs = self.halving.rungs[self.rung].runs
                    return Task(kind, self, (candidate,), self.rung, runs)
            if pending:
                return None
            self._advance()
        return None

    def _advance(self) -> None:
        """Ends the rung: whoever is too slow is out."""
        times = self._times(self.rung)
        survivors = set(self.halving.survivors(self.rung, times, times))
        best = min(times.values(), default=0.0)
        for candidate in self.field:
            if candidate.name not in survivors:
                slower = times[candidate.name] / best - 1
                candidate.drop("slower", f"{slower:.1%} behind the best of rung {self.rung + 1}")
        self.rung += 1

    def close_search(self) -> None:
        """Ends the search early: what was not timed is out."""
        self.closed = True
        if self.rung == 0:
            for candidate in self.field:
                if 0 not in candidate.times:
                    candidate.drop("not reached", "the budget ended before it was timed")

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
        return [self.candidates[name] for name in self.halving.final_field(times, times)]

    def final_task(self, ready: Collection[Build], seconds: float) -> Task | None:
        """What the final needs next; None: it is over, or does not fit into so many seconds.

        Whoever is in it is checked thoroughly first.
        """
        finalists = self.finalists()
        if self.finished or not all(c.build in ready for c in finalists):
            return None
        if self.final_failures:
            # Who broke it? Timed alone, the culprit fails alone.
            for candidate in finalists:
                if ALONE not in candidate.times:
                    return Task("time", self, (candidate,), ALONE, self.halving.rungs[-1].runs)
        unchecked = [c for c in finalists if not c.checked]
        if unchecked:
            return Task("check", self, (unchecked[0],))
        round_seconds = sum(c.times[self.last_rung].median_ms for c in finalists) / 1e3
        runs = int(min(self.halving.final_runs, seconds / max(round_seconds, 1e-6)))
        if runs < min(MIN_FINAL_RUNS, self.halving.final_runs):
            return None
        return Task("final", self, tuple(finalists), runs=runs)

    def _final_is_over(self) -> bool:
        return self._final() is not None or len(self.final_failures) >= FINAL_ATTEMPTS

    def _final(self) -> dict[str, Samples] | None:
        """The final's times, if those who are in it now are those who ran it."""
        return self.finals.get(frozenset(c.name for c in self.finalists()))

    def work(self) -> tuple[float, float]:
        """FLOP launched so far and expected in all, for an estimate of the time that is left."""
        running = [c for c in self.candidates.values() if c.survived]
        field, launches, done = len(running), 0, 0
        for rung in self.halving.rungs:
            launches += field * (rung.runs + _PROOF_LAUNCHES)
            field = min(field, max(-(-field // self.halving.eta), self.halving.finalists))
        launches += min(field, self.halving.finalists) * self.halving.final_runs
        if self.finished:
            done = launches
        else:
            done = sum(len(s.times_ms) for c in running for s in c.times.values())
            done += _PROOF_LAUNCHES * sum(len(c.times) for c in running)
        flop = self.problem.attn_flop()
        return float(flop * min(done, launches)), float(flop * launches)

    # ---- what came out ----

    def apply(self, record: dict[str, Any]) -> None:
        """Takes over what a journal's record says about this problem."""
        if record["kind"] == "final":
            samples = {name: samples_from_json(found) for name, found in record["times"].items()}
            self.finals[frozenset(samples)] = samples
            return
        if record["kind"] == "final failed":
            self.final_failures.append(record["reason"])
            return
        candidate = self.candidates.get(record["config"])
        if candidate is None:  # of another space
            return
        if record["kind"] == "times":
            candidate.times[record["rung"]] = samples_from_json(record["times"])
        elif record["kind"] == "proof":
            candidate.proof = Proof(**record["proof"])
            candidate.checked = record["thorough"] and candidate.proof.ok

    def standings(self) -> list[Standing]:
        """Everybody with a time, fastest first.

        Times of the final stand as they are. Those of a rung are scaled by what the winner took in
        the final and on that rung: the GPU's clock was another then.
        """
        final = self._final() or {}
        times = {name: samples.median_ms for name, samples in final.items()}
        leaders = times or self._times(self.last_rung)
        if not leaders:
            return []
        best = self.candidates[min(leaders, key=lambda name: (leaders[name], name))]
        standings = [
            Standing(self.candidates[name], samples.median_ms, samples, "final")
            for name, samples in final.items()
        ]
        for candidate in self.candidates.values():
            rung = max(candidate.times, default=ALONE)
            if candidate.name in final or not candidate.survived or rung == ALONE:
                continue
            samples = candidate.times[rung]
            scale = 1.0
            if best.name in final and rung in best.times:
                scale = times[best.name] / best.times[rung].median_ms
            standings.append(
                Standing(candidate, samples.median_ms * scale, samples, f"rung {rung + 1}")
            )
        return sorted(standings, key=lambda s: (s.ms, s.candidate.name))


def samples_to_json(samples: Samples) -> dict[str, Any]:
    """What samples_from_json reads."""
    return asdict(samples)


def samples_from_json(record: dict[str, Any]) -> Samples:
    """The samples that samples_to_json wrote."""
    return Samples(**{**record, "times_ms": tuple(record["times_ms"])})
