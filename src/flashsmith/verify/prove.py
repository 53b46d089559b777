"""prove(cfg, problem): runs one kernel and compares it with the reference, in the emulator or on a
GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial as with_arguments
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, device_spec
from flashsmith.families.canonical import emulated_arch
from flashsmith.operations import BACKWARD, DECODE, DEFAULT, FORWARD, MERGE, Operation
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.operations.operation import load_attribute
from flashsmith.operations.score_sums import SCORE_SUMS
from flashsmith.operations.write_slots import WRITE_SLOTS
from flashsmith.runtime import query_gpu
from flashsmith.runtime.arguments import check_serves
from flashsmith.runtime.emulation import EmulationResult, Finding, Observer, all_checks
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.runtime.prepared_call import OperationResult
from flashsmith.verify.attention_semantics import NO_WINDOW, Attention, Lens, Ranges, Window
from flashsmith.verify.backward_reference import BackwardReference
from flashsmith.verify.decode_reference import DecodeReference
from flashsmith.verify.engine import gpu_engine_pays
from flashsmith.verify.forward_reference import ForwardReference, check_lens, semantics_of
from flashsmith.verify.latent_decode_reference import LatentDecodeReference
from flashsmith.verify.merge_reference import MergeReference
from flashsmith.verify.operation_reference import OperationReference, ProofCase
from flashsmith.verify.problem_options import drawn_ranges
from flashsmith.verify.proof_inputs import check_seed
from flashsmith.verify.score_sums_reference import ScoreSumsReference
from flashsmith.verify.tolerance import Comparison
from flashsmith.verify.write_slots_reference import WriteSlotsReference

BACKENDS = ("emulator", "gpu")
# At most this many findings are shown, since one mistake in a kernel causes a finding at each
# instruction that it affects.
_FINDINGS_SHOWN = 8
# Values of options that have no effect.
_NOT_SAID = (None, False, 0.0, NO_WINDOW)
# The options of attention that determine what its kernel computes.
_OF_ATTENTION = ("causal", "window", "softcap", "lens_q", "lens_k", "ranges")
# The references, by the name of the operation; those of other operations are added when they are
# loaded.
_REFERENCES: dict[str, OperationReference] = {
    FORWARD.name: ForwardReference(),
    BACKWARD.name: BackwardReference(),
    DECODE.name: DecodeReference(),
    LATENT_DECODE.name: LatentDecodeReference(),
    MERGE.name: MergeReference(),
    WRITE_SLOTS.name: WriteSlotsReference(),
    SCORE_SUMS.name: ScoreSumsReference(),
}


@dataclass(frozen=True)
class Verdict(Comparison):
    """The result of checking one kernel on one problem: the comparison, and how the kernel ran.

    ``problem`` is the problem that was run, with repeated heads; ``meaning`` describes the
    computation in words. ``findings`` come from the emulator's checks; ``emulation`` has the
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
        """Whether the output is correct and the checks found nothing."""
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
    """Runs ``cfg``'s kernel, of any operation, on seeded inputs of ``problem``, and compares the
    outputs with the reference of the operation.

    Outputs are filled with NaN before the launch. If a problem has fewer than 4,096 outputs, its
    heads are repeated until it has as many.

    Args:
        problem: what to compute. None makes it from ``described``, which are keywords of
            ``describe_problem``: ``prove(cfg, seq=300, causal=True)``.
        options: the options of the reference for a proof; None uses the typical ones for the
            problem.
        inputs: 'random', or another kind that the reference can draw (for attention:
            ``INPUT_KINDS``).
        backend: 'emulator', which emulates ``arch`` (None: the oldest one on which the config
            runs), or 'gpu', which is GPU ``device``.
        checks: whether to run the emulator's checks; if they find something, the proof fails.
        observers: further observers for the emulator, such as measurements.
        seed: seed of the inputs.
        schedule_seed: seed of the emulator's schedule; None is the fixed schedule.
        sm_count: the number of SMs for which the launch is planned; None is the device's.

    Raises:
        ArgumentError: the backend or the kind of inputs is unknown, the seed is negative, or the
            config cannot serve the problem.
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
    case = _draw_case(cfg, problem, options, inputs, seed, on_gpu=backend == "gpu")
    if backend == "gpu":
        where = _with_sms(query_gpu(device), sm_count)
        result = _run_on_gpu(cfg, case, where, device)
    else:
        where = _with_sms(device_spec(emulated_arch(cfg) if arch is None else arch), sm_count)
        result = _emulate(cfg, case, where, observers, schedule_seed, checks=checks)
    return _verdict(cfg, case, result, inputs, backend, where)


def _draw_case(
    cfg: KernelConfig,
    problem: Problem,
    options: Mapping[str, Any] | None,
    inputs: str,
    seed: int,
    *,
    on_gpu: bool,
) -> ProofCase:
    """The inputs and the expected outputs of a proof."""
    reference = reference_of(problem.computed)
    if inputs not in reference.kinds:
        raise ArgumentError(f"inputs={inputs!r}: allowed are {', '.join(reference.kinds)}")
    asked = reference.options(problem, seed=seed) if options is None else options
    work = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    pays = on_gpu and gpu_engine_pays(work)
    made = reference.case(cfg, problem, kind=inputs, seed=seed, options=asked, on_gpu=pays)
    return replace(made, reference=reference)


def _run_on_gpu(
    cfg: KernelConfig, case: ProofCase, where: DeviceSpec, device: int
) -> OperationResult:
    """The outputs of a kernel on a GPU, as host arrays."""
    to_device = with_arguments(DeviceArray.from_host, ordinal=device)
    result = reference_of(case.problem.computed).run(cfg, case, to_device, arch=where)
    return result._replace(outputs={name: it.to_host() for name, it in result.outputs.items()})


def _emulate(
    cfg: KernelConfig,
    case: ProofCase,
    where: DeviceSpec,
    observers: Sequence[Observer],
    schedule_seed: int | None,
    *,
    checks: bool,
) -> OperationResult:
    """The outputs of a kernel in the emulator, with the findings and counts of that run."""
    own = all_checks(cfg.family.is_deterministic(cfg)) if checks else ()
    return reference_of(case.problem.computed).run(
        cfg,
        case,
        lambda array: array,
        emulate=True,
        arch=where,
        observers=[*observers, *own],
        schedule_seed=schedule_seed,
    )


def _verdict(
    cfg: KernelConfig,
    case: ProofCase,
    result: OperationResult,
    inputs: str,
    backend: str,
    where: DeviceSpec,
) -> Verdict:
    return Verdict(
        **vars(case.verdict(result.outputs, cfg)),
        config=cfg,
        problem=case.problem,
        meaning=reference_of(case.problem.computed).meaning(case.problem, case.options),
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
    d_v: int | None = None,
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
    """Makes a problem for a config from sizes and options.

    Returns it and the options for its proof.

    Args:
        seq, seq_k: numbers of queries and of keys; for seq_k, None means seq.
        heads, heads_k: heads of q, and of k and v; for heads_k, None means heads.
        d: head dimension of q and k; None is the d_head of the config.
        d_v: head dimension of v; None is d or, without d, the config's.
        causal, window, softcap: as in ``forward``. If the config is of another operation, only
            options of that operation are allowed, and its reference defines what they mean.
        scale: None is 1/sqrt(d).
        sinks: whether each head has a sink logit, which is drawn with the inputs.
        lens_q, lens_k: lengths of packed sequences, instead of batch, seq and seq_k; for lens_k,
            None means lens_q.
        row_max: whether to return row maxima, for which kernels do not rescale lazily.
        page: keys per page of the cache, for operations that have pages; 0 is a dense cache.
        partial: whether to use only some of the keys, which are drawn from seed; sinks must then be
            False.
        seed: seed for everything that the operation draws besides inputs.

    Raises ArgumentError if no problem can have these sizes.
    """
    lens_k = _check_packing(lens_q, lens_k)
    if lens_q is not None and lens_k is not None:
        batch, seq, seq_k = len(lens_q), max(lens_q, default=0), max(lens_k, default=0)
    seq_k = seq if seq_k is None else seq_k
    ranges = _draw_ranges(batch, seq_k, lens_k, seed, sinks=sinks) if partial else None
    attention = Attention(1.0, causal, window, softcap, lens_q, lens_k, ranges)
    problem = Problem(
        *(batch, seq, seq_k, heads, heads if heads_k is None else heads_k),
        *(cfg.d_head if d is None else d, cfg.dtype, semantics_of(attention)),
        *(cfg.family.operation, page, cfg.family.gradients_of(cfg)),
        cache=cfg.family.cache_of(cfg),
        d_v=(cfg.d_head_v if d is None else d) if d_v is None else d_v,
    )
    others = {"scale": scale, "sinks": sinks}
    return problem, _proof_options(problem, attention, others, seed, row_max=row_max)


def _check_packing(lens_q: Lens | None, lens_k: Lens | None) -> Lens | None:
    """The lengths of k's packed sequences; by default, the same as q's."""
    if lens_q is None:
        if lens_k is not None:
            raise ArgumentError("lens_k: give lens_q as well")
        return None
    lens_k = lens_q if lens_k is None else lens_k
    check_lens(lens_q, lens_k)
    return lens_k


def _draw_ranges(batch: int, seq_k: int, lens_k: Lens | None, seed: int, *, sinks: bool) -> Ranges:
    """The keys of each sequence that a partial kernel uses."""
    rows = seq_k if lens_k is None else sum(lens_k)
    if sinks:
        raise ArgumentError("sinks: a part has none; leave out sinks or partial")
    return drawn_ranges(batch, rows, seq_k, random.Random(seed))


def _proof_options(
    problem: Problem, attention: Attention, others: dict[str, Any], seed: int, *, row_max: bool
) -> dict[str, Any]:
    """The options of the operation's reference: those that determine what attention computes, and
    ``others``."""
    options = {name: getattr(attention, name) for name in _OF_ATTENTION} | others
    if problem.operation == DEFAULT:
        return options | {"row_max": row_max}
    given = {name: value for name, value in options.items() if value not in _NOT_SAID}
    return reference_of(problem.computed).options(problem, seed=seed, **given)


def reference_of(operation: Operation) -> OperationReference:
    """The reference for the outputs of an operation: the one in this package, or the one that the
    operation names.

    Raises ArgumentError if the operation names something that cannot be loaded or is not an
    OperationReference.
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
