"""prove(cfg): one kernel against the references, in the emulator or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashsmith.configs import FlashForwardKernelConfig, Problem
from flashsmith.emulator import EmulationResult, Finding, Observer
from flashsmith.emulator.observers import all_checks
from flashsmith.errors import ArgumentError
from flashsmith.runtime import DEFAULT_EMULATED_ARCH, ForwardResult, query_gpu, run_forward
from flashsmith.runtime.arguments import check_scale
from flashsmith.runtime.device_array import DeviceArray
from flashsmith.verify.inputs import TILE_KINDS, InputSpec
from flashsmith.verify.reference import inputs_and_references
from flashsmith.verify.rule import Comparison, compare, heads_for_enough_outputs

BACKENDS = ("emulator", "gpu")


@dataclass(frozen=True)
class Verdict(Comparison):
    """What a proof found out about one kernel on one problem: the comparison, and how it ran.

    ``problem`` is what ran, heads repeated included; ``findings`` are the emulator's checks', and
    ``emulation`` its counts (None on a GPU).
    """

    config: FlashForwardKernelConfig
    problem: Problem
    inputs: str
    backend: str
    arch: int
    emulation: EmulationResult | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the emulator's checks saw."""
        return tuple(self.emulation.findings) if self.emulation else ()

    @property
    def ok(self) -> bool:
        """Whether the output is right and no check found anything."""
        return not self.reasons and not self.findings

    def __str__(self) -> str:
        where = f"{self.config} on {self.problem}, {self.inputs} inputs, {self.backend}"
        if self.ok:
            return f"{where}: right (largest error {self.max_error:.3g}, allowed {self.bound:.3g})"
        lines = [f"{where}: WRONG", *(f"  {reason}" for reason in self.reasons)]
        if self.first_mismatch:
            share = f"{self.mismatches} of {self.outputs} outputs ({self.mismatch_share:.2%})"
            lines += [f"  {share} mismatch", f"  first: {self.first_mismatch}"]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.findings)])


def prove(
    cfg: FlashForwardKernelConfig,
    *,
    seq: int = 128,
    seq_k: int | None = None,
    batch: int = 1,
    heads: int = 1,
    inputs: str = "random",
    scale: float | None = None,
    backend: str = "emulator",
    arch: int = DEFAULT_EMULATED_ARCH,
    device: int = 0,
    checks: bool = False,
    observers: Sequence[Observer] = (),
    seed: int = 0,
) -> Verdict:
    """Runs ``cfg``'s kernel on seeded inputs and judges o and the LSE (see ``rule.compare``).

    Outputs are NaN before the launch. A problem of fewer than 4,096 outputs is repeated over heads
    until it has that many.

    Args:
        seq, seq_k: query and key length; seq_k None means as long as seq.
        batch, heads: of the problem.
        inputs: 'random' or one of ``INPUT_KINDS``.
        scale: None is 1/sqrt(d_head).
        backend: 'emulator' (as on ``arch``) or 'gpu' (GPU ``device``).
        checks: run the emulator's checks; what they find fails the verdict.
        observers: further observers of the emulation, such as measurements.
        seed: of the inputs.

    Raises:
        ArgumentError: an unknown backend or kind of inputs, or a problem the config cannot serve.
        EmulatorError, LaunchError: the kernel did not come to its end.
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r}: allowed are {', '.join(BACKENDS)}")
    asked = Problem(
        batch, seq, seq if seq_k is None else seq_k, heads, heads, cfg.d_head, cfg.dtype
    )
    heads = heads_for_enough_outputs(batch, seq, heads, cfg.d_head)
    problem = replace(asked, heads_q=heads, heads_k=heads)
    spec = InputSpec(
        kind=inputs,
        dtype=cfg.dtype,
        batch=batch,
        seq_q=seq,
        seq_k=problem.seq_k,
        heads=heads,
        d=cfg.d_head,
        scale=check_scale(scale, cfg.d_head),
        seed=seed,
        first_tile=cfg.B_c if inputs in TILE_KINDS else 0,
    )
    drawn, references = inputs_and_references(spec)
    arrays = (drawn.q, drawn.k, drawn.v)
    if backend == "gpu":
        arch = query_gpu(device).arch
        o, lse = _run_on_gpu(cfg, arrays, spec.scale, device)
        emulation = None
    else:
        watching = [*observers, *(all_checks() if checks else ())]
        result = _run(cfg, arrays, spec.scale, emulate=True, arch=arch, observers=watching)
        o, lse, emulation = result.o, result.lse, result.emulation
    return Verdict(
        **vars(compare(cfg, o, lse, references)),
        config=cfg,
        problem=problem,
        inputs=inputs,
        backend=backend,
        arch=arch,
        emulation=emulation,
    )


def _run(
    cfg: FlashForwardKernelConfig, qkv: Sequence[Any], scale: float, **options: Any
) -> ForwardResult:
    q, k, v = qkv
    return run_forward(cfg, q, k, v, scale=scale, return_lse=True, poisoned=True, **options)


def _run_on_gpu(
    cfg: FlashForwardKernelConfig, arrays: Sequence[np.ndarray], scale: float, device: int
) -> tuple[np.ndarray, np.ndarray]:
    result = _run(cfg, [DeviceArray.from_host(array, device) for array in arrays], scale)
    return result.o.to_host(), result.lse.to_host()
