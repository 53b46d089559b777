"""attention(..., partial=True): fp32 outputs over some of the keys, for a merge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import shared_kernels

import flashsmith
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    KernelConfig,
    Semantics,
    get_kernel_configs,
    parse_kernel_name_into_config,
)
from flashsmith.runtime.arguments import check_request
from flashsmith.semantics.signature import ForwardOptions
from flashsmith.verify import prove
from flashsmith.verify.reference import References, compute_references

# What other tests have, too.
MMA = parse_kernel_name_into_config(
    "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
)
HOPPER = next(
    config
    for config in get_kernel_configs("hopper")
    if (config.d_head, config.dtype) == (64, MMA.dtype)
)
SEQ_Q, SEQ_K, D = 50, 200, 64
BEGIN, USED = np.array([0, 17, 100], np.int32), np.array([200, 0, 77], np.int32)
# Few, since each is a kernel to compile; the proof grid has all.
CASES: list[tuple[KernelConfig, dict[str, Any]]] = [
    (MMA, {}),
    (MMA, {"window": (30, 5), "softcap": 20.0}),
    (HOPPER, {"causal": True}),
]
for _words in ("uneven", "packed+uneven", "causal+packed+uneven", "window+softcap+uneven"):
    shared_kernels.want([MMA], Semantics.parse(f"{_words}+partial"))
shared_kernels.want([MMA], Semantics(uneven=True))
shared_kernels.want([HOPPER], Semantics.parse("causal+uneven+partial"))
shared_kernels.want([HOPPER], Semantics.parse("packed+uneven+partial"))

MASK: dict[KernelConfig, dict[str, Any]] = {MMA: {}, HOPPER: {"causal": True}}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float16)


def inputs(batch: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        draw(batch, SEQ_Q, 4, D),
        draw(batch, SEQ_K, 2, D, seed=1),
        draw(batch, SEQ_K, 2, D, seed=2),
    )


def check(o: np.ndarray, lse: np.ndarray, expected: References) -> None:
    """Two times honest arithmetic, whose output would not be rounded either."""
    assert o.dtype == lse.dtype == np.float32
    bound = 2 * np.abs(expected.same_precision.astype(np.float64) - expected.o).max() + 1e-5
    assert np.abs(o - expected.o).max() <= bound
    empty = np.isneginf(expected.lse)
    assert np.array_equal(np.isneginf(lse), empty)
    assert np.abs(lse[~empty] - expected.lse[~empty]).max(initial=0) < 2.0**-13
    assert not np.moveaxis(o, -3, -2)[empty].any()


def with_nan(array: np.ndarray, batch: int, keys: slice) -> None:
    kept = array[batch, keys].copy()
    array[batch] = np.nan
    array[batch, keys] = kept


@pytest.mark.parametrize(("config", "mask"), CASES)
def test_ranges_of_dense_keys(config: KernelConfig, mask: dict[str, Any]) -> None:
    """Also none of the keys, and NaN where the others are."""
    q, k, v = inputs()
    spoilt = k.copy(), v.copy()
    parts = [slice(b, b + u) for b, u in zip(BEGIN, USED, strict=True)]
    for b, keys in enumerate(parts):
        for array in spoilt:
            with_nan(array, b, keys)
    o, lse = flashsmith.forward(
        config, q, *spoilt, partial=True, seqused_k=USED, k_begin=BEGIN, **mask
    )
    for b, keys in enumerate(parts):
        one = slice(b, b + 1)
        expected = compute_references(q[one], k[one, keys], v[one, keys], D**-0.5, **mask)
        check(o[one], lse[one], expected)


@pytest.mark.parametrize(
    ("config", "causal"), [(MMA, True), (HOPPER, False)], ids=["mma_sync", "wgmma"]
)
def test_queries_of_one_sequence_see_overlapping_keys(config: KernelConfig, causal: bool) -> None:
    """Two chunks of queries in one launch, as a rank of several GPUs has them: each sees the keys
    up to its own end, and the merged halves are the whole."""
    q, k, v = draw(64, 4, D), draw(160, 2, D, seed=1), draw(160, 2, D, seed=2)
    cu_seqlens = np.array([0, 32, 64], np.int32)
    ends = np.array([64, 160])
    parts = []
    for begin, end in ((np.array([0, 0]), ends // 2), (ends // 2, ends)):
        # The chunk stands at the end of its keys, not of a part of them: causal is for the last.
        is_last = bool((end == ends).all())
        parts.append(
            flashsmith.forward(
                *(config, q, k, v),
                partial=True,
                causal=causal and is_last,
                cu_seqlens_q=cu_seqlens,
                seqused_k=(end - begin).astype(np.int32),
                k_begin=begin.astype(np.int32),
            )
        )
    o, lse = flashsmith.merge_attention(*map(list, zip(*parts, strict=True)))
    for b, end in enumerate(ends):
        rows = slice(32 * b, 32 * b + 32)
        expected = compute_references(
            q[None, rows], k[None, :end], v[None, :end], D**-0.5, causal=causal
        )
        check(o[None, rows], lse[None, :, rows], expected)


def test_what_is_left_out() -> None:
    """Without ranges, or with one vector, a sequence's own keys count."""
    q, k, v = inputs()
    ends, begins = np.full(3, SEQ_K, np.int32), np.zeros(3, np.int32)
    whole = flashsmith.forward(MMA, q, k, v, partial=True)
    for keywords in ({"seqused_k": ends}, {"k_begin": begins}):
        same = flashsmith.forward(MMA, q, k, v, partial=True, **keywords)
        assert all(map(np.array_equal, same, whole))
    check(*whole, compute_references(q, k, v, D**-0.5))
    rounded = flashsmith.forward(MMA, q, k, v)
    assert np.array_equal(whole[0].astype(np.float16), rounded)
    later = np.array([0, 64, SEQ_K], np.int32)
    o, lse = flashsmith.forward(MMA, q, k, v, partial=True, k_begin=later)
    assert np.array_equal(o[0], whole[0][0])
    assert np.isneginf(lse[2]).all()

    packed = [array.reshape(-1, *array.shape[2:]) for array in (q, k, v)]
    offsets = [np.arange(4, dtype=np.int32) * length for length in (SEQ_Q, SEQ_K)]
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
    of_packed, _ = flashsmith.forward(MMA, *packed, partial=True, **names, seqused_k=USED)
    dense, _ = flashsmith.forward(MMA, q, k, v, partial=True, seqused_k=USED)
    assert np.array_equal(of_packed.reshape(q.shape), dense)


