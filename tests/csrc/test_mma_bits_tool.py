"""tools/gpu/mma_bits.py without a GPU: what it compares and counts, and its kernels, emulated."""

from __future__ import annotations

import csv
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ptxlab

f4, u2, u4, u8 = np.float32, np.uint16, np.uint32, np.uint64
FEW = ("24 octaves", "infinity and NaN")


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a small part of its cases."""
    module = load_tool("gpu/mma_bits.py")
    monkeypatch.setattr(module, "VALUES", {name: module.VALUES[name] for name in FEW})
    monkeypatch.setattr(module, "STEPS", (1, 3))
    monkeypatch.setattr(module, "FORMS", ["n8_shared_k", "n64_registers_mn"])
    return module


class Driver:
    """The driver's functions on host memory. Sums are those of the tool's own model; in the form
    ``wrong`` one bit is."""

    def __init__(self, tool: ModuleType, wrong: str) -> None:
        self.tool, self.wrong = tool, wrong
        self.kept: list[Any] = []
        self.names: dict[int, str] = {}

    def __call__(self, what: str, *arguments: Any) -> None:
        getattr(self, what)(*arguments)

    def cuModuleLoadData(self, module: Any, image: bytes) -> None:
        assert image == b"cubin"

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> None:
        function._obj.value = len(self.names) + 1
        self.names[function._obj.value] = name.decode()

    def cuMemAlloc_v2(self, pointer: Any, size: ctypes.c_size_t) -> None:
        self.kept.append(np.zeros(size.value // 4, u4))
        pointer._obj.value = self.kept[-1].ctypes.data

    def cuMemcpyHtoD_v2(self, to: Any, data: Any, size: Any) -> None:
        ctypes.memmove(to.value, data.value, size.value)

    cuMemcpyDtoH_v2 = cuMemcpyHtoD_v2

    def cuLaunchKernel(self, function: Any, ctas: int, *rest: Any) -> None:
        name, pointers = self.names[function.value], rest[-2]
        if name == "count_differences":
            one, other, to = (ctypes.c_uint64.from_address(pointers[i]).value for i in (0, 1, 3))
            count = ctypes.c_int.from_address(pointers[2]).value
            words = [memory(at, count, u4) for at in (one, other)]
            memory(to, 1, u8)[0] += (words[0] != words[1]).sum()
            return
        a, b, c, d = (ctypes.c_uint64.from_address(pointers[i]).value for i in range(4))
        steps, stride, b_tiles, accumulate = (
            ctypes.c_int.from_address(pointers[i]).value for i in range(4, 8)
        )
        assert b_tiles * b_tiles == ctas == 1
        tool = self.tool
        start = "zero" if accumulate else tool.PREDICATE_0
        bits = tool.Case(
            name.split("_")[1], "", start,
            memory(a, tool.ROWS * stride, u2).reshape(tool.ROWS, -1),
            memory(b, tool.COLUMNS * stride, u2).reshape(tool.COLUMNS, -1),
            memory(c, tool.ROWS * tool.COLUMNS, f4).reshape(tool.ROWS, -1),
        ).by_model(steps)  # fmt: skip
        bits[3, 5] ^= name.endswith(self.wrong)
        memory(d, bits.size, u4)[:] = bits.reshape(-1)


def memory(address: int, count: int, kind: Any) -> np.ndarray:
    nbytes = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_byte * nbytes).from_address(address), kind)


@contextmanager
def no_gpu(ordinal: int) -> Iterator[None]:
    yield


def run(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, wrong: str = "nothing"
) -> tuple[int, list[dict[str, str]]]:
    monkeypatch.setattr(sys.modules["gpu_kernels"], "call", Driver(tool, wrong))
    monkeypatch.setattr(tool, "current_gpu", no_gpu)
    cubin, rows = folder / "kernels.cubin", folder / "rows.csv"
    cubin.write_bytes(b"cubin")
    options = ["--model", "--sample", str(folder / "sample.npz"), "--cubin", str(cubin)]
    status = tool.main([str(rows), "--tiles", "1", *options])
    with rows.open() as file:
        return status, list(csv.DictReader(file))


def test_equal_bits(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, rows = run(tool, monkeypatch, tmp_path)
    assert status == 0
    assert {row["differing"] for row in rows} == {"0"}
    against = {row["against"] for row in rows}
    assert against == {"wgmma n8_shared_k", "wgmma n64_registers_mn", "model"}
    # Two types, two kinds of values, five starts, two lengths.
    assert len(rows) == 2 * 2 * 5 * 2 * 3
    assert "mma.sync against model: 0 of" in capsys.readouterr().out
    # The sample holds what a check without a GPU needs.
    assert tool.main(["--check", str(tmp_path / "sample.npz")]) == 0
    sample = dict(np.load(tmp_path / "sample.npz"))
    assert len(list(tool.check(sample))) == 2 * 2 * 5 * 2
    key = "bf16/24 octaves/zero/3"
    sample[key][7, 9] ^= 1
    assert [row for row in tool.check(sample) if row.differing] == [
        ("bf16", "24 octaves", "zero", 3, "model", sample[key].size, 1)
    ]


def test_one_bit_is_found_and_named(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, rows = run(tool, monkeypatch, tmp_path, wrong="n64_registers_mn")
    assert status == 1
    for row in rows:
        assert row["differing"] == ("1" if row["against"] == "wgmma n64_registers_mn" else "0")
    said = capsys.readouterr().out
    assert "f16, 24 octaves, predicate 0, 1, wgmma n64_registers_mn, 1 of 16384 differ" in said


def test_values_are_what_they_are_called(load_tool: Callable[[str], ModuleType]) -> None:
    tool = load_tool("gpu/mma_bits.py")
    middle = {
        "minus zero": (0, 0), "zeros": (0, 0), "zero times large": (0, 1e-6),
        "normal": (0.5, 1), "near 2": (1.9, 2), "probabilities": (0.05, 0.1),
    }  # fmt: skip
    by_kind = {
        "f16": {"subnormal": (0, 2.0**-14), "large": (2e3, 65504), "small products": (1e-4, 1e-3)},
        "bf16": {"subnormal": (0, 1e-38), "large": (1e18, 1e20), "small products": (1e-23, 1e-21)},
    }  # fmt: skip
    for kind in tool.KINDS:
        for values in tool.VALUES:
            a = tool.floats_of(tool.operands(values, kind, 1, 0)[0], kind)
            assert np.isfinite(a).all() == (values not in ("infinity and NaN", "any bits")), values
            least, most = (middle | by_kind[kind]).get(values, (-1, np.inf))
            assert least <= np.nanmedian(np.abs(a)) <= most, (kind, values)


class Emulated:
    """The kernels in the emulator, under its checks."""

    def __init__(self, tool: ModuleType) -> None:
        self.tool, self.arrays = tool, {}
        self.module = ptxlab.load(tool.compiled(tool.SOURCE, "ptx"))

    def put(self, name: str, array: np.ndarray) -> None:
        self.arrays[name] = np.ascontiguousarray(array)

    def sums(self, kernel: str, into: str, tiles: int, steps: int, accumulate: bool) -> None:
        d = np.full((tiles * tiles * self.tool.ROWS, self.tool.COLUMNS), np.nan, f4)
        operands = [self.arrays[name] for name in "abc"]
        numbers = [steps, self.tool.DEPTH, tiles, int(accumulate)]
        result = self.module.launch(
            kernel, [*operands, d, *numbers], grid=tiles * tiles, block=128, exact_mma=True
        )
        assert not result.findings
        self.arrays[into] = d

    def differing(self, one: str, other: str) -> int:
        count = np.zeros(1, u8)
        words = [self.arrays[name] for name in (one, other)]
        self.module.launch("count_differences", [*words, words[0].size, count], grid=2, block=128)
        return int(count[0])

    def first(self, name: str) -> np.ndarray:
        return self.arrays[name][: self.tool.ROWS]


@pytest.mark.full
def test_the_kernels_in_the_emulator(
    load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every form of wgmma reads its operands where they are: the bits are those of mma.sync, and
    those of the model on the same operands."""
    tool = load_tool("gpu/mma_bits.py")
    chosen = {("f16", "24 octaves", "near the products"), ("bf16", *FEW[1:], tool.PREDICATE_0)}
    device, every = Emulated(tool), tool.cases
    monkeypatch.setattr(
        tool, "cases", lambda tiles, seed: (x for x in every(tiles, seed) if x[:3] in chosen)
    )
    how: dict[str, Any] = {"steps": (5,), "forms": tool.FORMS, "model": True}
    rows = list(tool.compare(device, tiles=1, **how))
    assert len(rows) == 2 * 17
    assert not [row for row in rows if row.differing]
    # Of two tiles of A and two of B each meets each.
    case = next(tool.cases(2, 0))
    for name in "abc":
        device.put(name, getattr(case, name))
    device.sums("wgmma_f16_n128_shared_mn", "d", 2, 1, case.accumulate)
    second = case._replace(a=case.a[:64], b=case.b[256:], c=case.c[:64])
    assert np.array_equal(device.arrays["d"][64:128].view(u4), second.by_model(1))


def test_the_model_has_the_bits_that_an_h200_recorded(load_tool: Callable[[str], ModuleType]):
    tool = load_tool("gpu/mma_bits.py")
    path = Path(__file__).parents[2] / "benchmarks" / "h200" / "mma-bits-sample.npz"
    with np.load(path) as sample:
        rows = list(tool.check(dict(sample)))
    assert sum(row.compared for row in rows) > 200_000
    assert [row for row in rows if row.differing] == []
