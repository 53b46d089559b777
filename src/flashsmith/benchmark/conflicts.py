"""The tables' bank-conflict figures: a factor for each use the kernels make of shared memory."""

from __future__ import annotations

from flashsmith.emulator import BankConflicts
from flashsmith.families import KernelConfig

# What kernels use shared memory for; each family says which accesses those are.
CONFLICT_KINDS = ("ldmatrix", "copy st", "O st", "O ld")


def conflict_factors(measured: BankConflicts, cfg: KernelConfig) -> dict[str, float | None]:
    """Wavefronts over their ideal number for each of CONFLICT_KINDS; None where there were none."""
    factors: dict[str, float | None] = {}
    uses = cfg.family.conflict_kinds()
    for use in CONFLICT_KINDS:
        kinds = uses.get(use, ())
        counted = [measured.by_kind[kind] for kind in kinds if kind in measured.by_kind]
        ideal = sum(wavefronts.ideal for wavefronts in counted)
        actual = sum(wavefronts.actual for wavefronts in counted)
        factors[use] = actual / ideal if ideal else None
    return factors
