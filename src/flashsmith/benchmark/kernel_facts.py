"""KernelFacts: the costs and the executed instructions of a kernel, as all commands show them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flashsmith.builder import KernelEntry, KernelLibrary, Progress, find_library, library_for
from flashsmith.errors import IllegalConfigError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics, by_family, check_legal
from flashsmith.families.config import THREADS_PER_WARP
from flashsmith.runtime.emulation import (
    BankConflicts,
    EmulationResult,
    instruction_mix,
    parse_entry,
)

# The kinds of use of shared memory for which bank conflicts are reported; each family assigns its
# accesses to these kinds.
CONFLICT_KINDS = ("ldmatrix", "copy st", "O st", "O ld")
KernelUse = tuple[KernelConfig, Problem]


@dataclass(frozen=True)
class KernelFacts:
    """The costs of a kernel, from the report of the compiler, and its counts, from the emulator.

    registers, spill_store_bytes, spill_load_bytes: per thread. If a config has several kernels,
    this is the maximum over them.
    smem_bytes: per CTA.
    instructions: executed warp instructions by class; None if nothing was emulated.
    conflicts: for each use of shared memory, the wavefronts divided by the wavefronts without bank
    conflicts; None for a use that does not occur.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    ctas_per_sm: int
    instructions: dict[str, int] | None = None
    conflicts: dict[str, float | None] = field(default_factory=lambda: NO_CONFLICTS.copy())

    @classmethod
    def of(
        cls,
        entry: KernelEntry,
        device: DeviceSpec,
        emulation: EmulationResult | None = None,
        conflicts: BankConflicts | None = None,
    ) -> KernelFacts:
        """Returns the facts about a built kernel on a device; ``emulation`` adds the counts of the
        emulator."""
        cfg, spilling = entry.config, entry.most_spilling
        return cls(
            registers=entry.most_registers,
            spill_store_bytes=spilling.spill_store_bytes,
            spill_load_bytes=spilling.spill_load_bytes,
            smem_bytes=cfg.smem_bytes(),
            ctas_per_sm=cfg.num_ctas_per_sm(device.max_smem_per_sm, entry.registers),
            instructions=instruction_mix(emulation.instructions) if emulation else None,
            conflicts=conflict_factors(conflicts, cfg) if conflicts else NO_CONFLICTS.copy(),
        )

    @property
    def spill_bytes(self) -> int:
        """The spilled bytes that are stored plus the bytes that are loaded."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def total_instructions(self) -> int | None:
        """The sum of the warp instructions of all classes; None if nothing was emulated."""
        return None if self.instructions is None else sum(self.instructions.values())

    def columns(self) -> dict[str, Any]:
        """The facts as columns of a Measurement."""
        names = ["registers", "spill_bytes", "smem_bytes", "ctas_per_sm"]
        names += ["instructions", "conflicts"] if self.instructions is not None else []
        return {name: getattr(self, name) for name in names}


NO_CONFLICTS: dict[str, float | None] = dict.fromkeys(CONFLICT_KINDS)


def conflict_factors(measured: BankConflicts, cfg: KernelConfig) -> dict[str, float | None]:
    """For each of CONFLICT_KINDS, the ratio of the wavefronts to the wavefronts without bank
    conflicts; None for a use that does not occur."""
    factors: dict[str, float | None] = {}
    uses = cfg.family.conflict_kinds()
    for use in CONFLICT_KINDS:
        kinds = uses.get(use, ())
        counted = [measured.by_kind[kind] for kind in kinds if kind in measured.by_kind]
        ideal = sum(wavefronts.ideal for wavefronts in counted)
        actual = sum(wavefronts.actual for wavefronts in counted)
        factors[use] = actual / ideal if ideal else None
    return factors


def static_mix(ptx: str, entry: str) -> dict[str, int]:
    """The number of instructions of each class in the PTX of one entry, the most frequent class
    first."""
    kernel = parse_entry(ptx, entry)
    return instruction_mix(Counter(instruction.mnemonic for instruction in kernel.instructions))


@dataclass(frozen=True)
class Occupancy:
    """The numbers of CTAs that the resources of one SM allow; the smallest number is the
    occupancy."""

    ctas_per_sm: int
    warps_per_sm: int
    limits: dict[str, int]
    limited_by: tuple[str, ...]


def occupancy(cfg: KernelConfig, device: DeviceSpec, registers: int) -> Occupancy:
    """Returns how many CTAs of a kernel fit on one SM, for each resource, if each thread has
    `registers` registers."""
    limits = cfg.cta_limits(
        device.max_smem_per_sm,
        registers,
        max_threads=device.max_threads_per_sm,
        max_ctas=device.max_ctas_per_sm,
    )
    fewest = min(limits.values())
    return Occupancy(
        ctas_per_sm=fewest,
        warps_per_sm=fewest * cfg.n_threads // THREADS_PER_WARP,
        limits=limits,
        limited_by=tuple(name for name, ctas in limits.items() if ctas == fewest),
    )


class BuiltKernels:
    """The kernels of a benchmark; all are built before the first is timed.

    They are looked up by config and by the semantics for which they are compiled.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self._libraries: dict[Semantics, list[KernelLibrary]] = defaultdict(list)

    def build(self, uses: Iterable[KernelUse], progress: Progress) -> None:
        """Builds the kernels that are not in any library yet; a library contains the kernels of one
        family with the same semantics.

        A config that is illegal on this device is skipped. Raises any error of building.
        """
        wanted: dict[Semantics, dict[KernelConfig, None]] = defaultdict(dict)
        for config, problem in uses:
            if self.illegality(config) is None:
                wanted[problem.required_semantics(config)][config] = None
        for semantics, configs in wanted.items():
            missing = [config for config in configs if not self._find(config, semantics)]
            for group in by_family(missing):
                built = library_for(
                    group, arch=self.device.arch, semantics=semantics, progress=progress
                )
                self._libraries[semantics].append(built)

    def illegality(self, config: KernelConfig) -> str | None:
        """Returns the reason why the config is illegal on this device; None if it is legal."""
        try:
            check_legal(config, self.device)
        except IllegalConfigError as error:
            return str(error)
        return None

    def facts(self, config: KernelConfig, problem: Problem) -> KernelFacts | None:
        """The facts of the kernel that computes a problem with this config; None if it is not
        built."""
        entry = self._find(config, problem.required_semantics(config))
        return None if entry is None else KernelFacts.of(entry, self.device)

    def _find(self, config: KernelConfig, semantics: Semantics) -> KernelEntry | None:
        libraries = self._libraries[semantics]
        for library in libraries:
            if config in library:
                return library.entry(config)
        found = find_library(config, arch=self.device.arch, semantics=semantics)
        if found is None:
            return None
        libraries.append(found)
        return found.entry(config)
