"""ForwardCall: one checked forward pass, in the form a kernel library takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashsmith.configs import DeviceSpec, Problem
from flashsmith.runtime.allocation import address_of
from flashsmith.runtime.options import CAUSAL, NO_MASK, UNLIMITED, Mask
from flashsmith.runtime.request import Request
from flashsmith.runtime.tensors import TensorView, contiguous_strides

# address, batch stride, seq stride, head stride
TensorInts = tuple[int, int, int, int]

# Stands for what a planned call has, but nowhere yet.
_SOMEWHERE = 1
_NOMINAL_MASKS = {"none": NO_MASK, "causal": CAUSAL, "window": Mask("window", 0, UNLIMITED)}


class ForwardCall(NamedTuple):
    """A problem, where its tensors are, and the limits of the device that is to run it.

    Addresses may be 0 when the call is only planned, and are for what is not given or not wanted.
    Strides count elements. ``totals`` are the rows of all packed sequences of q and k; else 0.
    """

    problem: Problem
    tensors: tuple[TensorInts, TensorInts, TensorInts, TensorInts]  # q, k, v, o
    scale: float
    device: DeviceSpec
    softcap: float = 0.0
    mask: Mask = NO_MASK
    totals: tuple[int, int] = (0, 0)
    cu_seqlens: tuple[int, int] = (0, 0)  # addresses, q's and k's
    sinks: int = 0
    lse: int = 0
    row_max: int = 0

    def library_arguments(self) -> tuple[int | float, ...]:
        """What follows the kernel's index in the library's plan, launch and launch_timed.

        In the order in which csrc/bindings.cc reads it.
        """
        p, d = self.problem, self.device
        q, k, v, o = self.tensors
        return (
            *(p.batch, p.seq_q, p.seq_k, p.heads_q, p.heads_k, p.d),
            *self.totals,
            *q,
            *k,
            *v,
            *o,
            *self.cu_seqlens,
            *(self.sinks, self.lse, self.row_max),
            *(self.scale, self.softcap),
            *(self.mask.left, self.mask.right),
            *(d.arch, d.sm_count, d.max_smem_per_block, d.max_smem_per_sm),
        )


def forward_call(
    request: Request, o: TensorView, lse: Any, row_max: Any, device: DeviceSpec
) -> ForwardCall:
    """The call that a request becomes once its outputs are there (None: not wanted)."""
    totals = offsets = (0, 0)
    packing = request.packing
    if packing is not None:
        totals = request.q.shape[0], request.k.shape[0]
        offsets = packing.cu_seqlens_q.address, packing.cu_seqlens_k.address
    tensors = map(tensor_ints, (request.q, request.k, request.v, o))
    return ForwardCall(
        request.problem,
        tuple(tensors),  # type: ignore[arg-type]
        request.scale,
        device,
        request.softcap,
        request.mask,
        totals,
        offsets,
        0 if request.sinks is None else request.sinks.address,
        0 if lse is None else address_of(lse),
        0 if row_max is None else address_of(row_max),
    )


def tensor_ints(view: TensorView) -> TensorInts:
    """Address and strides of a (batch, seq, heads, d) tensor, or of a (total, heads, d) one."""
    if len(view.strides) == 3:
        return view.address, 0, view.strides[0], view.strides[1]
    batch, seq, head, _ = view.strides
    return view.address, batch, seq, head


def unplaced_call(problem: Problem, scale: float, device: DeviceSpec) -> ForwardCall:
    """A call on dense tensors that do not exist yet: every address is 0, but those of cu_seqlens.

    A softcap is 1, a window's left limit 0; packed, every sequence is as long as the longest.
    """
    p, semantics = problem, problem.semantics
    q = _dense(p.batch, p.seq_q, p.heads_q, p.d)
    k = _dense(p.batch, p.seq_k, p.heads_k, p.d)
    call = ForwardCall(
        problem,
        (q, k, k, q),
        scale,
        device,
        softcap=float(semantics.softcap),
        mask=_NOMINAL_MASKS[semantics.mask],
    )
    if not semantics.packed:
        return call
    q, k = ((0, 0, *ints[2:]) for ints in (q, k))
    return call._replace(
        tensors=(q, k, k, q),
        totals=(p.batch * p.seq_q, p.batch * p.seq_k),
        cu_seqlens=(_SOMEWHERE, _SOMEWHERE),
    )


def _dense(*shape: int) -> TensorInts:
    batch, seq, head, _ = contiguous_strides(shape)
    return 0, batch, seq, head
