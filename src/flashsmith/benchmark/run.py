"""The main job: build a set of kernels, run each on real tensors, prove it, count what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashsmith.benchmark.conflicts import CONFLICT_KINDS, conflict_factors
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.run_times import TIMED, Timing, time_kernels
from flashsmith.benchmark.target import Target
from flashsmith.benchmark.timing import CudaEvents
from flashsmith.benchmark.usable_gpu import require_usable_gpu
from flashsmith.benchmark.whole_tiles import tiles_of, whole_tiles
from flashsmith.builder import KernelLibrary, libraries_for
from flashsmith.configs import KernelConfig, Problem, check_legal
from flashsmith.emulator import BankConflicts, estimate_seconds
from flashsmith.errors import ArgumentError, EmulatorError, LaunchError
from flashsmith.verify import Verdict, prove


@dataclass(frozen=True)
class Size:
    """How large a problem every kernel gets; head dimension and dtype are the config's own.

    `seq` None gives each kernel a length of its own: the shortest from the default on that its
    tiles divide.
    """

    batch: int
    seq: int | None
    heads: int


# Four K/V steps of 64 keys: enough for every part of the loop, a second or two per kernel.
EMULATED = Size(batch=1, seq=None, heads=2)
EMULATED_SEQ = 256
# On a GPU: what the float64 reference on the CPU does in seconds.
PROVEN_ON_GPU = Size(batch=2, seq=None, heads=4)
PROVEN_SEQ_ON_GPU = 1024
# What the emulator's checks slow it down by, for the estimate.
_CHECKS_COST = 4.0
# What both references take for a score and a column on one core.
_REFERENCE_SECONDS = 0.8e-9


@dataclass(frozen=True)
class KernelRow:
    """What the run found out about one kernel.

    `proven_seq` is the length it was proven at, `emulated_seq` the one of the counts. `problems`
    says what is wrong, empty for a kernel that passed. Spilled bytes and registers are per thread;
    `instructions` are warp instructions of the emulated size; a conflict factor is None where the
    kernel makes no such access; `timing` is None without a GPU.
    """

    config: KernelConfig
    proven_seq: int
    emulated_seq: int
    problems: tuple[str, ...]
    max_error: float | None
    bound: float | None
    rel_l2: float | None
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    ctas_per_sm: int
    instructions: int | None
    conflicts: dict[str, float | None]
    timing: Timing | None

    @property
    def ok(self) -> bool:
        """Whether the kernel is right."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        facts["config"] = str(self.config)
        facts["verdict"] = "pass" if self.ok else "FAIL"
        facts["timing"] = asdict(self.timing) if self.timing else None
        return facts


