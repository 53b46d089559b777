"""prove(cfg): one kernel against the references, in the emulator or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashsmith.emulator import EmulationResult, Finding, Observer
from flashsmith.emulator.checks import all_checks
from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics, device_spec
from flashsmith.runtime import ForwardResult, query_gpu, run_forward
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.runtime.options import check_mask, check_scale
from flashsmith.verify.attention import NO_WINDOW, Attention, Lens, Window, offsets
from flashsmith.verify.engine import gpu_engine_pays
from flashsmith.verify.inputs import TILE_KINDS, Inputs, InputSpec, check_seed
from flashsmith.verify.reference import inputs_and_references
from flashsmith.verify.rule import Comparison, compare, heads_for_enough_outputs

BACKENDS = ("emulator", "gpu")
# One mistake in a kernel makes a finding at every instruction that it reaches.
_FINDINGS_SHOWN = 8


@dataclass(frozen=True)
class Verdict(Comparison):
    """What a proof found out about one kernel on one problem: the comparison, and how it ran.

    ``problem`` is what ran, heads repeated included, and ``attention`` what was computed;
    ``findings`` are the emulator's checks', and ``emulation`` its counts (None on a GPU).
    """

    config: KernelConfig
    problem: Problem
    attention: Attention
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
        where = (
            f"{self.config} on {self.problem}, {self.attention}, {self.inputs} inputs, "
            f"{self.backend}"
        )
        if self.ok:
            return f"{where}: right (largest error {self.max_error:.3g}, allowed {self.bound:.3g})"
        lines = [f"{where}: WRONG", *(f"  {reason}" for reason in self.reasons)]
        if self.first_mismatch:
            share = f"{self.mismatches} of {self.outputs} outputs ({self.mismatch_share:.2%})"
            lines += [f"  {share} mismatch", f"  first: {self.first_mismatch}"]
        lines += [f"  {finding}" for finding in self.findings[:_FINDINGS_SHOWN]]
        left_out = len(self.findings) - _FINDINGS_SHOWN
        if left_out > 0:
            lines.append(f"  and {left_out} findings more")
        return "\n".join(lines)


def prove(
    cfg: KernelConfig,
    *,
    seq: int = 128,
    seq_k: int | None = None,
    batch: int = 1,
    heads: int = 1,
    heads_k: int | None = None,
    d: int | None = None,
    causal: bool = False,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: bool = False,
    lens_q: Lens | None = None,
    lens_k: Lens | None = None,
    inputs: str = "random",
    backend: str = "emulator",
    arch: int | None = None,
    device: int = 0,
    checks: bool = False,
    observers: Sequence[Observer] = (),
    seed: int = 0,
    row_max: bool = True,
    schedule_seed: int | None = None,
    sm_count: int | None = None,
) -> Verdict:
    """Runs ``cfg``'s kernel on seeded inputs and judges o and the statistics (``rule.compare``).

    Outputs are NaN before the launch. A problem of fewer than 4,096 outputs is repeated over heads
    until it has that many.

    Args:
        seq, seq_k: query and key length; seq_k None means as long as seq.
        batch, heads: of the problem.
        heads_k: heads of k and v; None means as many as heads.
        d: of the tensors; None is the config's d_head.
        causal, window, softcap: as in ``forward``.
        scale: None is 1/sqrt(d).
        sinks: whether every head has a sink logit (drawn with the inputs).
        lens_q, lens_k: lengths of packed sequences, in place of batch, seq and seq_k; lens_k None
            means as long as lens_q.
        inputs: 'random' or one of ``INPUT_KINDS``.
        backend: 'emulator' (as on ``arch``; None: the oldest that the config runs on) or 'gpu'
            (GPU ``device``).
        checks: run the emulator's checks; what they find fails the verdict.
        observers: further observers of the emulation, such as measurements.
        seed: of the inputs.
        row_max: whether the row maxima are asked for: kernels that rescale lazily then do not.
        schedule_seed: of the emulator's schedule; None is the fixed one.
        sm_count: plan as for a device with so many SMs; None is what the device has.

    Raises:
        ArgumentError: an unknown backend or kind of inputs, a negative seed, or a problem the
            config cannot serve.
        EmulatorError, LaunchError: the kernel did not come to its end.
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r}: allowed are {', '.join(BACKENDS)}")
    check_seed(seed)
    d = cfg.d_head if d is None else d
    if lens_q is not None:
        lens_k = lens_q if lens_k is None else lens_k
        _check_lens(lens_q, lens_k)
        batch, seq, seq_k = len(lens_q), max(lens_q, default=0), max(lens_k, default=0)
    elif lens_k is not None:
        raise ArgumentError("lens_k: give lens_q as well")
    seq_k = seq if seq_k is None else seq_k
    attention = Attention(check_scale(scale, d), causal, window, softcap, lens_q, lens_k)
    problem = _repeated_over_heads(
        Problem(
            batch,
            seq,
            seq_k,
            heads,
            heads if heads_k is None else heads_k,
            d,
            cfg.dtype,
            semantics_of(attention),
        ),
        lens_q,
    )
    problem = replace(problem, semantics=problem.required_semantics(cfg))
    spec = InputSpec(
        kind=inputs,
        dtype=cfg.dtype,
        batch=batch,
        seq_q=seq,
        seq_k=seq_k,
        heads=problem.heads_q,
        d=d,
        scale=attention.scale,
        seed=seed,
        first_tile=cfg.B_c if inputs in TILE_KINDS else 0,
        heads_k=problem.heads_k,
        lens_q=lens_q,
        lens_k=lens_k,
        sinks=sinks,
    )
    on_gpu = backend == "gpu" and gpu_engine_pays(batch * problem.heads_q * seq * seq_k)
    drawn, references = inputs_and_references(spec, causal, window, softcap, on_gpu)
    if backend == "gpu":
        where = _with_sms(query_gpu(device), sm_count)
        outputs = _run_on_gpu(cfg, drawn, attention, device, return_row_max=row_max, arch=where)
        emulation = None
    else:
        where = _with_sms(device_spec(cfg.OLDEST_ARCH if arch is None else arch), sm_count)
        result = _run(
            cfg,
            drawn,
            attention,
            _on_host,
            return_row_max=row_max,
            emulate=True,
            arch=where,
            observers=[*observers, *(all_checks() if checks else ())],
            schedule_seed=schedule_seed,
        )
        outputs, emulation = (result.o, result.lse, result.row_max), result.emulation
    o, lse, maxima = outputs
    return Verdict(
        **vars(compare(cfg, o, lse, references, row_max=maxima, lens_q=lens_q)),
        config=cfg,
        problem=problem,
        attention=attention,
        inputs=inputs,
        backend=backend,
        arch=where.arch,
        emulation=emulation,
    )


