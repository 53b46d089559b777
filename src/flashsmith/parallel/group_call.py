"""A call to attention() over a group, and the interface of the schedules that compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashsmith.parallel.group import Group
from flashsmith.parallel.layout import Layout, Limits


class GroupCall(NamedTuple):
    """One call to attention() over a group.

    Its fields differ between ranks only in the rank and the rows.
    """

    group: Group
    q_layout: Layout
    k_layout: Layout
    packed: bool
    limits: Limits
    # The options softcap, scale and emulate, which both passes need.
    options: dict[str, Any]
    config: Any
    backward_config: Any
    deterministic: bool
    # Whether q, k, v or sinks require gradients; the same on every rank.
    has_gradients: bool
    return_lse: bool
    return_row_max: bool
    shape: tuple[int, ...]  # The shape of this rank's q
    d_v: int  # The head dimension of v and o
    # A function that returns when all ranks have agreed on the call. The forward pass sends nothing
    # before it has returned.
    confirm: Callable[[], None]
    devices: tuple[str, ...] = ()  # The devices of all ranks
    bits: str = ""  # 'canonical', or '' for free bits
    # The launches of earlier calls with the same signature, keyed by their purpose; None if the
    # call is not recorded.
    launches: dict[Any, Any] | None = None

    @property
    def dim(self) -> int:
        """The dimension of rows."""
        return 0 if self.packed else 1

    def zeros(self, like: Any, dtype: Any = None) -> Any:
        """Zeros in the shape of this rank's o."""
        return like.new_zeros((*self.shape[:-1], self.d_v), dtype=dtype)

    def split(self, kv: Any) -> tuple[Any, Any]:
        """The reverse of side_by_side(): views of K and V, or of their gradients."""
        k, v = kv.split((self.shape[-1], self.d_v), -1)
        return k, v


class GroupResults(NamedTuple):
    """This rank's shards of the results, and ``saved``, the tensors that the backward pass needs.

    lse and row_max may be None if they were not requested. No later call uses the memory of these
    tensors again.
    """

    o: Any
    lse: Any
    row_max: Any
    saved: tuple[Any, ...]


Needs = tuple[bool, bool, bool, bool]
GroupGradients = tuple[Any, Any, Any, Any]


class GroupSchedule(NamedTuple):
    forward: Callable[[GroupCall, Any, Any, Any, Any], GroupResults]
    # call, saved, do, dlse (may be None), needs -> dq, dk, dv, this rank's part of dsinks
    backward: Callable[[GroupCall, tuple[Any, ...], Any, Any, Needs], GroupGradients]


def as_needed(needs: Needs, *gradients: Any) -> GroupGradients:
    dq, dk, dv, dsinks = (it if need else None for it, need in zip(gradients, needs, strict=True))
    return dq, dk, dv, dsinks
