"""Trial: the results of one kernel on one problem. Trials: all records of a journal, as trials."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement import Proof
from flashsmith.benchmark.records import read_record
from flashsmith.benchmark.timing import Samples
from flashsmith.chooser.winners.staleness import is_of_other_sources, sources_here
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    broken_rules,
    parse_kernel_name_into_config,
)

# 'culled': dropped without being run. 'not reached': never timed.
Status = Literal["active", "culled", "crash", "hang", "error", "wrong", "slower", "not reached"]
# The stages of a kernel. The stages of rungs (see rung_stage()) are between PROVE and CHECK.
# PREPARE makes the tensors of a problem. ALONE times each finalist alone, to find the kernel that
# made a final fail.
COMPILE, PREPARE, PROVE, CHECK, ALONE, FINAL = (
    "compile", "prepare", "prove", "check", "alone", "final",
)  # fmt: skip
_STAGES = rf"{COMPILE}|{PREPARE}|{PROVE}|{CHECK}|rung \d+|{ALONE}|{FINAL}"
# For each stage, the name of the field of a record that has the result. For stages that are not
# listed, it is "samples".
_PARTS = {COMPILE: "facts", PREPARE: "failure", PROVE: "proof", CHECK: "proof"}
# The maximum number of bytes per thread that ptxas may spill, as the sum of stores and loads. A few
# spills outside the main loop do not matter.
DEFAULT_MAX_SPILL = 256


def rung_stage(number: int) -> str:
    """The name of the stage of a rung, which is counted from 0."""
    return f"rung {number + 1}"


@dataclass(frozen=True, order=True)
class Build:
    """A kernel to compile: a config and semantics. The kernel serves all problems that need these
    semantics."""

    config: KernelConfig
    semantics: Semantics

    @classmethod
    def of(cls, problem: Problem, config: KernelConfig) -> Build:
        """The build of `config` that serves `problem`."""
        return cls(config, problem.required_semantics(config))

    @cached_property
    def name(self) -> str:
        """The short form of the config."""
        return str(self.config)

    def __str__(self) -> str:
        return self.name if self.semantics == Semantics() else f"{self.name} [{self.semantics}]"


def is_right(proof: Proof) -> bool:
    """Whether a check found the output correct."""
    return proof.verdict == "pass"


@dataclass(frozen=True)
class Trial:
    """The results of one kernel on one problem.

    reason: why the kernel has this `status`.
    checked: whether the kernel's output has passed the thorough check.
    samples: its timings, by stage.
    origins: where and when it was timed, by stage.
    ms: the time by which the kernel is ranked, in milliseconds; infinite if there is none.
    stage: the stage in which `ms` was measured; '' if there is none.
    """

    build: Build
    status: Status = "active"
    reason: str = ""
    facts: KernelFacts | None = None
    proof: Proof | None = None
    checked: bool = False
    samples: Mapping[str, Samples] = field(default_factory=dict)
    origins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ms: float = math.inf
    stage: str = ""

    @property
    def name(self) -> str:
        """The short form of the config."""
        return self.build.name

    @property
    def active(self) -> bool:
        """Whether the kernel may still win."""
        return self.status == "active"

    @property
    def survived(self) -> bool:
        """Whether the kernel did not fail: it may win, or it was slower."""
        return self.status in ("active", "slower")

    @cached_property
    def medians(self) -> dict[str, float]:
        """The medians of the kernel's timings in milliseconds, by stage."""
        return {stage: samples.median_ms for stage, samples in self.samples.items()}

    def after(self, stage: str, samples: Samples, origin: Mapping[str, Any]) -> Trial:
        """A copy of this trial to which the timings of one more stage are added."""
        timed, origins = {**self.samples, stage: samples}, {**self.origins, stage: origin}
        return replace(self, samples=timed, origins=origins)


