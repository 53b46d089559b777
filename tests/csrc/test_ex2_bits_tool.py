"""tools/gpu/ex2_bits.py without a GPU: it finds how a unit rounds, and where the rule fails."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ptxlab

f4, f8, i8 = np.float32, np.float64, np.int64
#: Of the tables here.
BITS = 12


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a small table."""
    module = load_tool("gpu/ex2_bits.py")
    monkeypatch.setattr(module, "BITS", BITS)
    rules = [module.Rule(how, BITS - less) for less in range(3) for how in module.ROUNDINGS]
    monkeypatch.setattr(module, "RULES", rules)
    return module


def unit(x: np.ndarray, bits: int, nearest: bool) -> np.ndarray:
    """2^x as a unit with so many bits of the fraction gives it, a little too small."""
    flushed = np.where(np.abs(x) < f4(2.0**-126), f4(0), x).astype(f8)
    scaled = np.ldexp(np.clip(flushed, -1000, 1000), bits)
    fixed = (np.rint(scaled) if nearest else np.floor(scaled)).astype(i8)
    whole, fraction = fixed >> bits, np.ldexp((fixed & ((1 << bits) - 1)).astype(f8), -bits)
    mantissa = np.maximum(1, np.floor(np.exp2(fraction) * 2.0**23 - 0.3) * 2.0**-23)
    with np.errstate(over="ignore"):
        found = np.ldexp(mantissa, whole).astype(f4)
    return np.where(whole < -126, f4(0), found)


@contextmanager
def no_gpu(ordinal: int) -> Iterator[None]:
    yield


def run(
    tool: ModuleType,
    function: Callable[[np.ndarray], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> tuple[int, list[dict[str, str]]]:
    monkeypatch.setattr(tool, "Gpu", lambda image: function)
    monkeypatch.setattr(tool, "current_gpu", no_gpu)
    cubin, rows = folder / "kernel.cubin", folder / "rows.csv"
    cubin.write_bytes(b"")
    files = ["--table", str(folder / "table.npz"), "--cubin", str(cubin)]
    status = tool.main([str(rows), "--stride", str(1 << 14), *files])
    with rows.open() as file:
        return status, list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("bits", "nearest", "found"),
    [
        (BITS, False, f"down to {BITS} bits"),
        (BITS, True, f"nearest to {BITS} bits"),
        (BITS - 2, True, f"nearest to {BITS - 2} bits"),
    ],
)
def test_the_rounding_is_found(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    bits: int,
    nearest: bool,
    found: str,
) -> None:
    status, rows = run(tool, lambda x: unit(x, bits, nearest), monkeypatch, tmp_path)
    assert status == 0
    assert {row["rule"] for row in rows} == {found}
    assert len(rows) == 2 * len(tool.EXPONENTS)
    deviations = np.load(tmp_path / "table.npz")["deviations"]
    assert deviations.size == 1 << BITS
    assert (deviations != 0).any()


def test_floats_that_break_the_rule_are_an_error(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def function(x: np.ndarray) -> np.ndarray:
        found = unit(x, BITS, nearest=False)
        return np.where((x > -8) & (x <= -4), found * f4(1 + 2.0**-23), found)

    status, rows = run(tool, function, monkeypatch, tmp_path)
    assert status == 1
    assert [(row["sign"], row["exponent"]) for row in rows if row["differing"] != "0"] == [
        ("1", "2")
    ]
    assert f"down to {BITS} bits, 1, 2, " in capsys.readouterr().out


@pytest.mark.full
def test_the_kernel_in_the_emulator(load_tool: Callable[[str], ModuleType]) -> None:
    tool = load_tool("gpu/ex2_bits.py")
    module = ptxlab.load(tool.compiled(tool.SOURCE, "ptx"))
    x, y = np.linspace(-140, 140, 1000, dtype=f4), np.zeros(1000, f4)
    assert not module.launch("exp2_each", [x, y, x.size], grid=2, block=256).findings
    with np.errstate(over="ignore", under="ignore"):
        wanted = np.exp2(x)
    assert np.allclose(y, np.where(wanted < f4(2.0**-126), 0, wanted), rtol=1e-6)
