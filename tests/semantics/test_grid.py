"""The proof grid: a cover of it in the emulator under every check, and on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built_kernels import QUICK_SEMANTICS, SEMANTICS, built, cover, quick_cover
from grids.proof_grid import REFUSED_D

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Semantics, family_named
from flashsmith.runtime import forward, query_gpu
from flashsmith.verify import prove
from flashsmith.verify.proof_inputs import numpy_dtype

MMA_SYNC, WGMMA = "mma_sync", "wgmma"


def wrong_verdicts(
    semantics: Semantics, arch: int, family: str, whole: bool = True, **options: Any
) -> list[str]:
    """Proves the cases of a family's cover that one library's kernels serve."""
    built(semantics, arch, family, whole)
    known = cover(family) if whole else quick_cover(family)
    cases = [case for case in known if case.semantics == semantics]
    assert cases
    verdicts = ((case, prove(case.config, **case.keywords(), **options)) for case in cases)
    return [f"{case}\n{verdict}" for case, verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("semantics", QUICK_SEMANTICS, ids=str)
def test_a_quick_cover_is_right_and_has_no_findings(semantics: Semantics) -> None:
    wrong = wrong_verdicts(semantics, 80, MMA_SYNC, whole=False, checks=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_a_cover_is_right_and_has_no_findings(semantics: Semantics) -> None:
    wrong = wrong_verdicts(semantics, 80, MMA_SYNC, checks=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_a_cover_of_wgmma_is_right_and_has_no_findings(semantics: Semantics) -> None:
    wrong = wrong_verdicts(semantics, 90, WGMMA, checks=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [MMA_SYNC, WGMMA])
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_a_cover_is_right_on_the_gpu(semantics: Semantics, family: str) -> None:
    arch = query_gpu(0).arch
    if family == WGMMA and arch != 90:
        pytest.skip("needs a GPU of compute capability 9.0")
    wrong = wrong_verdicts(semantics, arch, family, backend="gpu")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("d", REFUSED_D)
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("family", [MMA_SYNC, WGMMA])
def test_other_head_dimensions_are_refused(family: str, dtype: DType, d: int) -> None:
    q = np.zeros((1, 64, 1, d), numpy_dtype(dtype))
    for config in family_named(family).proof_configs(dtype, 64 if d < 64 else 128):
        with pytest.raises(ArgumentError, match=rf"^q: .*{d}.*multiple of 8"):
            forward(config, q, q, q)
