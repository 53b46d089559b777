"""The process under the profiler: proves every kernel of a job, then launches each between marks.

    python -m flashsmith.benchmark.ncu.profiled_process JOB.json

Only what runs between the marks is profiled, so neither the tensors' making nor the proof is.
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
class Use:
    """One kernel on one problem, as texts that a file can hold."""

    problem: str
    config: str


@dataclass(frozen=True)
class Job:
    """What a process is to do: every use `runs` times, in order; `verdicts` is the file for what
    it thinks of them."""

    uses: tuple[Use, ...]
    runs: int
    verdicts: str


def run_job(job: Job) -> None:
    """Does a job. A verdict, '' for a kernel that is right, is on the disk before that kernel is
    profiled; one that is wrong is not profiled.

    Raises what launching raises: after a crash the GPU serves this process no more.
    """
    from flashsmith.benchmark.implementations import kernel_implementation
    from flashsmith.benchmark.workload import workload_of

    verdicts: list[str] = []
    path = Path(job.verdicts)
    # Problems come one after the other, so only one's tensors are in memory.
    problem, workload = "", None
    for use in job.uses:
        if workload is None or use.problem != problem:
            problem, workload = use.problem, None
            workload = workload_of(Problem.parse(use.problem))
        implementation = kernel_implementation(parse_kernel_name_into_config(use.config), workload)
        verdicts.append("; ".join(workload.judge(implementation.output()).reasons))
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
    """Does the job in the file that the only argument names."""
    (path,) = arguments
    try:
        run_job(msgspec.json.decode(Path(path).read_bytes(), type=Job))
    except FlashsmithError as error:
        print(f"flashsmith: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
