"""Runs a kernel's PTX on the CPU with NumPy, and watches it."""

from __future__ import annotations

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
from flashsmith.emulator.memory import GlobalMemory
from flashsmith.emulator.observers import BankConflicts, all_checks
from flashsmith.emulator.ptx import parse
from flashsmith.emulator.tensor_maps import TensorMapSpec

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
