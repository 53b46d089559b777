"""Problem and Semantics: what is computed, apart from how (that is the config)."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field

from flashsmith.configs.dtype import DType
from flashsmith.errors import ArgumentError


@dataclass(frozen=True, order=True)
class Semantics:
    """What of the semantics is fixed when a kernel is compiled; a library has one.

    mask: which keys a query sees ('none': all). softcap: whether scores are capped. packed:
    whether sequences are packed one after another. uneven: whether the last tile may be partial.
    Only the neutral values can be compiled so far.

    Raises:
        ArgumentError: a value other than the neutral one.
    """

    mask: str = "none"
    softcap: bool = False
    packed: bool = False
    uneven: bool = False

    def __post_init__(self) -> None:
        for name, neutral in (
            ("mask", "none"),
            ("softcap", False),
            ("packed", False),
            ("uneven", False),
        ):
            if getattr(self, name) != neutral:
                raise ArgumentError(
                    f"{name}={getattr(self, name)!r}: kernels are compiled with {neutral!r} only"
                )


_SIZES = ("batch", "seq_q", "seq_k", "heads_q", "heads_k", "d")


@dataclass(frozen=True, order=True)
class Problem:
    """One attention call's sizes.

    q and o are (batch, seq_q, heads_q, d), k and v (batch, seq_k, heads_k, d).

    Raises:
        ArgumentError: a size is not a whole number above 0, or the heads do not group.
    """

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    d: int
    dtype: DType
    semantics: Semantics = field(default_factory=Semantics)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ArgumentError(f"{name}={value!r}: give a whole number above 0")
            object.__setattr__(self, name, operator.index(value))
        if self.heads_q % self.heads_k:
            raise ArgumentError(
                f"heads_q={self.heads_q}: must be a multiple of heads_k={self.heads_k}"
            )

    def attn_flop(self) -> int:
        """FLOP of the two matrix products: 4 b h s_q s_k d."""
        return 4 * self.batch * self.heads_q * self.seq_q * self.seq_k * self.d

    def __str__(self) -> str:
        seq = _pair("s", self.seq_q, self.seq_k)
        heads = _pair("h", self.heads_q, self.heads_k)
        return f"b{self.batch} {seq} {heads} d{self.d} {self.dtype.name.lower()}"

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem that e.g. 'b2 s128 h16 d128 fp16' names, in any order.

        's128:512' means seq_q 128 and seq_k 512, 'h32:8' heads_q 32 and heads_k 8; b and h
        default to 1. str() writes this form.

        Raises:
            ArgumentError: a word is unknown or doubled, or s, d or the dtype is missing.
        """
        found: dict[str, tuple[int, int]] = {}
        dtype: DType | None = None
        for word in text.lower().split():
            match = re.fullmatch(r"(?:([bd])(\d+)|([sh])(\d+)(?::(\d+))?)", word, re.ASCII)
            key = (match.group(1) or match.group(3)) if match else "dtype"
            if key in found or (key == "dtype" and dtype is not None):
                raise ArgumentError(f"problem={text!r}: {word!r} says {key} a second time")
            if match is None:
                dtype = DType.parse(word)
                continue
            first = int(match.group(2) or match.group(4))
            found[key] = (first, int(match.group(5) or first))
        missing = [name for name in ("s", "d") if name not in found]
        if dtype is None or missing:
            lacks = ", ".join(missing + ["dtype"] * (dtype is None))
            raise ArgumentError(
                f"problem={text!r}: {lacks} missing; write it like 'b1 s128 h1 d128 fp16'"
            )
        (batch, _), (seq_q, seq_k) = found.get("b", (1, 1)), found["s"]
        (heads_q, heads_k), (d, _) = found.get("h", (1, 1)), found["d"]
        return cls(batch, seq_q, seq_k, heads_q, heads_k, d, dtype)


def _pair(letter: str, first: int, second: int) -> str:
    return f"{letter}{first}" if first == second else f"{letter}{first}:{second}"
