"""The oracles themselves, held against a real GPU: the same tables as test_opcodes.py."""

from __future__ import annotations

import gpu_executor
import pytest
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
