"""Order: in which order a kernel's operations compute a row, as values that can be compared.

Where two orders are equal a row goes through the same operations. Of canonical-1 its bits are equal
then; an order of a config's own may follow what other rows hold, or how many SMs are idle.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from flashsmith.families.canonical import CHUNK, ORDER, version_of

_HOPPER, _BLACKWELL = 90, 100

FIRST_TILE, LAST_TILE = "from the first tile on", "from the last tile on"
ONE_STATE = "one of all keys"
IN_FMA = "in the FMA before ex2"
RUNNING_MAXIMUM = "the row's maximum so far"
SCALED_DIFFERENCE = "ex2((m - m') sigma)"
DIFFERENCE_OF_PRODUCTS = "ex2(m sigma - m' sigma)"
EX2 = "ex2.approx"
KEY_BY_KEY = "key by key, into the row's sum"
NO_CHUNKS, NO_MERGE = "none", "none"
O_BY_SUM = "o = O (w / sum)"


def outgrown(log2_growth: int) -> str:
    """An offset that is some row's of the warp to change."""
    return f"an older maximum, until a row of the warp outgrows it by its weight or 2^{log2_growth}"


class Difference(NamedTuple):
    """The first operation whose order differs, and how both orders have it."""

    operation: str
    first: str
    second: str


@dataclass(frozen=True)
class Order:
    """What decides a row's bits, in the order of the computation; sigma is scale x log2(e), m and
    m' the row's maximum before and after a tile.

    tensor_cores: how they add up a step of products. tiles: how many keys. direction: which tile of
    a chunk is first. states: of how many sets of keys a row has a maximum and sums of their own
    until they are merged. scale: where scores are multiplied with sigma. offset: what exponents are
    relative to. factor: what sums are multiplied with where it changes. exponentials: what computes
    them. row_sums: how a lane adds up a tile's. lanes: how the row's four lanes add up theirs.
    chunks: where new states begin. merge: how chunks become one. end: the final formula. rounding:
    who says which products and sums are fused.
    """

    tensor_cores: str
    tiles: str
    direction: str
    states: str
    scale: str
    offset: str
    factor: str
    exponentials: str
    row_sums: str
    lanes: str
    chunks: str
    merge: str
    end: str
    rounding: str

    @classmethod
    def own(cls, arch: int, keys: int, **differing: str) -> Order:
        """A config's own, with tiles of so many keys: as most have it where nothing else is said.

        arch: that the kernel is compiled for, 90 for 9.0.
        """
        usual = {
            "direction": LAST_TILE,
            "states": ONE_STATE,
            "scale": IN_FMA,
            "offset": RUNNING_MAXIMUM,
            "factor": SCALED_DIFFERENCE,
            "exponentials": EX2,
            "row_sums": KEY_BY_KEY,
            "lanes": "xor 2, then xor 1",
            "chunks": NO_CHUNKS,
            "merge": NO_MERGE,
            "end": O_BY_SUM,
            "rounding": "products and sums are fused as ptxas likes",
        }
        return cls(_tensor_cores(arch), _tiles(keys), **{**usual, **differing})

    @classmethod
    def canonical(cls, arch: int, keys: int) -> Order:
        """That of the specification, docs/bits.md, whose tiles have so many keys."""
        return cls(
            tensor_cores=_tensor_cores(arch),
            tiles=_tiles(keys),
            direction=FIRST_TILE,
            states=ONE_STATE,
            scale=IN_FMA,
            offset=RUNNING_MAXIMUM,
            factor=DIFFERENCE_OF_PRODUCTS,
            exponentials=EX2,
            row_sums="of 16 keys by pairs, a tile's for itself",
            lanes="xor 1, then xor 2",
            chunks=f"of {CHUNK} keys, from the sequence's first on",
            merge="from the first chunk on, relative to the larger offset",
            end=f"{O_BY_SUM} + 0",
            rounding="each product, sum and FMA for itself",
        )

    def difference(self, other: Order) -> Difference | None:
        """The first operation that the other has in another order; None where the orders are
        equal."""
        for field in fields(self):
            first, second = (str(getattr(it, field.name)) for it in (self, other))
            if first != second:
                return Difference(field.name.replace("_", " "), first, second)
        return None


def order_name(cfg: Any) -> str:
    """The name of the order that a config's rows keep: 'canonical-1', or 'its own'."""
    return ORDER if version_of(cfg) else "its own"


def _tensor_cores(arch: int) -> str:
    if arch >= _BLACKWELL:
        return f"those of sm_{arch}"
    products = 16 if arch >= _HOPPER else 8
    return f"{products} products and the accumulator in one sum"


def _tiles(keys: int) -> str:
    return f"of {keys} keys"
