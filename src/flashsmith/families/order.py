"""Order: describes the order of operations in which a kernel computes a row, by values that can be
compared.

If the orders of two kernels compare equal, both kernels compute a row by the same operations. If
that order is canonical-1, both kernels give the row the same bits. In every other order, the row's
bits may also depend on the values of other rows or on idle SMs.
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
    """Describes an offset that is an older maximum of the row: it is replaced only when a new
    maximum exceeds it by enough."""
    return f"an older maximum, until the row outgrows it by its weight or 2^{log2_growth}"


class Difference(NamedTuple):
    """The first operation in which two orders differ, with the description of this operation in
    each order."""

    operation: str
    first: str
    second: str


@dataclass(frozen=True)
class Order:
    """Describes everything that determines the bits of a row, in the order of the computation.
    sigma is scale x log2(e); m and m' are the maximum of the row before and after a tile.

    tensor_cores: how tensor cores sum the products of a step.
    tiles: how many keys a tile has.
    direction: which tile of a chunk is computed first.
    states: the number of sets into which a row's keys are divided; each set has its own maximum and
        sums, which are merged at the end.
    scale: where scores are multiplied by sigma.
    offset: the value to which exponents are relative.
    factor: the number that multiplies sums when the offset changes.
    exponentials: which instruction computes exponentials.
    row_sums: how a lane adds up its values of a tile.
    lanes: how the four lanes of a row add their sums.
    chunks: the keys at which a new state begins.
    merge: how chunks are merged.
    end: the formula at the end.
    rounding: which multiplications and additions are fused, or what decides this.
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
        """Returns the order of a config that is not canonical and whose tiles have `keys` keys.

        Fields that are missing in `differing` have their usual values.

        arch: the architecture for which the kernel is compiled; 90 stands for 9.0.
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
            "rounding": "ptxas decides which multiplications and additions are fused",
        }
        return cls(_tensor_cores(arch), _tiles(keys), **{**usual, **differing})

    @classmethod
    def canonical(cls, arch: int, keys: int) -> Order:
        """Returns the order that docs/bits.md specifies, with tiles of `keys` keys."""
        return cls(
            tensor_cores=_tensor_cores(arch),
            tiles=_tiles(keys),
            direction=FIRST_TILE,
            states=ONE_STATE,
            scale=IN_FMA,
            offset=RUNNING_MAXIMUM,
            factor=DIFFERENCE_OF_PRODUCTS,
            exponentials=EX2,
            row_sums="pairwise over 16 keys, separately for each tile",
            lanes="xor 1, then xor 2",
            chunks=f"of {CHUNK} keys, from the sequence's first on",
            merge="from the first chunk on, relative to the larger offset",
            end=f"{O_BY_SUM} + 0",
            rounding="each multiplication, addition and FMA is rounded separately",
        )

    def difference(self, other: Order) -> Difference | None:
        """The first operation in which the two orders differ; None if they are equal."""
        for field in fields(self):
            first, second = (str(getattr(it, field.name)) for it in (self, other))
            if first != second:
                return Difference(field.name.replace("_", " "), first, second)
        return None


def order_name(cfg: Any) -> str:
    """The name of the order in which a config computes rows: 'canonical-1' or 'its own'."""
    return ORDER if version_of(cfg) else "its own"


def _tensor_cores(arch: int) -> str:
    if arch >= _BLACKWELL:
        return f"as on sm_{arch}"
    products = 16 if arch >= _HOPPER else 8
    return f"{products} products and the accumulator in one sum"


def _tiles(keys: int) -> str:
    return f"of {keys} keys"
