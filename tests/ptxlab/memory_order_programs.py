"""PTX programs in which CTAs wait for each other through words of global memory."""

from __future__ import annotations

import numpy as np
from ptx_programs import program

THREADS, CTAS = 64, 5

# %rd1 points to the word that CTAs wait for, %r61 is the CTA's number.
WAITS = {
    "acquire": "SPIN: ld.acquire.gpu.global.u32 %r1, [%rd1]; {again}",
    "acquire_sys": "SPIN: ld.acquire.sys.u32 %r1, [%rd1]; {again}",
    "relaxed_fence": "SPIN: ld.relaxed.gpu.global.u32 %r1, [%rd1]; {again} fence.acq_rel.gpu;",
    "volatile_membar": "SPIN: ld.volatile.global.u32 %r1, [%rd1]; {again} membar.gl;",
    "fence_in_loop": "SPIN: ld.relaxed.gpu.global.u32 %r1, [%rd1]; fence.sc.gpu; {again}",
}
WRONG_WAITS = {
    "relaxed": "SPIN: ld.relaxed.gpu.global.u32 %r1, [%rd1]; {again}",
    "volatile": "SPIN: ld.volatile.global.u32 %r1, [%rd1]; {again}",
    "acquire_cta": "SPIN: ld.acquire.cta.global.u32 %r1, [%rd1]; {again}",
    "fence_before": "fence.acq_rel.gpu; SPIN: ld.relaxed.gpu.global.u32 %r1, [%rd1]; {again}",
    "fence_of_cta": "SPIN: ld.relaxed.gpu.global.u32 %r1, [%rd1]; {again} fence.acq_rel.cta;",
}
AGAIN = "setp.ne.u32 %p1, %r1, %r61; @%p1 bra SPIN;"

# %r2 is the next CTA's number, %r3 holds 1.
SIGNALS = {
    "st_release": "st.release.gpu.global.u32 [%rd1], %r2;",
    "red_release": "red.release.gpu.global.add.u32 [%rd1], %r3;",
    "atom_release": "atom.release.gpu.global.exch.b32 %r4, [%rd1], %r2;",
    "atom_acq_rel": "atom.acq_rel.gpu.global.add.u32 %r4, [%rd1], %r3;",
    "fence_st": "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%rd1], %r2;",
    "membar_volatile": "membar.gl; st.volatile.global.u32 [%rd1], %r2;",
    "fence_red": "fence.sc.gpu; red.global.add.u32 [%rd1], %r3;",
}
WRONG_SIGNALS = {
    "st_relaxed": "st.relaxed.gpu.global.u32 [%rd1], %r2;",
    "st_volatile": "st.volatile.global.u32 [%rd1], %r2;",
    "red": "red.global.add.u32 [%rd1], %r3;",
    "atom_acquire": "atom.acquire.gpu.global.add.u32 %r4, [%rd1], %r3;",
    "release_cta": "st.release.cta.global.u32 [%rd1], %r2;",
    "fence_after": "st.relaxed.gpu.global.u32 [%rd1], %r2; fence.acq_rel.gpu;",
    "membar_cta": "membar.cta; st.volatile.global.u32 [%rd1], %r2;",
}


def chain(wait: str, signal: str, work: str = "") -> str:
    """CTA after CTA works on the same 64 words: x = 3 x + number, or ``work``.

    Pointers: the word waited for (0 at first), the 64 words, and what each CTA left in them.
    """
    work = work or (
        "ld.global.u32 %r9, [%rd5]; mad.lo.u32 %r9, %r9, 3, %r61; st.global.u32 [%rd5], %r9;"
    )
    return program(
        f"""
        setp.ne.u32 %p2, %r60, 0; add.u32 %r2, %r61, 1; mov.u32 %r3, 1;
        mul.wide.u32 %rd4, %r60, 4; add.s64 %rd5, %rd2, %rd4; add.s64 %rd6, %rd3, %rd0;
        @%p2 bra MEET;
        {wait.format(again=AGAIN)}
        MEET: bar.sync 0;
        {work}
        st.global.u32 [%rd6], %r9;
        bar.sync 0;
        @%p2 bra DONE;
        {signal}
        DONE: ret;
        """,
        3,
    )


def chained(ctas: int = CTAS) -> list[int]:
    """What the CTAs of a chain write, thread by thread in plain Python."""
    words, found = [0] * THREADS, []
    for cta in range(ctas):
        words = [3 * x + cta for x in words]
        found += words
    return found


