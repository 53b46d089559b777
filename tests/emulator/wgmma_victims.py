"""Kernels of the wgmma family whose mutants are run, and runs of them on small problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any
from unittest.mock import patch

from hopper_mutant_runs import Noticed

from flashsmith.builder import library_for
from flashsmith.configs import KernelConfig, Semantics, get_kernel_configs
from flashsmith.configs import parse_kernel_name_into_config as parse
from flashsmith.emulator.mutants import Mutant, mutants_by
from flashsmith.emulator.mutants_hopper import hopper_operators
from flashsmith.errors import EmulatorError
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from flashsmith.verify import prove

ARCH = 90


@dataclass(frozen=True)
class KernelVictim:
    """A kernel, and keywords of prove() for a problem in which all of its code runs: several tiles
    for one CTA, each of several K/V blocks, so that every ring goes round."""

    config: KernelConfig
    semantics: Semantics
    problem: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((self.config, self.semantics))

    @cached_property
    def kernel(self) -> LoadedKernel:
        """The kernel as it is."""
        loaded_kernels.add(library_for([self.config], arch=ARCH, semantics=self.semantics))
        return loaded_kernels.get(self.config, ARCH, self.semantics)

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        """All of them, in text order."""
        kernel = self.kernel
        return tuple(mutants_by(hopper_operators(), kernel.ptx, kernel.entry.ptx_entry))

    def run(self, mutant: Mutant | None) -> Noticed:
        """One proof of the kernel, or of a mutant of it, under all checks."""
        changed = replace(self.kernel)
        text = mutant.apply(self.kernel.ptx) if mutant else self.kernel.ptx
        changed.__dict__["ptx"] = text
        key = self.config, ARCH, self.semantics
        with patch.dict(loaded_kernels.kernels, {key: changed}):
            try:
                verdict = prove(self.config, **self.problem, sm_count=1, checks=True)
            except EmulatorError as stopped:
                return Noticed(frozenset(), str(stopped), False)
        assert verdict.problem.semantics == self.semantics
        kinds = frozenset(finding.kind for finding in verdict.findings)
        return Noticed(kinds, "", bool(verdict.reasons))


def victim(config: KernelConfig, semantics: str, **problem: Any) -> KernelVictim:
    return KernelVictim(config, Semantics.parse(semantics), problem)


@cache
def shipped() -> dict[str, KernelVictim]:
    """Kernels of the set 'hopper'."""
    three, _, _, _, _, two = get_kernel_configs("hopper")
    return {
        "three": victim(three, "plain", seq=192, heads=4, seq_k=384),
        "two": victim(two, "causal+uneven", seq=250, heads=3, seq_k=380, causal=True),
    }


@cache
def small() -> dict[str, KernelVictim]:
    """The same schedules on the smallest tiles, and one with all that those do without."""
    three, two = (victim.config for victim in shipped().values())
    other = "(FP16, 64, 128, 48, 2wg): tma+stages_1+q_buffers_1+regs_24_240+pingpong_exp"
    return {
        "small three": victim(
            replace(three, d_head=64, B_c=32), "plain", seq=192, heads=4, seq_k=96
        ),
        "small two": victim(
            replace(two, d_head=64, B_c=32), "causal+uneven", seq=150, heads=3, seq_k=160,
            causal=True,
        ),
        "separate": victim(
            parse(f"{other}+static_persistent+separate_O"), "packed+uneven",
            lens_q=(130, 0, 70, 128), lens_k=(100, 40, 0, 150), heads=1, d=56,
        ),
    }  # fmt: skip
