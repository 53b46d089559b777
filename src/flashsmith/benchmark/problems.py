"""The problems of a benchmark: default problems, combinations of sizes, and named sets.

A named set has fixed problems, so that results from different days and machines can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, Semantics
from flashsmith.operations import BACKWARD, DECODE, DEFAULT
from flashsmith.printable import quoted
from flashsmith.safe_json import whole_number

SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
# The number of heads for each head dimension, with which heads times d is 2048, a common value.
_HEADS = {64: 32, 128: 16, 256: 8}
_OTHER_HEADS = 16
# (longest sequence, batch size) pairs, which limit the work of a problem.
_BATCHES = ((4096, 16), (8192, 8), (16384, 4), (32768, 2))


def default_problem(
    d: int,
    seq: int,
    dtype: DType,
    *,
    causal: bool = False,
    heads: tuple[int, int] | None = None,
    packed: bool = False,
    operation: str = DEFAULT,
) -> Problem:
    """Returns the default problem for a head dimension and a sequence length.

    The batch is 16 up to length 4096, 8 up to 8192, 4 up to 16384, 2 up to 32768, then 1. The
    number of heads is 32 for d 64, 8 for d 256 and 16 for any other d, unless ``heads``, (heads_q,
    heads_k), is given. In decode, ``seq`` is the length of the cache, and each sequence has one
    query.

    Raises ArgumentError if the sizes are invalid.
    """
    heads_q, heads_k = heads or (default_heads(d),) * 2
    batch = next((batch for longest, batch in _BATCHES if seq <= longest), 1)
    semantics = Semantics("causal" if causal else "none", packed=packed, uneven=packed)
    queries = 1 if operation == DECODE.name else seq
    return Problem(batch, queries, seq, heads_q, heads_k, d, dtype, semantics, operation)


def default_heads(d: int) -> int:
    """The number of heads of a default problem with this head dimension."""
    return _HEADS.get(d, _OTHER_HEADS)


@dataclass(frozen=True)
class Shapes:
    """The shapes that were given to `flashsmith bench`.

    ``gqa`` is the number of heads of k and v, such as '8', or the number of q heads and the number
    of KV heads, such as '32:8'.
    """

    d_heads: tuple[int, ...]
    seq_lens: tuple[int, ...]
    dtypes: tuple[DType, ...]
    masks: tuple[bool, ...]  # causal or not
    gqa: str | None = None
    packed: bool = False
    operation: str = DEFAULT

    def problems(self) -> tuple[Problem, ...]:
        """All combinations, as problems. Raises ArgumentError if the sizes are invalid."""
        combined = product(self.d_heads, self.dtypes, self.masks, self.seq_lens)
        return tuple(
            default_problem(
                d,
                seq,
                dtype,
                causal=causal,
                heads=self._heads(d),
                packed=self.packed,
                operation=self.operation,
            )
            for d, dtype, causal, seq in combined
        )

    def _heads(self, d: int) -> tuple[int, int] | None:
        if self.gqa is None:
            return None
        first, colon, second = self.gqa.partition(":")
        heads_q = whole_number(first) if colon else default_heads(d)
        heads_k = whole_number(second if colon else first)
        if not heads_q or not heads_k:
            raise ArgumentError(
                f"gqa={quoted(self.gqa)}: give the heads of k and v, as 8, or those of q as "
                "well, as 32:8"
            )
        return heads_q, heads_k


# --- from lists of sizes ---

_D_HEADS = (128,)
_DTYPES = (DType.FP16, DType.BF16)
# The largest size that is accepted. A larger one is probably a typing error, and would run for
# hours.
_LARGEST = 1 << 20


def parse_problems(texts: Sequence[str]) -> tuple[Problem, ...]:
    """Returns the problems in the strings ``texts``. One string may have several problems,
    separated by ';'.

    Raises ArgumentError if a string does not describe a problem.
    """
    words = [word for text in texts for word in text.split(";") if word.strip()]
    return tuple(dict.fromkeys(map(Problem.parse, words)))


def make_shapes(
    configs: Sequence[KernelConfig],
    *,
    d_heads: str | None = None,
    seq_lens: str | None = None,
    dtypes: str | None = None,
    causal: bool = False,
    both: bool = False,
    gqa: str | None = None,
    packed: bool = False,
) -> Shapes:
    """The shapes in comma-separated lists.

    If a list is None, the values that the configs support are used.

    Raises ArgumentError for an invalid list.
    """
    operations = {config.family.operation for config in configs}
    return Shapes(
        d_heads=(
            _numbers("d_heads", d_heads)
            if d_heads is not None
            else tuple(sorted({config.d_head for config in configs})) or _D_HEADS
        ),
        seq_lens=SEQ_LENS if seq_lens is None else _numbers("seq_lens", seq_lens),
        dtypes=(
            tuple(dict.fromkeys(DType.parse(word) for word in _words("dtypes", dtypes)))
            if dtypes is not None
            else tuple(sorted({config.dtype for config in configs})) or _DTYPES
        ),
        masks=(False, True) if both else (causal,),
        gqa=gqa,
        packed=packed,
        operation=operations.pop() if len(operations) == 1 else DEFAULT,
    )


def _words(name: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ArgumentError(f"{name}={quoted(text)}: give at least one, separated by commas")
    return words


def _numbers(name: str, text: str) -> tuple[int, ...]:
    words = _words(name, text)
    numbers = [whole_number(word) for word in words]
    if not all(number and number <= _LARGEST for number in numbers):
        raise ArgumentError(
            f"{name}={quoted(text)}: give whole numbers from 1 to {_LARGEST}, separated by commas"
        )
    return tuple(dict.fromkeys(filter(None, numbers)))


# --- named sets ---

_MASKS = (False, True)
_FROM_1024 = SEQ_LENS[1:]
_UNSEEN = (
    "b1 s4096 h32:8 d128 bf16 causal",
    "b1 s4096 h32:8 d128 fp16",
    "b2 s4096 h32:8 d128 bf16",
    "b2 s2048 h32:8 d128 fp16 causal",
    "b1 s1024 h32:8 d128 fp16",
    "b1 s16384 h32:8 d128 bf16 causal",
    "b16 s1536 h16 d128 fp16",
    "b16 s1536 h16 d128 bf16 causal",
    "b16 s3000 h16 d128 fp16",
    "b16 s3000 h16 d128 bf16 causal",
    "b4 s10000 h16 d128 fp16",
    "b4 s10000 h16 d128 bf16 causal",
)


# (batch, keys): with 32 heads of q and 8 of k, caches have 4 MB to 17 GB.
_CACHES = (
    *((1, 1024), (1, 4096), (1, 8192), (8, 1024)),
    *((1, 65536), (8, 8192), (64, 1024)),
    *((8, 65536), (64, 8192), (128, 8192), (64, 65536)),
)
_OTHER_CACHES = {
    "h16 d128": ((1, 8192), (16, 4096)),
    "h32:1 d128": ((1, 8192), (64, 4096)),
    "h32:8 d64": ((1, 8192), (64, 8192)),
    "h16:8 d256": ((1, 8192), (16, 8192)),
}
_LATENT_CACHES = ((1, 8192), (1, 65536), (32, 8192), (128, 4096))


def _main() -> Iterator[Problem]:
    for dtype, causal, seq in product(DType, _MASKS, SEQ_LENS):
        yield default_problem(128, seq, dtype, causal=causal)


def _heads() -> Iterator[Problem]:
    for d, dtype, causal, seq in product((64, 96, 256), DType, _MASKS, _FROM_1024):
        yield default_problem(d, seq, dtype, causal=causal)


def _grouped() -> Iterator[Problem]:
    for (d, heads), dtype, seq in product(((128, (16, 4)), (64, (32, 8))), DType, _FROM_1024):
        yield default_problem(d, seq, dtype, causal=True, heads=heads)


def _packed() -> Iterator[Problem]:
    for d, dtype, seq in product((128, 64), DType, _FROM_1024):
        yield default_problem(d, seq, dtype, causal=True, packed=True)


def _unseen() -> Iterator[Problem]:
    return map(Problem.parse, _UNSEEN)


def _public() -> Iterator[Problem]:
    for dtype, causal, seq in product(DType, _MASKS, (512, 1024, 4096, 16384)):
        yield default_problem(128, seq, dtype, causal=causal)
    for d, causal, seq in product((64, 256), _MASKS, (1024, 4096, 16384)):
        yield default_problem(d, seq, DType.FP16, causal=causal)


def _canonical() -> Iterator[Problem]:
    for problem in _public():
        yield replace(problem, bits="canonical")


def _backward() -> Iterator[Problem]:
    for d, dtype, causal, seq in product((128, 64), DType, _MASKS, (1024, 4096, 16384)):
        yield default_problem(d, seq, dtype, causal=causal, heads=(16, 16), operation=BACKWARD.name)


def _decode() -> Iterator[Problem]:
    for page, (batch, keys) in product((0, 16), _CACHES):
        yield Problem.parse(_cache(batch, keys, "h32:8 d128", page))


def _decode_wide() -> Iterator[Problem]:
    for heads, batches in _OTHER_CACHES.items():
        for batch, keys in batches:
            yield Problem.parse(_cache(batch, keys, heads))
    for batch in (1, 16):
        yield Problem.parse(f"b{batch} s8:8192 h32:8 d128 bf16 causal decode")


def _latent_decode() -> Iterator[Problem]:
    for heads, (batch, keys) in product((16, 64, 128), _LATENT_CACHES):
        yield Problem.parse(
            f"b{batch} s1:{keys} h{heads}:1 d576:512 bf16 latent_decode causal page64"
        )


def _cache(batch: int, keys: int, heads: str, page: int = 0) -> str:
    return f"b{batch} s1:{keys} {heads} bf16 decode" + f" page{page}" * (page > 0)


def _verdict() -> Iterator[Problem]:
    return chain(_main(), _heads(), _grouped(), _packed(), _unseen())


# main: d 128.
# heads: d 64, 96 and 256.
# grouped: four heads of q per head of k.
# packed: packed sequences.
# unseen: batches and lengths that the default problems of `flashsmith tune` do not contain.
# verdict: all of the above.
# public: problems for which the speed of the best public kernel is known
# (benchmarks/h200/best-public.csv).
# canonical: the problems of public with bits='canonical'; peers compute in their own order.
# backward: gradients of such problems (best-public-backward.csv).
# decode: one token over a cache that is dense or has pages of 16 keys.
# decode_wide: decode with other heads and head dimensions, and with eight tokens.
# latent_decode: one token over a latent cache of 512 + 64 columns.
PROBLEM_SETS: dict[str, Callable[[], Iterator[Problem]]] = {
    "main": _main,
    "heads": _heads,
    "grouped": _grouped,
    "packed": _packed,
    "unseen": _unseen,
    "verdict": _verdict,
    "public": _public,
    "canonical": _canonical,
    "backward": _backward,
    "decode": _decode,
    "decode_wide": _decode_wide,
    "latent_decode": _latent_decode,
}


def named_problems(names: str) -> tuple[Problem, ...]:
    """The problems in a comma-separated list of named sets, without duplicates.

    Raises ArgumentError for an unknown name; the message lists the known names.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PROBLEM_SETS]
    if unknown or not wanted:
        raise ArgumentError(
            f"cells={names!r}: {', '.join(unknown) or 'no name'}: allowed are "
            f"{', '.join(PROBLEM_SETS)}, separated by commas"
        )
    return tuple(dict.fromkeys(chain.from_iterable(PROBLEM_SETS[name]() for name in wanted)))
