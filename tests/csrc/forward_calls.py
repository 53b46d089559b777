"""Forward passes in the form a kernel library takes them, on tensors that are nowhere."""

from __future__ import annotations

from typing import NamedTuple

from flashsmith.families import DeviceSpec, Problem
from flashsmith.operations.forward import forward_numbers
from flashsmith.runtime.prepared_call import OperationCall
from flashsmith.semantics import UNLIMITED

# address, batch stride, seq stride, head stride
TensorInts = tuple[int, int, int, int]


class ForwardCall(NamedTuple):
    """A problem, where its tensors are, and the limits of the device that is to run it.

    Strides count elements. ``totals`` are the rows of all packed sequences of q and k; else 0.
    """

    problem: Problem
    tensors: tuple[TensorInts, TensorInts, TensorInts, TensorInts]  # q, k, v, o
    scale: float
    device: DeviceSpec
    softcap: float = 0.0
    limits: tuple[int | None, int | None] = (None, None)  # a window's
    totals: tuple[int, int] = (0, 0)
    cu_seqlens: tuple[int, int] = (0, 0)  # addresses, q's and k's
    sinks: int = 0
    lse: int = 0
    row_max: int = 0

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of all tensors, in the operation's order."""
        q, k, v, o = self.tensors
        statistics = self.lse, self.row_max
        return (q[0], k[0], v[0], o[0], *statistics, self.sinks, *self.cu_seqlens, 0, 0)

    def library_arguments(self) -> tuple[int | float, ...]:
        """The arguments after the config's index of the library's plan and prepare."""
        strides = (ints[1:] for ints in self.tensors)
        numbers = forward_numbers(
            self.problem, self.totals, strides, self.scale, self.softcap, *self.limits
        )
        call = OperationCall(self.problem, self.device, numbers, self.addresses)
        return call.library_arguments()


def unplaced_call(problem: Problem, scale: float, device: DeviceSpec) -> ForwardCall:
    """A call on dense tensors that do not exist yet: every address is 0, but those of cu_seqlens.

    A softcap is 1, a window's left limit 0; packed, every sequence is as long as the longest.
    """
    p, packed = problem, problem.semantics.packed
    q, k = _dense(p.batch, p.seq_q, p.heads_q, p.d), _dense(p.batch, p.seq_k, p.heads_k, p.d)
    if packed:
        q, k = ((0, 0, *ints[2:]) for ints in (q, k))
    return ForwardCall(
        problem,
        (q, k, k, q),
        scale,
        device,
        float(problem.semantics.softcap),
        (0, UNLIMITED) if problem.semantics.key_mask.takes_limits else (None, None),
        (p.batch * p.seq_q, p.batch * p.seq_k) if packed else (0, 0),
        (1, 1) if packed else (0, 0),
    )


def _dense(batch: int, seq: int, heads: int, d: int) -> TensorInts:
    return 0, seq * heads * d, heads * d, d
