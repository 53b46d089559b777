"""PTX of kernels that begin before the launch before theirs is over, made to guess wrong lengths
and pages and to load what they prefetch."""

from __future__ import annotations

import re
from itertools import cycle

#: What a length seems to be, from ``%guess`` as it is: of other warps something else, of warps
#: 0 and 2 the truth, and of odd lanes everywhere.
WRONG_BY_WARPS = """mov.u32 %thread, %tid.x;
	shr.u32 %warp, %thread, 5;
	sub.u32 %other, %warp, 2;
	mul.lo.u32 %warp, %warp, %other;
	not.b32 %thread, %thread;
	and.b32 %thread, %thread, 1;
	mul.lo.u32 %warp, %warp, %thread;
	mad.lo.u32 %guess, %warp, 70, %guess;"""


def wrong_in_warp(number: int) -> str:
    """Of one warp something else, of others the truth."""
    return f"""mov.u32 %thread, %tid.x;
	shr.u32 %warp, %thread, 5;
	xor.b32 %warp, %warp, {number};
	min.u32 %warp, %warp, 1;
	xor.b32 %warp, %warp, 1;
	mad.lo.u32 %guess, %warp, 200, %guess;"""


#: Of warp 0, which does for its CTA what one thread does.
WRONG_IN_WARP_0 = wrong_in_warp(0)
GUESS = re.compile(r"(ld\.relaxed\.gpu\.global\.s32)\s+(%\w+), (\[[^\]]*\]);")
_PREFETCH = re.compile(r"prefetch\.global\.L2\s+(\[[^\]]*\]);")


def guessing(ptx: str, *guesses: str, right_lengths: bool = False) -> str:
    """PTX whose relaxed loads, of lengths and of pages' numbers, give what ``guesses`` make of
    them by turns, without any what is wrong by warps. ``right_lengths``: all but the first, which
    is that of lengths."""
    begin = next(GUESS.finditer(ptx)).end() if right_lengths else 0
    turns = cycle(guesses or (WRONG_BY_WARPS,))

    def spoiled(load: re.Match[str]) -> str:
        name, to, place = load.groups()
        return f"{name} %guess, {place};\n\t{next(turns)}\n\tmov.b32 {to}, %guess;"

    changed, times = GUESS.subn(spoiled, ptx[begin:])
    changed = ptx[:begin] + changed
    assert times
    return changed.replace(
        ".reg .pred", ".reg .b32 %guess, %thread, %warp, %other;\n\t.reg .pred", 1
    )


def asked_by_loads(ptx: str) -> str:
    """A kernel that loads what it prefetches: a prefetch changes nothing, wherever it goes, and the
    address of a load is checked."""
    changed, times = _PREFETCH.subn(r"ld.global.u8 %asked, \1;", ptx)
    assert times
    return changed.replace(".reg .pred", ".reg .b16 %asked;\n\t.reg .pred", 1)
