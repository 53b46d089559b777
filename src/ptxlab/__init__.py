"""Runs CUDA kernels without a GPU: PTX on the CPU with NumPy, under checks.

    module = ptxlab.load("sum.ptx")
    result = module.launch("sum", [x, total, x.size], grid=4, block=256)
    for finding in result.findings:
        print(finding)

Imports go one way, from bottom to top:
  errors
  ptx/        text to a tree of instructions
  interface   for users: events, observers, findings, the result
  machine/    what generated code runs on: memories, groups of threads, barriers, the scheduler;
              its parts use the wave they belong to through machine/protocols.py
  translate/  PTX to Python that runs on the machine: control flow, opcodes
  execute     a launch: translates, runs the grid in waves of CTAs, collects what happened
  checks/     observers, which use the interface alone
  arguments   NumPy arrays and scalars to the bytes of a kernel's arguments
  module      load() and Module: the way in for users
"""

from __future__ import annotations

from ptxlab.errors import PtxlabError
from ptxlab.interface import EmulationResult, Finding
from ptxlab.module import Module, load

__all__ = ["EmulationResult", "Finding", "Module", "PtxlabError", "load"]
