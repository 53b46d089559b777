"""The oracles themselves, held against a real GPU: the same tables as test_opcodes.py."""

from __future__ import annotations

import gpu_executor
import numpy as np
import pytest
from memory_order_programs import AGREEING, CTAS, THREADS
from micro_kernels import Case, disagreements
from opcode_tables import TABLES
from warp_kernels import WarpCase, all_warp_cases, wrong_lanes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("table", TABLES)
def test_scalar_oracles_agree_with_the_gpu(table: str) -> None:
    cases: list[Case] = list(TABLES[table]())
    found = [line for case in cases for line in disagreements(case, gpu_executor.execute)[:3]]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", all_warp_cases(), ids=str)
def test_warp_oracles_agree_with_the_gpu(case: WarpCase) -> None:
    assert not wrong_lanes(case, gpu_executor.execute)


@pytest.mark.parametrize("name", AGREEING)
def test_ctas_that_wait_for_each_other_agree_with_the_gpu(name: str) -> None:
    """Under any timing: twenty runs."""
    text, words, expected = AGREEING[name]
    for _ in range(20):
        given = [bytes(4), bytes(4 * words)]
        (found,) = gpu_executor.execute(
            text, "main", THREADS, given, [4 * len(expected)], ctas=CTAS
        )
        assert np.frombuffer(found, np.uint32).tolist() == expected
