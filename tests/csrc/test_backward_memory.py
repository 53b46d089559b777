"""What a backward pass takes beside its gradients: at most what FlashAttention-3 takes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import shared_kernels

from flashsmith.families import KernelConfig, Problem, Semantics, parse_kernel_name_into_config
from flashsmith.runtime.launch_plan import LaunchPlan
from flashsmith.runtime.operation_run import prepare_operation

# Rows of a sequence are padded to whole tiles of as many.
ROWS_PADDED = 128
# Of a kernel's counters, whatever the problem.
COUNTERS = 64
# Kernels that this folder's other tests have, too.
REPEATABLE, FREE, SHARING, SPLIT_COLUMNS, BY_COLUMNS, BY_TURNS = map(
    parse_kernel_name_into_config,
    (
        "(FP16, 64, 64, 64, 4): backward",
        "(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics",
        "(BF16, 96, 32, 64, 4): backward+columns_2+stages_2",
        "(BF16, 256, 32, 32, 4): backward+columns_2+dq_atomics",
        "(BF16, 128, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
        "+scores_together+lagged_dq+pingpong+persistent",
        "(BF16, 64, 64, 192, 3): tma_backward+q_stages_3+do_stages_2+ds_stages_2+regs_32_160"
        "+scores_together+early_exp+lagged_dq+persistent",
    ),
)
OF_BOTH = (REPEATABLE, FREE, BY_COLUMNS, BY_TURNS)
PLAIN, UNEVEN = (SPLIT_COLUMNS, *OF_BOTH), (SHARING, *OF_BOTH)
PACKED = (REPEATABLE, FREE, BY_TURNS)
shared_kernels.want(PLAIN, Semantics())
shared_kernels.want(UNEVEN, Semantics("causal", uneven=True))
shared_kernels.want(PACKED, Semantics("window", softcap=True, packed=True, uneven=True))


def full(cfg: KernelConfig) -> Any:
    return pytest.param(cfg, marks=pytest.mark.full)


def plan(cfg: KernelConfig, text: str, lengths: tuple[int, ...] = ()) -> tuple[Problem, LaunchPlan]:
    problem = Problem.parse(f"{text} d{cfg.d_head} {cfg.dtype.name.lower()} backward")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    rows = keys = (sum(lengths),)
    if not lengths:
        rows, keys = (problem.batch, problem.seq_q), (problem.batch, problem.seq_k)
    kind = "uint16" if cfg.dtype.name == "BF16" else "float16"

    def heads(n: int, of: tuple[int, ...]) -> Any:
        array = np.zeros((*of, n, cfg.d_head), kind)
        return array.view(ml_dtypes.bfloat16) if kind == "uint16" else array

    q, k = heads(problem.heads_q, rows), heads(problem.heads_k, keys)
    lse = np.zeros((*rows[:-1], problem.heads_q, rows[-1]), np.float32)
    tensors = {"do": q, "q": q, "k": k, "v": k, "o": q, "lse": lse}
    if lengths:
        offsets = np.cumsum((0, *lengths), dtype=np.int32)
        tensors |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    windowed = problem.semantics.mask == "window"
    limits = {"left": 9 if windowed else None, "softcap": 5.0 if problem.semantics.softcap else 0.0}
    prepared = prepare_operation(cfg, problem, tensors, options=limits, emulate=True)
    assert prepared.kernel is not None
    return problem, prepared.kernel.plan(prepared.call)


def most(cfg: KernelConfig, problem: Problem, total: int | None) -> int:
    """One fp32 dq and two fp32 vectors of the rows. Of grouped heads FlashAttention-3 sums dk and
    dv in fp32 memory as well, our kernels in registers."""
    if total is None:
        rows = problem.batch * math.ceil(problem.seq_q / ROWS_PADDED) * ROWS_PADDED
    else:
        rows = math.ceil((total + problem.batch * ROWS_PADDED) / ROWS_PADDED) * ROWS_PADDED
    return 4 * rows * problem.heads_q * (cfg.d_head + 2) + COUNTERS


@pytest.mark.parametrize("cfg", [*PLAIN, full(SHARING)], ids=str)
@pytest.mark.parametrize("heads", ["4", "4:1"])
def test_whole_tiles(cfg: KernelConfig, heads: str) -> None:
    problem, planned = plan(cfg, f"b2 s768 h{heads}")
    assert 0 < planned.workspace_bytes <= most(cfg, problem, None)


@pytest.mark.parametrize("cfg", [*UNEVEN, full(SPLIT_COLUMNS)], ids=str)
@pytest.mark.parametrize("text", ["b3 s1:900 h4", "b1 s700:64 h6:2"])
def test_uneven_lengths(cfg: KernelConfig, text: str) -> None:
    problem, planned = plan(cfg, f"{text} causal")
    assert 0 < planned.workspace_bytes <= most(cfg, problem, None)


@pytest.mark.parametrize("cfg", PACKED, ids=str)
@pytest.mark.parametrize("lengths", [(128, 256), (1,), (127, 129, 0, 1, 511), (300,) * 7])
def test_packed_sequences(cfg: KernelConfig, lengths: tuple[int, ...]) -> None:
    text = f"b{len(lengths)} s{max(lengths)} h4:2 window softcap packed"
    problem, planned = plan(cfg, text, lengths)
    assert 0 < planned.workspace_bytes <= most(cfg, problem, sum(lengths))


def test_a_kernel_that_sums_dq_in_registers_has_two_vectors() -> None:
    problem, planned = plan(REPEATABLE, "b2 s768 h4")
    assert planned.workspace_bytes == 2 * 4 * problem.batch * problem.heads_q * problem.seq_q