@dataclass(frozen=True)
class Record:
    """The result of one request to a compiler or the bench; a line of the journal.

    builds: the kernels that the request was about. A record has exactly one of the following
    results. `facts` are those of a compiled kernel, and `proof` is the result of a check. `samples`
    has an item for each build, and `origin` says where and when they were timed. `failure` is the
    resulting status of the kernel, and the reason.

    Raises ValueError if these do not fit the stage.
    """

    stage: str
    problem: Problem | None = None
    builds: tuple[Build, ...] = ()
    facts: KernelFacts | None = None
    proof: Proof | None = None
    samples: tuple[Samples, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    failure: tuple[Status, str] | None = None

    def __post_init__(self) -> None:
        parts = ("facts", "proof", "samples", "failure")
        fits = (
            re.fullmatch(_STAGES, self.stage)
            and [name for name in parts if getattr(self, name)]
            == ["failure" if self.failure else _PARTS.get(self.stage, "samples")]
            and (self.problem is None) == (self.stage == COMPILE)
            and (self.stage == FINAL or len(self.builds) == (self.stage != PREPARE))
            and len(self.samples) in (0, len(self.builds))
            and all(samples.times_ms for samples in self.samples)
            and (self.failure is None or self.failure[0] in ("crash", "hang", "error"))
        )
        if not fits:
            raise ValueError(f"the parts of a record of the stage {self.stage!r} do not fit")

    @property
    def names(self) -> frozenset[str]:
        """The short forms of the kernels."""
        return frozenset(build.name for build in self.builds)

    @property
    def may_pass(self) -> bool:
        """Whether the record is a failure that the kernel may not have caused, such as a lack of
        memory or a compiler that was killed. If so, the next run tries again."""
        if self.failure is None:
            return False
        return self.stage in (COMPILE, PREPARE, FINAL) or self.failure[0] == "error"

    def to_json(self) -> dict[str, Any]:
        """The record as from_json() reads it, with the hash of the CUDA sources of each family."""
        families = sorted({build.config.FAMILY for build in self.builds})
        parts = {name: getattr(self, name) for name in _TYPES if getattr(self, name) is not None}
        return {
            "stage": self.stage,
            "problem": self.problem and str(self.problem),
            "kernels": [[build.name, str(build.semantics)] for build in self.builds],
            "csrc": {family: sources_here(family) for family in families},
            **{name: asdict(part) for name, part in parts.items()},
            "samples": [asdict(samples) for samples in self.samples],
            "origin": dict(self.origin),
            "failure": self.failure,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Record | None:
        """Reads a record that to_json() wrote.

        Returns None if the CUDA sources have changed since then.

        Raises ValueError, TypeError or KeyError for anything that is not such a record.
        """
        sources = dict(found["csrc"])
        if any(is_of_other_sources({"csrc": sources[family]}, family) for family in sources):
            return None
        parts = {
            name: read_record(kind, found[name]) for name, kind in _TYPES.items() if name in found
        }
        return cls(
            stage=found["stage"],
            problem=None if found["problem"] is None else Problem.parse(str(found["problem"])),
            builds=tuple(_build(*texts) for texts in found["kernels"]),
            samples=tuple(read_record(Samples, one) for one in found["samples"]),
            origin=dict(found["origin"]),
            failure=found["failure"] and (found["failure"][0], str(found["failure"][1])),
            **parts,
        )


_TYPES: dict[str, Any] = {"facts": KernelFacts, "proof": Proof}


@cache
def _build(config: str, semantics: str) -> Build:
    return Build(parse_kernel_name_into_config(config), Semantics.parse(semantics))


class Trials:
    """All results of a sweep: the records of earlier runs and of this run, collected in trials.

    Failures in earlier runs that may have been caused by the machine are ignored. A kernel that has
    failed or given a wrong result once is disqualified for all problems.
    """

    def __init__(
        self,
        device: DeviceSpec,
        max_spill: int = DEFAULT_MAX_SPILL,
        records: Iterable[Record] = (),
    ) -> None:
        self._device, self._max_spill = device, max_spill
        self._trials: dict[Problem, dict[str, Trial]] = {}
        self._facts: dict[Build, KernelFacts] = {}
        self._dropped: dict[Build, tuple[Status, str]] = {}
        # For each problem whose tensors cannot be made, the reason.
        self.unprepared: dict[Problem, str] = {}
        # The keys are the problem and the short forms of all its finalists.
        self.finals: dict[tuple[Problem, frozenset[str]], Record] = {}
        self.failed_finals: Counter[tuple[Problem, frozenset[str]]] = Counter()
        # A problem's version number increases with each change to its trials.
        self.versions: Counter[Problem] = Counter()
        for record in records:
            if not record.may_pass:
                self.add(record)

    def of(self, problem: Problem, builds: Iterable[Build]) -> dict[str, Trial]:
        """The trials of the given kernels on a problem, by short form.

        Each trial is active, unless its kernel was culled or has failed and is thus dropped from
        all races.
        """
        known = self._trials.setdefault(problem, {})
        return {b.name: known.get(b.name) or self._begin(problem, b) for b in builds}

    def _begin(self, problem: Problem, build: Build) -> Trial:
        if build not in self._dropped and (reason := cull_unbuilt(build.config, self._device)):
            self._dropped[build] = "culled", reason
        status, reason = self._dropped.get(build, ("active", ""))
        begun = Trial(build, status, reason, self._facts.get(build))
        self._trials[problem][build.name] = begun
        return begun

    def add(self, record: Record) -> tuple[Status, str] | None:
        """Adds a record. Returns the new status and the reason if the record disqualifies the
        kernel, otherwise None."""
        problem, stage, failure = record.problem, record.stage, record.failure
        if problem is None:
            return self._add_compiled(record.builds[0], record.facts, failure)
        self.versions[problem] += 1
        if stage == FINAL:
            if failure is not None:
                self.failed_finals[problem, record.names] += 1
            else:
                self.finals[problem, record.names] = record
            return None
        if stage == PREPARE and failure is not None:
            self.unprepared[problem] = failure[1]
            return None
        (trial,) = self.of(problem, record.builds).values()
        if failure is not None:
            what = "proven" if stage in (PROVE, CHECK) else "timed"
            reason = f"while it was {what} on {problem}: {failure[1]}"
            return self._drop(trial.build, failure[0], reason)
        if record.proof is None:
            trial = trial.after(stage, record.samples[0], record.origin)
        elif trial.proof is None or is_right(trial.proof):
            checked = trial.checked or (stage == CHECK and is_right(record.proof))
            trial = replace(trial, proof=record.proof, checked=checked)
        self._trials[problem][trial.name] = trial
        if record.proof is None or is_right(record.proof):
            return None
        return self._drop(trial.build, "wrong", f"on {problem}: {record.proof.note}")

    def _add_compiled(
        self, build: Build, facts: KernelFacts | None, failure: tuple[Status, str] | None
    ) -> tuple[Status, str] | None:
        if facts is None:
            return self._drop(build, "culled", f"does not compile: {failure and failure[1]}")
        self._facts[build] = facts
        self._change(build, facts=facts)
        reason = cull_compiled(build.config, facts, self._device, self._max_spill)
        return None if reason is None else self._drop(build, "culled", reason)

    def _drop(self, build: Build, status: Status, reason: str) -> tuple[Status, str]:
        """Drops a kernel from all races. If it already is dropped, the first reason is kept."""
        status, reason = self._dropped.setdefault(build, (status, reason))
        self._change(build, status=status, reason=reason)
        return status, reason

    def _change(self, build: Build, **changes: Any) -> None:
        for problem, known in self._trials.items():
            trial = known.get(build.name)
            if trial is not None and trial.build == build:
                known[build.name] = replace(trial, **changes)
                self.versions[problem] += 1


# ---- reasons to drop a kernel before it is measured ----


def cull_unbuilt(cfg: KernelConfig, device: DeviceSpec) -> str | None:
    """Returns the reason why a config is not compiled: it is illegal on the device, or its CTA does
    not fit on an SM. None if the config may be compiled."""
    broken = broken_rules(cfg, device)
    if broken:
        return "illegal: " + "; ".join(rule.message for rule in broken)
    if cfg.n_threads > device.max_threads_per_sm or not cfg.num_ctas_per_sm(device.max_smem_per_sm):
        return _cannot_reside(cfg, device)
    return None


def cull_compiled(
    cfg: KernelConfig, facts: KernelFacts, device: DeviceSpec, max_spill: int
) -> str | None:
    """Returns the reason why a compiled kernel is not run; None if it may run.

    Some families allow no spills, because in their kernels every spill costs time.
    """
    if cfg.family.must_not_spill:
        max_spill = 0
    if facts.spill_bytes > max_spill:
        return f"spills: {facts.spill_bytes} bytes per thread, allowed are {max_spill}"
    if facts.ctas_per_sm == 0:
        return _cannot_reside(cfg, device, f" and {facts.registers} registers each")
    return None


def _cannot_reside(cfg: KernelConfig, device: DeviceSpec, registers: str = "") -> str:
    return (
        f"cannot reside: {cfg.n_threads} threads with {cfg.smem_bytes()} bytes of shared memory"
        f"{registers}, more than an SM of {device.name} has"
    )
