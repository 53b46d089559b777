"""Problem: what is to be computed, apart from how (that is the config)."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field, replace

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.families.dtype import DType
from flashsmith.families.family import KernelConfig
from flashsmith.families.semantics import MASKS, Semantics
from flashsmith.printable import quoted
from flashsmith.untrusted import MOST_DIGITS_OF_COUNTS, whole_number

# The smallest value of every size. A batch may be empty, and so may sequences.
_SIZES = {"batch": 0, "seq_q": 0, "seq_k": 0, "heads_q": 1, "heads_k": 1, "d": 1}
# A window and a cap as models have them.
TYPICAL_WINDOW = 1024
TYPICAL_SOFTCAP = 30.0
_SIZE = re.compile(r"(?:([bd])(\d+)|([sh])(\d+)(?::(\d+))?)", re.ASCII)
_SEMANTIC_WORDS = (*MASKS, "softcap", "packed", "uneven", "plain")
_DTYPE_WORDS = {word for dtype in DType for word in (dtype.name.lower(), str(int(dtype)))}


@dataclass(frozen=True, order=True)
class Problem:
    """One attention call's sizes, and what of its semantics is compiled in.

    q and o are (batch, seq_q, heads_q, d), k and v (batch, seq_k, heads_k, d). Packed, batch is the
    number of sequences, and seq_q and seq_k are the lengths of the longest.

    Raises:
        ArgumentError: a size is not a whole number (lengths and batch from 0, the others from 1),
            or the heads do not group.
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
        for name, lowest in _SIZES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < lowest:
                raise ArgumentError(
                    f"{name}={quoted(value)}: give a whole number, at least {lowest}"
                )
            object.__setattr__(self, name, operator.index(value))
        if self.heads_q % self.heads_k:
            raise ArgumentError(
                f"heads_q={self.heads_q}: must be a multiple of heads_k={self.heads_k}"
            )

    def required_semantics(self, cfg: KernelConfig) -> Semantics:
        """What `cfg`'s kernel must be compiled for: uneven where tiles or d_head are not filled."""
        if self.semantics.uneven or cfg.fills_tiles(self.seq_q, self.seq_k, self.d):
            return self.semantics
        return replace(self.semantics, uneven=True)

    @property
    def window(self) -> tuple[int, int] | None:
        """What stands for a window's (left, right), which are no part of a problem, wherever one is
        measured: the last TYPICAL_WINDOW keys before a query's own, and half of all keys where
        these are fewer. None without a window."""
        if self.semantics.mask != "window":
            return None
        return min(TYPICAL_WINDOW, self.seq_k // 2), 0

    @property
    def softcap(self) -> float:
        """What stands for a cap's value in the same way; 0 without one."""
        return TYPICAL_SOFTCAP if self.semantics.softcap else 0.0

    def attn_flop(self) -> int:
        """FLOP of the two matrix products: 4 b h s_q s_k d; half of it when causal, and with a
        window 4 b h d for every key that a query sees.

        Packed, every sequence counts as the longest.
        """
        scores = self.seq_q * self.seq_k
        if self.window is not None:
            scores = _scores_in_window(self.seq_q, self.seq_k, self.window[0])
        flop = 4 * self.batch * self.heads_q * scores * self.d
        return flop // 2 if self.semantics.mask == "causal" else flop

    def __str__(self) -> str:
        seq = _pair("s", self.seq_q, self.seq_k)
        heads = _pair("h", self.heads_q, self.heads_k)
        sizes = f"b{self.batch} {seq} {heads} d{self.d} {self.dtype.name.lower()}"
        return " ".join([sizes, *self.semantics.words()])

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem that e.g. 'b2 s128 h16 d128 fp16 causal' names, in any order.

        's128:512' means seq_q 128 and seq_k 512, 'h32:8' heads_q 32 and heads_k 8; b and h
        default to 1. The words of Semantics follow one by one or joined by '+'; packed implies
        uneven. str() writes this form.

        Raises:
            ArgumentError: a word is unknown or doubled, or s, d or the dtype is missing.
        """
        found: dict[str, tuple[int, int]] = {}
        semantics: list[str] = []
        dtype: DType | None = None
        for word in text.lower().split():
            if set(word.split("+")) <= set(_SEMANTIC_WORDS):
                semantics += word.split("+")
                continue
            match = _SIZE.fullmatch(word)
            if match is None and word not in _DTYPE_WORDS:
                raise ArgumentError(f"problem={quoted(text)}: {_unknown(word)}")
            key = (match.group(1) or match.group(3)) if match else "dtype"
            if key in found or (key == "dtype" and dtype is not None):
                raise ArgumentError(
                    f"problem={quoted(text)}: {quoted(word)} says {key} a second time"
                )
            if match is None:
                dtype = DType.parse(word)
                continue
            first = whole_number(match.group(2) or match.group(4))
            second = whole_number(match.group(5)) if match.group(5) else first
            if first is None or second is None:
                raise ArgumentError(
                    f"problem={quoted(text)}: {quoted(word)} has more than "
                    f"{MOST_DIGITS_OF_COUNTS} digits"
                )
            found[key] = (first, second)
        missing = [name for name in ("s", "d") if name not in found]
        if dtype is None or missing:
            lacks = ", ".join(missing + ["dtype"] * (dtype is None))
            raise ArgumentError(
                f"problem={quoted(text)}: {lacks} missing; write it like 'b1 s128 h1 d128 fp16'"
            )
        (batch, _), (seq_q, seq_k) = found.get("b", (1, 1)), found["s"]
        (heads_q, heads_k), (d, _) = found.get("h", (1, 1)), found["d"]
        kind = Semantics.parse("+".join(semantics) or "plain")
        return cls(batch, seq_q, seq_k, heads_q, heads_k, d, dtype, kind)


def _unknown(word: str) -> str:
    """What is wrong with a word of a problem that is neither a size, a dtype nor of semantics."""
    single = (part for part in word.split("+") if part not in _SEMANTIC_WORDS)
    wrong = next(single, word)
    hint = did_you_mean(wrong, (*_SEMANTIC_WORDS, *(dtype.name.lower() for dtype in DType)))
    return (
        f"unknown word {quoted(wrong)}{hint or ';'} allowed are sizes (b2, s128 or s128:512, h16 "
        f"or h32:8, d64), fp16 or bf16, and {', '.join(_SEMANTIC_WORDS)}"
    )


def _scores_in_window(seq_q: int, seq_k: int, left: int) -> int:
    """Keys that all queries of a head see, each its own and `left` before it."""
    first = max(0, seq_k - seq_q)  # the first query's own key, or that of the first with one
    queries = seq_k - first
    short = max(0, min(left, seq_k) - first)  # queries with fewer keys before them
    return short * (2 * first + short + 1) // 2 + (queries - short) * (left + 1)


def _pair(letter: str, first: int, second: int) -> str:
    return f"{letter}{first}" if first == second else f"{letter}{first}:{second}"
