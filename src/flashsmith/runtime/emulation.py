"""The interface to the emulator ptxlab; no other module imports it.

The host path runs a library's own PTX and launch plan on the tensors. Import this module only where
a call runs in the emulator, so that calls on a GPU load nothing of ptxlab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import numpy as np

from flashsmith.errors import ArgumentError, EmulatorError
from flashsmith.runtime.frameworks.base import WORKSPACE_ALIGNMENT
from flashsmith.runtime.launch_counter import note_launch
from flashsmith.runtime.launch_plan import (
    InitialContents,
    Launch,
    LaunchPlan,
    TensorMapSpec,
    Workspace,
)
from ptxlab.checks import BankConflicts, all_checks, instruction_mix
from ptxlab.errors import ArgumentError as PtxlabArgumentError
from ptxlab.errors import EmulatorError as PtxlabEmulatorError
from ptxlab.execute import WAVE_THREADS, emulate
from ptxlab.interface import EmulationResult, Finding, Observer
from ptxlab.machine.memory import GlobalMemory
from ptxlab.ptx import Entry, parse

__all__ = [
    "WAVE_THREADS",
    "BankConflicts",
    "EmulationResult",
    "Finding",
    "Observer",
    "all_checks",
    "exact_mma",
    "instruction_mix",
    "parse_entry",
    "run_in_emulator",
]


_exact_mma: ContextVar[bool] = ContextVar("exact_mma", default=False)


@contextmanager
def flashsmith_errors() -> Iterator[None]:
    """Converts ptxlab's errors to flashsmith's."""
    try:
        yield
    except PtxlabEmulatorError as error:
        raise EmulatorError(str(error)) from error
    except PtxlabArgumentError as error:
        raise ArgumentError(str(error)) from error


@contextmanager
def exact_mma() -> Iterator[None]:
    """Emulates the MMA of a kernel's architecture to the last bit, for kernels that this thread
    emulates inside the block. Elsewhere products are summed in float32, in any order.

    Exact emulation takes two to four times the time. Use ``with exact_mma(): attention(q, k, v)``.
    Raises ArgumentError for a kernel of an architecture older than sm_80, because its order of
    summation is not known.
    """
    before = _exact_mma.set(True)
    try:
        yield
    finally:
        _exact_mma.reset(before)


def parse_entry(ptx: str, entry: str) -> Entry:
    """Returns the parsed kernel ``entry`` of a PTX module. Raises EmulatorError if the module does
    not parse or does not contain that kernel."""
    with flashsmith_errors():
        return parse(ptx).entry(entry)


@flashsmith_errors()
def run_in_emulator(
    ptx: str | Mapping[str, str],
    plan: LaunchPlan,
    *,
    readable: dict[str, np.ndarray],
    writable: dict[str, np.ndarray],
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
    sm_count: int | None = None,
    exact: bool = False,
) -> EmulationResult:
    """Executes ``plan`` on the host. The plan's kernels may access only the named arrays and the
    plan's workspaces. Launches run in order on the same memory.

    ``ptx`` is the text of one module with all kernels, or a mapping from each kernel's entry to the
    text of its module. Workspaces whose initial contents are undefined are filled with NaN. The
    same observers watch every launch. ``schedule_seed`` is the seed of a random schedule, or None
    for the fixed one. ``sm_count`` is the GPU's number of SMs; None means that all CTAs are
    resident at the same time. ``exact`` emulates the MMA to the last bit, like exact_mma(). The
    result counts the instructions of all launches.

    Raises EmulatorError when a kernel cannot continue, or leaves nonzero contents in a workspace
    that must stay zero.
    """
    memory = GlobalMemory()
    for name, array in readable.items():
        memory.register(name, array, writable=False)
    for name, array in writable.items():
        memory.register(name, array, writable=True)
    workspaces = [_filled(workspace) for workspace in plan.workspaces]
    for workspace, array in zip(plan.workspaces, workspaces, strict=True):
        memory.register(workspace.name, array, writable=True)
    addresses = [array.ctypes.data for array in workspaces]
    total = EmulationResult()
    for launch in plan.launched:
        result = emulate(
            ptx if isinstance(ptx, str) else ptx[launch.kernel],
            launch.kernel,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            smem_bytes=launch.smem_bytes,
            argument_bytes=_arguments(launch, addresses),
            memory=memory,
            tensor_maps=[_placed(spec, addresses) for spec in launch.tensor_maps],
            observers=observers,
            seed=schedule_seed,
            sm_count=sm_count,
            programmatic=launch.programmatic,
            exact_mma=exact or _exact_mma.get(),
        )
        total.add(result)
    total.findings = [finding for observer in observers for finding in observer.findings]
    _check_zero(plan, workspaces)
    note_launch("emulator", len(plan.launched))
    return total


def _check_zero(plan: LaunchPlan, workspaces: Sequence[np.ndarray]) -> None:
    """Raises EmulatorError unless the workspaces that the next call expects to be zero are zero."""
    for workspace, array in zip(plan.workspaces, workspaces, strict=True):
        if workspace.contents == InitialContents.KEPT_ZERO and array.any():
            raise EmulatorError(
                f"{plan.kernel}: its workspace {workspace.name} must be zero at the end, for the "
                f"next call, but holds {array[:64].tobytes().hex()}"
            )


def _filled(workspace: Workspace) -> np.ndarray:
    """Returns a host workspace with its initial contents.

    Where these are undefined, all bytes are 0xFF, which is NaN in every format.
    """
    byte = 0xFF if workspace.contents == InitialContents.UNDEFINED else 0
    memory = np.full(workspace.nbytes + WORKSPACE_ALIGNMENT, byte, np.uint8)
    begin = -memory.ctypes.data % WORKSPACE_ALIGNMENT
    return memory[begin : begin + workspace.nbytes]


def _arguments(launch: Launch, workspaces: Sequence[int]) -> bytes:
    """Returns a launch's arguments with the addresses of the workspaces filled in."""
    arguments = bytearray(launch.argument_bytes)
    for offset, workspace, bytes_into in launch.workspace_addresses:
        arguments[offset : offset + 8] = (workspaces[workspace] + bytes_into).to_bytes(8, "little")
    return bytes(arguments)


def _placed(spec: TensorMapSpec, workspaces: Sequence[int]) -> TensorMapSpec:
    if spec.workspace is None:
        return spec
    return replace(spec, address=workspaces[spec.workspace] + spec.address, workspace=None)
