"""The operation `decode`: attention over a KV cache, optionally after appending keys and values.

The kernel reads the lengths and the page table of the cache on the device. Causal masks and windows
are aligned to the bottom right: query j of n sees keys up to L - n + j, where L is the sequence's
length after appending. For a row that sees no keys, the output is 0 and the LSE is -inf.
"""

from __future__ import annotations

from collections.abc import Collection

from flashsmith.errors import ArgumentError
from flashsmith.operations.cache_scales import (
    MEASURED_SCALES,
    SCALE_OPTIONS,
    SCALE_TENSORS,
    scale_numbers,
)
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
    SEMANTIC_WORDS,
    Call,
    Operation,
    TensorSpec,
    packed_rows,
    program_numbers,
)
from flashsmith.printable import quoted
from flashsmith.semantics.flop import visible_pairs
from flashsmith.semantics.sizes import Sizes

# A dense cache is (batch, capacity, heads_k, d), a paged one (pages, page, heads_k, d). In the
# cache of values, d_v takes the place of d.
_CACHE = ("blocks", "slots", "heads_k")
_NEW, _PACKED_NEW = ("batch", "seq_q", "heads_k"), ("total_q", "heads_k")
_ROTARY = ("positions", "rotary_half")
# The strides that are passed for a tensor that the call omits.
_ABSENT = (0,)
INVARIANT, FREE = SPLITS = ("invariant", "free")
_INT_BYTES = 4


def keys_read(sizes: Sizes) -> int:
    """The number of keys of one sequence that at least one query sees."""
    if sizes.window is None:
        return sizes.seq_k
    return min(sizes.seq_k, sizes.window[0] + sizes.seq_q)


def decode_flop(sizes: Sizes) -> int:
    """The FLOP of the two GEMMs: 2 b h_q (d + d_v) for each visible query-key pair of a
    sequence."""
    return 2 * sizes.batch * sizes.heads_q * visible_pairs(sizes) * (sizes.d + sizes.d_v)


