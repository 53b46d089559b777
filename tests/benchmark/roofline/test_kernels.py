"""The microbenchmarks' kernels: what the compiler made of them, and that they are right."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cuda.pathfinder import find_nvidia_binary_utility
from emulated_machine import EmulatedMachine, ptx

from flashsmith.benchmark.roofline import measuring as compilation
from flashsmith.benchmark.roofline.measuring import MICROBENCHMARKS, compile_sources
from flashsmith.benchmark.roofline.microbenchmarks import (
    EXPONENTIALS,
    MEMORY_READS,
    PERIOD,
    PRODUCTS,
    SHAPES,
    CeilingUnavailable,
    WrongOutput,
    sum_of_words,
    words,
)
from flashsmith.errors import CompileError
from ptxlab.ptx import parse

EMULATED = [bench for bench in (*PRODUCTS, *EXPONENTIALS, *MEMORY_READS) if not bench.absence(80)]


@pytest.mark.parametrize("bench", EMULATED, ids=lambda bench: bench.key)
def test_the_emulator_finds_the_output_right(bench) -> None:
    machine = EmulatedMachine()
    error = bench.start(machine).check()
    assert (error == 0.0) == (bench.source == "memory_read")
    for kernel in machine.kernels:
        assert not kernel.findings
        # Fed without conflicts, or it would be the conflicts that are measured.
        assert set(kernel.conflicts.factors().values()) <= {1.0}


# One instruction of each kernel gone or changed.
MUTANTS = {
    "mma_registers": (r"mma\.sync[^;]*;", ""),
    "mma_shared": (r"(ldmatrix[^;]*\[%r\d+)(\+\d+)?\]", r"\1+128]"),
    "exp2": (r"ex2\.approx\.ftz\.f32", "lg2.approx.ftz.f32"),
    "memory_read": (r"(add\.s64[^;]*, )8192;", r"\g<1>16384;"),
}


@pytest.mark.parametrize("bench", EMULATED, ids=lambda bench: bench.key)
def test_a_wrong_kernel_is_found_out(bench) -> None:
    pattern, replacement = MUTANTS[bench.source]

    def changed(text: str) -> str:
        # Every kernel of the source has the mistake, but only once.
        mutant = _once_per_entry(text, pattern, replacement)
        assert mutant != text
        return mutant

    with pytest.raises(WrongOutput, match=r"its output is wrong|add up to"):
        bench.start(EmulatedMachine(changed)).check()


def _once_per_entry(text: str, pattern: str, replacement: str) -> str:
    head, *entries = re.split(r"(?=\.visible \.entry)", text)
    return head + "".join(re.sub(pattern, replacement, entry, count=1) for entry in entries)


def mnemonics(source: str, entry: str, arch: int = 80) -> Counter[str]:
    kernel = parse(ptx(source, arch)).entry(entry)
    return Counter(instruction.mnemonic.split(".")[0] for instruction in kernel.instructions)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if not s.in_shared], ids=lambda s: s.kernel)
def test_a_turn_is_the_products_it_counts(shape, dtype: str) -> None:
    counts = mnemonics(shape.source, f"{shape.kernel}_{dtype}")
    assert counts["mma"] * shape.groups * 2 * 16 * 8 * 16 == shape.flop
    # An ldmatrix.x4 brings 16 columns of 16 elements.
    expected = shape.cols * shape.depth // 256 if shape.tiles > 1 else 0
    assert counts["ldmatrix"] == expected


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.in_shared], ids=lambda s: s.kernel)
def test_a_turn_of_wgmma_is_the_products_it_counts(shape, dtype: str) -> None:
    text = ptx("wgmma", 90)
    (entry,) = re.findall(rf"\.entry {shape.kernel}_{dtype}\(.*?\n\n}}", text, flags=re.DOTALL)
    kind = {"fp16": "f16", "bf16": "bf16"}[dtype]
    name = f"wgmma.mma_async.sync.aligned.m64n{shape.cols}k16.f32.{kind}.{kind}"
    assert entry.count(name) * shape.groups * 2 * 64 * shape.cols * 16 == shape.flop
    assert entry.count("wgmma.mma_async") == entry.count(name)


def loops(sass: str) -> dict[str, list[Counter[str]]]:
    """The instructions of every loop of every function of a disassembly."""
    found: dict[str, list[Counter[str]]] = {}
    for function in sass.split("Function : ")[1:]:
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@\S+ )?([A-Z]\w*)([^;]*);", function)
        code = [(int(place, 16), name, rest) for place, name, rest in lines]
        bodies = []
        for end, name, rest in code:
            begin = re.search(r"0x([0-9a-f]+)", rest)
            if name == "BRA" and begin and int(begin[1], 16) < end:
                inside = [n for at, n, _ in code if int(begin[1], 16) <= at <= end]
                bodies.append(Counter(inside))
        found[function.split()[0]] = bodies
    return found


HOUSEKEEPING = {"BRA", "NOP", "ISETP", "IADD3", "UIADD3", "USHF", "ULOP3", "VIADD", "UISETP"}


@pytest.mark.parametrize(
    ("source", "instruction", "beside"),
    [
        ("mma_registers", "HMMA", set()),
        ("mma_shared", "HMMA", {"LDSM"}),
        ("wgmma", "HGMMA", {"R2UR", "UMOV", "WARPGROUP"}),
        ("exp2", "MUFU", {"FADD"}),
    ],
)
def test_the_machine_code_loops_over_nothing_else(source, instruction, beside, tmp_path) -> None:
    image = compile_sources([source], 90)[source]
    (tmp_path / "it.cubin").write_bytes(image)
    cuobjdump = find_nvidia_binary_utility("cuobjdump") or shutil.which("cuobjdump")
    if cuobjdump is None:  # the extra 'sass'; the PTX is looked at above all the same
        assert instruction.encode() not in image
        return
    sass = subprocess.run(
        [cuobjdump, "--dump-sass", "it.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "STL" not in sass
    for function, bodies in loops(sass).items():
        hot = [body for body in bodies if body[instruction]]
        assert hot, function
        for body in hot:
            assert set(body) <= HOUSEKEEPING | beside | {instruction}, function
            assert body[instruction] >= 8


def test_a_kernel_that_spills_is_refused(monkeypatch) -> None:
    real = compilation.parse_ptxas_report

    def spilling(text: str):
        reports = real(text)
        assert reports
        return {name: _with_spills(report) for name, report in reports.items()}

    monkeypatch.setattr(compilation, "parse_ptxas_report", spilling)
    with pytest.raises(CompileError, match=r"exp2\.cu: exp2_rate spills 12 bytes"):
        compile_sources(["exp2"], 80)


def _with_spills(report):
    return replace(report, spill_store_bytes=8, spill_load_bytes=4)


def test_the_words_of_a_long_buffer_repeat() -> None:
    period = words(PERIOD)
    assert len(np.unique(period)) > 0.99 * PERIOD
    longer = np.concatenate([period, period, period[:7]])
    assert sum_of_words(len(longer)) == int(longer.sum(dtype=np.uint64)) % 2**32


def test_dram_is_not_measured_where_its_buffer_would_fit_into_the_l2() -> None:
    machine = EmulatedMachine()
    machine.free_bytes = lambda: 8 * 2**20
    (dram,) = [bench for bench in MICROBENCHMARKS if bench.key == "dram_read"]
    with pytest.raises(CeilingUnavailable, match="needs 20 MiB of free GPU memory, found 8"):
        dram.start(machine)


def test_the_library_product_is_a_named_gap_without_a_gpu(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (matmul,) = [bench for bench in MICROBENCHMARKS if bench.key == "matmul_fp16"]
    with pytest.raises(CeilingUnavailable, match="PyTorch is not installed"):
        matmul.start(EmulatedMachine())
