"""What is right for the operation first_row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsmith.families import Problem
from flashsmith.verify import ExpectedOutputs, OperationReference


class FirstRowReference(OperationReference):
    """A copy rounds nothing: what is exact is what honest rounding gives."""

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        row = inputs["v"][:, 0]
        return ExpectedOutputs(exact={"o": row.astype(np.float64)}, rounded={"o": row})


REFERENCE = FirstRowReference()
