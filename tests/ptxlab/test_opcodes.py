"""Every scalar instruction in the emulator against its plain-Python oracle."""

from __future__ import annotations

import emulator_executor
import pytest
from micro_kernels import Case, disagreements
from opcode_tables import all_cases


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_instruction(case: Case) -> None:
    found = disagreements(case, emulator_executor.execute)
    assert not found, f"{len(found)} vectors, the first:\n" + "\n".join(found[:5])
