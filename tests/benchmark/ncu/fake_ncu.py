#!/usr/bin/env python3
"""A profiler of our own making: answers like Nsight Compute, from what a test tells it to do.

fake.json beside this script says what goes wrong; calls.jsonl, written there, what was asked.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Filled from fake.json.
PLAN: dict[str, Any] = {}

LISTED = """\
gpu__time_duration                                     Counter         ns  # of ns
sm__cycles_elapsed                                     Counter         cycle
sm__pipe_tensor_op_hmma_cycles_active                  Counter         cycle
sm__inst_executed_pipe_xu                              Counter         inst
sm__inst_issued                                        Counter         inst
sm__warps_active                                       Counter         warp
lts__t_bytes                                           Counter         byte
lts__t_sector_hit_rate                                 Ratio           %
dram__bytes_read                                       Counter         byte
dram__bytes_write                                      Counter         byte
l1tex__data_pipe_lsu_wavefronts_mem_shared             Counter
smsp__average_warps_issue_stalled_barrier_per_issue_active      Ratio   warps waiting at a barrier
smsp__average_warps_issue_stalled_wait_per_issue_active         Ratio   warps waiting for a result
smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active  Ratio
smsp__average_warps_issue_stalled_selected_per_issue_active     Ratio   warps that issue
smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active  Ratio
smsp__average_warps_issue_stalled_sleeping_per_issue_active     Ratio
"""

# Per metric: unit and value of the first launch; each further launch takes 1 % longer.
VALUES = {
    "gpu__time_duration.sum": ("ns", 812_345.0),
    "sm__cycles_elapsed.avg.per_second": ("hz", 1_695_000_000.0),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("%", 61.25),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("%", 33.5),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("%", 40.0),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", 24.9),
    "sm__maximum_warps_per_active_cycle_pct": ("%", 25.0),
    "launch__registers_per_thread": ("register/thread", 168.0),
    "memory_l1_wavefronts_shared": ("", 1_250_000.0),
    "memory_l1_wavefronts_shared_ideal": ("", 1_000_000.0),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", 1_260_000.0),
    "lts__t_bytes.sum": ("Mbyte", 2_150.5),
    "lts__t_sector_hit_rate.pct": ("%", 88.0),
    "dram__bytes_read.sum": ("byte", 100_000_000.0),
    "dram__bytes_write.sum": ("byte", 33_000_000.0),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("", 2.61),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("", 2.44),
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": ("", 3.75),
    "smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio": ("", 0.0),
}


def mangled(config: str) -> str:
    """The name that nvcc gives the kernel."""
    shape, features = re.fullmatch(r"\((.*)\): (.*)", config).groups()
    dtype, *sizes = shape.split(", ")
    words = features.split("+")
    loads = next(word for word in words if word.startswith("load_")).split("_")[1:4]

    def flag(word: str) -> str:
        return f"Lb{int(word in words)}E"

    fields = "".join(
        [
            f"LNS_5DTypeE{ {'FP16': 5, 'BF16': 15}[dtype] }E",
            *(f"Li{size}E" for size in sizes),
            *map(flag, ("async", "eager", "swizzled")),
            *(f"Li{load}E" for load in loads),
            *map(flag, ("buffer", "opt_softmax")),
        ]
    )
    return (
        "_ZN10flashsmith20flash_forward_kernelINS_25StaticForwardKernelConfigIXtlNS_"
        f"24FlashForwardKernelConfigE{fields}EEXtlNS_9SemanticsEEEEEEEvNS_17ForwardKernelArgsE"
    )


def page(metrics: list[str], kernels: list[str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    facts = ["ID", "Process ID", "Process Name", "Kernel Name", "Context", "CC"]
    writer.writerow([*facts, *metrics])
    writer.writerow([*[""] * len(facts), *(VALUES[name][0] for name in metrics)])
    for number, kernel in enumerate(kernels):
        cells = []
        for name in metrics:
            value = VALUES[name][1] * (1.01**number if name == "gpu__time_duration.sum" else 1)
            cells.append("n/a" if name in PLAN["not_available"] else f"{value:,.2f}")
        writer.writerow([number, 4711, "python3.12", kernel, 1, "9.0", *cells])
    return out.getvalue()


def profile(arguments: list[str]) -> int:
    def value(option: str) -> str:
        return arguments[arguments.index(option) + 1]

    log = Path(value("--log-file"))
    metrics = value("--metrics").split(",")
    job = json.loads(Path(arguments[-1]).read_text())
    head = "==PROF== Connected to process 4711 (/usr/bin/python3.12)\n"
    if PLAN["hangs"]:
        print(PLAN["application_says"], flush=True)
        # The process under a profiler holds its output open.
        subprocess.run(["sleep", "60"])
    if PLAN["error"]:
        log.write_text(head + PLAN["error"] + "\n")
        print(PLAN["application_says"])
        return PLAN["exit_status"]
    if unknown := [name for name in metrics if name.partition(".")[0] in PLAN["unknown"]]:
        base = unknown[0].partition(".")[0]
        log.write_text(f"{head}==ERROR== Failed to find metric regex:^{base}(\\.|$)\n")
        return 1
    done = job["uses"][: PLAN["stops_after"]]
    verdicts = ["row 0 is wrong" if use["config"] in PLAN["wrong"] else "" for use in done]
    Path(job["verdicts"]).write_text(json.dumps(verdicts))
    kernels = [
        kernel
        for use in done
        if use["config"] not in PLAN["wrong"]
        for _ in range(job["runs"])
        for kernel in PLAN["renamed"].get(use["config"]) or [mangled(use["config"])]
    ]
    text = page(metrics, [*PLAN["other_kernels"], *kernels])
    log.write_text(head + text[: len(text) - PLAN["cut_off"]] + PLAN["tail"])
    print(PLAN["application_says"])
    return PLAN["exit_status"]


def main(arguments: list[str]) -> int:
    PLAN.update(json.loads((HERE / "fake.json").read_text()))
    with (HERE / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if arguments == ["--version"]:
        print("NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.1.0 (build 36400)")
        return 0
    if arguments == ["--query-metrics"]:
        print(PLAN["listing_error"] or f"Device NVIDIA Test (GH100)\n-----\n{LISTED}")
        return int(bool(PLAN["listing_error"]))
    return profile(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
