"""Trial: the results of one kernel on one problem. Trials: the journal's records as trials."""

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

# 'culled': dropped before it ran. 'not reached': it was never timed.
Status = Literal["active", "culled", "crash", "hang", "error", "wrong", "slower", "not reached"]
# The stages of a kernel; the stages of rung_stage() come between PROVE and CHECK. PREPARE makes a
# problem's tensors. ALONE, which times each finalist alone, finds the kernel that broke the final.
COMPILE, PREPARE, PROVE, CHECK, ALONE, FINAL = (
    "compile", "prepare", "prove", "check", "alone", "final",
)  # fmt: skip
_STAGES = rf"{COMPILE}|{PREPARE}|{PROVE}|{CHECK}|rung \d+|{ALONE}|{FINAL}"
# The field that a stage's record has. Stages that are not listed here use "samples".
_PARTS = {COMPILE: "facts", PREPARE: "failure", PROVE: "proof", CHECK: "proof"}
# ptxas's spill stores and loads, bytes per thread. A few outside the main loop cost nothing.
DEFAULT_MAX_SPILL = 256


def rung_stage(number: int) -> str:
    """The stage of a rung, counted from 0."""
    return f"rung {number + 1}"


@dataclass(frozen=True, order=True)
class Build:
    """A kernel to compile. It serves every problem that needs these semantics."""

    config: KernelConfig
    semantics: Semantics

    @classmethod
    def of(cls, problem: Problem, config: KernelConfig) -> Build:
        """The build that serves `problem` with `config`."""
        return cls(config, problem.required_semantics(config))

    @cached_property
    def name(self) -> str:
        """The config's short form."""
        return str(self.config)

    def __str__(self) -> str:
        return self.name if self.semantics == Semantics() else f"{self.name} [{self.semantics}]"


def is_right(proof: Proof) -> bool:
    """Whether an output was correct."""
    return proof.verdict == "pass"


@dataclass(frozen=True)
class Trial:
    """One kernel on one problem.

    reason: why the kernel has its `status`. checked: whether the output passed the thorough proof.
    samples: the timings by stage. origins: where and when each stage was timed. ms: the time that
    ranks the kernel, in milliseconds, or infinity without a time. stage: where `ms` was measured,
    or ''.
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
        """The config's short form."""
        return self.build.name

    @property
    def active(self) -> bool:
        """Whether it may still win."""
        return self.status == "active"

    @property
    def survived(self) -> bool:
        """Whether the kernel did not fail: it may win, or was slower."""
        return self.status in ("active", "slower")

    @cached_property
    def medians(self) -> dict[str, float]:
        """Median milliseconds, by stage."""
        return {stage: samples.median_ms for stage, samples in self.samples.items()}

    def after(self, stage: str, samples: Samples, origin: Mapping[str, Any]) -> Trial:
        """The trial with the timings of one more stage."""
        timed, origins = {**self.samples, stage: samples}, {**self.origins, stage: origin}
        return replace(self, samples=timed, origins=origins)


@dataclass(frozen=True)
class Record:
    """The result of one request to a compiler or to the bench: a line of the journal.

    builds: the kernels of the request. A record has exactly one of four results. `facts` belong to
    a compiled kernel, and `proof` is a check's result. `samples` has one item for each build, and
    `origin` has their place and time. `failure` is the resulting status and the reason.

    Raises ValueError when the parts do not fit the stage.
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
        """The kernels' short forms."""
        return frozenset(build.name for build in self.builds)

    @property
    def may_pass(self) -> bool:
        """Whether the record is a failure that may have another cause than the kernel, such as a
        machine without free memory or a killed compiler. Another run tries again."""
        if self.failure is None:
            return False
        return self.stage in (COMPILE, PREPARE, FINAL) or self.failure[0] == "error"

    def to_json(self) -> dict[str, Any]:
        """The record for from_json(), with the hash of each family's CUDA sources."""
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
        """The record that to_json() wrote; None when the CUDA sources have changed since.

        Raises ValueError, TypeError or KeyError for anything else.
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
    """All results of a sweep: its records, beginning with earlier runs' records, folded into
    trials.

    Failures that an earlier run's machine may have caused are ignored. A kernel that failed or was
    wrong once is disqualified on all problems.
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
        # The problems whose tensors cannot be made, with the reason.
        self.unprepared: dict[Problem, str] = {}
        # The keys hold the short forms of the finalists.
        self.finals: dict[tuple[Problem, frozenset[str]], Record] = {}
        self.failed_finals: Counter[tuple[Problem, frozenset[str]]] = Counter()
        # A problem's version grows with every change to its trials.
        self.versions: Counter[Problem] = Counter()
        for record in records:
            if not record.may_pass:
                self.add(record)

    def of(self, problem: Problem, builds: Iterable[Build]) -> dict[str, Trial]:
        """The trials of kernels on a problem, by short form. Each is active, or dropped from all
        races because the kernel was culled or failed."""
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
        """Adds a record. If the record drops its kernel, returns the status and reason."""
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
        """Drops a kernel from all races; the first reason is kept."""
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
    """Why compiling would be useless: the config is illegal on the device, or its CTA does not fit
    an SM. None if the config is worth trying."""
    broken = broken_rules(cfg, device)
    if broken:
        return "illegal: " + "; ".join(rule.message for rule in broken)
    if cfg.n_threads > device.max_threads_per_sm or not cfg.num_ctas_per_sm(device.max_smem_per_sm):
        return _cannot_reside(cfg, device)
    return None


def cull_compiled(
    cfg: KernelConfig, facts: KernelFacts, device: DeviceSpec, max_spill: int
) -> str | None:
    """Why running a compiled kernel would be useless; None if the kernel is worth trying.

    Some families do not allow any spills, since every spill costs time there.
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