def _with_sms(device: DeviceSpec, sm_count: int | None) -> DeviceSpec:
    return device if sm_count is None else replace(device, sm_count=sm_count)


def _check_lens(lens_q: Lens, lens_k: Lens) -> None:
    if len(lens_q) != len(lens_k) or not lens_q or min(*lens_q, *lens_k) < 0:
        raise ArgumentError(
            f"lens_q={lens_q}, lens_k={lens_k}: give as many of both, at least one, none negative"
        )


def semantics_of(attention: Attention) -> Semantics:
    """What is compiled in, whatever the lengths."""
    packed = attention.packed
    mask = check_mask(attention.causal, attention.window).kind
    return Semantics(mask, attention.softcap > 0, packed, uneven=packed)


def _repeated_over_heads(problem: Problem, lens_q: Lens | None) -> Problem:
    """The problem with its heads, grouped as they are, repeated until its outputs are enough."""
    rows = problem.batch * problem.seq_q if lens_q is None else sum(lens_q)
    heads = heads_for_enough_outputs(1, rows, problem.heads_q, problem.d)
    repeats = heads // problem.heads_q
    return replace(problem, heads_q=heads, heads_k=problem.heads_k * repeats)


def _run(
    cfg: KernelConfig,
    drawn: Inputs,
    attention: Attention,
    place: Callable[[np.ndarray], Any],
    **options: Any,
) -> ForwardResult:
    """Runs on ``drawn``, wherever ``place`` puts the arrays."""
    packed: dict[str, Any] = {}
    if attention.lens_q is not None and attention.lens_k is not None:
        packed = {
            "cu_seqlens_q": place(offsets(attention.lens_q)),
            "cu_seqlens_k": place(offsets(attention.lens_k)),
            "max_seqlen_q": max(attention.lens_q),
            "max_seqlen_k": max(attention.lens_k),
        }
    return run_forward(
        cfg,
        place(drawn.q),
        place(drawn.k),
        place(drawn.v),
        causal=attention.causal,
        window=attention.window,
        softcap=attention.softcap,
        scale=attention.scale,
        sinks=None if drawn.sinks is None else place(drawn.sinks),
        return_lse=True,
        poisoned=True,
        **packed,
        **options,
    )


def _on_host(array: np.ndarray) -> np.ndarray:
    return array


def _run_on_gpu(
    cfg: KernelConfig, drawn: Inputs, attention: Attention, device: int, **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    def place(array: np.ndarray) -> DeviceArray:
        return DeviceArray.from_host(array, device)

    result = _run(cfg, drawn, attention, place, **options)
    maxima = None if result.row_max is None else result.row_max.to_host()
    return result.o.to_host(), result.lse.to_host(), maxima
