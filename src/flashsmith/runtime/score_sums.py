"""Sums the gradients of scores with a kernel, on a GPU or in the emulator; operations/score_sums.py
defines the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashsmith.families import DeviceSpec, d_head_for, families
from flashsmith.operations.score_sums import SCORE_SUMS
from flashsmith.runtime.arguments import check_request
from flashsmith.runtime.kernel_choice import (
    DEFAULT_EMULATED_ARCH,
    check_server,
    kernel_for,
    limits_of,
)
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.runtime.prepared_call import OperationResult, prepare
from flashsmith.runtime.request import check_operation
from flashsmith.semantics.signature import ForwardOptions

if TYPE_CHECKING:
    from flashsmith.runtime.emulation import Observer

_SPECS = {tensor.name for tensor in SCORE_SUMS.tensors}


def run_score_sums(
    tensors: tuple[Any, Any, Any, Any, Any, Any],
    options: ForwardOptions,
    dlse: Any,
    sums: Any,
    axis: str,
    *,
    emulate: bool = False,
    arch: int | DeviceSpec | None = None,
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
) -> OperationResult:
    """Writes ``sums``, an fp32 tensor of the shape of ``axis``, for do, q, k, v, o and lse.

    The program in ``options`` defines the derivative that is summed.

    Raises:
        ArgumentError: an argument is unusable; its name comes first, and nothing was launched.
        The other errors of ``flashsmith.forward``.
    """
    forward = check_request((*tensors[1:4], None), options)
    problem = forward.problem.of_operation(SCORE_SUMS.name)
    device = limits_of(forward.first, emulate, DEFAULT_EMULATED_ARCH if arch is None else arch)
    (family, *_) = families(SCORE_SUMS.name)
    (cfg, *_) = family.proof_configs(problem.dtype, d_head_for(problem))
    semantics = check_server(cfg, problem, device)
    own = {name: it for name, it in forward.views.items() if name in _SPECS}
    given = {"do": tensors[0], **own, "o": tensors[4], "lse": tensors[5], "dlse": dlse}
    numbers = {name: it for name, it in forward.options.items() if name in SCORE_SUMS.options}
    request = check_operation(problem, {**given, "sums": sums}, options={**numbers, "axis": axis})
    request = request._replace(
        views={**request.views, **{it: x for it, x in forward.views.items() if it not in own}},
        options={**forward.options, **request.options},
        sizes={**forward.sizes, **request.sizes},
    )

    def find_kernel() -> LoadedKernel:
        return kernel_for(cfg, semantics, request, device, None)

    prepared = prepare(request, device, find_kernel, timed=False, poisoned=False)
    return prepared.run(observers, schedule_seed)
