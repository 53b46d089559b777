"""Climbs a ladder: builds its kernels, proves and counts each in the emulator, and times them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from flashsmith.benchmark.kernel_facts import CONFLICT_KINDS, conflict_factors
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.progression.ladder import Ladder, Step, StepTime
from flashsmith.benchmark.whole_tiles import whole_tiles
from flashsmith.builder import KernelLibrary, libraries_for
from flashsmith.counted import counted
from flashsmith.emulator import BankConflicts, estimate_seconds
from flashsmith.emulator.checks import instruction_mix
from flashsmith.errors import EmulatorError
from flashsmith.families import KernelConfig, Problem, check_legal
from flashsmith.runtime.target import Target
from flashsmith.verify import Verdict, prove

# At least; four K/V steps of 64 keys: the loop's weight shows, at a second or two per kernel.
COUNTED_SEQ = 256
COUNTED_HEADS = 2

NO_TIMES = "no times: a GPU is needed, and the emulator stood in for it"


@dataclass(frozen=True)
class Times:
    """What a timer found out: a time or a list of problems for each config, by short form."""

    problem: str
    protocol: str
    peer: str
    peer_note: str
    by_config: dict[str, StepTime]
    problems: dict[str, list[str]]


Timer = Callable[[Sequence[KernelConfig]], Times]


def climb(
    configs: Sequence[KernelConfig],
    target: Target,
    *,
    timer: Timer | None,
    environment: dict[str, object],
    seed: int = 0,
    narrator: Narrator,
) -> Ladder:
    """The ladder of `configs`, in their order; `timer` is None where there is nothing to time on.

    A kernel that is wrong, or does not come to its end, is a step with problems. Raises
    IllegalConfigError and what building raises.
    """
    for cfg in configs:
        check_legal(cfg, target.device)
    seq = {cfg: whole_tiles(COUNTED_SEQ, cfg) for cfg in configs}
    narrator.expect(
        "emulating", [estimate_seconds(cfg, _problem(cfg, seq[cfg])) for cfg in configs]
    )
    libraries = libraries_for(configs, arch=target.device.arch, progress=narrator.build)
    counts = []
    for done, cfg in enumerate(configs):
        narrator.step(f"counting {cfg}", done, len(configs))
        counts.append(_count(cfg, target, seq[cfg], seed))
    times = None
    if timer is not None:
        narrator.say(f"timing {counted(len(configs), 'kernel')}")
        times = timer(configs)
    steps = tuple(
        _step(cfg, seq[cfg], target, libraries[cfg], count, times)
        for cfg, count in zip(configs, counts, strict=True)
    )
    return Ladder(
        arch=target.arch,
        device=target.device.name,
        counted=f"batch 1, seq {_lengths(seq.values())}, heads {COUNTED_HEADS}",
        timed=times.problem if times else None,
        peer=times.peer if times else "",
        peer_note=times.peer_note if times else NO_TIMES,
        protocol=times.protocol if times else "",
        environment=environment,
        steps=steps,
    )


def _problem(cfg: KernelConfig, seq: int) -> Problem:
    return Problem(1, seq, seq, COUNTED_HEADS, COUNTED_HEADS, cfg.d_head, cfg.dtype)


def _lengths(lengths: Collection[int]) -> str:
    shortest, longest = min(lengths), max(lengths)
    return str(shortest) if shortest == longest else f"{shortest} to {longest}"


@dataclass(frozen=True)
class _Count:
    verdict: Verdict | None
    conflicts: dict[str, float | None]
    problems: list[str]


def _count(cfg: KernelConfig, target: Target, seq: int, seed: int) -> _Count:
    observer = BankConflicts()
    try:
        verdict = prove(
            cfg,
            seq=seq,
            heads=COUNTED_HEADS,
            arch=target.device.arch,
            observers=[observer],
            seed=seed,
        )
    except EmulatorError as error:
        return _Count(None, dict.fromkeys(CONFLICT_KINDS), [f"did not come to its end: {error}"])
    problems = [] if verdict.ok else [str(verdict)]
    return _Count(verdict, conflict_factors(observer, cfg), problems)


def _step(
    cfg: KernelConfig,
    seq: int,
    target: Target,
    library: KernelLibrary,
    count: _Count,
    times: Times | None,
) -> Step:
    entry, name = library.entry(cfg), str(cfg)
    emulation = count.verdict.emulation if count.verdict else None
    return Step(
        config=name,
        family=cfg.FAMILY,
        problems=(*count.problems, *(times.problems.get(name, ()) if times else ())),
        registers=entry.registers,
        spill_store_bytes=entry.spill_store_bytes,
        spill_load_bytes=entry.spill_load_bytes,
        smem_bytes=cfg.smem_bytes(),
        ctas_per_sm=cfg.num_ctas_per_sm(target.device.max_smem_per_sm, entry.registers),
        instructions=instruction_mix(emulation.instructions) if emulation else None,
        conflicts=count.conflicts,
        time=times.by_config.get(name) if times else None,
        counted_seq=seq,
    )
