"""Kernels under Nsight Compute: hardware counters.

Each sequence length has one profiler process, which runs ``ncu.profiled_process``. Its counters
become ProfileRows, which a CSV or JSON Lines file keeps from run to run.
"""

from __future__ import annotations

from flashsmith.benchmark.ncu.profiling import ProfilePlan, run_profile, settled
from flashsmith.benchmark.ncu.rows import (
    ProfileRow,
    ProfileRowFile,
    profile_as_json,
    read_profile,
    write_profile,
)

__all__ = [
    "ProfilePlan",
    "ProfileRow",
    "ProfileRowFile",
    "profile_as_json",
    "read_profile",
    "run_profile",
    "settled",
    "write_profile",
]
