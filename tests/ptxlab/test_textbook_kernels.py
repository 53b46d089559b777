"""The CUDA kernels of examples/ptxlab: right beside NumPy, free of findings, and each with mistakes
that must be found."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.checks import BankConflicts

EXAMPLES = Path(__file__).parents[2] / "examples" / "ptxlab"
SCRIPT = runpy.run_path(str(EXAMPLES / "check_kernels.py"))
KERNELS: dict[str, Callable[[Any], tuple[Any, np.ndarray, np.ndarray]]] = SCRIPT["KERNELS"]


def test_the_kernels_are_right_and_have_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    SCRIPT["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(KERNELS)
    assert {path.stem for path in EXAMPLES.glob("*.cu")} == set(KERNELS)


#: (kernel, the right line, a wrong one, the findings' kinds, what a message says).
MISTAKES = {
    "no barrier after the warps' sums": (
        "reduction",
        "    __syncthreads();\n",
        "",
        {"race-raw"},
        "warp_sums[lane]",
    ),
    "a block more than the array has": (
        "reduction",
        "i < n; i += ",
        "i <= n; i += ",
        {"out-of-bounds"},
        "value += x[i]",
    ),
    "no barrier between loads and stores": (
        "transpose",
        "    __syncthreads();\n",
        "",
        {"race-raw"},
        "tile[threadIdx.x][threadIdx.y + i];",
    ),
    "an edge that is off by one": (
        "transpose",
        "row + i < columns",
        "row + i <= columns",
        {"out-of-bounds", "uninitialised"},
        "out[(row + i) * rows + column]",
    ),
    "the copies are not waited for": (
        "gemm",
        "__pipeline_wait_prior(1)",
        "__pipeline_wait_prior(2)",
        {"in-flight-read", "in-flight-write"},
        "sum +=",
    ),
    "the next copies overwrite what others still read": (
        "gemm",
        "        __syncthreads();  // before",
        "        // before",
        {"race-war"},
        "copy_tile(b[next % 2]",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    kernel, right, wrong, kinds, line = MISTAKES[name]
    text = (EXAMPLES / f"{kernel}.cu").read_text()
    assert text.count(right) == 1
    source = tmp_path / f"{kernel}.cu"
    source.write_text(text.replace(right, wrong))
    result, *_ = KERNELS[kernel](SCRIPT["compiled"](source))
    assert {finding.kind for finding in result.findings} == kinds, result.findings
    lines = source.read_text().splitlines()
    named = " ".join(map(str, result.findings))
    assert any(f"{source}:{i + 1}" in named for i, each in enumerate(lines) if line in each), named


def test_bank_conflicts_of_a_tile_without_padding(tmp_path: Path) -> None:
    counted = {}
    for padded in ("kTile + 1", "kTile"):
        source = tmp_path / "transpose.cu"
        source.write_text(
            (EXAMPLES / "transpose.cu").read_text().replace("[kTile + 1]", f"[{padded}]")
        )
        module, conflicts = SCRIPT["compiled"](source), BankConflicts()
        matrix = np.ones((32, 32), np.float32)
        out = np.zeros_like(matrix)
        module.launch(
            "transpose", [matrix, out, 32, 32], grid=1, block=(32, 8), observers=[conflicts]
        )
        counted[padded] = {kind: one.actual / one.ideal for kind, one in conflicts.by_kind.items()}
    assert counted == {
        "kTile + 1": {"st.shared.4B": 1, "ld.shared.4B": 1},
        "kTile": {"st.shared.4B": 1, "ld.shared.4B": 32},
    }
