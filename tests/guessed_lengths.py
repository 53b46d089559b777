"""PTX of kernels that begin before the launch before theirs is over, made to guess wrong lengths
and to load what they prefetch."""

from __future__ import annotations

import re

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
#: Of warp 0, which does for its CTA what one thread does, something else, of others the truth.
WRONG_IN_WARP_0 = """mov.u32 %thread, %tid.x;
	shr.u32 %warp, %thread, 5;
	min.u32 %warp, %warp, 1;
	xor.b32 %warp, %warp, 1;
	mad.lo.u32 %guess, %warp, 200, %guess;"""
GUESS = re.compile(r"(ld\.relaxed\.gpu\.global\.s32)\s+(%\w+), (\[[^\]]*\]);")
_PREFETCH = re.compile(r"prefetch\.global\.L2\s+(\[[^\]]*\]);")


def guessing(ptx: str, guess: str = WRONG_BY_WARPS) -> str:
    """PTX whose relaxed loads, of lengths and of pages' numbers, give what ``guess`` makes of
    them."""
    changed, times = GUESS.subn(rf"\1 %guess, \3;\n\t{guess}\n\tmov.b32 \2, %guess;", ptx)
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
