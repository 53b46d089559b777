"""Shuffles, votes, ldmatrix and mma.sync in the emulator against the ISA's index formulas."""

from __future__ import annotations

import emulator_executor
import pytest
from warp_kernels import WarpCase, all_warp_cases, wrong_lanes


@pytest.mark.parametrize("case", all_warp_cases(), ids=str)
def test_warp_instruction(case: WarpCase) -> None:
    found = wrong_lanes(case, emulator_executor.execute)
    assert not found, f"{len(found)} values, the first:\n" + "\n".join(found[:5])
