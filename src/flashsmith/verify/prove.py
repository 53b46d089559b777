"""prove(cfg, problem): one kernel against the reference, in the emulator or on a GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, device_spec
from flashsmith.families.canonical import emulated_arch
from flashsmith.operations import BACKWARD, DECODE, DEFAULT, FORWARD, MERGE, Operation
from flashsmith.operations.operation import load_attribute
from flashsmith.operations.write_slots import WRITE_SLOTS
from flashsmith.runtime import query_gpu
from flashsmith.runtime.arguments import check_serves
from flashsmith.runtime.emulation import EmulationResult, Finding, Observer, all_checks
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.verify.attention_semantics import NO_WINDOW, Attention, Lens, Window
from flashsmith.verify.backward_reference import BackwardReference
from flashsmith.verify.decode_reference import DecodeReference
from flashsmith.verify.engine import gpu_engine_pays
from flashsmith.verify.forward_reference import ForwardReference, check_lens, semantics_of
from flashsmith.verify.merge_reference import MergeReference
from flashsmith.verify.operation_reference import OperationReference
from flashsmith.verify.problem_options import drawn_ranges
from flashsmith.verify.proof_inputs import check_seed
from flashsmith.verify.tolerance import Comparison
from flashsmith.verify.write_slots_reference import WriteSlotsReference

BACKENDS = ("emulator", "gpu")
# At most this many findings are shown; one mistake in a kernel causes a finding at every
# instruction that the mistake affects.
_FINDINGS_SHOWN = 8
# Option values without an effect.
_NOT_SAID = (None, False, 0.0, NO_WINDOW)
# By operation name; the references of other operations are added as they are loaded.
_REFERENCES: dict[str, OperationReference] = {
    FORWARD.name: ForwardReference(),
    BACKWARD.name: BackwardReference(),
    DECODE.name: DecodeReference(),
    MERGE.name: MergeReference(),
    WRITE_SLOTS.name: WriteSlotsReference(),
}


@dataclass(frozen=True)
class Verdict(Comparison):
    """The result of a proof of one kernel on one problem: the comparison, and how it ran.

    ``problem`` is the problem that ran, including repeated heads, and ``meaning`` describes the
    computation. ``findings`` are the findings of the emulator's checks, and ``emulation`` has the
    emulator's counts (None on a GPU).
    """

    config: KernelConfig
    problem: Problem
    meaning: str
    inputs: str
    backend: str
    arch: int
    emulation: EmulationResult | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the emulator's checks."""
        return tuple(self.emulation.findings) if self.emulation else ()

    @property
    def ok(self) -> bool:
        """Whether the output is correct and no check found anything."""
        return not self.reasons and not self.findings

    def __str__(self) -> str:
        where = (
            f"{self.config} on {self.problem}, {self.meaning}, {self.inputs} inputs, {self.backend}"
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
    problem: Problem | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    inputs: str = "random",
    backend: str = "emulator",
    arch: int | None = None,
    device: int = 0,
    checks: bool = False,
    observers: Sequence[Observer] = (),
    seed: int = 0,
    schedule_seed: int | None = None,
    sm_count: int | None = None,
    **described: Any,
) -> Verdict:
    """Run ``cfg``'s kernel on seeded inputs of ``problem``, for any operation, and compare its
    outputs with the operation's reference.

    Outputs are NaN before the launch. The heads of a problem with fewer than 4,096 outputs are
    repeated until there are at least 4,096.

    Args:
        problem: what to compute; None builds it from ``described``, the keywords of
            ``describe_problem``: ``prove(cfg, seq=300, causal=True)``.
        options: the reference's options for a proof; None uses its typical ones for the problem.
        inputs: 'random' or another kind that the reference draws (for attention ``INPUT_KINDS``).
        backend: 'emulator' (as on ``arch``; None: the oldest that the config runs on) or 'gpu'
            (GPU ``device``).
        checks: run the emulator's checks; their findings fail the verdict.
        observers: further observers of the emulation, such as measurements.
        seed: for the inputs.
        schedule_seed: for the emulator's schedule; None is the fixed one.
        sm_count: plan for a device with this number of SMs; None is the device's number.

    Raises:
        ArgumentError: an unknown backend or kind of inputs, a negative seed, or a problem that the
            config cannot serve.
        EmulatorError, LaunchError: the kernel did not finish.
    """
    if problem is None:
        problem, options = describe_problem(cfg, seed=seed, **described)
    elif described:
        raise ArgumentError(
            f"{next(iter(described))}: problem='{problem}' already sets it; leave it out"
        )
    if backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r}: allowed are {', '.join(BACKENDS)}")
    check_seed(seed)
    check_serves(cfg, problem)
    reference = reference_of(problem.computed)
    if inputs not in reference.kinds:
        raise ArgumentError(f"inputs={inputs!r}: allowed are {', '.join(reference.kinds)}")
    asked = reference.options(problem, seed=seed) if options is None else options
    work = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    on_gpu = backend == "gpu" and gpu_engine_pays(work)
    made = reference.case(cfg, problem, kind=inputs, seed=seed, options=asked, on_gpu=on_gpu)
    case = replace(made, reference=reference)
    if backend == "gpu":
        where = _with_sms(query_gpu(device), sm_count)
        result = reference.run(
            cfg, case, lambda array: DeviceArray.from_host(array, device), arch=where
        )
        outputs = {name: array.to_host() for name, array in result.outputs.items()}
    else:
        where = _with_sms(device_spec(emulated_arch(cfg) if arch is None else arch), sm_count)
        deterministic = cfg.family.is_deterministic(cfg)
        result = reference.run(
            cfg,
            case,
            lambda array: array,
            emulate=True,
            arch=where,
            observers=[*observers, *(all_checks(deterministic) if checks else ())],
            schedule_seed=schedule_seed,
        )
        outputs = result.outputs
    return Verdict(
        **vars(case.verdict(outputs, cfg)),
        config=cfg,
        problem=case.problem,
        meaning=reference.meaning(case.problem, case.options),
        inputs=inputs,
        backend=backend,
        arch=where.arch,
        emulation=result.emulation,
    )


