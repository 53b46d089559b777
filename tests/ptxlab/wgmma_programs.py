"""PTX programs around wgmma: an image into shared memory, products, accumulators out."""

from __future__ import annotations

import numpy as np
from ptx_programs import map_program
from wgmma_tiles import Tile, floats, words_of

#: The image of shared memory comes from the first tensor, 16 bytes a thread and turn.
PREPARE = """
mov.u32 %r9, s; shl.b32 %r1, %r60, 4; shl.b32 %r3, %r62, 4;
FILL:
cvt.u64.u32 %rd5, %r1; add.s64 %rd6, %rd1, %rd5; add.u32 %r2, %r9, %r1;
ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd6];
st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
add.u32 %r1, %r1, %r3; setp.lt.u32 %p1, %r1, {size};
@%p1 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.eq.u32 %p2, %r60, %r60; setp.ne.u32 %p3, %r60, %r60;
"""


def vector(prefix: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{prefix}{first + i}" for i in range(count)) + "}"


def product(
    n: int, a: str, b: int | str, kind: str, scale_d: str, literals: str, registers: str = ""
) -> str:
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    return f"{name} {registers or vector('d', n // 2)}, {a}, {b}, {scale_d}, {literals};\n"


def store(n: int) -> str:
    """Register r of thread t goes to word 128 r + t of the last tensor."""
    text = "add.s64 %rd8, %rd2, %rd0;\n"
    return text + "".join(f"st.global.f32 [%rd8+{512 * r}], %d{r};\n" for r in range(n // 2))


FENCE, COMMIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"


def whole_program(body: str, image_bytes: int) -> str:
    """The module: tensors are the image and the accumulators."""
    declarations = f".shared .align 1024 .b8 s[{image_bytes}];\n.reg .f32 %d<256>;\n"
    return map_program(PREPARE.format(size=image_bytes) + body + "ret;", 0, 2, declarations)


def operands(
    n: int, depth: int, kind: str, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (64 x depth), B (n x depth) as words, and A B^T."""
    rng = np.random.default_rng((n, depth, seed))
    a, b = (words_of(rng.standard_normal((rows, depth)), kind) for rows in (64, n))
    return a, b, floats(a, kind) @ floats(b, kind).T


def tiles_body(a_tile: Tile, b_tile: Tile, kind: str) -> tuple[str, np.ndarray, np.ndarray]:
    """A product of tiles in shared memory, all steps of k: (body, image, expected)."""
    n = b_tile.rows
    a, b, want = operands(n, a_tile.depth, kind)
    image = np.concatenate([a_tile.image(a), b_tile.image(b)])
    major = f"{int(not a_tile.k_major)}, {int(not b_tile.k_major)}"
    body = FENCE
    steps = zip(a_tile.steps(0), b_tile.steps(a_tile.size), strict=True)
    for number, (da, db) in enumerate(steps):
        body += _step(n, da, db, number, kind, major)
    return body + COMMIT + WAIT + store(n), image, want


def shifted_body() -> tuple[str, np.ndarray, np.ndarray]:
    """Tiles that begin three lines behind where the swizzle's pattern repeats."""
    tile, shift = Tile(64, 64, True, 128), 3 * 128
    a, b, want = operands(64, 64, "f16")
    image = np.zeros(17 * 1024, np.uint8)
    image[shift : shift + 8192] = tile.image(a)
    image[8192 + shift : 16384 + shift] = tile.image(b)
    body = FENCE
    steps = zip(tile.steps(shift, 3), tile.steps(8192 + shift, 3), strict=True)
    for number, (da, db) in enumerate(steps):
        body += _step(64, da, db, number, "f16", "0, 0")
    return body + COMMIT + WAIT + store(64), image, want


def _step(n: int, a: int, b: int, number: int, kind: str, major: str) -> str:
    """One step of k. Descriptors are relative to the image: its own start is added."""
    text = "and.b32 %r3, %r9, 0x3ffff; shr.u32 %r3, %r3, 4; cvt.u64.u32 %rd5, %r3;\n"
    text += f"add.s64 %rd9, %rd5, {a}; add.s64 %rd7, %rd5, {b};\n"
    scale_d = "%p2" if number else "%p3"
    return text + product(n, "%rd9", "%rd7", kind, scale_d, f"1, 1, {major}")
