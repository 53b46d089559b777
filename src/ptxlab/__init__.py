"""Runs CUDA kernels without a GPU: PTX on the CPU with NumPy, under checks.

    module = ptxlab.load("sum.ptx")
    result = module.launch("sum", [x, total, x.size], grid=4, block=256)
    for finding in result.findings:
        print(finding)

A module imports only modules above it in this list:
  errors      Error classes.
  ptx/        Parses text into a tree of instructions.
  interface   Types that users meet: events, observers, findings, the result.
  machine/    Runs generated code: memories, groups of threads, barriers, the scheduler. Its parts
              use their wave through machine/protocols.py.
  translate/  Translates PTX to Python that runs on the machine: control flow, opcodes.
  execute     Launches: translates, runs the grid in waves of CTAs, collects the results.
  checks/     Observers; they depend on the interface alone.
  arguments   Packs NumPy arrays and scalars into the bytes of a kernel's arguments.
  module      load() and Module: the entry points for users.
"""

from __future__ import annotations

from ptxlab.errors import PtxlabError
from ptxlab.interface import EmulationResult, Finding
from ptxlab.module import Module, load

__all__ = ["EmulationResult", "Finding", "Module", "PtxlabError", "load"]
