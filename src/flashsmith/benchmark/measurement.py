"""Measurement: the result of one implementation on one problem, with all conditions that affect its
figures.

A measurement is a row. Its fields are the columns of all measurement files. It is assembled from a
Problem, a Proof, Times, KernelFacts and an Environment:.

    proof = Proof.of(workload.check(output))
    Measurement.of("ours", "ours", problem, proof, Times.of(samples, problem), environment)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, Literal, TypeVar

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.timing import Samples
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.verify import Comparison

# The number of FLOP per byte below which memory limits a problem: the tensor cores of every GPU so
# far compute more FLOP in the time in which memory delivers one byte.
FLOP_PER_BYTE = 100
Kind = Literal["ours", "peer"]
Verdict = Literal["pass", "fail", "absent", "error"]


@dataclass(frozen=True)
class Proof:
    """The result of checking an output before it is timed.

    verdict: 'pass' or a failure; 'absent' for a peer that cannot take part, 'error' for a kernel
    that did not finish.
    note: why it failed; for a peer that passed, its version.
    max_error, error_bound, rel_l2: errors against float64; None if nothing was compared.
    """

    verdict: Verdict
    note: str = ""
    max_error: float | None = None
    error_bound: float | None = None
    rel_l2: float | None = None

    @classmethod
    def of(cls, found: Comparison, note: str = "") -> Proof:
        """The Proof of an output with the result ``found``; ``note`` is stored only if the output
        is correct."""
        verdict: Verdict = "pass" if found.ok else "fail"
        note = note if found.ok else "; ".join(found.reasons)
        return cls(verdict, note, found.max_error, found.bound, found.rel_l2)


@dataclass(frozen=True)
class Times:
    """Statistics of the times of an implementation's launches.

    ms: the median.
    spread: the interquartile range divided by the median.
    tflops: `Problem.attn_flop` divided by the median.
    sm_clock_mhz, power_w: readings during the timed launches; None without a sensor.
    """

    ms: float
    best_ms: float
    spread: float
    tflops: float
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    @classmethod
    def of(cls, samples: Samples, problem: Problem) -> Times:
        """The times of an implementation's launches on a problem."""
        ms = samples.median_ms
        return cls(
            ms=ms,
            best_ms=samples.best_ms,
            spread=samples.spread,
            tflops=problem.attn_flop() / ms / 1e9,
            sm_clock_mhz=samples.sm_clock_mhz,
            power_w=samples.power_w,
        )


Part = Proof | Times | KernelFacts | Environment
_Self = TypeVar("_Self", bound="Measurement")


@dataclass(frozen=True)
class Measurement:
    """The result of one implementation on one problem: a row.

    implementation: its name in tables; in files this column is called 'contender'.
    family, config: flashsmith's kernel, also if attention() chose it; '' for a peer.
    semantics: the words of the problem's semantics, or 'plain'. Batch, lengths and d are those of
        the Problem; d_v is None if it equals d.
    verdict to rel_l2: fields of Proof.
    ms to power_w: fields of Times.
    registers to ctas_per_sm, instructions, conflicts: fields of KernelFacts. CSV and Parquet files
        do not have instructions and conflicts.
    gpu to python: fields of Environment.
    time: the time at which the row was made (UTC, in ISO format).
    """

    implementation: str
    kind: Kind
    family: str
    config: str
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    d: int
    dtype: str
    semantics: str
    verdict: Verdict
    note: str = ""
    ms: float | None = None
    best_ms: float | None = None
    spread: float | None = None
    tflops: float | None = None
    max_error: float | None = None
    error_bound: float | None = None
    rel_l2: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    protocol: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    smem_bytes: int | None = None
    ctas_per_sm: int | None = None
    gpu: str = ""
    arch: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    flashsmith: str = ""
    revision: str = ""
    python: str = ""
    time: str = ""
    d_v: int | None = None
    instructions: dict[str, int] | None = field(default=None, hash=False)
    conflicts: dict[str, float | None] | None = field(default=None, hash=False)

    @classmethod
    def of(
        cls: type[_Self],
        implementation: str,
        kind: Kind,
        problem: Problem,
        *parts: Part | Mapping[str, Any] | None,
        **columns: Any,
    ) -> _Self:
        """Makes the row of an implementation from parts, which may be None."""
        for part in parts:
            columns |= _columns(part)
        named = {"implementation": implementation, "kind": kind, "family": "", "config": ""}
        return cls(**{**named, **problem_columns(problem), **columns})

    @property
    def environment(self) -> Environment:
        """The row's environment."""
        return Environment(**{part.name: getattr(self, part.name) for part in fields(Environment)})

    @property
    def is_failure(self) -> bool:
        """Whether this row makes the run fail: its output is wrong, or a flashsmith kernel did not
        finish. A peer's wrong output is a failure too, because nothing can be compared with that
        output."""
        return self.verdict in ("fail", "error")

    @property
    def is_memory_bound(self) -> bool:
        """Whether memory limits the problem on any GPU, by the bytes that the operation must read
        and write. False if the row's problem cannot be read."""
        try:
            problem = self.problem
        except ArgumentError:
            return False
        if problem.computed.traffic is None:
            return False
        return problem.attn_flop() < FLOP_PER_BYTE * problem.computed.bytes(problem)

    @property
    def tb_per_s(self) -> float:
        """The bytes that a kernel must read and write, divided by the time, in TB/s; 0 without a
        time."""
        problem = self.problem
        return problem.computed.bytes(problem) / self.ms / 1e9 if self.ms else 0.0

    @property
    def problem(self) -> Problem:
        """The problem of the row. Raises ArgumentError if the row does not name a valid problem."""
        d = f"d{self.d}" if self.d_v is None else f"d{self.d}:{self.d_v}"
        return _problem(
            f"b{self.batch} s{self.seq_q}:{self.seq_k} h{self.heads_q}:{self.heads_k} {d} "
            f"{self.dtype} {self.semantics}"
        )


def _columns(part: Part | Mapping[str, Any] | None) -> dict[str, Any]:
    if part is None:
        return {}
    if isinstance(part, Mapping):
        return dict(part)
    return part.columns() if isinstance(part, KernelFacts) else asdict(part)


@lru_cache(maxsize=4096)
def _problem(text: str) -> Problem:
    return Problem.parse(text)


def problem_columns(problem: Problem) -> dict[str, Any]:
    """The columns that name a problem."""
    return {
        **{name: getattr(problem, name) for name in _SIZES},
        **({} if problem.d_v == problem.d else {"d_v": problem.d_v}),
        "dtype": problem.dtype.name.lower(),
        "semantics": problem.kind,
    }


_SIZES = ("batch", "seq_q", "seq_k", "heads_q", "heads_k", "d")


def now() -> str:
    """The current time as measurements store it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
