"""Decides which kernels a package leaves out because few calls use them.

Every property of calls, such as a dtype or a mask, has kernels of its own, so the number of kernels
is the product of the numbers of their values. A package has all combinations of common properties
and, in addition, those with one rare property. Kernels for two rare properties at once, such as
fp16 with a softcap, are left out unless a user names them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from flashsmith.families import DType
from flashsmith.families.head_dims import HeadDims, HeadPair

# The widths of most models: those of q, k and v, of DeepSeek's prompts and of its latent cache.
_COMMON_WIDTHS = (64, 128, 256, HeadPair(192, 128), HeadPair(576, 512))
# Widths whose calls kernels of 80, 256 or 256:256 columns serve as well.
_RAREST_WIDTHS = (72, 192, HeadPair(64, 128), HeadPair(128, 64), HeadPair(256, 128))
_RARE_DTYPE = DType.FP16
# The words of rare kinds of calls.
_RARE_WORDS = ("softcap", "canonical", "partial", "only_dq", "no_dq", "cache_e4m3")
_RAREST_WORDS = ("cache_e5m2",)
# Kinds of calls that are rare in engines: of encoders and of decode context parallelism with
# canonical bits, and of decode context parallelism with a softcap.
_RAREST_KINDS = ("packed canonical", "decode packed canonical", "decode softcap packed")
# The most rare properties that kernels in a package have. One of the rarest counts as two.
_MOST, _RAREST = 1, 2


def left_out() -> str:
    """Says what a package of STANDARD scope leaves out."""
    rarest = (*_RAREST_WORDS, *(f"d{d}" for d in _RAREST_WIDTHS), *map(repr, _RAREST_KINDS))
    rare = (_RARE_DTYPE.name.lower(), *_RARE_WORDS)
    common = ", ".join(map(str, _COMMON_WIDTHS))
    return (
        f"without {', '.join(rarest)} and without combinations of two of {', '.join(rare)}, a "
        f"d_head that is none of {common}"
    )


class PackageScope(NamedTuple):
    """The kernels that a package may have.

    ``everything``: whether kernels for any combination of properties belong to it.
    ``named``: properties that the user named, such as 'fp16', 'd96' or 'softcap'. They do not
        count as rare.
    """

    everything: bool = False
    named: Collection[str] = ()

    def includes(self, kind: str, dtype: DType, d: HeadDims) -> bool:
        """Whether kernels for these properties belong to the package."""
        return self.everything or self._rarity(kind, dtype, d) <= _MOST

    def has_whole_tiles(self, kind: str, dtype: DType, d: HeadDims) -> bool:
        """Whether kernels that serve only lengths of whole tiles belong to the package, too. The
        kernels for any lengths serve these calls as well; with d 128 they took 1% more time."""
        return self.everything or self._rarity(kind, dtype, d) == 0

    def _rarity(self, kind: str, dtype: DType, d: HeadDims) -> int:
        """The number of rare properties that the user did not name."""
        counts = {word: int(word in _RARE_WORDS) for word in kind.split()}
        counts |= {word: _RAREST for word in _RAREST_WORDS if word in counts}
        counts[dtype.name.lower()] = int(dtype is _RARE_DTYPE)
        counts[f"d{d}"] = _RAREST if d in _RAREST_WIDTHS else int(d not in _COMMON_WIDTHS)
        if kind in _RAREST_KINDS and not set(kind.split()) <= set(self.named):
            return _RAREST
        return sum(count for word, count in counts.items() if word not in self.named)


STANDARD = PackageScope()
