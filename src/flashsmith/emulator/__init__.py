"""Runs a kernel's PTX on the CPU with NumPy, and watches it."""

from __future__ import annotations

from flashsmith.emulator.checks import BankConflicts, all_checks
from flashsmith.emulator.estimate import estimate_seconds
from flashsmith.emulator.execute import emulate, translate
from flashsmith.emulator.interface import (
    AsyncGroupEvent,
    AsyncLanding,
    BarrierEvent,
    EmulationResult,
    Finding,
    Launch,
    MemoryAccess,
    MemoryRange,
    Observer,
    Site,
    WarpSync,
)
from flashsmith.emulator.machine.memory import GlobalMemory
from flashsmith.emulator.machine.tensor_maps import TensorMapSpec
from flashsmith.emulator.ptx import parse

__all__ = [
    "AsyncGroupEvent",
    "AsyncLanding",
    "BankConflicts",
    "BarrierEvent",
    "EmulationResult",
    "Finding",
    "GlobalMemory",
    "Launch",
    "MemoryAccess",
    "MemoryRange",
    "Observer",
    "Site",
    "TensorMapSpec",
    "WarpSync",
    "all_checks",
    "emulate",
    "estimate_seconds",
    "parse",
    "translate",
]
