"""CacheFormat: how a KV cache holds its keys and values."""

from __future__ import annotations

from enum import IntEnum

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted

_PREFIX = "cache_"


class CacheFormat(IntEnum):
    """The elements of a KV cache; the C++ side has the same numbers and names.

    PLAIN: q's dtype, without scales.
    SCALED: q's dtype, with scales.
    E4M3, E5M2: 8-bit floats, with scales.
    """

    PLAIN = 0
    SCALED = 1
    E4M3 = 2
    E5M2 = 3

    @property
    def numpy_name(self) -> str:
        """The dtype's name in NumPy (with ml_dtypes) and PyTorch; '' if the cache has q's dtype."""
        return _NUMPY_NAMES.get(self, "")

    @property
    def is_8bit(self) -> bool:
        """Whether elements are 8-bit floats."""
        return self in _NUMPY_NAMES

    @property
    def word(self) -> str:
        """The word in a problem string, such as 'cache_e4m3'; '' if plain."""
        return f"{_PREFIX}{self.name.lower()}" if self else ""

    @property
    def label(self) -> str:
        """The value of Problem.cache, such as 'e4m3'; '' if plain."""
        return self.name.lower() if self else ""

    @classmethod
    def of_word(cls, word: str) -> CacheFormat | None:
        """Returns the format that a word of a problem string names; None if the word names no
        format."""
        return next((it for it in cls if it and it.word == word), None)

    @classmethod
    def of_dtype(cls, dtype: str) -> CacheFormat:
        """Returns the format of a cache with elements of this dtype and no scales."""
        return next((it for it, name in _NUMPY_NAMES.items() if name == dtype), cls.PLAIN)

    @classmethod
    def parse(cls, value: object) -> CacheFormat:
        """Returns the format with this label; the label '' means plain. Raises ArgumentError for
        anything else."""
        named = (value.upper() or "PLAIN") if isinstance(value, str) else ""
        if named in cls.__members__:
            return cls[named]
        allowed = ", ".join(repr(it.label) for it in cls)
        raise ArgumentError(f"cache={quoted(value)}: allowed are {allowed}")


_NUMPY_NAMES = {CacheFormat.E4M3: "float8_e4m3fn", CacheFormat.E5M2: "float8_e5m2"}
# The dtypes that keys and values in a cache may have, apart from the dtype of q.
DTYPES_OF_8BIT = tuple(_NUMPY_NAMES.values())
# If keys and values are 8-bit floats, the d of both must be multiples of this, since rows are
# copied in units of 16 bytes.
D_STEP_OF_8BIT = 16
