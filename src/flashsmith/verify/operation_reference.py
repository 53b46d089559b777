"""OperationReference: inputs for proofs of an operation, the expected outputs, and the verdict."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem
from flashsmith.operations import Operation
from flashsmith.printable import quoted
from flashsmith.runtime import OperationResult, run_operation
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.verify.tolerance import MIN_OUTPUTS, Comparison, ExpectedOutputs, compare_tensors

# A function that places a proof's arrays where the kernel runs: it copies them to a GPU, or leaves
# them on the host.
ToDevice = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class ProofCase:
    """One problem for a proof or benchmark, with its inputs, expected outputs and verdict.

    ``inputs`` are host arrays by the names of the operation. The type of ``expected`` is private to
    the reference that made the case.
    """

    problem: Problem
    inputs: Mapping[str, np.ndarray]
    options: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None
    reference: OperationReference | None = None

    def verdict(
        self, outputs: Mapping[str, np.ndarray], kernel: KernelConfig | None = None
    ) -> Comparison:
        """The verdict on outputs, which are given by name.

        If a kernel's config is given, the first mismatch is located in that kernel's tiles.

        Raises ArgumentError if an output is missing or has the wrong shape.
        """
        assert self.reference is not None, "made by prove() or OperationReference.given()"
        return self.reference.compare(kernel or self.problem.dtype, self, outputs)


class OperationReference(ABC):
    """Draws the inputs of an operation and judges its outputs. A subclass must define ``expected``.

    ``kinds`` are the kinds of inputs that ``draw`` can make; the first is the plain random one.
    """

    kinds: tuple[str, ...] = ("random",)

    # --- required ----------------------------------------------------------------------------

    @abstractmethod
    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        """The expected outputs in two versions: in float64 without rounding, and from a plain
        implementation that rounds wherever a kernel must."""

    # --- optional ----------------------------------------------------------------------------

    def draw(self, problem: Problem, kind: str, seed: int) -> dict[str, np.ndarray]:
        """The inputs of the given kind, by name.

        The default is standard normal numbers for every required input.

        Raises ArgumentError for an integer input: a subclass must define what its values mean.
        """
        rng = np.random.default_rng(seed)
        drawn = {}
        for tensor in problem.computed.inputs:
            if not tensor.is_required(problem):
                continue
            dtype = NUMPY_DTYPES[tensor.dtype_of(problem)]
            if dtype.kind in "iu":
                raise ArgumentError(
                    f"{tensor.name}: the meaning of its numbers is unknown; the reference of "
                    f"{problem.operation} must draw them"
                )
            shape = problem.computed.shape(tensor, problem)
            drawn[tensor.name] = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        return drawn

    def options(self, problem: Problem, *, seed: int = 0, **asked: Any) -> dict[str, Any]:
        """The options for a proof of ``problem``.

        By default, these are the ``asked`` options that are neither None nor False.

        Raises ArgumentError for an option that the operation does not have.
        """
        given = {name: value for name, value in asked.items() if value not in (None, False)}
        known = problem.computed.options
        unknown = [name for name in given if name not in known]
        if unknown:
            value = quoted(given[unknown[0]])
            raise ArgumentError(
                f"{unknown[0]}={value}: {problem.operation} has no such option; "
                f"leave it out (it has {', '.join(known) or 'none'})"
            )
        return given

    def call_options(self, problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the call: the proof's options, except the ones that only describe
        inputs."""
        return {name: it for name, it in options.items() if name in problem.computed.options}

    def meaning(self, problem: Problem, options: Mapping[str, Any]) -> str:
        """Describes in words the options of the call, which the problem string does not contain."""
        return ", ".join(f"{name} {value}" for name, value in options.items()) or "plain"

    def case(
        self,
        cfg: KernelConfig,
        problem: Problem,
        *,
        kind: str,
        seed: int,
        options: Mapping[str, Any],
        on_gpu: bool = False,
    ) -> ProofCase:
        """The case for a proof of ``cfg``'s kernel: the problem for which the kernel is compiled,
        with heads repeated until MIN_OUTPUTS outputs are compared.

        ``on_gpu``: whether the expected outputs may be computed on a GPU.
        """
        repeats = -(-MIN_OUTPUTS // max(1, outputs_of(problem.computed, problem)))
        problem = replace(
            problem,
            heads_q=problem.heads_q * repeats,
            heads_k=problem.heads_k * repeats,
            semantics=problem.required_semantics(cfg),
        )
        inputs = self.draw(problem, kind, seed)
        return ProofCase(problem, inputs, options, self.expected(problem, inputs, options))

    def given(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ProofCase:
        """The case for inputs that exist already, for example a benchmark's."""
        return ProofCase(problem, inputs, options, self.expected(problem, inputs, options), self)

    def run(
        self, cfg: KernelConfig, case: ProofCase, to_device: ToDevice, **how: Any
    ) -> OperationResult:
        """Fills every output with NaN and runs the kernel. ``how`` has keywords of
        run_operation()."""
        operation = case.problem.computed
        given = {name: to_device(array) for name, array in case.inputs.items()}
        return run_operation(
            cfg,
            case.problem,
            given,
            options=self.call_options(case.problem, case.options),
            wanted=[tensor.name for tensor in operation.outputs],
            poisoned=True,
            **how,
        )

    def compare(
        self, kernel: KernelConfig | DType, case: ProofCase, outputs: Mapping[str, np.ndarray]
    ) -> Comparison:
        """The verdict of compare_tensors() on outputs, which are given by name."""
        dtype = kernel if isinstance(kernel, DType) else kernel.dtype
        return compare_tensors(dtype, outputs, case.expected)


def outputs_of(operation: Operation, problem: Problem) -> int:
    """The number of elements of the first output; a proof needs at least MIN_OUTPUTS."""
    return math.prod(operation.shape(operation.outputs[0], problem))
