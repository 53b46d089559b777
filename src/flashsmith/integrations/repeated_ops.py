"""Wraps the kernels of PyTorch custom ops so that a repeated call is looked up first.

A compiled program calls the same ops at every step. Reading an op's arguments, finding the cached
call and, in autograd's kernel, calling the op a second time take longer than the cached call
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flashsmith.runtime import cached_calls
from flashsmith.runtime.cached_calls import Invocation, Run, run_repeated

Kernel = Callable[..., Any]
# The call that an op makes and, if the results of this call are not yet the op's outputs, a
# function that turns the results and the op's first tensor into the outputs.
Asked = tuple[Invocation | None, Callable[[Any, Any], Any] | None]
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


def repeated_op(name: str, kernel: Kernel, asked: Callable[..., Asked]) -> Kernel:
    """Returns a kernel that serves repeated calls from the cache, and runs ``kernel`` for all
    others.

    ``name`` identifies the kernel, and ``asked`` maps the op's arguments to the call that the op
    makes. Calls that may need gradients are not repeated.
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
    """Records a call to an op, so that run_repeated serves later calls with equivalent
    arguments."""
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
