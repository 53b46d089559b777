"""The process that runs under the profiler. It checks each kernel of a job, then launches the
kernel in a profiled range.

    python -m flashsmith.benchmark.ncu.profiled_process JOB.json

The profiler records only these launches, not the creation of tensors and not the proof.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flashsmith.errors import FlashsmithError
from flashsmith.families import Problem, parse_kernel_name_into_config


@dataclass(frozen=True)
class ProfiledKernel:
    """One kernel and one problem, as strings that can be stored in a file."""

    problem: str
    config: str


@dataclass(frozen=True)
class ProfilingJob:
    """The job of a profiled process: launch each kernel in `uses` `runs` times, in order, and write
    the verdicts to the file `verdicts`."""

    uses: tuple[ProfiledKernel, ...]
    runs: int
    verdicts: str


def run_job(job: ProfilingJob) -> None:
    """Checks and launches the kernels of a job.

    Each kernel's verdict, which is '' for a correct kernel, is on disk before the kernel is
    profiled. Incorrect kernels are not profiled.

    Raises any error of launching, because this process cannot use the GPU after a crash.
    """
    from flashsmith.benchmark.implementations import kernel_implementation
    from flashsmith.benchmark.workload import workload_of

    verdicts: list[str] = []
    path = Path(job.verdicts)
    # The kernels are grouped by problem, so that only one problem's tensors are in memory.
    problem, workload = "", None
    for use in job.uses:
        if workload is None or use.problem != problem:
            problem, workload = use.problem, None
            workload = workload_of(Problem.parse(use.problem))
        implementation = kernel_implementation(parse_kernel_name_into_config(use.config), workload)
        verdicts.append("; ".join(workload.check(implementation.output()).reasons))
        path.write_text(json.dumps(verdicts))
        if not verdicts[-1]:
            _launch_marked(implementation, job.runs)


def _launch_marked(implementation: Any, runs: int) -> None:
    from flashsmith.runtime import driver

    with driver.current_gpu(0):
        driver.call("cuCtxSynchronize")
        driver.call("cuProfilerStart")
        for _ in range(runs):
            implementation.launch()
        driver.call("cuCtxSynchronize")
        driver.call("cuProfilerStop")


def main(arguments: Sequence[str]) -> int:
    """Runs the job in the file that is named by the only argument."""
    (path,) = arguments
    try:
        run_job(msgspec.json.decode(Path(path).read_bytes(), type=ProfilingJob))
    except FlashsmithError as error:
        print(f"flashsmith: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
