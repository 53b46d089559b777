"""Runs any operation with one named kernel, on a GPU or in the emulator.

run_operation() runs a call once; prepare_operation() prepares a call to run many times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.families.canonical import emulated_arch
from flashsmith.runtime import cached_calls
from flashsmith.runtime.arguments import check_config, check_device, check_serves
from flashsmith.runtime.cached_calls import Invocation
from flashsmith.runtime.kernel_choice import kernel_for, limits_of
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.runtime.prepared_call import OperationResult, PreparedCall, prepare
from flashsmith.runtime.request import check_operation
from flashsmith.runtime.running_time import check_seconds, estimate_seconds
from flashsmith.semantics.signature import check_flag

if TYPE_CHECKING:
    from flashsmith.runtime.emulation import Observer

# The keywords that a repeatable call may have, which are those that affect what is launched.
_REPEATABLE = {"options", "wanted", "unwanted", "emulate"}


def run_operation(
    cfg: KernelConfig,
    problem: Problem,
    tensors: Mapping[str, Any],
    *,
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
    **how: Any,
) -> OperationResult:
    """Runs ``cfg``'s kernel on ``problem`` once; ``how`` are keywords of ``prepare_operation``.

    ``observers`` watch the emulator, and ``schedule_seed`` selects its schedule (None: the fixed
    one).
    """
    asked = None
    if not observers and schedule_seed is None and how.keys() <= _REPEATABLE:
        asked = _invocation(cfg, problem, tensors, **how)
    calls, (signature, call) = cached_calls.cached, cached_calls.find(asked)
    if asked is not None and call is not None:
        found = call.run(asked.given())
        if found is not None:
            return OperationResult(
                dict(zip(map(str, call.returned[:-1]), found, strict=False)), None, None
            )
    prepared = prepare_operation(cfg, problem, tensors, **how)
    result = prepared.run(observers, schedule_seed)
    if asked is not None and signature is not None:
        # The final None stands for an absent output; because of it, even a single output is
        # returned in a tuple.
        returned = *result.outputs, None
        cached_calls.remember(calls, signature, asked, tuple(tensors), prepared, returned)
    return result


def _invocation(
    cfg: KernelConfig,
    problem: Problem,
    tensors: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    wanted: Collection[str] = (),
    unwanted: Collection[str] = (),
    emulate: Any = False,
) -> Invocation:
    asked = options or {}
    names = "operation", cfg, problem, frozenset(wanted), frozenset(unwanted), *tensors, *asked
    return Invocation(names, tuple(tensors.values()), (*asked.values(), emulate))


def prepare_operation(
    cfg: KernelConfig,
    problem: Problem,
    tensors: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    wanted: Collection[str] = (),
    unwanted: Collection[str] = (),
    emulate: bool = False,
    timed: bool = False,
    poisoned: bool = False,
    arch: int | DeviceSpec | None = None,
) -> PreparedCall:
    """Prepares a call of ``cfg``'s kernel on ``problem``: does everything except the launch. The
    call runs on the tensors' GPU, or in the emulator for host tensors. A kernel that is not built
    is built first.

    Args:
        tensors: by the operation's names: every input, and the outputs that already have memory.
            All must share one framework and device, with a contiguous last dimension.
        options: the operation's options by name; the others take their defaults.
        wanted: names of optional outputs that are also written.
        unwanted: names of usual outputs that are not written.
        emulate, timed, poisoned, arch: as for ``run_forward``.

    Raises:
        ArgumentError: an argument is unusable; its name comes first, and nothing was launched.
        IllegalConfigError, KernelNotBuiltError, EmulationTooLongError, LaunchError: as for
            ``forward``.
    """
    check_serves(check_config(cfg, problem.operation), problem)
    request = check_operation(
        problem, tensors, options=options or {}, wanted=wanted, unwanted=unwanted
    )
    if request.deterministic and not cfg.family.is_deterministic(cfg):
        raise ArgumentError(
            f"deterministic=True: {cfg} sums in an order that depends on timing; choose another "
            "config"
        )
    first = request.first
    device = limits_of(
        first, check_flag("emulate", emulate), emulated_arch(cfg) if arch is None else arch
    )
    check_device(cfg, device)
    if first.device.kind != "cuda" and not emulate:
        check_seconds(cfg, problem, estimate_seconds(cfg, problem))

    def find_kernel() -> LoadedKernel:
        return kernel_for(cfg, problem.required_semantics(cfg), request, device, None)

    return prepare(request, device, find_kernel, timed=timed, poisoned=poisoned)
