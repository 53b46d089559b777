"""Runs mutants of a real kernel on a small problem and says who noticed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from mutants import Mutant, mutants

from flashsmith.errors import EmulatorError
from flashsmith.families import FlashForwardKernelConfig, Problem
from flashsmith.runtime import prepare_operation
from flashsmith.runtime.emulation import run_in_emulator
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.verify.proof_inputs import InputSpec, default_scale
from flashsmith.verify.reference import inputs_and_references
from flashsmith.verify.tolerance import compare, heads_for_enough_outputs
from ptxlab.checks import all_checks
from ptxlab.interface import Finding, Observer

ARCH = 80
KEY_TILES = 3  # a first, a middle and a last turn of the loop


@dataclass(frozen=True)
class Outcome:
    """How one run ended: findings, what is wrong with the numbers, or why it stopped."""

    findings: tuple[Finding, ...]
    numbers: tuple[str, ...]
    error: str

    @property
    def caught(self) -> bool:
        return bool(self.findings or self.numbers or self.error)


@dataclass(frozen=True)
class Victim:
    """A kernel and one small problem to run its mutants on: one CTA a head, three key tiles."""

    config: FlashForwardKernelConfig

    @cached_property
    def spec(self) -> InputSpec:
        cfg = self.config
        heads = heads_for_enough_outputs(1, cfg.B_r, 1, cfg.d_head)
        return InputSpec(
            kind="random",
            dtype=cfg.dtype,
            batch=1,
            seq_q=cfg.B_r,
            seq_k=KEY_TILES * cfg.B_c,
            heads=heads,
            d=cfg.d_head,
            scale=default_scale(cfg.d_head),
            sinks=True,
        )

    @cached_property
    def ptx(self) -> str:
        return loaded_kernels.get(self.config, ARCH).ptx

    @cached_property
    def entry(self) -> str:
        return loaded_kernels.get(self.config, ARCH).entry.ptx_entry

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        return tuple(mutants(self.ptx, self.entry, row_bytes=2 * self.config.d_head))

    def run(self, ptx: str, checks: bool = True) -> Outcome:
        """Runs a variant of the kernel on outputs full of NaN and judges what comes out."""
        spec = self.spec
        drawn, references = inputs_and_references(spec)
        tensors = {"q": drawn.q, "k": drawn.k, "v": drawn.v}
        o = np.full(drawn.q.shape, np.nan, drawn.q.dtype)
        lse, row_max = np.full((2, 1, spec.heads, spec.seq_q), np.nan, np.float32)
        prepared = prepare_operation(
            self.config,
            Problem(1, spec.seq_q, spec.seq_k, spec.heads, spec.heads, spec.d, spec.dtype),
            {**tensors, "o": o, "sinks": drawn.sinks, "lse": lse, "row_max": row_max},
            options={"scale": spec.scale},
            emulate=True,
            arch=ARCH,
        )
        plan = loaded_kernels.get(self.config, ARCH).plan(prepared.call)
        observers: list[Observer] = all_checks() if checks else []
        error = ""
        try:
            run_in_emulator(
                ptx,
                plan,
                readable={**tensors, "sinks": drawn.sinks},
                writable={"o": o, "lse": lse, "row_max": row_max},
                observers=observers,
            )
        except EmulatorError as stopped:
            error = str(stopped)
        findings = tuple(finding for observer in observers for finding in observer.findings)
        with np.errstate(all="ignore"):
            checked = compare(self.config, o, lse, references, row_max=row_max)
        numbers = () if error else checked.reasons
        return Outcome(findings, numbers, error)

    def run_mutant(self, mutant: Mutant, checks: bool = True) -> Outcome:
        return self.run(mutant.apply(self.ptx), checks)
