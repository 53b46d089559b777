"""Random, mostly unstructured control flow against a scalar interpreter of the same program.

Every block mixes some registers, leaves when it has run long enough, and branches on bits of them,
so that threads part, meet in the middle of other branches' regions, and loop at unlike length.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from ptx_programs import words_of

_MASK = 0xFFFFFFFF
_REGISTERS = 5
_STEPS = 25


@dataclass(frozen=True)
class Mix:
    """r[target] = r[target] * factor + r[source], where bit ``bit`` of r[guard] allows it."""

    target: int
    source: int
    factor: int
    guard: int | None
    bit: int


@dataclass(frozen=True)
class Block:
    mixes: tuple[Mix, ...]
    tested: int
    bit: int
    taken: int
    #: None falls through; ``len(blocks)`` is the end.
    otherwise: int | None


def draw(seed: int) -> list[Block]:
    rng = random.Random(seed)
    count = rng.randint(3, 9)

    def mix() -> Mix:
        guard = rng.randrange(_REGISTERS) if rng.random() < 0.3 else None
        odd = rng.randrange(1, 1 << 16, 2)
        return Mix(
            rng.randrange(_REGISTERS), rng.randrange(_REGISTERS), odd, guard, rng.randrange(8)
        )

    return [
        Block(
            tuple(mix() for _ in range(rng.randint(0, 3))),
            rng.randrange(_REGISTERS),
            rng.randrange(6),
            rng.randrange(count + 1),
            rng.choice([None, None, rng.randrange(count + 1)]),
        )
        for _ in range(count)
    ]


def text_of(blocks: list[Block]) -> str:
    lines = [f"mad.lo.u32 %r{10 + i}, %r60, {7 + 4 * i}, {i};" for i in range(_REGISTERS)]
    lines.append("mov.u32 %r20, 0;")
    for number, block in enumerate(blocks):
        lines.append(f"B{number}: add.u32 %r20, %r20, 1;")
        lines.append(f"setp.gt.u32 %p1, %r20, {_STEPS}; @%p1 bra B{len(blocks)};")
        for mix in block.mixes:
            target, source = f"%r{10 + mix.target}", f"%r{10 + mix.source}"
            guard = ""
            if mix.guard is not None:
                lines.append(f"and.b32 %r21, %r{10 + mix.guard}, {1 << mix.bit};")
                lines.append("setp.ne.u32 %p2, %r21, 0;")
                guard = "@%p2 "
            lines.append(f"{guard}mad.lo.u32 {target}, {target}, {mix.factor}, {source};")
        lines.append(f"and.b32 %r22, %r{10 + block.tested}, {1 << block.bit};")
        lines.append(f"setp.eq.u32 %p3, %r22, 0; @%p3 bra B{block.taken};")
        if block.otherwise is not None:
            lines.append(f"bra.uni B{block.otherwise};")
    lines.append(f"B{len(blocks)}: mov.u32 %r1, %r20;")
    lines += [f"mad.lo.u32 %r1, %r1, 31, %r{10 + i};" for i in range(_REGISTERS)]
    return "\n".join(lines) + "\n"


def interpret(blocks: list[Block], tid: int) -> int:
    registers = [(tid * (7 + 4 * i) + i) & _MASK for i in range(_REGISTERS)]
    steps, place = 0, 0
    while place < len(blocks):
        block = blocks[place]
        steps += 1
        if steps > _STEPS:
            break
        for mix in block.mixes:
            if mix.guard is None or registers[mix.guard] >> mix.bit & 1:
                product = registers[mix.target] * mix.factor + registers[mix.source]
                registers[mix.target] = product & _MASK
        if not registers[block.tested] >> block.bit & 1:
            place = block.taken
        else:
            place = place + 1 if block.otherwise is None else block.otherwise
    result = steps
    for register in registers:
        result = (result * 31 + register) & _MASK
    return result


@pytest.mark.parametrize("seed", range(60))
def test_like_one_thread_at_a_time(seed: int) -> None:
    blocks = draw(seed)
    want = [interpret(blocks, tid) for tid in range(64)]
    assert words_of(text_of(blocks), threads=64) == want


def test_the_programs_diverge() -> None:
    """The comparison means little unless threads take different ways."""
    lengths = []
    for seed in range(60):
        blocks = draw(seed)
        lengths.append(len({interpret(blocks, tid) for tid in range(64)}))
    assert sum(length > 16 for length in lengths) > 40
