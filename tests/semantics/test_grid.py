"""The proof grid: a cover of it in the emulator under every check, and on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels import SEMANTICS, built, cover

from flashsmith.configs import DType, Semantics
from flashsmith.errors import ArgumentError
from flashsmith.runtime import forward, query_gpu
from flashsmith.verify import prove
from flashsmith.verify.grid import REFUSED_D, schedules
from flashsmith.verify.inputs import numpy_dtype


def wrong_verdicts(semantics: Semantics, arch: int, **options: Any) -> list[str]:
    """Proves the cover's cases that one library's kernels serve."""
    built(semantics, arch)
    cases = [case for case in cover() if case.semantics == semantics]
    assert cases
    verdicts = ((case, prove(case.config, **case.keywords(), **options)) for case in cases)
    return [f"{case}\n{verdict}" for case, verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_a_cover_is_right_and_has_no_findings(semantics: Semantics) -> None:
    wrong = wrong_verdicts(semantics, 80, checks=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_a_cover_is_right_on_the_gpu(semantics: Semantics) -> None:
    wrong = wrong_verdicts(semantics, query_gpu(0).arch, backend="gpu")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("d", REFUSED_D)
@pytest.mark.parametrize("dtype", list(DType))
def test_other_head_dimensions_are_refused(dtype: DType, d: int) -> None:
    q = np.zeros((1, 64, 1, d), numpy_dtype(dtype))
    for config in schedules(dtype, 64 if d < 64 else 128):
        with pytest.raises(ArgumentError, match=rf"^q: .*{d}.*multiple of 8"):
            forward(config, q, q, q)
