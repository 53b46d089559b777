"""Running PTX: divergence, loops, registers, parameters, counts, errors."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from ptx_programs import HEADER, STORE_R1, program, run, words_of

from ptxlab.errors import ArgumentError, EmulatorError
from ptxlab.execute import emulate
from ptxlab.interface import Site
from ptxlab.machine.memory import GlobalMemory
from ptxlab.translate.translator import translate

NESTED = """
and.b32 %r2, %r60, 3;
setp.eq.s32 %p1, %r2, 0;
mov.u32 %r1, 1000;
@%p1 bra DONE;
setp.eq.s32 %p2, %r2, 1;
@%p2 bra ONE;
setp.gt.u32 %p3, %r60, 15;
mov.u32 %r1, 3000;
@%p3 bra JOIN;
mov.u32 %r1, 4000;
bra.uni JOIN;
ONE:
mov.u32 %r1, 2000;
JOIN:
add.s32 %r1, %r1, 1;
DONE:
add.s32 %r1, %r1, %r60;
"""


def nested(tid: int) -> int:
    if tid & 3 == 0:
        return 1000 + tid
    if tid & 3 == 1:
        return 2001 + tid
    return (3001 if tid > 15 else 4001) + tid


def test_nested_branches_join() -> None:
    assert words_of(NESTED, threads=64) == [nested(t) for t in range(64)]


def test_trip_counts_of_each_thread_its_own() -> None:
    body = """
    and.b32 %r2, %r60, 7; mov.u32 %r1, 0; mov.u32 %r3, 0;
    LOOP:
    add.s32 %r1, %r1, %r3;
    add.s32 %r3, %r3, 1;
    setp.le.u32 %p1, %r3, %r2;
    @%p1 bra LOOP;
    """
    assert words_of(body) == [sum(range(t % 8 + 1)) for t in range(32)]


def test_nested_loops_with_break() -> None:
    body = """
    and.b32 %r5, %r60, 3; mov.u32 %r1, 0; mov.u32 %r2, 0;
    OUTER:
    mov.u32 %r3, 0;
    INNER:
    add.s32 %r1, %r1, 1;
    setp.eq.s32 %p1, %r3, %r5;
    @%p1 bra BREAK;
    add.s32 %r3, %r3, 1;
    setp.lt.s32 %p2, %r3, 3;
    @%p2 bra INNER;
    BREAK:
    add.s32 %r2, %r2, 1;
    setp.lt.s32 %p3, %r2, 4;
    @%p3 bra OUTER;
    """
    assert words_of(body) == [4 * min(t % 4 + 1, 3) for t in range(32)]


def test_two_branches_into_one_block() -> None:
    """A block reached by two different branches: the join is further down than either."""
    body = """
    mov.u32 %r1, 5;
    setp.lt.u32 %p1, %r60, 8; setp.lt.u32 %p2, %r60, 16;
    @%p1 bra A;
    add.s32 %r1, %r1, 1;
    @%p2 bra A;
    add.s32 %r1, %r1, 10;
    bra.uni B;
    A:
    add.s32 %r1, %r1, 100;
    B:
    """
    assert words_of(body) == [105] * 8 + [106] * 8 + [16] * 16


def test_early_return_leaves_the_others_running() -> None:
    out = np.zeros(96, np.uint32)
    body = f"setp.ge.u32 %p1, %r0, 70; @%p1 ret; mov.u32 %r1, %r0; {STORE_R1} exit;"
    run(program(body), [(out, True)], threads=32, ctas=3)
    assert out.tolist() == [*range(70), *[0] * 26]


def test_warp_instructions_work_again_after_a_join() -> None:
    body = """
    setp.lt.u32 %p1, %r60, 5; mov.u32 %r2, 1;
    @%p1 bra SKIP;
    mov.u32 %r2, 2;
    SKIP:
    shfl.sync.idx.b32 %r1, %r2, 4, 31, -1;
    """
    assert words_of(body) == [1] * 32


def test_shuffle_among_the_lanes_of_a_branch() -> None:
    body = """
    mov.u32 %r1, 7;
    setp.ge.u32 %p1, %r60, 16;
    @%p1 bra OUT;
    shfl.sync.bfly.b32 %r1, %r60, 1, 31, 0xffff;
    OUT:
    """
    assert words_of(body) == [t ^ 1 for t in range(16)] + [7] * 16


def test_shuffle_that_waits_for_lanes_elsewhere() -> None:
    body = """
    setp.ge.u32 %p1, %r60, 16; mov.u32 %r1, 0;
    @%p1 bra OUT;
    shfl.sync.bfly.b32 %r1, %r60, 1, 31, -1;
    OUT:
    """
    with pytest.raises(EmulatorError, match="waits for lanes 0xffff0000"):
        words_of(body)


def test_aligned_instruction_in_part_of_a_warp() -> None:
    body = """
    setp.ge.u32 %p1, %r60, 16; mov.u32 %r1, 0;
    @%p1 bra OUT;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r1];
    OUT:
    """
    with pytest.raises(EmulatorError, match="ldmatrix is executed by part of a warp"):
        words_of(body, smem_bytes=128)


@pytest.mark.parametrize("shape", [(48, 1, 1), (8, 4, 2), (3, 2, 5)])
def test_special_registers(shape: tuple[int, int, int]) -> None:
    grid = (2, 3, 2)
    threads, ctas = shape[0] * shape[1] * shape[2], 12
    names = ["%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid", "%warpid"]
    names += ["%ntid.x", "%nctaid.y", "%lanemask_lt", "%clusterid.x", "%cluster_ctarank"]
    out = np.zeros((ctas * threads, len(names)), np.uint32)
    body = ".reg .b32 %n<8>; .reg .b64 %a<4>;\n"
    body += "mov.u32 %n1, %tid.x; mov.u32 %n2, %tid.y; mov.u32 %n3, %tid.z; mov.u32 %n4, %ntid.x;\n"
    body += "mov.u32 %n5, %ntid.y; mad.lo.u32 %n3, %n3, %n5, %n2; mad.lo.u32 %n1, %n3, %n4, %n1;\n"
    body += "mov.u32 %n2, %ctaid.z; mov.u32 %n3, %nctaid.y; mov.u32 %n4, %ctaid.y;\n"
    body += "mad.lo.u32 %n2, %n2, %n3, %n4; mov.u32 %n3, %nctaid.x; mov.u32 %n4, %ctaid.x;\n"
    body += f"mad.lo.u32 %n2, %n2, %n3, %n4; mad.lo.u32 %n1, %n2, {threads}, %n1;\n"
    body += f"mul.wide.u32 %a1, %n1, {4 * len(names)}; ld.param.u64 %a2, [p0];\n"
    body += "add.s64 %a1, %a1, %a2;\n"
    for number, name in enumerate(names):
        body += f"mov.u32 %n6, {name}; st.global.u32 [%a1+{4 * number}], %n6;\n"
    text = f"{HEADER}.visible .entry main(.param .u64 p0)\n{{\n{body}ret;\n}}\n"
    memory = GlobalMemory()
    pointer = memory.register("out", out, writable=True)
    emulate(
        text, "main", grid=grid, block=shape, cluster=(2, 1, 1), smem_bytes=0,
        argument_bytes=struct.pack("<Q", pointer), memory=memory,
    )  # fmt: skip
    row = 0
    for cz, cy, cx in np.ndindex(2, 3, 2):
        for tz, ty, tx in np.ndindex(shape[2], shape[1], shape[0]):
            tid = tx + shape[0] * (ty + shape[1] * tz)
            lane = tid % 32
            want = [tx, ty, tz, cx, cy, cz, lane, tid // 32, shape[0], 3]
            want += [(1 << lane) - 1, cx // 2, cx % 2]
            assert out[row].tolist() == want
            row += 1


def test_parameters_of_every_size() -> None:
    text = (
        f"{HEADER}.visible .entry main(.param .u64 p0, .param .align 8 .b8 s[24], .param .u8 c)\n"
        f"{{\n{'.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b16 %h<2>; .reg .f32 %f<2>;'}\n"
        "ld.param.u64 %rd1, [p0]; ld.param.v2.u32 {%r1, %r2}, [s+8]; ld.param.s8 %h1, [c];\n"
        "ld.param.f32 %f1, [s+4]; mov.b64 %rd2, s; ld.param.u32 %r3, [%rd2+16];\n"
        "cvt.s32.s16 %r4, %h1; mov.b32 %r5, %f1;\n"
        "st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.u32 [%rd1+16], %r5; ret;\n}\n"
    )
    out = np.zeros(8, np.uint32)
    memory = GlobalMemory()
    pointer = memory.register("out", out, writable=True)
    arguments = struct.pack("<QIfIIIIb", pointer, 1, 2.5, 3, 4, 5, 6, -7)
    emulate(
        text, "main", grid=(1, 1, 1), block=(1, 1, 1), smem_bytes=0, argument_bytes=arguments,
        memory=memory,
    )  # fmt: skip
    assert out[:5].view(np.int32).tolist() == [3, 4, 5, -7, np.float32(2.5).view(np.int32)]


def test_module_variables() -> None:
    module = ".const .align 4 .u32 table[4] = {10, 20, 30, 40};\n.global .align 4 .u32 total;\n"
    body = """
    and.b32 %r2, %r60, 3; mul.wide.u32 %rd3, %r2, 4; mov.u64 %rd4, table; add.s64 %rd3, %rd3, %rd4;
    ld.const.u32 %r1, [%rd3];
    mov.u64 %rd5, total; atom.global.add.u32 %r3, [%rd5], 2; ld.global.u32 %r4, [total];
    add.s32 %r1, %r1, %r4;
    """
    assert words_of(body, module=module) == [10 * (t % 4 + 1) + 64 for t in range(32)]


def test_local_memory_is_each_threads_own() -> None:
    declarations = ".local .align 8 .b8 depot[16]; .reg .b64 %SP; .reg .b64 %SPL;\n"
    body = """
    mov.u64 %SPL, depot; cvta.local.u64 %SP, %SPL;
    st.local.u32 [%SPL+4], %r60; add.s32 %r2, %r60, 100; st.u32 [%SP+8], %r2;
    ld.local.v2.u32 {%r4, %r5}, [%SPL+8]; ld.u32 %r3, [%SP+4];
    add.s32 %r1, %r3, %r4;
    """
    assert words_of(body, declarations=declarations) == [2 * t + 100 for t in range(32)]


def test_generic_addresses_reach_shared_memory() -> None:
    declarations = ".shared .align 4 .b8 s[128];\n"
    body = """
    mov.u64 %rd3, s; cvta.shared.u64 %rd4, %rd3; shl.b32 %r2, %r60, 2; cvt.u64.u32 %rd5, %r2;
    add.s64 %rd4, %rd4, %rd5; st.u32 [%rd4], %r60; cvta.to.shared.u64 %rd6, %rd4;
    cvt.u32.u64 %r3, %rd6; ld.shared.u32 %r4, [%r3]; isspacep.shared %p1, %rd4;
    selp.u32 %r5, 100, 0, %p1; add.s32 %r1, %r4, %r5;
    """
    assert words_of(body, declarations=declarations) == [100 + t for t in range(32)]


def test_floats_in_registers_declared_as_bits() -> None:
    """Newer compilers declare every register .b32; what only floats write is held as float."""
    declarations = ".reg .b32 %x<9>;\n"
    body = """
    cvt.rn.f32.u32 %x1, %r60; mul.f32 %x2, %x1, 0f3F000000; mov.b32 %x3, %x2;
    mov.b32 %x4, 0f40000000; add.f32 %x4, %x4, %x3; and.b32 %x5, %x4, 0xff800000;
    add.f32 %x6, %x5, 0f00000000; mov.b32 %r1, %x6;
    """
    want = [np.float32(2.0 ** np.floor(np.log2(t / 2 + 2))).view(np.uint32) for t in range(32)]
    assert words_of(body, declarations=declarations) == want


def test_an_unwritten_register_is_an_error() -> None:
    with pytest.raises(EmulatorError, match=r"PTX line \d+: add.s32: register %r2 is read before"):
        words_of("add.s32 %r1, %r2, 1;")


def test_a_register_written_on_one_path_only() -> None:
    body = """
    setp.lt.u32 %p1, %r60, 40;
    @%p1 bra SKIP;
    mov.u32 %r2, 5;
    SKIP: add.s32 %r1, %r2, 1;
    """
    with pytest.raises(EmulatorError, match="register %r2 is read before it is written"):
        words_of(body)


def test_a_choice_may_leave_out_what_is_not_written() -> None:
    """All ones stand for it where it is chosen."""
    body = """
    mov.u32 %r3, 0;
    LOOP:
    setp.eq.u32 %p1, %r3, 1;
    setp.lt.u32 %p2, %r60, 2;
    and.pred %p3, %p1, %p2;
    @!%p1 bra CHOOSE;
    mov.u32 %r2, 7;
    CHOOSE: selp.b32 %r1, {chosen}, %p3;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p4, %r3, {rounds};
    @%p4 bra LOOP;
    """
    assert words_of(body.format(chosen="%r2, 5", rounds=1))[:3] == [5, 5, 5]
    assert words_of(body.format(chosen="%r2, 5", rounds=2))[:3] == [7, 7, 5]
    assert words_of(body.format(chosen="5, %r2", rounds=1))[:3] == [0xFFFFFFFF] * 3


def test_a_half_that_nothing_writes_is_poison() -> None:
    """nvcc packs a register that it never writes to convert the other half."""
    body = "mov.b64 %rd3, {packed}; mov.b64 {{%r2, %r1}}, %rd3; mov.b32 %r1, {used};"
    assert words_of(body.format(packed="{%r60, %r3}", used="%r2"))[:3] == [0, 1, 2]
    assert words_of(body.format(packed="{%r3, %r60}", used="%r1"))[:3] == [0, 1, 2]
    assert words_of(body.format(packed="{%r60, %r3}", used="%r1"))[:3] == [0xFFFFFFFF] * 3
    with pytest.raises(EmulatorError, match="register %r3 is read before it is written"):
        words_of(body.format(packed="{%r3, %r3}", used="%r1"))


def test_a_guarded_first_write_leaves_poison_in_the_others() -> None:
    body = "setp.lt.u32 %p1, %r60, 2; @%p1 mov.u32 %r1, 5; @!%p1 xor.b32 %r1, %r60, 1;"
    assert words_of(body)[:4] == [5, 5, 3, 2]
    only = (
        "setp.lt.u32 %p1, %r60, 2; @%p1 mov.u32 %r2, 5; mov.u32 %r1, %r60; @%p1 mov.u32 %r1, %r2;"
    )
    assert words_of(only)[:3] == [5, 5, 2]


def test_instruction_counts_follow_the_warps() -> None:
    out = np.zeros(96, np.uint32)
    body = """
    setp.lt.u32 %p1, %r60, 40; mov.u32 %r1, 0;
    @%p1 bra SKIP;
    mul.lo.u32 %r1, %r60, 3;
    SKIP:
    """
    result = run(program(body + STORE_R1 + "ret;"), [(out, True)], threads=96)
    assert result.instructions["mul.lo.u32"] == 2
    assert result.thread_instructions["mul.lo.u32"] == 56
    assert result.instructions["st.global.u32"] == 3
    assert result.instructions["setp.lt.u32"] == 3


def test_waves_cover_a_grid_larger_than_one() -> None:
    ctas = 300
    got = words_of("mad.lo.u32 %r1, %r61, 1000, %r60;", ctas=ctas, threads=64)
    assert got == [1000 * c + t for c in range(ctas) for t in range(64)]


def test_pairs_of_integers() -> None:
    """Of sm_90."""
    body = "mad.lo.u32 %r2, %r60, 0x10001, 0xfffe0005;"
    for mnemonic, want in {
        "add.u16x2": lambda a, b: (a + b) & 0xFFFF,
        "min.u16x2": min,
        "max.s16x2": lambda a, b: max(a, b, key=lambda x: x - (x >> 15 << 16)),
    }.items():
        got = words_of(body + f"{mnemonic} %r1, %r2, 0x00070009;")
        for thread, word in enumerate(got):
            given = thread * 0x10001 + 0xFFFE0005 & 0xFFFFFFFF
            halves = [want(given >> s & 0xFFFF, 0x00070009 >> s & 0xFFFF) for s in (0, 16)]
            assert word == halves[0] | halves[1] << 16, mnemonic


def test_the_size_of_a_warp_has_a_name() -> None:
    assert words_of("mov.u32 %r1, WARP_SZ; add.u32 %r1, %r1, WARP_SZ;") == [64] * 32


def test_registers_declared_without_a_space() -> None:
    assert (
        words_of("{.reg.b16 lo, hi; mov.b32 {lo, hi}, 0x30002; mov.b32 %r1, {hi, lo};}")
        == [0x20003] * 32
    )


def test_endless_loop() -> None:
    with pytest.raises(EmulatorError, match="endless loop"):
        words_of("mov.u32 %r1, 0; LOOP: bra.uni LOOP;", loop_limit=1000)


def test_trap_and_call() -> None:
    body = "setp.eq.u32 %p1, %r60, 3; mov.u32 %r1, 0; @%p1 bra BAD; bra.uni OK; BAD: trap; OK:"
    with pytest.raises(EmulatorError, match="trap reached by thread 3"):
        words_of(body)
    with pytest.raises(EmulatorError, match="thread 0 calls __assertfail"):
        words_of("mov.u32 %r1, 0; call.uni __assertfail, (%r1, %r1);")


def test_an_assertion_that_holds_costs_nothing() -> None:
    """A trap in the middle must not keep divergent threads from joining again."""
    body = """
    setp.lt.u32 %p1, %r60, 5; mov.u32 %r2, 1;
    @%p1 bra SKIP;
    setp.gt.u32 %p2, %r60, 99; mov.u32 %r2, 2;
    @%p2 bra BAD;
    SKIP:
    shfl.sync.idx.b32 %r1, %r2, 31, 31, -1;
    bra.uni END;
    BAD: trap;
    END:
    """
    assert words_of(body) == [2] * 32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("frobnicate.u32 %r1, %r2;", "frobnicate.u32: opcode frobnicate is not supported"),
        ("add.rn.s32 %r1, %r60, 1;", "add.rn.s32: modifier .rn of add is not supported"),
        ("ld.global.banana.u32 %r1, [%rd1];", "modifier .banana of ld is not supported"),
        ("add.u32 %r1, %p1, 1;", "add.u32: a predicate where a number is expected"),
        ("add.u64 %rd1, %r2, 1;", "add.u64: a register of 4 bytes where 8 are needed"),
        ("cvt.rn.e4m3x2.f32 %r1, %f1, %f2;", "cvt.rn.e4m3x2.f32 is not supported"),
        ("ld.shared::cluster.u32 %r1, [%r2];", "shared memory of other CTAs"),
        ("vote.all.pred %p1, %p2;", "vote.all.pred is not supported"),
        (
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1,%r2},{%r3,%r4,%r5,%r6},"
            "{%r7,%r8},{%r9,%r10};",
            "this form of mma is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_named_with_its_place(line: str, message: str) -> None:
    body = f".loc 1 77 3\n{line}\nret;"
    with pytest.raises(EmulatorError, match=r"program.cu:77, PTX line \d+: ") as caught:
        translate(program(body), "main")
    assert message in str(caught.value)


def test_runtime_errors_name_the_place_too() -> None:
    body = f".loc 1 88 3\nmov.u64 %rd2, 64; st.global.u32 [%rd2], %r0;\n{STORE_R1}"
    with pytest.raises(EmulatorError, match=r"program.cu:88, PTX line \d+: st.global.u32: write"):
        words_of("mov.u32 %r1, 0;" + body)


def test_sites_are_the_instructions() -> None:
    translated, module = translate(program("mov.u32 %r1, 5; ret;"), "main")
    instructions = list(module.entry("main").instructions)
    assert translated.sites == tuple(Site.of(i) for i in instructions)


def test_translations_are_kept() -> None:
    text = program("mov.u32 %r1, 123; ret;")
    assert translate(text, "main")[0] is translate(text, "main")[0]
    assert translate(text, "main", observed=True)[0] is not translate(text, "main")[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, "grid=(0, 1, 1)"),
        ({"block": (2048, 1, 1)}, "at most 1024 threads"),
        ({"block": (64, 1, 1)}, "allows at most 32"),
        ({"cluster": (2, 1, 1)}, "not a multiple of cluster"),
        ({"smem_bytes": -1}, "smem_bytes=-1"),
        ({"argument_bytes": b""}, "argument_bytes has 0 bytes; the kernel's parameters take 8"),
    ],
)
def test_a_launch_that_makes_no_sense(change: dict, message: str) -> None:
    text = program("ret;").replace(")\n{", ")\n.maxntid 32, 1, 1\n{", 1)
    launch = {
        "grid": (1, 1, 1), "block": (32, 1, 1), "smem_bytes": 0, "argument_bytes": bytes(8),
    }  # fmt: skip
    with pytest.raises(ArgumentError) as caught:
        emulate(text, "main", memory=GlobalMemory(), **{**launch, **change})
    assert message in str(caught.value)