@dataclass(frozen=True)
class Report:
    """A whole run. `emulated` is the size that instructions and conflicts were counted on."""

    target: Target
    proven: Size
    emulated: Size
    checks: bool
    seed: int
    rows: tuple[KernelRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every kernel is right."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it, a kernel an item of `kernels`. The sizes' lengths are None where those
        of the kernels differ."""
        return {
            "arch": self.target.arch,
            "device": self.target.device.name,
            "backend": self.target.backend,
            "proven": _shared(self.proven, {row.proven_seq for row in self.rows}),
            "emulated": _shared(self.emulated, {row.emulated_seq for row in self.rows}),
            "timed": asdict(TIMED) if self.target.backend == "gpu" else None,
            "checks": self.checks,
            "seed": self.seed,
            "kernels": [row.to_json() for row in self.rows],
        }


def _shared(size: Size, lengths: set[int]) -> dict[str, int | None]:
    return asdict(replace(size, seq=lengths.pop() if len(lengths) == 1 else None))


def default_size(target: Target) -> Size:
    """What is proven when nobody says otherwise."""
    return PROVEN_ON_GPU if target.backend == "gpu" else EMULATED


def run_kernels(
    configs: Sequence[KernelConfig],
    target: Target,
    *,
    size: Size,
    checks: bool = False,
    seed: int = 0,
    narrator: Narrator,
) -> Report:
    """Builds, runs, proves and, on a GPU, times every config.

    `size` is what is proven. Instructions and conflicts are always counted in the emulator: on that
    size too or, with a GPU, on EMULATED. `checks` turns all of the emulator's checks on. A kernel
    that is wrong, or that does not come to its end, is a row of the report and not an exception.

    Raises ArgumentError for a size that a config's tiles do not divide, IllegalConfigError,
    LaunchError when a kernel has left the GPU unusable to this process, and what building raises.
    """
    on_gpu = target.backend == "gpu"
    emulated = EMULATED if on_gpu else size
    jobs = [_Job(cfg, target, size, emulated, checks, seed) for cfg in configs]
    for job in jobs:
        check_legal(job.config, target.device)
        _check_size(job.config, size)
    narrator.expect("emulating", _estimates(jobs))
    libraries = libraries_for(configs, arch=target.device.arch, progress=narrator.build)
    rows = []
    for done, job in enumerate(jobs):
        narrator.step(f"proving {job.config}", done, len(jobs))
        rows.append(job.row(libraries[job.config]))
    if on_gpu:
        narrator.step("timing them together", len(configs), len(configs))
        rows = _timed(rows, seed)
    return Report(target, size, emulated, checks, seed, tuple(rows))


def _estimates(jobs: Sequence[_Job]) -> list[float]:
    """Seconds that each kernel is expected to take; the first of a problem has its references
    computed, too."""
    estimates, known = [], set[Problem]()
    for job in jobs:
        problem, seconds = job.emulated_problem, job.estimate()
        if problem not in known:
            known.add(problem)
            # 4 FLOP a score and column, in either reference.
            seconds += _REFERENCE_SECONDS * problem.attn_flop() / 4
        estimates.append(seconds)
    return estimates


def _timed(rows: Sequence[KernelRow], seed: int) -> list[KernelRow]:
    """The rows with the times of the kernels that are right."""
    found = time_kernels([row.config for row in rows if row.ok], seed)
    timed = []
    for row in rows:
        outcome = found.get(row.config, row.problems)
        if isinstance(outcome, Timing):
            timed.append(replace(row, timing=outcome))
        else:
            timed.append(replace(row, problems=outcome))
    return timed


def _check_size(cfg: KernelConfig, size: Size) -> None:
    for name, value in (("batch", size.batch), ("heads", size.heads), ("seq", size.seq)):
        if value is not None and value < 1:
            raise ArgumentError(f"{name}={value}: give a whole number above 0")
    for name, tile in tiles_of(cfg).items():
        if size.seq is not None and size.seq % tile:
            raise ArgumentError(
                f"seq={size.seq}: must be a multiple of {name}={tile} of {cfg}; "
                f"take {-(-size.seq // tile) * tile}"
            )


@dataclass(frozen=True)
class _Job:
    """One kernel's part of the run."""

    config: KernelConfig
    target: Target
    proven: Size
    emulated: Size
    checks: bool
    seed: int

    @property
    def proven_seq(self) -> int:
        on_gpu = self.target.backend == "gpu"
        return self._seq(self.proven, PROVEN_SEQ_ON_GPU if on_gpu else EMULATED_SEQ)

    @property
    def emulated_seq(self) -> int:
        return self._seq(self.emulated, EMULATED_SEQ)

    def _seq(self, size: Size, least: int) -> int:
        return whole_tiles(least, self.config) if size.seq is None else size.seq

    @property
    def emulated_problem(self) -> Problem:
        cfg, size, seq = self.config, self.emulated, self.emulated_seq
        return Problem(size.batch, seq, seq, size.heads, size.heads, cfg.d_head, cfg.dtype)

    def estimate(self) -> float:
        """Seconds that the emulation is expected to take."""
        seconds = estimate_seconds(self.config, self.emulated_problem)
        return seconds * (_CHECKS_COST if self.checks else 1.0)

    def row(self, library: KernelLibrary) -> KernelRow:
        conflicts = BankConflicts()
        problems: list[str] = []
        emulated = self._prove("emulator", self.emulated, self.emulated_seq, problems, conflicts)
        judged = emulated
        if self.target.backend == "gpu":
            judged = self._prove("gpu", self.proven, self.proven_seq, problems)
        entry = library.entry(self.config)
        return KernelRow(
            config=self.config,
            proven_seq=self.proven_seq,
            emulated_seq=self.emulated_seq,
            problems=tuple(problems),
            max_error=judged.max_error if judged else None,
            bound=judged.bound if judged else None,
            rel_l2=judged.rel_l2 if judged else None,
            registers=entry.registers,
            spill_store_bytes=entry.spill_store_bytes,
            spill_load_bytes=entry.spill_load_bytes,
            smem_bytes=self.config.smem_bytes(),
            ctas_per_sm=self.config.num_ctas_per_sm(
                self.target.device.max_smem_per_sm, entry.registers
            ),
            instructions=(
                emulated.emulation.warp_instructions if emulated and emulated.emulation else None
            ),
            conflicts=(
                conflict_factors(conflicts, self.config)
                if emulated
                else dict.fromkeys(CONFLICT_KINDS)
            ),
            timing=None,
        )

    def _prove(
        self, backend: str, size: Size, seq: int, problems: list[str], *observers: BankConflicts
    ) -> Verdict | None:
        """The verdict, or None for a kernel that did not end; what is wrong goes to `problems`."""
        try:
            verdict = prove(
                self.config,
                seq=seq,
                batch=size.batch,
                heads=size.heads,
                backend=backend,
                arch=self.target.device.arch,
                checks=self.checks and backend == "emulator",
                observers=observers,
                seed=self.seed,
            )
        except (EmulatorError, LaunchError) as error:
            if backend == "gpu":
                require_usable_gpu(CudaEvents(), str(self.config))
            problems.append(f"did not come to its end: {error}")
            return None
        if not verdict.ok:
            problems.append(str(verdict))
        return verdict
