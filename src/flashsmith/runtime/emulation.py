"""The host path: the library's own PTX and launch plan, run by the emulator on the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flashsmith.emulator import EmulationResult, GlobalMemory, Observer, emulate, estimate_seconds
from flashsmith.errors import EmulationTooLongError, EmulatorError
from flashsmith.families import KernelConfig, Problem
from flashsmith.runtime.launches import note_launch
from flashsmith.runtime.plan import LaunchPlan
from flashsmith.runtime.request import Request

# Above this the caller has to say emulate=True.
LONGEST_UNASKED_SECONDS = 60.0


def check_estimate(cfg: KernelConfig, request: Request) -> None:
    """Raises EmulationTooLongError when emulating the request is estimated above 60 s."""
    alike = _as_one_sequence(request) if request.packing else request.problem
    check_seconds(cfg, request.problem, estimate_seconds(cfg, alike))


def check_seconds(cfg: KernelConfig, problem: Problem, seconds: float) -> None:
    """Raises EmulationTooLongError when what emulating is estimated to take is above 60 s."""
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
    ptx: str,
    plan: LaunchPlan,
    *,
    readable: dict[str, np.ndarray],
    writable: dict[str, np.ndarray],
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
) -> EmulationResult:
    """Executes ``plan`` on the host; the kernel may touch the named arrays and nothing else.

    ``schedule_seed`` is None for the fixed schedule, else the number that decides a random one.

    Raises EmulatorError when the kernel cannot go on, or leaves a workspace behind that the next
    launch could not use.
    """
    memory = GlobalMemory()
    for name, array in readable.items():
        memory.register(name, array, writable=False)
    for name, array in writable.items():
        memory.register(name, array, writable=True)
    arguments = plan.argument_bytes
    if plan.workspace_bytes:
        workspace = np.zeros(plan.workspace_bytes, np.uint8)
        memory.register("workspace", workspace, writable=True)
        place = slice(plan.workspace_offset, plan.workspace_offset + 8)
        patched = bytearray(arguments)
        patched[place] = workspace.ctypes.data.to_bytes(8, "little")
        arguments = bytes(patched)
    result = emulate(
        ptx,
        plan.kernel,
        grid=plan.grid,
        block=plan.block,
        cluster=plan.cluster,
        smem_bytes=plan.smem_bytes,
        argument_bytes=arguments,
        memory=memory,
        tensor_maps=plan.tensor_maps,
        observers=observers,
        seed=schedule_seed,
    )
    if plan.workspace_bytes and plan.workspace_zeroed and workspace.any():
        raise EmulatorError(
            f"{plan.kernel}: its workspace must be zero at the end, for the next launch, and holds "
            f"{workspace.tobytes().hex()}"
        )
    note_launch("emulator")
    return result