#: Adds 1 / (CTA + thread + 1) to the word of a thread; its old bits are what the CTA leaves.
SUM = """
    add.u32 %r10, %r61, %r60; add.u32 %r10, %r10, 1; cvt.rn.f32.u32 %f1, %r10;
    rcp.rn.f32 %f1, %f1; atom.global.add.f32 %f2, [%rd5], %f1; mov.b32 %r9, %f2;
"""


def summed(ctas: int = CTAS) -> list[int]:
    """What the CTAs of a chain of sums leave, in their order."""
    sums, found = np.zeros(THREADS, np.float32), []
    for cta in range(ctas):
        found += sums.view(np.uint32).tolist()
        sums += np.float32(1) / (np.arange(THREADS) + cta + 1).astype(np.float32)
    return found


ARRIVALS = {
    "acq_rel": "atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], 1;",
    "fences": "membar.gl; atom.global.add.u32 %r1, [%rd1], 1; membar.gl;",
    "release_then_fence": "atom.release.gpu.global.inc.u32 %r1, [%rd1], 4; fence.acq_rel.gpu;",
    "fence_then_acquire": "fence.acq_rel.gpu; atom.acquire.gpu.global.add.u32 %r1, [%rd1], 1;",
}
WRONG_ARRIVALS = {
    "relaxed": "atom.global.add.u32 %r1, [%rd1], 1;",
    "no_fence_before": "atom.global.add.u32 %r1, [%rd1], 1; membar.gl;",
    "no_fence_behind": "membar.gl; atom.global.add.u32 %r1, [%rd1], 1;",
    "release_alone": "atom.release.gpu.global.add.u32 %r1, [%rd1], 1;",
    "acquire_alone": "atom.acquire.gpu.global.add.u32 %r1, [%rd1], 1;",
    "acq_rel_of_cta": "atom.acq_rel.cta.global.add.u32 %r1, [%rd1], 1;",
}


def last_arriver(arrive: str) -> str:
    """Every CTA writes a part, and the last one to arrive merges all.

    Pointers: the count of arrivals, the parts, and their sum.
    """
    return program(
        f"""
        setp.ne.u32 %p2, %r60, 0; add.s64 %rd5, %rd2, %rd0; mad.lo.u32 %r9, %r0, %r0, 7;
        st.global.u32 [%rd5], %r9; mov.u32 %r20, s;
        bar.sync 0;
        @%p2 bra MEET;
        {arrive}
        st.shared.u32 [%r20], %r1;
        MEET: bar.sync 0;
        ld.shared.u32 %r1, [%r20]; setp.ne.u32 %p3, %r1, {CTAS - 1}; @%p3 bra DONE;
        mul.wide.u32 %rd4, %r60, 4; add.s64 %rd6, %rd2, %rd4; add.s64 %rd7, %rd3, %rd4;
        mov.u32 %r9, 0; mov.u32 %r10, 0;
        SUM: ld.global.u32 %r11, [%rd6]; add.u32 %r9, %r9, %r11;
        add.s64 %rd6, %rd6, {4 * THREADS}; add.u32 %r10, %r10, 1;
        setp.lt.u32 %p4, %r10, {CTAS}; @%p4 bra SUM;
        st.global.u32 [%rd7], %r9;
        DONE: ret;
        """,
        3,
        ".shared .align 4 .b8 s[4];\n",
    )


def merged() -> list[int]:
    """The sum of all parts."""
    return [
        sum((t + THREADS * cta) ** 2 + 7 for cta in range(CTAS)) % 2**32 for t in range(THREADS)
    ]


#: By name: a program whose pointers are one word, some words, and results, with what these are.
AGREEING: dict[str, tuple[str, int, list[int]]] = {
    **{
        f"chain_{wait}_{signal}": (
            chain(WAITS[wait], SIGNALS[signal]), THREADS, chained(),
        )
        for wait, signal in [
            *((wait, "st_release") for wait in WAITS),
            *(("acquire", signal) for signal in SIGNALS),
        ]
    },
    "sums": (chain(WAITS["acquire"], SIGNALS["st_release"], SUM), THREADS, summed()),
    **{
        f"last_{name}": (last_arriver(text), CTAS * THREADS, merged())
        for name, text in ARRIVALS.items()
    },
}  # fmt: skip
