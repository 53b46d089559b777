"""Entries and tables that several tests begin with."""

from __future__ import annotations

from flashsmith.chooser.winners import Entry, RankedConfig, WinnersTable
from flashsmith.families import DeviceSpec, Problem, device_spec

H200 = device_spec("H200")
BIG = "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles"
SMALL = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
MIDDLE = "(FP16, 128, 128, 32, 4): async+eager+swizzled+load_2_2_2_tiles"
WGMMA = "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
TUNED = "b16 s4096 h16 d128 fp16"
ENVIRONMENT = {"gpu": "NVIDIA H200", "time": "2026-11-21T03:00:00+00:00"}


def ranked(
    config: str, ms: float, problem: str = TUNED, family: str = "mma_sync", time: str | None = None
) -> RankedConfig:
    environment = ENVIRONMENT if time is None else {**ENVIRONMENT, "time": time}
    tflops = Problem.parse(problem).attn_flop() / ms / 1e9
    return RankedConfig(family, config, ms, tflops, environment)


def add(
    table: WinnersTable,
    problem: str,
    times: dict[str, float],
    device: DeviceSpec = H200,
    time: str | None = None,
) -> Entry:
    figures = [ranked(config, ms, problem, time=time) for config, ms in times.items()]
    return table.add(Problem.parse(problem), device, figures)


def tuned_table() -> WinnersTable:
    table = WinnersTable()
    add(table, TUNED, {SMALL: 6.7, BIG: 5.7, MIDDLE: 6.3})
    return table
