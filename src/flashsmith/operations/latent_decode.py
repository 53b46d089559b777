"""The operation `latent_decode`: attention over a cache whose rows are both key and value.

All query heads share one head of the cache. All columns of a row are the key, and the first d_v
columns are also the value. This is the absorbed form of multi-head latent attention (MLA). Lengths,
pages, masks and splits work as in the operation `decode`.
"""

from __future__ import annotations

from flashsmith.errors import ArgumentError
from flashsmith.operations.cache_scales import K_SCALE_OPTION, K_SCALE_TENSOR
from flashsmith.operations.decode import SPLITS, check_split, keys_read
from flashsmith.operations.forward import (
    OUT,
    PACKED_OUT,
    PACKED_Q,
    PACKED_ROWS,
    ROWS,
    Q,
    batch_seq_head,
    mask_limits,
    scale_of,
)
from flashsmith.operations.operation import (
    Call,
    Operation,
    TensorSpec,
    packed_rows,
    program_numbers,
)
from flashsmith.semantics.flop import visible_pairs
from flashsmith.semantics.sizes import Sizes

# A dense cache is (batch, capacity, 1, d), a paged one (pages, page, 1, d).
_CACHE = ("blocks", "slots", "heads_k", "d")
_NEW, _PACKED_NEW = ("batch", "seq_q", "heads_k", "d"), ("total_q", "heads_k", "d")
_ABSENT = (0,)
_INT_BYTES = 4


def latent_flop(sizes: Sizes) -> int:
    """The FLOP of the two GEMMs: 2 b h_q (d + d_v) for each visible query-key pair of a
    sequence."""
    return 2 * sizes.batch * sizes.heads_q * visible_pairs(sizes) * (sizes.d + sizes.d_v)


def latent_bytes(sizes: Sizes) -> int:
    """The bytes of q, o, the lengths, the visible rows of the cache (each counted once), and the
    page numbers of these rows."""
    keys = keys_read(sizes)
    queries = sizes.seq_q * sizes.heads_q * (sizes.d + sizes.d_v)
    pages = -(-keys // sizes.page) if sizes.page else 0
    size = sizes.dtype.element_size
    rows = keys * sizes.heads_k * sizes.d * (1 if sizes.cache_format.is_8bit else size)
    return sizes.batch * (queries * size + rows + (1 + pages) * _INT_BYTES)


def _measured(sizes: Sizes) -> dict[str, int]:
    """The sizes of the operation's own dimensions in measurements: the capacity of the cache is
    exactly the number of keys."""
    pages = -(-sizes.seq_k // sizes.page) if sizes.page else 0
    return {
        **packed_rows(sizes),
        "blocks": sizes.batch * pages if sizes.page else sizes.batch,
        "slots": sizes.page or sizes.seq_k,
        "most_pages": pages,
        "k_scales": 1,
    }


def _numbers(call: Call) -> tuple[int | float, ...]:
    """Returns the numbers that the C++ host path takes, in its order.

    Sizes come first: batch, seq_q (of the longest sequence if packed), the capacity of a sequence
    in keys, heads_q, heads_k, d, d_v, total_q, blocks and slots. Strides follow: (batch, row, head)
    of q, (block, slot, head) of k_cache, (batch, row, head) of o and k, (row) of page_table, and
    (batch, head) of lse. Then come scale (None: 1/sqrt(d)), the window's limits, a flag, 1 if the
    split is free and 0 otherwise, and the scale of the cache if it is a number. The numbers of a
    program are last. The sizes and strides of an absent tensor are 0.

    Raises ArgumentError if tensors do not fit each other or if the split is unknown, and the errors
    that mask_limits() raises.
    """
    p, strides, sizes, options = call.problem, call.strides, call.sizes, call.options
    slots, most_pages = sizes["slots"], sizes.get("most_pages", 0)
    if p.page and slots != p.page:
        raise ArgumentError(
            f"k_cache: {slots} slots per page, but '{p}' has {p.page}; give pages of that size"
        )
    if not p.page and sizes["blocks"] != p.batch:
        raise ArgumentError(
            f"k_cache: {sizes['blocks']} sequences, but q has {p.batch}; give equal numbers, or a "
            "page_table"
        )
    if sizes.get("k_scales", 1) != 1:
        raise ArgumentError(
            f"k_scale: {sizes['k_scales']} scales, and a latent cache has one head; give one"
        )
    lse = strides.get("lse", _ABSENT)
    return (
        *(p.batch, p.seq_q, most_pages * slots if p.page else slots),
        *(p.heads_q, p.heads_k, p.d, p.d_v, sizes.get("total_q", 0)),
        *(sizes["blocks"], slots),
        *(
            step
            for name in ("q", "k_cache", "o", "k")
            for step in batch_seq_head(strides.get(name, _ABSENT))
        ),
        strides.get("page_table", _ABSENT)[0],
        *((0,) * (3 - len(lse)) + lse[:-1]),
        scale_of(p, options["scale"]),
        *mask_limits(p, options["left"], options["right"]),
        SPLITS.index(check_split(options["split"])),
        *(options[name] for name in K_SCALE_OPTION),
        *program_numbers(call),
    )


LATENT_DECODE = Operation(
    name="latent_decode",
    tensors=(
        TensorSpec("q", Q, packed=PACKED_Q),
        TensorSpec("k_cache", _CACHE, role="inout", written_with="k", is_cache=True),
        # These are the lengths before appending.
        TensorSpec("cache_lens", ("batch",), "int32", alignment=4),
        TensorSpec("o", OUT, role="out", packed=PACKED_OUT),
        TensorSpec("lse", ROWS, "float32", "out", "optional", PACKED_ROWS, alignment=4),
        # Unused entries are -1.
        TensorSpec("page_table", ("batch", "most_pages"), "int32", presence="paged", alignment=4),
        TensorSpec("k", _NEW, presence="optional", packed=_PACKED_NEW),
        TensorSpec("sinks", ("heads_q",), "float32", presence="optional", alignment=4),
        TensorSpec("cu_seqlens_q", ("batch+1",), "int32", presence="packed", alignment=4),
        # The scale multiplies a row both as a key and as a value.
        K_SCALE_TENSOR,
    ),
    numbers=_numbers,
    flop=latent_flop,
    traffic=latent_bytes,
    sizes=_measured,
    semantics=frozenset({"causal", "window", "packed", "uneven"}),
    # split has the same meaning as in the operation `decode`.
    options={
        "scale": None,
        "left": None,
        "right": None,
        "split": "invariant",
        **K_SCALE_OPTION,
    },
    takes_programs=True,
)
