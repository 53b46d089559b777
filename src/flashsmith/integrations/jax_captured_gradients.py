"""Lets PyTorch compute the gradients of JAX arrays that a score function reads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax

from flashsmith.errors import ArgumentError
from flashsmith.semantics.program import BoundProgram
from flashsmith.semantics.signature import ForwardOptions


def check_can_differentiate() -> None:
    """Raises ArgumentError unless PyTorch is installed."""
    if find_spec("torch") is None:
        raise ArgumentError(
            "score_mod, bias: JAX differentiates with respect to an array that they read; PyTorch "
            "computes that gradient, and is not installed: install it, or give the array by "
            "jax.lax.stop_gradient()"
        )


def captured_gradients_of_jax(
    saved: Sequence[Any], options: ForwardOptions, needs: Sequence[bool]
) -> list[Any]:
    """Returns the gradients of the program's arrays, in the arrays' dtypes; None for an array that
    needs no gradient.

    ``saved`` has do, q, k, v, o, lse, dlse, cu_seqlens_q and cu_seqlens_k, each an array or None.
    """
    import torch

    from flashsmith.integrations.captured_gradients import Saved, captured_gradients

    program: BoundProgram = options.program
    program = program._replace(tensors=tuple(map(_as_tensor, program.tensors)))
    found = captured_gradients(Saved(*map(_as_tensor, saved)), options, program, needs)
    if any(it is not None and it.is_cuda for it in found):
        torch.cuda.synchronize()  # JAX is unaware of PyTorch's streams
    return [None if it is None else jax.dlpack.from_dlpack(it.contiguous()) for it in found]


def _as_tensor(array: Any) -> Any:
    """Returns a PyTorch tensor that shares the memory of an array."""
    if array is None:
        return None
    import torch

    return torch.from_dlpack(array.block_until_ready())
