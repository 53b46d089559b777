"""Kernels of PyTorch custom ops that first look up whether a call is repeated.

A compiled program calls the same ops at every step. Reading an op's arguments, finding its cached
call and, with autograd's kernel, calling the op a second time take longer than the cached call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flashsmith.runtime import cached_calls
from flashsmith.runtime.cached_calls import Invocation, Run, run_repeated

Kernel = Callable[..., Any]
# The call that an op makes, and, if the results are not the op's outputs yet, the function that
# completes them: it takes the results and the op's first tensor.
Asked = tuple[Invocation | None, Callable[[Any, Any], Any] | None]
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


def repeated_op(name: str, kernel: Kernel, asked: Callable[..., Asked]) -> Kernel:
    """``kernel`` of an op, changed so that it runs only for calls that are not repeated.

    ``name`` is the kernel's own, and ``asked`` takes the op's arguments. Calls that may need
    gradients are not repeated.
    """

    def run(*tensors: Any, **keywords: Any) -> Any:
        if _dispatch_modes() or _transforms() or forward_ad._current_level >= 0:
            return kernel(*tensors, **keywords)
        arguments, names = (*tensors, *keywords.values()), (name, len(tensors), *keywords)
        outputs = run_repeated(arguments, names)
        if outputs is None:
            outputs = kernel(*tensors, **keywords)
            if not any(it is not None and it.requires_grad for it in tensors):
                _remember(arguments, names, *asked(*tensors, **keywords))
        return outputs

    return run


def _remember(
    arguments: tuple[Any, ...],
    names: Any,
    invocation: Invocation | None,
    completed: Callable[[Any, Any], Any] | None,
) -> None:
    """Makes run_repeated serve calls of an op with such arguments."""
    groups = cached_calls.repeated
    call = cached_calls.find(invocation)[1]
    if invocation is None or call is None:
        return
    run = call.run if completed is None else _completing(call.run, completed)
    cached_calls.remember_repeated(groups, arguments, names, invocation.tensors, run)


def _completing(run: Run, completed: Callable[[Any, Any], Any]) -> Run:
    def run_and_complete(given: tuple[Any, ...]) -> Any:
        results = run(given)
        return None if results is None else completed(results, given[0])

    return run_and_complete
