"""The host path: the library's own PTX and launch plan, run by the emulator on the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flashsmith.errors import EmulationTooLongError, EmulatorError
from flashsmith.families import KernelConfig, Problem
from flashsmith.runtime.forward_request import Request
from flashsmith.runtime.frameworks.base import WORKSPACE_ALIGNMENT
from flashsmith.runtime.launch_counter import note_launch
from flashsmith.runtime.launch_plan import Contents, Launch, LaunchPlan, TensorMapSpec, Workspace
from flashsmith.runtime.running_time import estimate_seconds
from ptxlab import EmulationResult, GlobalMemory, Observer, emulate

# Above this the caller has to pass emulate=True.
LONGEST_UNASKED_SECONDS = 60.0


def check_estimate(request: Request, cfg: KernelConfig, *following: KernelConfig) -> None:
    """Raises EmulationTooLongError when emulating the request's kernel, and those of operations on
    the same problem that follow it, is estimated above 60 s."""
    estimated = _as_one_sequence(request) if request.packing else request.problem
    seconds = sum(
        estimate_seconds(one, replace(estimated, operation=one.family.operation))
        for one in (cfg, *following)
    )
    problem = replace(request.problem, operation=cfg.family.operation)
    check_seconds(cfg, problem, seconds)


def check_seconds(cfg: KernelConfig, problem: Problem, seconds: float) -> None:
    """Raises EmulationTooLongError when the estimated time is above 60 s."""
    if seconds > LONGEST_UNASKED_SECONDS:
        raise EmulationTooLongError(
            f"emulating {problem} with {cfg} is estimated to take {seconds:.0f} s, above "
            f"{LONGEST_UNASKED_SECONDS:.0f} s; pass emulate=True to run it all the same, give a "
            "smaller problem, or move the tensors to a GPU"
        )


def _as_one_sequence(request: Request) -> Problem:
    """A problem with as many rows and scores as the packed sequences have together."""
    packing = request.packing
    assert packing is not None
    lengths = [
        np.diff(view.framework.as_numpy(view.source).astype(np.int64)).clip(0, longest)
        for view, longest in (
            (packing.cu_seqlens_q, packing.max_seqlen_q),
            (packing.cu_seqlens_k, packing.max_seqlen_k),
        )
    ]
    rows, scores = request.q.shape[0], int((lengths[0] * lengths[1]).sum())
    return replace(request.problem, batch=1, seq_q=rows, seq_k=-(-scores // max(1, rows)))


def run_in_emulator(
    ptx: str | Mapping[str, str],
    plan: LaunchPlan,
    *,
    readable: dict[str, np.ndarray],
    writable: dict[str, np.ndarray],
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
    sm_count: int | None = None,
) -> EmulationResult:
    """Executes ``plan`` on the host; its kernels may access the named arrays and the plan's
    workspaces only. Launches run in order on the same memory.

    ``ptx`` is the text of a module with all kernels, or of one for each, by its entry. Workspaces
    with undefined contents are filled with NaN. Observers see one launch after the other.
    ``schedule_seed`` is None for the fixed schedule, else the number that decides a random one;
    ``sm_count`` is the GPU's, None for one with room for all CTAs at a time. The result counts the
    instructions of all launches.

    Raises EmulatorError when a kernel cannot continue, or leaves a workspace that is to be zero
    with other contents.
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
        )
        total.add(result)
    total.findings = [finding for observer in observers for finding in observer.findings]
    for workspace, array in zip(plan.workspaces, workspaces, strict=True):
        if workspace.contents == Contents.KEPT_ZERO and array.any():
            raise EmulatorError(
                f"{plan.kernel}: its workspace {workspace.name} must be zero at the end, for the "
                f"next call, and holds {array[:64].tobytes().hex()}"
            )
    note_launch("emulator", len(plan.launched))
    return total


def _filled(workspace: Workspace) -> np.ndarray:
    """A workspace on the host with its contents; bytes of 0xFF are NaN, whatever the format."""
    byte = 0xFF if workspace.contents == Contents.UNDEFINED else 0
    memory = np.full(workspace.nbytes + WORKSPACE_ALIGNMENT, byte, np.uint8)
    begin = -memory.ctypes.data % WORKSPACE_ALIGNMENT
    return memory[begin : begin + workspace.nbytes]


def _arguments(launch: Launch, workspaces: Sequence[int]) -> bytes:
    """A launch's arguments with the addresses of workspaces in them."""
    arguments = bytearray(launch.argument_bytes)
    for offset, workspace, bytes_into in launch.workspace_addresses:
        arguments[offset : offset + 8] = (workspaces[workspace] + bytes_into).to_bytes(8, "little")
    return bytes(arguments)


def _placed(spec: TensorMapSpec, workspaces: Sequence[int]) -> TensorMapSpec:
    if spec.workspace is None:
        return spec
    return replace(spec, address=workspaces[spec.workspace] + spec.address, workspace=None)
