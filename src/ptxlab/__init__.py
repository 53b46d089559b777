"""Runs CUDA kernels without a GPU: executes their PTX on the CPU with NumPy, and checks every
access.

    module = ptxlab.load("sum.ptx")
    result = module.launch("sum", [x, total, x.size], grid=4, block=256)
    for finding in result.findings:
        print(finding)

The modules in the order of their imports; each imports only modules above it:
  errors      Error classes.
  ptx/        Parses text into a tree of instructions.
  interface   The types that users see: events, observers, findings, the result of a launch.
  machine/    Runs generated code: memories, groups of threads, barriers, the scheduler. These
              parts access the wave (CTAs that run together) through machine/protocols.py.
  translate/  Translates PTX to Python that runs on the machine: control flow, opcodes.
  execute     Runs a launch: translates the kernel, runs its CTAs in waves, collects the results.
  checks/     Observers, which import nothing but the interface.
  arguments   Packs NumPy arrays and scalars into the bytes of a kernel's arguments.
  module      load() and Module: the entry points for users.
"""

from __future__ import annotations

from ptxlab.errors import PtxlabError
from ptxlab.interface import EmulationResult, Finding
from ptxlab.module import Module, load

__all__ = ["EmulationResult", "Finding", "Module", "PtxlabError", "load"]
