"""Profiles kernels with Nsight Compute: reads hardware counters.

A separate process under the profiler, ``ncu.profiled_process``, is started for each sequence
length. Its counters become ProfileRows in a CSV or JSON Lines file, which later runs continue.
"""

from __future__ import annotations

from flashsmith.benchmark.ncu.profile_rows import (
    ProfileRow,
    ProfileRowFile,
    profile_as_json,
    read_profile,
    write_profile,
)
from flashsmith.benchmark.ncu.profiling import ProfilePlan, run_profile, settled

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
