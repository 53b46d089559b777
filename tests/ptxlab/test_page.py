"""docs/ptxlab.md: its list of opcodes is complete, and its limits are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ptx_programs import words_of

import ptxlab
from ptxlab import checks
from ptxlab.errors import EmulatorError
from ptxlab.ptx.lowering import BARRIER_RESULT
from ptxlab.translate.translator import HANDLERS

PAGE = (Path(__file__).parents[2] / "docs" / "ptxlab.md").read_text()
#: What the translator knows by itself, beside its handlers.
CONTROL_FLOW = {"bra", "ret", "exit", "trap"}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_opcode_is_listed_and_no_other() -> None:
    listed = set()
    for cell in re.findall(r"^\| [^|]+ \| ([^|]+) \|$", section("Opcodes"), re.MULTILINE):
        without_forms = re.sub(r"\([^)]*\)", "", cell)
        listed |= set(re.findall(r"`(\w+)`", without_forms))
    assert listed == (set(HANDLERS) | CONTROL_FLOW) - {BARRIER_RESULT}


def test_the_public_names_and_the_checks_are_on_the_page() -> None:
    for name in (*ptxlab.__all__, *checks.__all__):
        if name not in ("Wavefronts", "all_checks", "instruction_mix"):
            assert name in section("Launching"), name


@pytest.mark.parametrize(
    "instruction",
    [
        "wmma.load.a.sync.aligned.row.m32n8k16.global.f16 {%r1}, [%rd1];",
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f1, %f2}];",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1,%r2,%r3,%r4},{%r1,%r2,%r3,%r4},"
        "{%r1,%r2},{%r1,%r2,%r3,%r4};",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd1,%rd2},{%rd1},{%rd1},{%rd1,%rd2};",
        "vabsdiff4.u32.u32.u32.add %r1, %r2, %r3, %r4;",
        "brx.idx %r1, targets;",
        "tcgen05.wait::ld.sync.aligned;",
    ],
)
def test_what_the_page_calls_unknown_is_an_error_with_its_line(instruction: str) -> None:
    with pytest.raises(EmulatorError, match=r"PTX line \d+"):
        words_of("mov.u32 %r1, 0;\n" + instruction)
