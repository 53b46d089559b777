"""Runs a kernel's PTX on the CPU with NumPy, under checks.

Imports go one way, from bottom to top:
  ptx/        text to a tree of instructions
  interface   for users: events, observers, findings, the result
  machine/    what generated code runs on: memories, groups of threads, barriers, the scheduler;
              its parts use the wave they belong to through machine/protocols.py
  translate/  PTX to Python that runs on the machine: control flow, opcodes
  execute     a launch: translates, runs the grid in waves of CTAs, collects what happened
  checks/     observers, which use the interface alone
"""

from __future__ import annotations

from ptxlab.checks import BankConflicts, all_checks
from ptxlab.execute import emulate
from ptxlab.interface import (
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
from ptxlab.machine.memory import GlobalMemory
from ptxlab.machine.tensor_maps import TensorMapSpec
from ptxlab.ptx import parse
from ptxlab.translate.translator import translate

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
    "parse",
    "translate",
]
