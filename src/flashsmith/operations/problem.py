"""Problem: describes what to compute. A config determines how a kernel computes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, NamedTuple, Protocol

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.operations.operation import Operation
from flashsmith.operations.registry import DEFAULT, OPERATIONS, known_operation, operation
from flashsmith.printable import quoted
from flashsmith.safe_json import MOST_DIGITS_OF_COUNTS, whole_number
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.compiled import FLAGS, Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.mask import known_masks
from flashsmith.semantics.sizes import (
    CANONICAL,
    GRADIENT_WORDS,
    PAGE,
    SIZE,
    SMALLEST_WINDOW,
    WINDOW_KEYS,
)

# The smallest value of every size. A batch may be empty, and so may sequences.
_SIZES = {
    "batch": 0,
    "seq_q": 0,
    "seq_k": 0,
    "heads_q": 1,
    "heads_k": 1,
    "d": 1,
    "d_v": 1,
    "page": 0,
}
# A typical window and softcap of models.
TYPICAL_WINDOW = 1024
TYPICAL_NUMBERS = {"softcap": 30.0}
_PLAIN = "plain"
_NAMES_AN_OPERATION = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_DTYPE_WORDS = {
    word for dtype in DType for word in (dtype.name.lower(), dtype.numpy_name, str(int(dtype)))
}


class _SameAsD(int):
    """The d_v of a problem that was made without one. It stays equal to d if d is replaced."""


class TiledConfig(Protocol):
    """The part of a config's interface that a problem uses."""

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether these sizes consist of whole tiles, so that a kernel without bounds checks can
        compute the problem."""

    @property
    def d_head_v(self) -> int:
        """The number of columns in the tiles of V and O."""


@dataclass(frozen=True, order=True)
class Problem:
    """The sizes of a call, the semantics that its kernel is compiled for, and its operation.

    In attention, q is (batch, seq_q, heads_q, d), o is (batch, seq_q, heads_q, d_v), k is (batch,
    seq_k, heads_k, d), and v is (batch, seq_k, heads_k, d_v); d_v is d unless it is given. If
    packed, batch is the number of sequences, and seq_q and seq_k are the longest lengths.

    ``operation`` is the name of a registered Operation; texts omit 'forward'. ``page`` is the
    number of keys per cache page, 0 for a dense cache. ``gradients`` is 'only_dq' if dq is the only
    gradient needed of q, k and v, 'no_dq' if dq is not needed, and '' otherwise. ``window_keys`` is
    the class of a window: the number of keys that a row sees in addition to its own, rounded to a
    power of two; 0 means any window. ``bits`` is 'canonical' if a row's bits must not depend on the
    kernel that computes it, and '' otherwise. ``cache`` is 'e4m3' or 'e5m2' if a KV cache has
    8-bit floats with scales, 'scaled' if it has elements like q's with scales, and '' otherwise.

    Raises:
        ArgumentError: a size is not a whole number (lengths and batch from 0, the others from 1),
            heads_q is not a multiple of heads_k, or window_keys is not the class of a window. Also
            raised if the operation does not exist, or does not support the semantics, pages, bits,
            cache, the word for gradients or a d_v other than d.
    """

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    d: int
    dtype: DType
    semantics: Semantics = field(default_factory=Semantics)
    operation: str = "forward"
    page: int = 0
    gradients: str = ""
    window_keys: int = 0
    bits: str = ""
    cache: str = ""
    d_v: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        follows = self.d_v == 0 or isinstance(self.d_v, _SameAsD)
        if follows:
            object.__setattr__(self, "d_v", self.d)
        for name, lowest in _SIZES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < lowest:
                raise ArgumentError(
                    f"{name}={quoted(value)}: give a whole number, at least {lowest}"
                )
            object.__setattr__(self, name, index(value))
        if follows:
            object.__setattr__(self, "d_v", _SameAsD(self.d))
        if self.heads_q % self.heads_k:
            raise ArgumentError(
                f"heads_q={self.heads_q}: must be a multiple of heads_k={self.heads_k}"
            )
        self.computed.check_semantics(self.semantics)
        if self.d_v != self.d and not self.computed.has_d_v:
            raise ArgumentError(
                f"d_v={self.d_v}: {self.operation} computes v of q's and k's d={self.d} only; pad "
                "the narrower ones with zeros"
            )
        if self.page and not self.computed.has_pages:
            raise ArgumentError(f"page={self.page}: {self.operation} has no pages; leave it out")
        if self.gradients not in ("", *self.computed.gradient_words):
            known = ", ".join(self.computed.gradient_words) or "none"
            raise ArgumentError(
                f"gradients={quoted(self.gradients)}: {self.operation} has no such word (known: "
                f"{known}); leave it out"
            )
        if self.window_keys != 0:
            self._check_window_keys()
        if self.bits != "":
            self._check_bits()
        if CacheFormat.parse(self.cache) and not self.computed.has_cache:
            raise ArgumentError(
                f"cache={quoted(self.cache)}: {self.operation} has no KV cache; leave it out"
            )

    def _check_window_keys(self) -> None:
        keys = self.window_keys
        if not self.semantics.key_mask.takes_limits:
            raise ArgumentError(
                f"window_keys={quoted(keys)}: the mask is {self.semantics.mask!r}, which has no "
                "window; leave it out"
            )
        is_power = isinstance(keys, int) and keys > 0 and not keys & (keys - 1)
        if not is_power or keys < SMALLEST_WINDOW:
            raise ArgumentError(
                f"window_keys={quoted(keys)}: give a power of two from {SMALLEST_WINDOW}, the "
                "class of all smaller windows, or 0 for any window"
            )

    def _check_bits(self) -> None:
        if self.bits != CANONICAL:
            raise ArgumentError(
                f"bits={quoted(self.bits)}: give {CANONICAL!r}, or '' for kernels with any "
                "summation order"
            )
        if not self.computed.has_canonical:
            raise ArgumentError(
                f"bits={CANONICAL!r}: {self.operation} has no canonical order; leave it out"
            )
        if self.semantics.partial:
            raise ArgumentError(
                f"bits={CANONICAL!r}: not with partial=True, whose merges add up in another "
                "order; leave one out"
            )

    @property
    def computed(self) -> Operation:
        """The operation of this problem."""
        return operation(self.operation)

    @property
    def cache_format(self) -> CacheFormat:
        """The format in which the KV cache stores its elements."""
        return CacheFormat.parse(self.cache)

    def of_operation(self, name: str, gradients: str = "") -> Problem:
        """This problem for another operation, without `bits` if the other operation has no
        canonical order, and without `cache` if it has no cache."""
        other = operation(name)
        bits = self.bits if other.has_canonical else ""
        cache = self.cache if other.has_cache else ""
        return replace(self, operation=name, gradients=gradients, bits=bits, cache=cache)

    def required_semantics(self, cfg: TiledConfig) -> Semantics:
        """The semantics for which a kernel of `cfg` must be compiled.

        The semantics are uneven unless the lengths fill whole tiles and the widths are those of the
        tiles.
        """
        whole = self.d_v == cfg.d_head_v and cfg.fills_tiles(self.seq_q, self.seq_k, self.d)
        if self.semantics.uneven or whole:
            return self.semantics
        return replace(self.semantics, uneven=True)

    @property
    def window(self) -> tuple[int, int] | None:
        """The limits (left, right) of the window in measurements; None without a window.

        The right limit is 0, and the left limit is window_keys. If window_keys is 0, the left limit
        is the smaller of TYPICAL_WINDOW and half of the number of keys.
        """
        if not self.semantics.key_mask.takes_limits:
            return None
        if self.window_keys:
            return self.window_keys, 0
        return min(TYPICAL_WINDOW, self.seq_k // 2), 0

    @property
    def softcap(self) -> float:
        """The softcap in measurements; 0 for a problem without one."""
        return self.numbers.get("softcap", 0.0)

    @property
    def numbers(self) -> dict[str, float]:
        """The values in measurements of the numbers that the score reads, by name."""
        return {name: TYPICAL_NUMBERS[name] for name in self.semantics.score.numbers}

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of attention() for the mask and the score, in measurements."""
        window = {} if self.window is None else {"window": self.window}
        return {"causal": self.semantics.causal, **window, **self.numbers}

    def attn_flop(self) -> int:
        """The FLOP of the problem, as its operation counts them.

        For attention, these are the FLOP of the two GEMMs. Every packed sequence counts as if it
        had the maximum length.
        """
        return self.computed.flop(self)

    def __str__(self) -> str:
        seq = _pair("s", self.seq_q, self.seq_k)
        heads = _pair("h", self.heads_q, self.heads_k)
        widths = _pair("d", self.d, self.d_v)
        sizes = f"b{self.batch} {seq} {heads} {widths} {self.dtype.name.lower()}"
        return " ".join([sizes, *self._words()])

    @property
    def kind(self) -> str:
        """The operation, semantics, page, gradients, bits and cache as a string, without sizes.

        Examples are 'causal+packed+uneven', 'first_row', 'decode+page16', 'backward+only_dq' and
        'plain'.
        """
        return "+".join(self._words()) or _PLAIN

    def _words(self) -> list[str]:
        return [
            *[self.operation] * (self.operation != DEFAULT),
            *semantic_words(self.semantics, self.window_keys),
            *[f"page{self.page}"] * (self.page > 0),
            *[self.gradients] * bool(self.gradients),
            *[self.bits] * bool(self.bits),
            *[self.cache_format.word] * bool(self.cache),
        ]

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem that a string such as 'b2 s128 h16 d128 fp16 causal' names.

        The words may be in any order.

        's128:512' means seq_q 128 and seq_k 512, 'h32:8' means heads_q 32 and heads_k 8,
        'd192:128' means d 192 and d_v 128, and b and h default to 1. The words of Semantics and the
        name of an operation are separated by spaces or '+'; packed implies uneven. str() writes
        this form.

        Raises:
            ArgumentError: a word is unknown or doubled, or s, d or the dtype is missing.
        """
        found: dict[str, tuple[int, int]] = {}
        kind: list[str] = []
        dtype: DType | None = None
        for word in text.lower().split():
            match = SIZE.fullmatch(word)
            if match is None and word not in _DTYPE_WORDS:
                if not all(map(_is_of_kind, word.split("+"))):
                    raise ArgumentError(f"problem={quoted(text)}: {_unknown(word)}")
                kind += word.split("+")
                continue
            key = (match.group(1) or match.group(3)) if match else "dtype"
            if key in found or (key == "dtype" and dtype is not None):
                raise ArgumentError(f"problem={quoted(text)}: {quoted(word)} repeats {key}")
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
        (heads_q, heads_k), (d, d_v) = found.get("h", (1, 1)), found["d"]
        try:
            parsed = parse_kind("+".join(kind))
        except ArgumentError as error:
            raise ArgumentError(f"problem={quoted(text)}: {error}") from None
        return cls(batch, seq_q, seq_k, heads_q, heads_k, d, dtype, *parsed, 0 if d_v == d else d_v)


def _semantic_words() -> tuple[str, ...]:
    """The words for semantics that the string of a problem may contain."""
    return (*known_masks(), *FLAGS, _PLAIN)


def semantic_words(semantics: Semantics, window_keys: int) -> list[str]:
    """The words for the differences between the semantics and the plain case, such as
    ['window_4096', 'packed']."""
    mask, *flags = semantics.words() or [""]
    return [f"{mask}_{window_keys}" if window_keys else mask, *flags] if mask else []


class ProblemKind(NamedTuple):
    """The fields of a Problem that follow its dtype; Problem.kind shows them as a string."""

    semantics: Semantics
    operation: str
    page: int
    gradients: str
    window_keys: int
    bits: str
    cache: str


def parse_kind(text: str) -> ProblemKind:
    """Parses a string that Problem.kind returned.

    Raises:
        ArgumentError: a word is unknown, or the operation, the mask, the page, the window, the
        gradients, the bits or the cache is given twice.
    """
    words = [word.strip() for word in text.split("+")]
    windows = [word for word in words if WINDOW_KEYS.fullmatch(word)]
    window_keys = whole_number(windows[0].partition("_")[2]) if windows else 0
    if len(windows) > 1 or window_keys is None or bool(windows) != bool(window_keys):
        raise ArgumentError(
            f"window={quoted('+'.join(windows))}: give one, such as window_4096: how many keys a "
            "row sees besides its own, a power of two"
        )
    words = [word.partition("_")[0] if word in windows else word for word in words]
    pages = [word for word in words if PAGE.fullmatch(word)]
    page = whole_number(pages[0].removeprefix("page")) if pages else 0
    if len(pages) > 1 or page is None or bool(pages) != bool(page):
        raise ArgumentError(f"page={quoted('+'.join(pages))}: give one whole number, at least 1")
    gradients = [word for word in words if word in GRADIENT_WORDS]
    if len(gradients) > 1:
        raise ArgumentError(f"gradients={quoted('+'.join(gradients))}: give one")
    bits = [word for word in words if word == CANONICAL]
    if len(bits) > 1:
        raise ArgumentError(f"bits={quoted('+'.join(bits))}: give it once")
    caches = [word for word in words if CacheFormat.of_word(word)]
    if len(caches) > 1:
        raise ArgumentError(f"cache={quoted('+'.join(caches))}: give one")
    cache = CacheFormat.of_word(caches[0]) if caches else None
    words = [word for word in words if word not in (*pages, *gradients, *bits, *caches)]
    names = [word for word in words if word not in _semantic_words() and known_operation(word)]
    if len(names) > 1:
        raise ArgumentError(f"operation={quoted('+'.join(names))}: give one")
    semantics = "+".join(word for word in words if word not in names)
    strangers = [w for w in words if w not in _semantic_words() and w not in names]
    if strangers and _NAMES_AN_OPERATION.fullmatch(strangers[0]):
        hint = did_you_mean(strangers[0], (*_semantic_words(), *OPERATIONS)) or ";"
        raise ArgumentError(
            f"semantics={quoted(text)}: {quoted(strangers[0])} is not a word of semantics, and no "
            f"operation of that name is registered{hint} known are "
            f"{', '.join((*_semantic_words(), *OPERATIONS))}. Install or import the package that "
            "registers it"
        )
    computed = names[0] if names else DEFAULT
    parsed = Semantics.parse(semantics or _PLAIN)
    return ProblemKind(
        *(parsed, computed, page, "".join(gradients), window_keys, "".join(bits)),
        cache.label if cache else "",
    )


def _is_of_kind(word: str) -> bool:
    if word in _semantic_words() or word in (*GRADIENT_WORDS, CANONICAL):
        return True
    if PAGE.fullmatch(word) or WINDOW_KEYS.fullmatch(word) or CacheFormat.of_word(word):
        return True
    return known_operation(word) is not None


def _unknown(word: str) -> str:
    """Returns the message about a word that is not a size, dtype, operation or word of
    semantics."""
    wrong = next((part for part in word.split("+") if not _is_of_kind(part)), word)
    operations = [name for name in OPERATIONS if name != DEFAULT]
    dtypes = (dtype.name.lower() for dtype in DType)
    caches = (it.word for it in CacheFormat if it)
    hint = did_you_mean(wrong, (*_semantic_words(), CANONICAL, *caches, *operations, *dtypes))
    return (
        f"unknown word {quoted(wrong)}{hint or ';'} allowed are sizes (b2, s128 or s128:512, h16 "
        "or h32:8, d64 or d192:128), fp16 or bf16, and "
        f"{', '.join((*_semantic_words(), *operations))}, and an operation's name where the "
        "package that registers it is installed"
    )


def _pair(letter: str, first: int, second: int) -> str:
    return f"{letter}{first}" if first == second else f"{letter}{first}:{second}"