def test_the_output_is_written_where_it_is_told() -> None:
    q, k, v = inputs(1)
    out = np.full(q.shape, np.nan, np.float32)
    o, lse = flashsmith.attention(q, k, v, partial=True, out=out, config=MMA)
    assert o is out
    check(o, lse, compute_references(q, k, v, D**-0.5))


@pytest.mark.parametrize("device", [80, 90])
def test_a_part_is_computed_by_the_kernel_of_the_whole(device: int) -> None:
    for text in ("b2 s1024 h8:2 d64 fp16 causal", "b4 s300 h4 d128 bf16 packed"):
        parts = flashsmith.choose(f"{text} partial", device)
        assert parts.problem.semantics.partial
        assert parts.config == flashsmith.choose(text, device).config


@pytest.mark.parametrize("config", [MMA, HOPPER], ids=["mma_sync", "wgmma"])
def test_parts_are_proven_with_ranges_of_their_own(config: KernelConfig) -> None:
    """By the emulator's checks too; what does not count is NaN."""
    verdict = prove(config, seq=50, seq_k=150, batch=4, partial=True, checks=True, **MASK[config])
    assert verdict.ok, verdict
    assert "uneven partial" in str(verdict)


def test_batches_of_keys_that_are_no_rows_apart() -> None:
    """TMA takes all batches for rows of one tensor; other kernels take any strides, and the chooser
    knows."""
    q, k, v = inputs()
    rows = k[0].size + 8
    apart = np.zeros(3 * rows, k.dtype)
    spread = np.lib.stride_tricks.as_strided(apart, k.shape, (2 * rows, *k.strides[1:]))
    spread[:] = k
    asked = ForwardOptions(causal=True, partial=True)
    assert check_request((q, k, v, None), asked).suits_tma
    assert not check_request((q, spread, v, None), asked).suits_tma
    with pytest.raises(ArgumentError, match="k: its batch stride is 25608 elements, no multiple"):
        flashsmith.forward(HOPPER, q, spread, v, causal=True, partial=True)
    o, _ = flashsmith.forward(MMA, q, spread, v, partial=True)
    assert np.array_equal(o, flashsmith.forward(MMA, q, k, v, partial=True)[0])