def decode_bytes(sizes: Sizes) -> int:
    """The bytes of q, o, the lengths, the visible keys and values, and the page numbers of these.

    The capacity of the cache does not affect this number.
    """
    keys = keys_read(sizes)
    of_cache = 1 if sizes.cache_format.is_8bit else sizes.dtype.element_size
    pages = -(-keys // sizes.page) if sizes.page else 0
    columns = sizes.d + sizes.d_v
    queries = sizes.seq_q * sizes.heads_q * columns * sizes.dtype.element_size
    cached = keys * sizes.heads_k * columns * of_cache
    per_sequence = queries + cached + (1 + pages) * _INT_BYTES
    return sizes.batch * per_sequence


def _measured(sizes: Sizes) -> dict[str, int]:
    """The sizes of the operation's own dimensions in measurements: the capacity of the cache is
    exactly the number of keys, and rotary embedding covers all d columns."""
    pages = -(-sizes.seq_k // sizes.page) if sizes.page else 0
    return {
        **packed_rows(sizes),
        "blocks": sizes.batch * pages if sizes.page else sizes.batch,
        "slots": sizes.page or sizes.seq_k,
        "most_pages": pages,
        "positions": sizes.seq_k,
        "rotary_half": sizes.d // 2,
        **MEASURED_SCALES,
    }


def _numbers(call: Call) -> tuple[int | float, ...]:
    """Returns the numbers that the C++ host path takes, in its order.

    Sizes come first: batch, seq_q (of the longest sequence if packed), the capacity of a sequence
    in keys, heads_q, heads_k, d, d_v, total_q, blocks, slots, most_pages, positions and
    rotary_half.

    Strides follow: (batch, row, head) of q, (block, slot, head) of k_cache and v_cache, (batch,
    row, head) of o, k and v, (row) of page_table, cos and sin, and (batch, head) of lse.

    Then come scale (None: 1/sqrt(d)), softcap, the window's limits, and three flags, 0 or 1:
    whether rotary pairs are neighbours, whether cos and sin are fp32, and whether the split is
    free. Then come the numbers of scale_numbers(). The numbers of a program are last. The sizes and
    strides of an absent tensor are 0.

    Raises ArgumentError if tensors do not fit each other or if the split or a dtype is unknown, and
    the errors that mask_limits() and scale_numbers() raise.
    """
    p, strides, sizes, options = call.problem, call.strides, call.sizes, call.options
    check_together(call)
    slots, most_pages = sizes["slots"], sizes.get("most_pages", 0)
    return (
        *(p.batch, p.seq_q, most_pages * slots if p.page else slots),
        *(p.heads_q, p.heads_k, p.d, p.d_v, sizes.get("total_q", 0)),
        *(sizes["blocks"], slots, most_pages),
        *(sizes.get(name, 0) for name in ("positions", "rotary_half")),
        *(
            step
            for name in ("q", "k_cache", "v_cache", "o", "k", "v")
            for step in batch_seq_head(strides.get(name, _ABSENT))
        ),
        *(strides.get(name, _ABSENT)[0] for name in ("page_table", "cos", "sin")),
        *_batch_head(strides.get("lse", _ABSENT)),
        *(scale_of(p, options["scale"]), options["softcap"]),
        *mask_limits(p, options["left"], options["right"]),
        int(options["rotary_interleaved"]),
        int(check_rotary_dtype(options["rotary_dtype"]) is not None),
        SPLITS.index(check_split(options["split"])),
        *scale_numbers(call),
        *program_numbers(call),
    )


def check_together(call: Call) -> None:
    """Raises ArgumentError if a call's tensors conflict in ways that the check of shapes does not
    detect."""
    p, given, sizes = call.problem, call.strides, call.sizes
    if p.page and sizes["slots"] != p.page:
        raise ArgumentError(
            f"k_cache: {sizes['slots']} slots per page, but '{p}' has {p.page}; give pages of that "
            "size"
        )
    if not p.page and sizes["blocks"] != p.batch:
        raise ArgumentError(
            f"k_cache: {sizes['blocks']} sequences, but q has {p.batch}; give equal numbers, or a "
            "page_table"
        )
    check_given(given)
    if 2 * sizes.get("rotary_half", 0) > p.d:
        raise ArgumentError(
            f"cos: {sizes['rotary_half']} pairs per row exceed d / 2, with d={p.d}; give fewer"
        )


def check_given(given: Collection[str]) -> None:
    """Raises ArgumentError if a call passes only some tensors of a group that must be passed
    together."""
    for one, other, why in (
        ("k", "v", "both are appended"),
        ("v", "k", "both are appended"),
        ("cos", "sin", "a rotation needs both"),
        ("sin", "cos", "a rotation needs both"),
        ("cos", "k", "the rotation is of k and of the queries at its positions"),
    ):
        if one in given and other not in given:
            raise ArgumentError(f"{other}: missing, and {one} is given; {why}: give both or none")


def check_split(split: object) -> str:
    """Returns ``split``. Raises ArgumentError unless it is 'invariant' or 'free'."""
    if isinstance(split, str) and split in SPLITS:
        return split
    raise ArgumentError(
        f"split={quoted(split)}: give 'invariant' (a sequence has the same bits in any batch) or "
        "'free' (keys may be split by the batch, too)"
    )


def check_rotary_dtype(dtype: object) -> str | None:
    """Returns ``dtype``. Raises ArgumentError unless it is 'float32' or None, which means the dtype
    of q."""
    if dtype is None or (isinstance(dtype, str) and dtype == "float32"):
        return dtype
    raise ArgumentError(f"rotary_dtype={quoted(dtype)}: give 'float32', or None for q's dtype")


def _batch_head(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the (batch, head) strides of a (batch, heads, seq) tensor. The batch stride is 0 if
    the tensor is packed."""
    return (0,) * (3 - len(strides)) + strides[:-1]


def _cache(name: str, other: str, width: str) -> TensorSpec:
    dims, shared = (*_CACHE, width), (other,)
    return TensorSpec(name, dims, role="inout", may_share=shared, written_with="k", is_cache=True)


def _new(name: str, width: str) -> TensorSpec:
    return TensorSpec(name, (*_NEW, width), presence="optional", packed=(*_PACKED_NEW, width))


def _rotary(name: str) -> TensorSpec:
    return TensorSpec(name, _ROTARY, presence="optional", alignment=2, dtype_option="rotary_dtype")


DECODE = Operation(
    name="decode",
    tensors=(
        TensorSpec("q", Q, packed=PACKED_Q),
        # k_cache and v_cache may be interleaved views of the same tensor.
        _cache("k_cache", "v_cache", "d"),
        _cache("v_cache", "k_cache", "d_v"),
        # These are the lengths before appending.
        TensorSpec("cache_lens", ("batch",), "int32", alignment=4),
        TensorSpec("o", OUT, role="out", packed=PACKED_OUT),
        TensorSpec("lse", ROWS, "float32", "out", "optional", PACKED_ROWS, alignment=4),
        # Unused entries are -1.
        TensorSpec("page_table", ("batch", "most_pages"), "int32", presence="paged", alignment=4),
        _new("k", "d"),
        _new("v", "d_v"),
        _rotary("cos"),
        _rotary("sin"),
        TensorSpec("sinks", ("heads_q",), "float32", presence="optional", alignment=4),
        TensorSpec("cu_seqlens_q", ("batch+1",), "int32", presence="packed", alignment=4),
        # For each sequence, the number of its first keys that the cache no longer has.
        TensorSpec("kv_offset", ("batch",), "int32", presence="optional", alignment=4),
        *SCALE_TENSORS,
    ),
    numbers=_numbers,
    flop=decode_flop,
    traffic=decode_bytes,
    sizes=_measured,
    semantics=frozenset(SEMANTIC_WORDS) - {"partial"},
    # rotary_interleaved says whether a pair consists of elements 2i and 2i + 1 or of i and i +
    # rotary_half. rotary_dtype is the dtype of cos and sin: None (the problem's dtype) or
    # 'float32'. split says whether the split of a sequence's keys depends only on its length
    # ('invariant') or also on the batch ('free').
    options={
        "scale": None,
        "softcap": 0.0,
        "left": None,
        "right": None,
        "rotary_interleaved": False,
        "rotary_dtype": None,
        "split": "invariant",
        **SCALE_OPTIONS,
    },
    has_canonical=True,
    takes_programs=True,
)
