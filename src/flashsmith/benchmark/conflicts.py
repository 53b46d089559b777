"""The tables' bank-conflict figures: a factor for each use the kernels make of shared memory."""

from __future__ import annotations

from flashsmith.emulator import BankConflicts
from flashsmith.families import HopperForwardKernelConfig, KernelConfig

# What the observer calls an access, by what the kernels use it for.
_USES: dict[str, tuple[str, ...]] = {
    "ldmatrix": ("ldmatrix",),
    "copy st": ("cp.async", "st.shared.16B"),
    "O st": ("st.shared.4B",),
    "O ld": ("ld.shared.16B",),
}
# Tiles come and go by TMA, which is no warp's access; the others tell of tiles, 32 bytes at a time.
_HOPPER_USES: dict[str, tuple[str, ...]] = {**dict.fromkeys(_USES, ()), "O st": ("stmatrix",)}
CONFLICT_KINDS = tuple(_USES)


def conflict_factors(measured: BankConflicts, cfg: KernelConfig) -> dict[str, float | None]:
    """Wavefronts over their ideal number for each of CONFLICT_KINDS; None where there were none."""
    factors: dict[str, float | None] = {}
    uses = _HOPPER_USES if isinstance(cfg, HopperForwardKernelConfig) else _USES
    for use, kinds in uses.items():
        counted = [measured.by_kind[kind] for kind in kinds if kind in measured.by_kind]
        ideal = sum(wavefronts.ideal for wavefronts in counted)
        actual = sum(wavefronts.actual for wavefronts in counted)
        factors[use] = actual / ideal if ideal else None
    return factors
