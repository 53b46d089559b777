"""What each mutation operator makes of an instruction."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mutants import Operator, mutants_by, operators
from mutants_hopper import REGISTER_A_OPERATORS

from ptxlab.ptx import parse

HEAD = """.version 9.0
.target sm_80
.address_size 64
.file 1 "kernel.cu"
.visible .entry k()
{
.reg .pred %p<4>;
.reg .b32 %r<64>;
.reg .f32 %f<16>;
.reg .b64 %rd<8>;
.loc 1 7 1
"""
ROW = 256


def mutated(*instructions: str, table: Sequence[Operator] = operators(ROW)) -> dict[str, str]:
    """Operator name -> replacement, of the last instruction."""
    ptx = HEAD + "\n".join(instructions) + "\nret;\n}\n"
    found = [m for m in mutants_by(table, ptx, "k") if m.original == instructions[-1]]
    for mutant in found:
        assert mutant.source == "kernel.cu:7"
        assert mutant.apply(ptx) == ptx.replace(mutant.original, mutant.replacement)
        list(parse(mutant.apply(ptx)).entry("k").instructions)
    return {mutant.operator: mutant.replacement for mutant in found}


def test_synchronisation() -> None:
    assert mutated("bar.sync 0;") == {"drop barrier": ""}
    assert mutated("bar.warp.sync -1;") == {"drop barrier": ""}
    assert mutated("cp.async.commit_group;") == {"drop commit": ""}
    assert mutated("cp.async.wait_all;") == {"drop wait": ""}
    assert mutated("cp.async.wait_group 1;") == {
        "drop wait": "",
        "weaken wait": "cp.async.wait_group 2;",
    }


def test_shuffles() -> None:
    assert mutated("shfl.sync.bfly.b32 %r1|%p1, %r2, 2, 31, -1;") == {
        "shuffle nothing": "mov.b32 %r1, %r2;",
        "double lane mask": "shfl.sync.bfly.b32 %r1|%p1, %r2, 4, 31, -1;",
    }
    assert mutated("shfl.sync.bfly.b32 %r1|%p1, %r2, %r3, %r4, %r5;")["double lane mask"] == (
        "{ .reg .b32 doubled; shl.b32 doubled, %r3, 1; "
        "shfl.sync.bfly.b32 %r1|%p1, %r2, doubled, %r4, %r5; }"
    )


def test_copies() -> None:
    assert mutated("cp.async.cg.shared.global [%r1+32], [%rd2], 16;") == {
        "drop copy": "",
        "copy to next chunk": "cp.async.cg.shared.global [%r1+48], [%rd2], 16;",
        "copy to next row": "cp.async.cg.shared.global [%r1+288], [%rd2], 16;",
        "copy from next chunk": "cp.async.cg.shared.global [%r1+32], [%rd2+16], 16;",
    }
    assert mutated("@%p1 cp.async.cg.shared.global [%r1], [%rd2-32], 16;")[
        "copy from next chunk"
    ] == ("@%p1 cp.async.cg.shared.global [%r1], [%rd2-16], 16;")


def test_ldmatrix() -> None:
    head = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, "
    assert mutated(head + "[%r3];") == {
        "drop ldmatrix": "mov.b32 %r1, 0; mov.b32 %r2, 0;",
        "ldmatrix next chunk": head + "[%r3+16];",
        "ldmatrix next row": head + "[%r3+256];",
    }


def test_loads_and_stores() -> None:
    assert mutated("@!%p2 ld.shared.v2.f32 {%f1, %f2}, [%r3];") == {
        "drop shared load": "@!%p2 mov.f32 %f1, 0f00000000; @!%p2 mov.f32 %f2, 0f00000000;",
        "load shared next row": "@!%p2 ld.shared.v2.f32 {%f1, %f2}, [%r3+256];",
    }
    assert mutated("st.shared.u32 [%r3], %r1;") == {
        "drop shared store": "",
        "store shared next chunk": "st.shared.u32 [%r3+16], %r1;",
    }
    assert mutated("ld.global.u64 %rd1, [%rd3];") == {
        "drop global load": "mov.b64 %rd1, 0;",
        "load global next chunk": "ld.global.u64 %rd1, [%rd3+16];",
    }
    assert mutated("st.global.f32 [%rd3], %f1;") == {
        "drop global store": "",
        "store global next chunk": "st.global.f32 [%rd3+16], %f1;",
    }


def mma(a: str, b: str, c: str = "%f0, %f1, %f2, %f3") -> str:
    head = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    return f"{head} {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};"


def test_products() -> None:
    a, b = "%r1, %r2, %r3, %r4", "%r5, %r6"
    other_a, other_b = "%r11, %r12, %r13, %r14", "%r15, %r16"
    assert mutated(mma(other_a, other_b), mma(a, b)) == {
        "drop mma": "",
        "exchange A rows": mma("%r2, %r1, %r3, %r4", b),
        "exchange A halves of k": mma("%r3, %r2, %r1, %r4", b),
        "exchange B halves of k": mma(a, "%r6, %r5"),
        "exchange accumulator rows": mma(a, b, "%f2, %f1, %f0, %f3"),
        "A of another step": mma(other_a, b),
        "B of another tile": mma(a, other_b),
    }


def test_the_nearest_other_fragment_is_taken() -> None:
    a, far, b = "%r1, %r2, %r3, %r4", "%r11, %r12, %r13, %r14", "%r5, %r6"
    near = "%r21, %r22, %r23, %r24"
    found = mutated(mma(far, b), mma(near, b), mma(a, "%r7, %r8"))
    assert found["A of another step"] == mma(near, "%r7, %r8")
    assert "B of another tile" in found
    assert "A of another step" not in mutated(mma(a, b)), "there is no other"


def wgmma(a: str) -> str:
    head = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
    rest = ", 1" if a.startswith("{") else ", 1, 0"
    return f"{head} {{%f0, %f1, %f2, %f3}}, {a}, %rd2, %p1, 1{rest}, 0;"


def test_products_with_A_in_registers() -> None:
    a, other, descriptor = "{%r1, %r2, %r3, %r4}", "{%r11, %r12, %r13, %r14}", "%rd1"
    found = mutated(wgmma(other), wgmma(descriptor), wgmma(a), table=REGISTER_A_OPERATORS)
    assert found == {
        "exchange A rows": wgmma("{%r2, %r1, %r3, %r4}"),
        "exchange A halves of k": wgmma("{%r3, %r2, %r1, %r4}"),
        "A of another step": wgmma(other),
    }
    assert mutated(wgmma(a), wgmma(descriptor), table=REGISTER_A_OPERATORS) == {}


@pytest.mark.parametrize("instruction", ["add.s32 %r1, %r2, %r3;", "mov.b32 %r1, %r2;", "ret;"])
def test_other_instructions_stay(instruction: str) -> None:
    assert mutated(instruction) == {}


def test_operators_have_names_of_their_own() -> None:
    names = [operator.name for operator in operators(ROW)]
    assert len(names) == len(set(names))
