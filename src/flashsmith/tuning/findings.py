"""Findings: what is known about all candidates, from the journal and since, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashsmith.families import DeviceSpec, Semantics, parse_kernel_name_into_config
from flashsmith.tuning.candidate import Candidate, Status
from flashsmith.tuning.cull import cull_compiled
from flashsmith.tuning.entry import new_candidate
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.race import Race
from flashsmith.tuning.runner import Build, Compiled


class Findings:
    """Applies records to the races, those of earlier runs first, and keeps new ones in the journal.

    A record is all that changes a race: whoever reads the same records stands where the sweep
    stood. `say` hears of what drops a kernel.
    """

    def __init__(
        self,
        races: Sequence[Race],
        journal: Journal,
        device: DeviceSpec,
        max_spill: int,
        say: Callable[[str], None],
    ) -> None:
        self.races = {str(race.problem): race for race in races}
        self._journal = journal
        self._device, self._max_spill = device, max_spill
        self._say = say
        self._unsaved: list[dict[str, Any]] = []
        self._compiled: dict[Build, Compiled] = {}
        self._condemned: dict[Build, tuple[Status, str]] = {}
        # Names of the races that records have touched; whoever looks at them clears it.
        self.touched: set[str] = set(self.races)
        for record in journal.records:
            self._apply(record, new=False)

    def note(self, kind: str, **facts: Any) -> None:
        """Something new. It counts from now on; `save` has to follow."""
        record = {"kind": kind, **facts}
        self._unsaved.append(record)
        self._apply(record, new=True)

    def save(self) -> None:
        """Has the disk hold what is new. Apart from `note`, so that the GPU need not wait for it.

        Raises ArgumentError when the disk is full.
        """
        records, self._unsaved = self._unsaved, []
        self._journal.add(records)

    def advance(self, race: Race) -> list[Build]:
        """Lets neighbours of the best join where a race has come so far; what has to be compiled
        for them."""
        wanted: list[Build] = []
        race.search_task(())  # ends the rungs that are complete
        while race.refinable:
            joined: list[Candidate] = []
            for leader in race.leaders():
                config = leader.build.config
                for cfg in config.family.neighbours(config):
                    candidate = new_candidate(race.problem, cfg, self._device)
                    known = [*race.candidates, *(c.name for c in joined)]
                    if candidate.name not in known:
                        joined.append(candidate)
            race.join(joined)
            for candidate in joined:
                self._tell(candidate)
            wanted += [c.build for c in joined if c.racing]
            race.search_task(())
        return wanted

    def _tell(self, candidate: Candidate) -> None:
        """Applies what is known of a candidate's build."""
        if compiled := self._compiled.get(candidate.build):
            self._take_compiled(candidate, compiled)
        if found := self._condemned.get(candidate.build):
            candidate.drop(*found)

    def _take_compiled(self, candidate: Candidate, compiled: Compiled) -> str | None:
        config = candidate.build.config
        reason = cull_compiled(config, compiled, self._device, self._max_spill)
        candidate.compiled = compiled
        if reason is not None:
            candidate.drop("culled", reason)
        return reason

    def _apply(self, record: dict[str, Any], new: bool) -> None:
        if not new and _may_pass(record):
            return
        if record["kind"] == "compiled":
            self._apply_compiled(record, new)
        elif record["kind"] == "failed":
            build = build_from_json(record["build"])
            self._condemn(build, record["status"], record["reason"], new)
        elif race := self.races.get(record["problem"]):
            race.apply(record)
            self.touched.add(record["problem"])
            if record["kind"] == "proof" and not record["proof"]["ok"]:
                build = Build.of(race.problem, parse_kernel_name_into_config(record["config"]))
                reason = f"on {record['problem']}: {record['proof']['reason']}"
                self._condemn(build, "wrong", reason, new)

    def _apply_compiled(self, record: dict[str, Any], new: bool) -> None:
        build = build_from_json(record["build"])
        compiled = self._compiled[build] = Compiled(**record["compiled"])
        reason = None
        for name, race in self.races.items():
            candidate = race.candidates.get(str(build.config))
            if candidate is not None and candidate.build == build:
                reason = self._take_compiled(candidate, compiled)
                self.touched.add(name)
        if reason is not None and new:
            self._say(f"culled {build}: {reason}")

    def _condemn(self, build: Build, status: Status, reason: str, new: bool) -> None:
        """A kernel that did wrong once is not trusted on any problem."""
        self._condemned.setdefault(build, (status, reason))
        touched = [race for race in self.races.values() if race.condemn(build, status, reason)]
        for race in self.races.values():
            if race.mentor in touched:
                race.reopen()
                touched.append(race)
        self.touched.update(str(race.problem) for race in touched)
        if new:
            self._say(f"{status}: {build} {reason}")


def _may_pass(record: dict[str, Any]) -> bool:
    """Whether a record is of a failure that need not be the kernel's fault (a GPU or a machine that
    was out of memory, a compiler that was killed): whoever goes on later tries again."""
    return bool(
        record["kind"] == "final failed"
        or (record["kind"] == "failed" and record["status"] == "error")
        or (record["kind"] == "compiled" and record["compiled"]["error"] is not None)
    )


def build_to_json(build: Build) -> list[str]:
    """What build_from_json reads."""
    return [str(build.config), str(build.semantics)]


def build_from_json(texts: list[str]) -> Build:
    """The build that build_to_json wrote."""
    return Build(parse_kernel_name_into_config(texts[0]), Semantics.parse(texts[1]))
