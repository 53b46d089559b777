"""ForwardCall: one checked forward pass, in the form a kernel library takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashsmith.configs import DeviceSpec, Problem
from flashsmith.runtime.tensors import TensorView, contiguous_strides

# address, batch stride, seq stride, head stride
TensorInts = tuple[int, int, int, int]


class ForwardCall(NamedTuple):
    """A problem, where its tensors are, and the limits of the device that is to run it.

    Addresses may be 0 when the call is only planned. Strides count elements.
    """

    problem: Problem
    tensors: tuple[TensorInts, TensorInts, TensorInts, TensorInts]  # q, k, v, o
    lse: int
    scale: float
    device: DeviceSpec

    def library_arguments(self) -> tuple[Any, ...]:
        """What follows the kernel's index in the library's plan, launch and launch_timed."""
        p, d = self.problem, self.device
        return (
            (p.batch, p.seq_q, p.seq_k, p.heads_q, p.heads_k, p.d),
            *self.tensors,
            self.lse,
            self.scale,
            (d.arch, d.sm_count, d.max_smem_per_block, d.max_smem_per_sm),
        )


def tensor_ints(view: TensorView) -> TensorInts:
    """Address and strides of a (batch, seq, heads, d) tensor."""
    batch, seq, head, _ = view.strides
    return view.address, batch, seq, head


def unplaced_call(problem: Problem, scale: float, device: DeviceSpec) -> ForwardCall:
    """A call on dense tensors that do not exist yet: every address is 0."""
    p = problem
    q = _dense(p.batch, p.seq_q, p.heads_q, p.d)
    k = _dense(p.batch, p.seq_k, p.heads_k, p.d)
    return ForwardCall(problem, (q, k, k, q), 0, scale, device)


def _dense(*shape: int) -> TensorInts:
    batch, seq, head, _ = contiguous_strides(shape)
    return 0, batch, seq, head
