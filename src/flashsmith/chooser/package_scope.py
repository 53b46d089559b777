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
_COMMON_WIDTHS = frozenset({64, 128, 256, HeadPair(192, 128), HeadPair(576, 512)})
# Rare widths whose calls kernels of another rare or common width serve as well: those of 80, 256
# and 256:256 columns.
_RAREST_WIDTHS = frozenset(
    {72, 192, HeadPair(64, 128), HeadPair(128, 64), HeadPair(256, 128)},
)
_RARE_DTYPES = frozenset({DType.FP16})
# The words of rare kinds of calls, each with the number of rare properties for which it counts.
_RARE_WORDS = {
    **{"softcap": 1, "canonical": 1, "partial": 1, "only_dq": 1, "no_dq": 1},
    **{"cache_e4m3": 1, "cache_e5m2": 2},
}
# Kinds of calls that no model is known to make.
_RAREST_KINDS = frozenset({"packed canonical", "decode packed canonical", "decode softcap packed"})
_MOST = 1

LEFT_OUT = (
    "without cache_e5m2, rare widths that wider kernels serve, and combinations of two of: fp16, "
    "softcap, canonical, partial, only_dq, no_dq, cache_e4m3, d_heads other than 64, 128, 256 and "
    "192:128"
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
        kernels for any lengths serve these calls as well."""
        return self.everything or self._rarity(kind, dtype, d) == 0

    def _rarity(self, kind: str, dtype: DType, d: HeadDims) -> int:
        """The number of rare properties that the user did not name."""
        counts = {word: _RARE_WORDS.get(word, 0) for word in kind.split()}
        counts[dtype.name.lower()] = int(dtype in _RARE_DTYPES)
        counts[f"d{d}"] = 0 if d in _COMMON_WIDTHS else 2 if d in _RAREST_WIDTHS else 1
        counts["kind"] = 2 if kind in _RAREST_KINDS and not self._names(kind) else 0
        return sum(count for word, count in counts.items() if word not in self.named)

    def _names(self, kind: str) -> bool:
        return set(kind.split()) <= set(self.named)


STANDARD = PackageScope()
