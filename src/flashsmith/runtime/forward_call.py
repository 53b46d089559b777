"""ForwardCall: one checked forward pass in the form a kernel library takes it; and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from flashsmith.families import DeviceSpec, Problem
from flashsmith.operations.forward import forward_numbers
from flashsmith.runtime.forward_options import CAUSAL, NO_MASK, Mask
from flashsmith.runtime.forward_request import Request
from flashsmith.runtime.frameworks.base import TensorView, contiguous_strides
from flashsmith.semantics import UNLIMITED

if TYPE_CHECKING:
    from flashsmith.runtime.emulation import EmulationResult

# address, batch stride, seq stride, head stride
TensorInts = tuple[int, int, int, int]

# An address of a planned call's tensor that does not exist yet.
_SOMEWHERE = 1
_NOMINAL_MASKS = {"none": NO_MASK, "causal": CAUSAL, "window": Mask("window", 0, UNLIMITED)}


class LibraryCall(Protocol):
    """What a kernel library plans and launches: a problem, and where its tensors are."""

    @property
    def problem(self) -> Problem: ...

    @property
    def addresses(self) -> tuple[int, ...]: ...

    def library_arguments(self) -> tuple[int | float, ...]: ...


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
    ranges: tuple[int, int] = (0, 0)  # addresses of seqused_k and k_begin

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of all tensors, in the operation's order."""
        q, k, v, o = self.tensors
        statistics = self.lse, self.row_max
        return (q[0], k[0], v[0], o[0], *statistics, self.sinks, *self.cu_seqlens, *self.ranges)

    def library_arguments(self) -> tuple[int | float, ...]:
        """The arguments after the config's index of the library's plan and prepare."""
        mask, strides = self.mask, (ints[1:] for ints in self.tensors)
        limits = (mask.left, mask.right) if mask.kind == "window" else (None, None)
        numbers = forward_numbers(
            self.problem, self.totals, strides, self.scale, self.softcap, *limits
        )
        return library_arguments(self.device, numbers, self.addresses)


def library_arguments(
    device: DeviceSpec, numbers: tuple[int | float, ...], addresses: tuple[int, ...]
) -> tuple[int | float, ...]:
    """The arguments after the config's index of a library's plan and prepare: the device, the count
    of the operation's numbers, these in its order, and the addresses of its tensors."""
    return (
        *(device.arch, device.sm_count, device.max_smem_per_block, device.max_smem_per_sm),
        *(len(numbers), *numbers),
        *addresses,
    )


def forward_call(
    request: Request, o: Any, lse: Any, row_max: Any, device: DeviceSpec
) -> ForwardCall:
    """The call that a request becomes with its outputs (None: not wanted).

    Without a request.o, ``o`` is dense.
    """
    totals = offsets = (0, 0)
    q, k, v, packing = request.q, request.k, request.v, request.packing
    if packing is not None:
        totals = q.shape[0], k.shape[0]
        offsets = packing.cu_seqlens_q.address, packing.cu_seqlens_k.address
    ranges = (0, 0)
    if request.ranges is not None:
        used, begin = (0 if view is None else view.address for view in request.ranges)
        ranges = used, begin
    given, address_of = request.o, q.framework.address
    o_ints = tensor_ints(given) if given else _ints(address_of(o), contiguous_strides(q.shape))
    return ForwardCall(
        request.problem,
        (tensor_ints(q), tensor_ints(k), tensor_ints(v), o_ints),
        request.scale,
        device,
        request.softcap,
        request.mask,
        totals,
        offsets,
        0 if request.sinks is None else request.sinks.address,
        0 if lse is None else address_of(lse),
        0 if row_max is None else address_of(row_max),
        ranges,
    )


def tensor_ints(view: TensorView) -> TensorInts:
    """Address and strides of a (batch, seq, heads, d) tensor, or of a (total, heads, d) one."""
    return _ints(view.address, view.strides)


def _ints(address: int, strides: tuple[int, ...]) -> TensorInts:
    if len(strides) == 3:
        return address, 0, strides[0], strides[1]
    return address, strides[0], strides[1], strides[2]


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


class ForwardResult(NamedTuple):
    """o and, if asked for, lse and row_max in the caller's framework; ms on the GPU if timed.

    Outputs that were not asked for are None, and so is ``emulation`` where nothing was emulated.
    """

    o: Any
    lse: Any
    row_max: Any
    ms: float | None
    emulation: EmulationResult | None

    @property
    def outputs(self) -> Any:
        """What forward returns: o, or o and the statistics that were asked for."""
        return outputs_of(self.o, self.lse, self.row_max)


def outputs_of(o: Any, lse: Any, row_max: Any) -> Any:
    """o, or o and those of the statistics that are not None."""
    if row_max is None:
        return o if lse is None else (o, lse)
    return (o, row_max) if lse is None else (o, lse, row_max)