def describe_problem(
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
    row_max: bool = True,
    page: int = 0,
    partial: bool = False,
    seed: int = 0,
) -> tuple[Problem, dict[str, Any]]:
    """The problem that sizes and options describe for a config, and the options of its proof.

    Args:
        seq, seq_k: query and key length; seq_k None means seq.
        heads, heads_k: of q, and of k and v; heads_k None means heads.
        d: of the tensors; None is the config's d_head.
        causal, window, softcap: as in ``forward``. A config of another operation accepts only the
            options that its operation has; the reference of the operation defines their meaning.
        scale: None is 1/sqrt(d).
        sinks: whether every head has a sink logit (drawn with the inputs).
        lens_q, lens_k: lengths of packed sequences, in place of batch, seq and seq_k; lens_k None
            means lens_q.
        row_max: whether to return the row maxima; kernels then do not rescale lazily.
        page: keys per page of the cache, for an operation that has pages; 0 is a dense cache.
        partial: whether only some of the keys are used, drawn from seed; sinks must then be False.
        seed: for anything that the operation draws in addition to inputs.

    Raises ArgumentError for sizes that are not valid for a problem.
    """
    if lens_q is not None:
        lens_k = lens_q if lens_k is None else lens_k
        check_lens(lens_q, lens_k)
        batch, seq, seq_k = len(lens_q), max(lens_q, default=0), max(lens_k, default=0)
    elif lens_k is not None:
        raise ArgumentError("lens_k: give lens_q as well")
    seq_k = seq if seq_k is None else seq_k
    ranges = None
    if partial:
        rows = seq_k if lens_k is None else sum(lens_k)
        ranges = drawn_ranges(batch, rows, seq_k, random.Random(seed))
        if sinks:
            raise ArgumentError("sinks: a part has none; leave out sinks or partial")
    problem = Problem(
        batch,
        seq,
        seq_k,
        heads,
        heads if heads_k is None else heads_k,
        cfg.d_head if d is None else d,
        cfg.dtype,
        semantics_of(Attention(1.0, causal, window, softcap, lens_q, lens_k, ranges)),
        cfg.family.operation,
        page,
        cfg.family.gradients_of(cfg),
    )
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "sinks": sinks,
        "lens_q": lens_q,
        "lens_k": lens_k,
        "ranges": ranges,
    }
    if problem.operation == DEFAULT:
        return problem, options | {"row_max": row_max}
    said = {name: value for name, value in options.items() if value not in _NOT_SAID}
    return problem, reference_of(problem.computed).options(problem, seed=seed, **said)


def reference_of(operation: Operation) -> OperationReference:
    """The reference for an operation's outputs: the package's, or the one that the operation names.

    Raises ArgumentError if the named reference cannot be loaded or is not an OperationReference.
    """
    known = _REFERENCES.get(operation.name)
    if known is None:
        what = f"reference of the operation {operation.name}"
        known = load_attribute(operation.reference, what)
        if not isinstance(known, OperationReference):
            raise ArgumentError(
                f"{what}: {operation.reference!r} is an object of {type(known).__name__}; give "
                "one of a class derived from flashsmith.verify.OperationReference"
            )
        _REFERENCES[operation.name] = known
    return known


def _with_sms(device: DeviceSpec, sm_count: int | None) -> DeviceSpec:
    return device if sm_count is None else replace(device, sm_count=sm_count)
