"""Explains how kernels compute score and mask functions: the expressions, their derivatives, the
C++, and the results of analysing masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashsmith.chooser.functions import CallFunctions, ScoreSizes, bound_functions
from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.dtype import dtype_name
from flashsmith.semantics.mask import UNLIMITED
from flashsmith.semantics.program import Program
from flashsmith.semantics.program_cuda import program_struct
from flashsmith.semantics.signature import NO_WINDOW, MaskLimits, check_mask
from flashsmith.semantics.typed import FLOAT
from flashsmith.tracing import BoundProgram


@dataclass(frozen=True)
class FunctionsExplained:
    """The form in which kernels compute the functions of a call; str() gives a text for people.

    bound: the program of the kernels, with the tensors and numbers of the call; None if causal and
        window express all functions.
    asked: the limits on visible keys that follow from the caller's causal and window.
    limits: the limits on visible keys that follow from the kernel's causal and window.
    has_mask: whether the call has a mask other than causal and window.
    has_lists: whether calls list blocks by the mask. Over latent caches, kernels evaluate it for
        every key.
    """

    bound: BoundProgram | None
    asked: MaskLimits
    limits: MaskLimits
    has_mask: bool
    has_lists: bool = True

    @property
    def program(self) -> Program | None:
        """The program: the expressions that kernels compute, and the name of the program. None if
        kernels need no program."""
        return None if self.bound is None else self.bound.program

    @property
    def score(self) -> str:
        """The score that enters the softmax, as an expression of 'score'; '' if it is 'score'
        itself."""
        return "" if self.program is None or self.program.score is None else str(self.program.score)

    @property
    def mask(self) -> str:
        """The condition that kernels evaluate; '' if they evaluate none."""
        return "" if self.program is None or self.program.mask is None else str(self.program.mask)

    @property
    def derivatives(self) -> dict[str, str]:
        """The derivatives of the score, as strings: under the key 'score' with respect to the
        score, and under the string of each read of a float tensor with respect to that read."""
        program = self.program
        if program is None or program.score is None:
            return {}
        reads = [it for it in program.score.reads() if it.dtype == FLOAT]
        found = {str(it): str(derivative(program.score, it)) for it in reads}
        return {"score": str(program.slope), **found}

    @property
    def cpp(self) -> str:
        """The C++ of the program that is compiled into the kernels; '' if there is no program."""
        return "" if self.program is None else program_struct(self.program)

    @property
    def intervals(self) -> str:
        """A sentence with the result of analysing the mask; this result decides how kernels hide
        keys."""
        parts = []
        if self.limits != self.asked:
            parts.append(f"the mask is {_band(self.limits)}: its kernels visit no hidden block")
        program = self.program
        if program is not None and program.mask is not None and not self.has_lists:
            parts.append("not an interval around the query: kernels evaluate it for every key")
        elif program is not None and program.mask is not None:
            by = ["sequence"] * program.mask_reads_batch + ["head"] * program.mask_reads_head
            lists = f"for each {' and '.join(by)}" if by else "once for all sequences and heads"
            parts.append(
                "not an interval around the query: each call evaluates the mask to list blocks as "
                f"absent, partial or full, {lists}; kernels skip absent blocks, and evaluate it in "
                "partial ones"
            )
        elif self.has_mask and not parts:
            parts.append("the mask hides nothing more than causal and window do")
        return "; ".join(parts) or "there is no mask"

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON."""
        program = self.program
        return {
            "program": None if program is None else str(program),
            "score": self.score,
            "derivatives": self.derivatives,
            "mask": self.mask,
            "intervals": self.intervals,
            "limits": _band(self.limits),
            "tensors": self._tensors(),
            "numbers": self._numbers(),
            "cpp": self.cpp,
        }

    def _tensors(self) -> dict[str, str]:
        if self.bound is None:
            return {}
        given = zip(self.bound.program.reads, self.bound.tensors, self.bound.names, strict=True)
        return {
            read.name: f"{dtype_name(it.dtype)} {tuple(it.shape)}"
            + (f", the {name}" if name else "")
            for read, it, name in given
        }

    def _numbers(self) -> dict[str, int | float]:
        if self.bound is None:
            return {}
        pairs = zip(self.bound.program.numbers, self.bound.numbers, strict=True)
        return {number.name: value for number, value in pairs}

    def __str__(self) -> str:
        facts = [
            ("program", "none" if self.program is None else str(self.program)),
            ("score", self.score or "unchanged"),
            *((f"d score / d {of}", it) for of, it in self.derivatives.items()),
            ("mask", self.mask or "none"),
            ("keys", _band(self.limits)),
            ("found", self.intervals),
            *self._tensors().items(),
            *((name, str(value)) for name, value in self._numbers().items()),
        ]
        width = max(len(name) for name, _ in facts)
        lines = [f"{name.ljust(width)}  {value}" for name, value in facts]
        return "\n".join([*lines, *([""] * bool(self.cpp)), *self.cpp.splitlines()])


def _band(limits: MaskLimits) -> str:
    if limits.kind == "window":
        left, right = ("all" if it >= UNLIMITED else str(it) for it in (limits.left, limits.right))
        return f"a window: {left} before and {right} after the query's own position"
    return "causal" if limits.kind == "causal" else "all"


def explain(
    score_mod: Callable[..., Any] | None = None,
    mask: Any = None,
    *,
    mask_mod: Callable[..., Any] | None = None,
    bias: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = NO_WINDOW,
    positions: str = "start",
    lengths: tuple[int, int] | None = None,
) -> FunctionsExplained:
    """Explains how attention() computes score and mask functions:
    ``print(flashsmith.explain(alibi))``.

    Shows the expressions, their derivatives, the generated C++, and the result of analysing the
    mask. Builds nothing.

    Args:
        score_mod, mask_mod, mask, bias, causal, window, positions: as for attention().
        lengths: (seq_q, seq_k) of the call; None for packed sequences.

    Raises:
        ArgumentError, TraceError: as attention() does.
    """
    functions = CallFunctions(score_mod, mask_mod, mask, bias, positions)
    asked = check_mask(causal, window)
    sizes = None if lengths is None else ScoreSizes(None, None, (lengths[0], lengths[1]))
    bound, causal, window = bound_functions(functions, (causal, window), sizes)
    has_mask = mask is not None or mask_mod is not None
    return FunctionsExplained(bound, asked, check_mask(causal, window), has_mask)