@pytest.mark.torch
def test_gradients_are_the_callers() -> None:
    import torch

    q, k, v = map(torch.from_numpy, inputs(1))
    o, lse = flashsmith.attention(q, k, v, partial=True, config=MMA)
    assert (o.dtype, lse.dtype) == (torch.float32, torch.float32)
    v.requires_grad_()
    with pytest.raises(ArgumentError, match=r"v requires grad.*flashsmith\.backward"):
        flashsmith.attention(q, k, v, partial=True)
    with torch.no_grad():
        assert torch.equal(flashsmith.attention(q, k, v, partial=True, config=MMA)[0], o)


@pytest.mark.torch
def test_compiled_code_breaks_its_graph_there() -> None:
    import torch

    q, k, v = map(torch.from_numpy, inputs(1))

    def halves(q: Any, k: Any, v: Any) -> Any:
        parts = [
            flashsmith.attention(q * 1, k[:, keys], v[:, keys], partial=True, config=MMA)
            for keys in (slice(0, 64), slice(64, SEQ_K))
        ]
        o, lse = flashsmith.merge_attention(*map(list, zip(*parts, strict=True)), dtype="float16")
        return o * 2, lse

    compiled: Any = torch.compile(halves, backend="eager")
    assert all(map(torch.equal, compiled(q, k, v), halves(q, k, v)))


INT = np.zeros(3, np.int32)
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("seqused_k: given without partial", {"partial": False, "seqused_k": INT}),
    ("k_begin: given without partial", {"partial": False, "k_begin": INT}),
    ("partial=1: allowed", {"partial": 1}),
    (r"seqused_k: shape \(2,\); must be \(batch,\)", {"seqused_k": INT[:2]}),
    ("seqused_k: dtype int64", {"seqused_k": INT.astype(np.int64)}),
    ("seqused_k: 201 keys of sequence 0; there are 200", {"seqused_k": INT + 201}),
    ("seqused_k: -1 keys", {"seqused_k": INT - 1}),
    ("seqused_k: 101 keys", {"seqused_k": INT + 101, "k_begin": INT + 100}),
    ("k_begin: goes from 201 to 201", {"k_begin": INT + 201}),
    ("sinks: given with partial", {"sinks": np.zeros(4, np.float32)}),
    ("return_row_max: given with partial", {"return_row_max": True}),
    ("out: dtype float16; must be float32", {"out": np.zeros((3, SEQ_Q, 4, D), np.float16)}),
]


@pytest.mark.parametrize(("message", "keywords"), WRONG, ids=lambda it: str(it)[:24])
def test_what_is_refused(message: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=message):
        flashsmith.attention(*inputs(), **{"partial": True, **keywords})


def test_numbers_of_a_device_are_clamped() -> None:
    """As they are unknown to the host: nothing outside of the keys is read."""
    from flashsmith.runtime.forward_pass import run_forward

    q, k, v = inputs()
    begin, used = np.array([-5, 190, 300], np.int32), np.array([999, 999, -3], np.int32)
    for config, mask in MASK.items():
        found = run_forward(
            *(config, q, k, v),
            partial=True,
            k_begin=begin,
            seqused_k=used,
            check_contents=False,
            **mask,
        )
        for b, keys in enumerate((slice(0, 200), slice(190, 200), slice(200, 200))):
            one = slice(b, b + 1)
            expected = compute_references(q[one], k[one, keys], v[one, keys], D**-0.5, **mask)
            check(found.o[one], found.lse[one], expected)
