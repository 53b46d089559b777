"""Reading what the compilers leave: PTX modules, the resource report, machine-code sizes, names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from stand_in_sources import CONFIGS

from flashsmith.builder.cubin import kernel_code_bytes
from flashsmith.builder.demangle import demangle
from flashsmith.builder.ptx_module import split_ptx
from flashsmith.builder.ptxas_report import ResourceReport, parse_ptxas_report
from flashsmith.families import parse_kernel_name_into_config

REPORT = """\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function '_Z1a' for 'sm_80'
ptxas info    : Function properties for _Z1a
    40 bytes stack frame, 56 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 255 registers, 40 bytes cumulative stack size, 520 bytes cmem[0]
ptxas info    : Compile time = 250.000 ms
ptxas info    : Function properties for _Z6helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function '_Z1b' for 'sm_80'
ptxas info    : Function properties for _Z1b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 4096 bytes smem, 520 bytes cmem[0]
"""

MODULE = """\
// header
.version 9.0
.target sm_80
.address_size 64

	// .globl	_Z1a
.extern .shared .align 16 .b8 smem[];

.visible .entry _Z1a(
	.param .u64 _Z1a_param_0
)
.maxntid 128, 1, 1
{
	.reg .b32 	%r<7>;
	.loc	1 7 0
	.loc	3 5 9, function_name $L__info_string1, inlined_at 1 9 5
	{ mov.b32 %r1, {%rs1,%rs2}; }
	bra 	$L__BB0_2;
$L__BB0_2:
	ret;

}
	// .globl	_Z1b
.visible .entry _Z1b(
	.param .u64 _Z1b_param_0
)
{
	.loc	2 70 0
	.loc	3 5 9, function_name $L__info_string2, inlined_at 2 9 5
	bra 	$L__BB1_3;
$L__BB1_3:
	ret;

}
	.file	1 "/tmp/xyz/sources/a.cuh"
	.file	2 "/tmp/xyz/sources/b.cuh"
	.file	3 "/cuda/bin/..//include/c.hpp"
	.section	.debug_str
	{
$L__info_string0:
.b8 1,0
$L__info_string1:
.b8 2,2
.b8 2,0
$L__info_string2:
.b8 3,0

	}
"""

SECOND = """\
// header
.version 9.0
.target sm_80
.address_size 64

.extern .shared .align 16 .b8 smem[];

.visible .entry _Z1b(
	.param .u64 _Z1b_param_0
)
{
	.loc	1 70 0
	.loc	2 5 9, function_name $L__info_string0, inlined_at 1 9 5
	bra 	$L__BB0_3;
$L__BB0_3:
	ret;

}
	.file	1 "b.cuh"
	.file	2 "c.hpp"
	.section	.debug_str
	{
$L__info_string0:
.b8 3,0
	}
"""


def test_the_report_of_each_kernel():
    assert parse_ptxas_report(REPORT) == {
        "_Z1a": ResourceReport(255, 40, 56, 60, 0, 0.25),
        "_Z1b": ResourceReport(32, 0, 0, 0, 4096, 0.0),
    }


@pytest.mark.parametrize("line", ["Used 32", "    0 bytes stack frame"])
def test_a_report_that_lacks_a_line_is_an_error(line):
    cut = "\n".join(text for text in REPORT.splitlines() if line not in text)
    with pytest.raises(ValueError, match="registers or stack frame of _Z1b"):
        parse_ptxas_report(cut)


def test_a_shard_is_split_into_modules_that_stand_alone():
    modules = split_ptx(MODULE, [Path("/tmp/xyz/sources"), Path("/cuda/include")])
    assert sorted(modules) == ["_Z1a", "_Z1b"]
    assert modules["_Z1b"].replace("\n\n", "\n") == SECOND.replace("\n\n", "\n")
    assert "$L__info_string0:\n.b8 2,2,2,0\n" in modules["_Z1a"]


def test_a_module_does_not_depend_on_its_neighbours():
    first, second = (MODULE.index("\t// .globl\t" + name) for name in ("_Z1a", "_Z1b"))
    end = MODULE.index("\t.file\t1")
    shared = ".extern .shared .align 16 .b8 smem[];\n\n"
    a = MODULE[first:second].replace(shared, "")
    swapped = MODULE[:first] + shared + MODULE[second:end] + a + MODULE[end:]
    swapped = swapped.replace("BB0_", "BBx_").replace("BB1_", "BB0_").replace("BBx_", "BB1_")
    assert split_ptx(swapped, []) == split_ptx(MODULE, [])


def test_a_module_does_not_name_its_shard():
    def debug_string(text):
        return ".b8 " + ",".join(str(byte) for byte in text.encode()) + ",0"

    of_shard = [
        MODULE.replace(
            ".b8 3,0",
            debug_string(f"_ZN4{n}_INTERNAL_bbba511{n}_1{n}_shard_{n * 9}_cu_0123456{n}5otherEv"),
        )
        for n in (0, 1)
    ]
    modules = [split_ptx(text, []) for text in of_shard]
    assert modules[0] == modules[1]
    assert debug_string("_ZN9_INTERNAL5otherEv") in modules[0]["_Z1b"]


def test_ptx_that_ends_too_early_is_an_error():
    with pytest.raises(ValueError, match="ends within"):
        split_ptx(MODULE[: MODULE.index("$L__BB1_3;")], [])


def test_what_the_real_compiler_leaves(recorded_home, toolchain, tmp_path):
    """ptxas takes each split module and counts the same registers as it did for the shard."""
    recorded = recorded_home / "recorded"
    reports = parse_ptxas_report((recorded / "shard_0.log").read_text())
    sizes = kernel_code_bytes((recorded / "shard_0.cubin").read_bytes())
    modules = split_ptx((recorded / "shard_0.ptx").read_text(), [])
    assert set(modules) == set(reports) == set(sizes)
    configs = {parse_kernel_name_into_config(demangle(name)) for name in modules}
    assert configs == set(CONFIGS)
    for name, module in modules.items():
        assert len(re.findall(r"^\.visible \.entry", module, re.MULTILINE)) == 1
        source, made = tmp_path / "module.ptx", tmp_path / "module.cubin"
        source.write_text(module)
        ptxas = toolchain.nvcc.parent / "ptxas"
        done = subprocess.run(
            [ptxas, "-v", "-arch=sm_80", "-lineinfo", source, "-o", made],
            capture_output=True,
            text=True,
            check=True,
        )
        again = parse_ptxas_report(done.stderr)[name]
        assert again.registers == reports[name].registers
        assert kernel_code_bytes(made.read_bytes()) == {name: sizes[name]}


def test_a_damaged_cubin_is_an_error(recorded_home):
    cubin = (recorded_home / "recorded" / "shard_0.cubin").read_bytes()
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        kernel_code_bytes(b"text")
    for end in (16, 64, len(cubin) // 2):
        with pytest.raises(ValueError, match=r"truncated|ELF"):
            kernel_code_bytes(cubin[:end])


def test_demangling():
    assert demangle("_ZN10flashsmith6kernelILi64EEEvv") == "void flashsmith::kernel<64>()"
    with pytest.raises(ValueError, match="'main' is not a mangled"):
        demangle("main")
