"""`flashsmith run --score ... --mask ...`: checks score and mask functions on random data.

Each function is compared with its traced expression, each derivative is compared with finite
differences, and the outputs and gradients of kernels are compared with float64. The kernels run in
the emulator with all checks enabled. They run twice, with different thread schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.tasks import OneProblem
from flashsmith.builder import library_for
from flashsmith.chooser import choose
from flashsmith.chooser.function_problems import FunctionProblem, parse_with_functions
from flashsmith.errors import ArgumentError, EmulatorError, LaunchError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, check_legal
from flashsmith.operations.backward import BACKWARD
from flashsmith.operations.forward import FORWARD
from flashsmith.runtime import run_forward, run_gradients
from flashsmith.runtime.emulation import all_checks
from flashsmith.runtime.target import Target
from flashsmith.semantics.program import BoundProgram
from flashsmith.semantics.signature import BackwardOptions, ForwardOptions, check_mask
from flashsmith.tracing.binding import mask_function, table_function
from flashsmith.tracing.captures import is_array, is_tensor
from flashsmith.verify import compare
from flashsmith.verify import function_values as values
from flashsmith.verify.attention_semantics import Attention, offsets
from flashsmith.verify.backward_reference import sequences_of
from flashsmith.verify.gradient_tolerance import compare_gradients
from flashsmith.verify.gradients import compute_gradients
from flashsmith.verify.problem_options import problem_options
from flashsmith.verify.proof_inputs import InputSpec, default_scale, make_inputs
from flashsmith.verify.reference import references_of

# The number of score elements at which functions are called.
POINTS = 300


@dataclass(frozen=True)
class FunctionCheck:
    """One check: its name, the kernel's short form ('' if no kernel ran), the largest error and its
    bound (if any), what is wrong, and a remark."""

    name: str
    kernel: str = ""
    error: float | None = None
    bound: float | None = None
    problems: tuple[str, ...] = ()
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True)
class FunctionReport:
    """The checks of a problem's functions. ``skipped`` maps selected kernels that cannot compute
    the problem to the reason."""

    problem: Problem
    device: DeviceSpec
    seed: int
    rows: tuple[FunctionCheck, ...]
    skipped: Mapping[KernelConfig, str]

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        verdicts = [asdict(row) | {"verdict": "pass" if row.ok else "FAIL"} for row in self.rows]
        return {
            "problem": str(self.problem),
            "arch": f"sm_{self.device.arch}",
            "seed": self.seed,
            "checks": verdicts,
            "skipped": [{"config": str(cfg), "reason": it} for cfg, it in self.skipped.items()],
        }


def read_functions(text: str, seed: int = 0) -> FunctionProblem:
    """Does the same as parse_with_functions(), but draws PyTorch tensors if PyTorch is installed,
    because most functions expect these."""
    if not values.can_call():
        return parse_with_functions(text, seed=seed)
    return parse_with_functions(text, seed=seed, wrap=values.as_tensor)


def run_functions(
    found: FunctionProblem,
    configs: Sequence[KernelConfig] | None,
    target: Target,
    *,
    seed: int = 0,
    reporter: ProgressReporter,
) -> FunctionReport:
    """Checks the functions of ``found``. ``configs`` are kernels of the forward and the backward
    pass; None means the kernels that attention() chooses.

    Raises ArgumentError if no selected kernel computes the problem, or if the problem has semantics
    other than masks, softcap and packing. Also raises any error of building.
    """
    if found.problem.semantics.partial or not found.problem.seq_q or not found.problem.seq_k:
        raise ArgumentError(
            f"problem='{found.problem}': functions are proven for whole calls with queries and "
            "keys; leave out partial, and give lengths of at least 1"
        )
    if found.problem.operation not in (FORWARD.name, BACKWARD.name):
        raise ArgumentError(
            f"problem='{found.problem}': functions are proven in attention() and its gradients; "
            f"leave out {found.problem.operation}"
        )
    device = target.device
    kernels, skipped = _kernels(found.problem, configs, device)
    rows = list(_value_checks(found, seed))
    case = _Case.drawn(found, seed)
    for done, (cfg, problem) in enumerate(kernels):
        reporter.step(f"proving {cfg}", done, len(kernels))
        library_for(
            [cfg],
            arch=device.arch,
            semantics=problem.required_semantics(cfg),
            progress=reporter.build,
        )
        rows += case.checks(cfg, device)
    return FunctionReport(found.problem, device, seed, tuple(rows), skipped)


def _kernels(
    problem: Problem, configs: Sequence[KernelConfig] | None, device: DeviceSpec
) -> tuple[list[tuple[KernelConfig, Problem]], dict[KernelConfig, str]]:
    """Returns the kernels to check, with their problems, and the reasons why other kernels are
    skipped."""
    forward, backward = (problem.of_operation(it.name) for it in (FORWARD, BACKWARD))
    if configs is None:
        return [(choose(it, device).config, it) for it in (forward, backward)], {}
    served: list[tuple[KernelConfig, Problem]] = []
    skipped: dict[KernelConfig, str] = {}
    for cfg in configs:
        check_legal(cfg, device)
        one = backward if cfg.family.operation == BACKWARD.name else forward
        reason = OneProblem(one).why_not(cfg) or _without_program(cfg, one)
        if reason:
            skipped[cfg] = reason
        else:
            OneProblem(one).check(cfg)
            served.append((cfg, one))
    if not served:
        cfg, reason = next(iter(skipped.items()))
        raise ArgumentError(
            f"problem='{problem}': no selected kernel computes it: {cfg} {reason}; leave out "
            "--kernels for those that attention() uses"
        )
    return served, skipped


def _without_program(cfg: KernelConfig, problem: Problem) -> str | None:
    if not problem.semantics.program:
        return None
    adapted = cfg.family.adapt_to_program(cfg, problem.semantics)
    if adapted == cfg:
        return None
    return f"takes no functions; {adapted} does" if adapted else "takes no functions"


# --- functions without kernels --------------------------------------------------------------------


def _value_checks(found: FunctionProblem, seed: int) -> Iterator[FunctionCheck]:
    """The checks of the traced expressions at random points."""
    problem, bound = found.problem, _on_host(found.program)
    sizes = problem.batch, problem.heads_q, problem.seq_q, problem.seq_k
    points = values.Points.drawn(sizes, POINTS, seed)
    score, mask = _score_of(found, problem), _mask_of(found, problem)
    if not values.can_call():
        score = mask = None
    at = f"{POINTS} elements"
    if score is not None:
        yield _row("score as called", values.check_score(score, bound, points), at)
    if mask is not None:
        seen = values.seen_by(bound, points) & _within(found.causal, found.window, points)
        yield _row("mask as called", values.check_mask(mask, seen, points), at)
    for of in [] if bound is None else values.varied_parts(bound):
        found_slope = values.check_derivative(bound, of, points)  # type: ignore[arg-type]
        yield _row(f"d score / d {of}", found_slope, "finite differences")


def _row(name: str, check: values.ValueCheck, note: str) -> FunctionCheck:
    problems = (check.reason,) if check.reason else ()
    return FunctionCheck(name, "", check.error, check.bound, problems, note)


def _within(causal: bool, window: Any, points: values.Points) -> np.ndarray:
    """Returns, for each point, whether the options causal and window leave the key of the point
    visible."""
    at, limits = points.values, check_mask(causal, window)
    distance = at["k"] - (at["q"] + at["seq_k"] - at["seq_q"])
    inside: np.ndarray = (distance >= -limits.left) & (distance <= limits.right)
    return inside


def _score_of(found: FunctionProblem, problem: Problem) -> Callable[..., Any] | None:
    """The caller's score function and bias as one function of scores and indices."""
    functions = found.functions
    score, bias = functions.score_mod, functions.bias
    if score is None and bias is None:
        return None
    at = None if bias is None else table_function(bias)
    shift = problem.seq_k - problem.seq_q if functions.positions == "end" else 0

    def called(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        new = s if score is None else score(s, b, h, q + shift, k)
        return (
            new if at is None else float(new) + float(at(*map(int, (b, h, *_inside(q, k, bias)))))
        )

    return called


def _inside(q: Any, k: Any, table: Any) -> tuple[int, int]:
    """The indices of the element for row ``q`` and key ``k`` in a tensor that may be broadcast
    along either dimension."""
    rows, keys = table.shape[-2:]
    return (int(q) if rows > 1 else 0), (int(k) if keys > 1 else 0)


def _mask_of(found: FunctionProblem, problem: Problem) -> Callable[..., Any] | None:
    """The caller's masks, causal and window as one function of indices."""
    functions, (causal, window) = found.functions, found.asked
    given = [it for it in (functions.mask_mod, functions.mask) if it is not None]
    if not given:
        return None
    limits, offset = check_mask(causal, window), problem.seq_k - problem.seq_q
    shift = offset if functions.positions == "end" else 0

    def called(b: Any, h: Any, q: Any, k: Any) -> bool:
        distance = int(k) - int(q) - offset
        seen = -limits.left <= distance <= limits.right
        for it in given:
            if is_array(it):
                where = map(int, (b, h, *_inside(q, k, it)))
                seen = seen and bool(mask_function(it)(*where))
            else:
                seen = seen and bool(it(b, h, q + shift, k))
        return seen

    return called


def _on_host(bound: BoundProgram | None) -> BoundProgram | None:
    """The program with its tensors as NumPy arrays."""
    if bound is None:
        return None
    return bound._replace(tensors=tuple(map(_array, bound.tensors)))


def _array(tensor: Any) -> np.ndarray:
    if not is_tensor(tensor):
        return np.asarray(tensor)
    import ml_dtypes
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        found: np.ndarray = plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return found
    found = plain.numpy()
    return found


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """Random tensors of a problem, and the results that its kernels must compute."""

    attention: Attention
    options: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    exact: Any
    sequences: Any

    @classmethod
    def drawn(cls, found: FunctionProblem, seed: int) -> _Case:
        problem, bound = found.problem, _on_host(found.program)
        known = problem_options(problem, seed=seed)
        names = [name for name in ("lens_q", "lens_k") if name in known]
        lens: dict[str, Any] = {name: known[name] for name in names}
        options: dict[str, Any] = {
            "causal": found.causal,
            "window": found.window,
            "softcap": known["softcap"],
        }
        attention = Attention(default_scale(problem.d), **options, **lens, program=bound)
        drawn = make_inputs(InputSpec.of(problem, attention, "random", seed, sinks=False))
        exact = references_of(attention, drawn.q, drawn.k, drawn.v)
        do = np.random.default_rng([seed, 1]).standard_normal(drawn.q.shape)
        tensors = {"do": do.astype(drawn.q.dtype), "q": drawn.q, "k": drawn.k, "v": drawn.v}
        tensors |= {"o": exact.o.astype(drawn.q.dtype), "lse": exact.lse.astype(np.float32)}
        if lens:
            options |= {f"cu_seqlens_{x}": offsets(lens[f"lens_{x}"]) for x in "qk"}
        return cls(attention, options, tensors, exact, sequences_of(problem, lens))

    def checks(self, cfg: KernelConfig, device: DeviceSpec) -> Iterator[FunctionCheck]:
        """Yields the checks of one kernel: of its values, of its bits, and the findings of the
        emulator."""
        is_backward = cfg.family.operation == BACKWARD.name
        name, run = ("gradients", self._backward) if is_backward else ("output", self._forward)
        deterministic = cfg.family.is_deterministic(cfg)
        try:
            outputs, findings = run(cfg, device, all_checks(deterministic), None)
            again, _ = run(cfg, device, [], 1)
        except (EmulatorError, LaunchError) as error:
            yield FunctionCheck(name, str(cfg), problems=(str(error),))
            return
        verdict = self._verdict(cfg, outputs)
        yield FunctionCheck(
            name, str(cfg), verdict.max_error, verdict.bound, verdict.reasons, "float64"
        )
        yield self._bits(cfg, outputs, again, deterministic)
        yield FunctionCheck(
            "races, bounds", str(cfg), problems=tuple(map(str, findings)), note="every access"
        )

    def _bits(
        self,
        cfg: KernelConfig,
        outputs: Mapping[str, np.ndarray],
        again: Mapping[str, np.ndarray],
        deterministic: bool,
    ) -> FunctionCheck:
        free = () if deterministic else ("dq",)
        differ = [
            name
            for name, array in outputs.items()
            if name not in free and array.tobytes() != again[name].tobytes()
        ]
        problems = tuple(f"{name}: other bits in another order of threads" for name in differ)
        note = "two orders of threads" + (", without dq, which this kernel adds up" if free else "")
        return FunctionCheck("same bits", str(cfg), problems=problems, note=note)

    def _verdict(self, cfg: KernelConfig, outputs: Mapping[str, np.ndarray]) -> Any:
        if "o" in outputs:
            return compare(
                *(cfg, outputs["o"], outputs["lse"], self.exact),
                row_max=outputs["row_max"],
                lens_q=self.attention.lens_q,
            )
        given = self.tensors, self.attention, self.sequences, self.exact.o, self.exact.lse
        return compare_gradients(cfg.dtype, outputs, compute_gradients(*given))

    def _forward(self, cfg: Any, device: DeviceSpec, observers: Any, order: int | None) -> Any:
        result = run_forward(
            *(cfg, *(self.tensors[name] for name in "qkv")),
            program=self.attention.program,
            return_lse=True,
            return_row_max=True,
            poisoned=True,
            emulate=True,
            arch=device,
            observers=observers,
            schedule_seed=order,
            **self.options,
        )
        outputs = {"o": result.o, "lse": result.lse, "row_max": result.row_max}
        return outputs, _findings(result)

    def _backward(self, cfg: Any, device: DeviceSpec, observers: Any, order: int | None) -> Any:
        do, q, k, v, o, lse = (self.tensors[it] for it in ("do", "q", "k", "v", "o", "lse"))
        result = run_gradients(
            cfg,
            (do, q, k, v, o, lse),
            BackwardOptions(ForwardOptions(**self.options, program=self.attention.program)),
            emulate=True,
            poisoned=True,
            arch=device,
            observers=observers,
            schedule_seed=order,
        )
        return result.outputs, _findings(result)


def _findings(result: Any) -> list[Any]:
    return [] if result.emulation is None else list(result.emulation.findings)
