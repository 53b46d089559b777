"""The operation `write_slots`: each row of k and v is written into its slot of a cache.

In a cache with n slots per block, slot s is row `s % n` of block `s // n`. Nothing is written for a
slot that is negative or beyond the cache. If k and v have more rows than there are slots to write,
the further rows are not read. Elements are copied, or divided by the scale of the cache and rounded
to the format of the cache.
"""

from __future__ import annotations

from flashsmith.errors import ArgumentError
from flashsmith.operations.cache_scales import (
    MEASURED_SCALES,
    SCALE_OPTIONS,
    SCALE_TENSORS,
    scale_numbers,
)
from flashsmith.operations.operation import Call, Operation, TensorSpec
from flashsmith.semantics.sizes import Sizes

# The number of slots of a block in measurements.
_MEASURED_SLOTS = 16
_SLOT_BYTES = 8
# In v, d_v takes the place of d.
_NEW = ("new_rows", "heads_k")
_CACHE = ("blocks", "slots", "heads_k")


def _elements(sizes: Sizes) -> int:
    """The number of elements of k and v that are copied."""
    return sizes.batch * sizes.seq_q * sizes.heads_k * (sizes.d + sizes.d_v)


def _bytes(sizes: Sizes) -> int:
    """The bytes of the slot numbers, of the rows of k and v that are read, and of the rows of the
    cache that are written."""
    of_cache = 1 if sizes.cache_format.is_8bit else sizes.dtype.element_size
    of_elements = _elements(sizes) * (sizes.dtype.element_size + of_cache)
    return of_elements + sizes.batch * sizes.seq_q * _SLOT_BYTES


def _measured(sizes: Sizes) -> dict[str, int]:
    """The sizes of the operation's own dimensions in measurements: there are as many slots as rows,
    in blocks of 16 slots."""
    rows = sizes.batch * sizes.seq_q
    return {
        "new_rows": rows,
        "slot_count": rows,
        "blocks": -(-rows // _MEASURED_SLOTS),
        "slots": _MEASURED_SLOTS,
        **MEASURED_SCALES,
    }


def _numbers(call: Call) -> tuple[int | float, ...]:
    """Returns the numbers that the C++ host path takes, in its order.

    Sizes come first: the number of slots to write, heads_k, d, d_v, blocks, and slots of a block.
    Strides follow: (row, head) of k and v, and (block, slot, head) of k_cache and v_cache. The
    scales come last, as scale_numbers() gives them.

    Raises ArgumentError if there are fewer rows than slots, and the errors that scale_numbers()
    raises.
    """
    sizes, strides = call.sizes, call.strides
    p, rows, count = call.problem, sizes["new_rows"], sizes["slot_count"]
    if count > rows:
        raise ArgumentError(
            f"slot_mapping: {count} slots for the {rows} rows of k and v; give at most as many"
        )
    names = ("k", "v", "k_cache", "v_cache")
    return (
        *(count, p.heads_k, p.d, p.d_v, sizes["blocks"], sizes["slots"]),
        *(step for name in names for step in strides[name][:-1]),
        *scale_numbers(call),
    )


def _cache(name: str, other: str, width: str) -> TensorSpec:
    return TensorSpec(name, (*_CACHE, width), role="inout", may_share=(other,), is_cache=True)


WRITE_SLOTS = Operation(
    name="write_slots",
    tensors=(
        TensorSpec("k", (*_NEW, "d")),
        TensorSpec("v", (*_NEW, "d_v")),
        # Both caches may be halves of one tensor.
        _cache("k_cache", "v_cache", "d"),
        _cache("v_cache", "k_cache", "d_v"),
        TensorSpec("slot_mapping", ("slot_count",), "int64", alignment=8),
        *SCALE_TENSORS,
    ),
    numbers=_numbers,
    # Each element that is written counts as one operation.
    flop=_elements,
    traffic=_bytes,
    sizes=_measured,
    options=dict(SCALE_OPTIONS),
)
