"""forward with masks, caps, sinks, grouped heads, packed and empty sequences, on host tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import shared_kernels
from plain_run import full_after

from flashsmith.families import DType, FlashForwardKernelConfig, Semantics, compiled_d_head
from flashsmith.runtime import (
    ForwardOptions,
    count_launches,
    forward,
    forward_timed,
    kernel_choice,
    run_forward,
    running_time,
)
from flashsmith.runtime.arguments import check_request
from flashsmith.runtime.running_time import estimate_seconds
from flashsmith.verify import compare, compute_references
from ptxlab.checks import all_checks

RNG = np.random.default_rng(7)


def config(d: int = 64, dtype: DType = DType.FP16, **knobs: Any) -> FlashForwardKernelConfig:
    shape = {"d_head": compiled_d_head(d), "B_r": 64, "B_c": 32, "n_warps": 4} | knobs
    features = {"async_copy": True, "eager_load_blocks": True, "swizzled": True}
    loads = {"Q_mma_load_K_tiles": 2, "K_mma_load_K_tiles": 2, "V_mma_load_K_tiles": 2}
    return FlashForwardKernelConfig(dtype, **(shape | features | loads), optimized_softmax=True)


CFG = config()
MASKED = [
    FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4, True, True, True, 0, 2, 2, False, optimized)
    for optimized in (False, True)
]
HEAD_DIMENSIONS = [*zip((8, 136, 256, 96, 72), 3 * tuple(DType), strict=False)]
QUICK_HEAD_DIMENSIONS = 3  # of the least, one between two, and the most
for _mask in ("none", "causal", "window"):
    shared_kernels.want([CFG], Semantics(_mask))
    shared_kernels.want([CFG], Semantics(_mask, uneven=True))
    shared_kernels.want([CFG], Semantics(_mask, packed=True, uneven=True))
shared_kernels.want([CFG], Semantics("causal", softcap=True, uneven=True))
shared_kernels.want([CFG], Semantics("none", softcap=True, packed=True, uneven=True))
for _mask in ("causal", "window"):
    shared_kernels.want(MASKED, Semantics(_mask))
shared_kernels.want(
    [config(d, dtype) for d, dtype in HEAD_DIMENSIONS[:QUICK_HEAD_DIMENSIONS]],
    Semantics("causal", uneven=True),
)


def drawn(
    seq_q: int | tuple[int, ...],
    seq_k: int | tuple[int, ...],
    *,
    heads: tuple[int, int] = (2, 2),
    d: int = 64,
    batch: int = 1,
    dtype: Any = np.float16,
) -> list[np.ndarray]:
    """q, k, v: (batch, seq, heads, d), or packed for tuples of lengths."""
    tensors = []
    for length, n_heads in ((seq_q, heads[0]), (seq_k, heads[1]), (seq_k, heads[1])):
        rows = (sum(length),) if isinstance(length, tuple) else (batch, length)
        tensors.append(RNG.standard_normal((*rows, n_heads, d)).astype(dtype))
    return tensors


def offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def packing(lens_q: tuple[int, ...], lens_k: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"cu_seqlens_q": offsets(lens_q), "cu_seqlens_k": offsets(lens_k)}


def check(
    cfg: FlashForwardKernelConfig,
    qkv: list[np.ndarray],
    *,
    lens: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    scale: float | None = None,
    **options: Any,
) -> np.ndarray:
    """Runs with NaN outputs and all checks, judges o, lse and row_max, and returns o."""
    packed = packing(*lens) if lens else {}
    asked = {
        "return_lse": True,
        "return_row_max": True,
        "poisoned": True,
        "observers": all_checks(),
    }
    result = run_forward(cfg, *qkv, scale=scale, **options, **packed, **asked)
    lens_of = dict(zip(("lens_q", "lens_k"), lens, strict=True)) if lens else {}
    true_scale = scale or qkv[0].shape[-1] ** -0.5
    references = compute_references(*qkv, true_scale, **options, **lens_of)
    checked = compare(
        cfg,
        result.o,
        result.lse,
        references,
        row_max=result.row_max,
        lens_q=lens_of.get("lens_q"),
    )
    assert checked.ok, (checked.reasons, str(checked.first_mismatch))
    assert result.emulation is not None
    assert not result.emulation.findings, result.emulation.findings[0]
    return np.asarray(result.o)


@pytest.mark.parametrize("lengths", [(100, 100), (1, 70), (70, 1), (130, 40), (33, 160)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (10, 5)},
        {"window": (None, 3)},
        {"window": (7, None)},
        {"window": (0, 0)},
        {"causal": True, "window": (20, None)},
    ],
    ids=str,
)
def test_masks_at_any_length(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    check(CFG, drawn(*lengths), **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (64, 64)}], ids=str)
def test_masks_on_whole_tiles(options: dict[str, Any]) -> None:
    check(CFG, drawn(128, 192), **options)


def test_a_window_wider_than_the_sequence_hides_nothing() -> None:
    qkv = drawn(70, 90)
    wide = forward(CFG, *qkv, window=(90, 70))
    assert np.array_equal(wide, forward(CFG, *qkv))


@pytest.mark.parametrize("cfg", MASKED, ids=str)
def test_a_row_masked_throughout_its_first_visited_tile(cfg: FlashForwardKernelConfig) -> None:
    """The last rows' window ends before the last tile, which the block's other rows visit first."""
    check(cfg, drawn(64, 96), window=(0, 0))
    check(cfg, drawn(64, 96), causal=True)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap: float) -> None:
    check(CFG, drawn(70, 90), softcap=softcap, causal=True)


@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (6, 3)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(CFG, drawn(64, 64, heads=heads, batch=2))


class TestASinkThatWeighsNothing:
    """Four keys and eight queries, causal: the first four rows see nothing."""

    def test_is_as_none(self) -> None:
        sinks = np.array([-np.inf, 0.5], np.float32)
        o = check(CFG, drawn(8, 4, heads=(2, 2)), sinks=sinks, causal=True)
        assert not o[:, :4].any()

    def test_may_overflow_in_base_2(self) -> None:
        sinks = np.array([np.finfo(np.float32).min, 0.5], np.float32)
        o, lse = forward(CFG, *drawn(8, 4, heads=(2, 2)), sinks=sinks, causal=True, return_lse=True)
        assert not o[:, :4].any()
        assert (lse[0, 0, :4] <= -1e38).all()
        assert np.isfinite(lse[0, 0, 4:]).all()


def test_a_sink_a_head() -> None:
    sinks = np.array([-2.0, 0.0, 3.0, 10.0], np.float32)
    check(CFG, drawn(70, 40, heads=(4, 2)), sinks=sinks, causal=True)


def test_the_scale_is_that_of_the_true_d() -> None:
    check(CFG, drawn(70, 64, d=40))
    check(CFG, drawn(70, 64, d=40), scale=0.3)


@pytest.mark.parametrize(("d", "dtype"), full_after(QUICK_HEAD_DIMENSIONS, HEAD_DIMENSIONS))
def test_head_dimensions(d: int, dtype: DType) -> None:
    numpy_dtype = np.float16 if dtype is DType.FP16 else ml_dtypes.bfloat16
    check(config(d, dtype), drawn(70, 40, heads=(1, 1), d=d, dtype=numpy_dtype), causal=True)


class TestPacked:
    LENS = (5, 0, 70, 100, 1), (7, 9, 0, 130, 64)

    @pytest.mark.parametrize(
        "options", [{}, {"causal": True}, {"window": (9, 4)}, {"softcap": 5.0}], ids=str
    )
    def test_sequences_of_any_length(self, options: dict[str, Any]) -> None:
        check(CFG, drawn(*self.LENS, heads=(4, 2), d=48), lens=self.LENS, **options)

    def test_with_sinks(self) -> None:
        sinks = np.array([1.0, -1.0], np.float32)
        check(CFG, drawn(*self.LENS), lens=self.LENS, sinks=sinks)

    def test_strides_are_each_tensors_own(self) -> None:
        q, k, v = drawn(*self.LENS)
        expected = forward(CFG, q, k, v, **packing(*self.LENS))
        outside = np.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2)
        padded = np.full((k.shape[0], 3, 72), np.nan, np.float16)
        padded[:, :2, :64] = k
        o = np.full((2 * q.shape[0], *q.shape[1:]), np.nan, np.float16)
        both = packing(*self.LENS)
        forward(CFG, outside, padded[:, :2, :64], v, o[::2], **both)
        assert np.array_equal(o[::2], expected)
        assert np.isnan(o[1::2]).all()

    def test_limits_may_be_given_and_generous(self) -> None:
        qkv = drawn(*self.LENS)
        expected = forward(CFG, *qkv, **packing(*self.LENS))
        limits = {"max_seqlen_q": 100, "max_seqlen_k": 10**12}
        assert np.array_equal(forward(CFG, *qkv, **packing(*self.LENS), **limits), expected)

    def test_contents_that_lie_lead_nowhere(self) -> None:
        """As on a device, where they are not read: no access leaves the tensors."""
        qkv = drawn((60, 40), (50, 50))
        wrong = {
            "cu_seqlens_q": np.array([-5, 300, 20], np.int32),
            "cu_seqlens_k": np.array([90, 10, 2**31 - 1], np.int32),
        }
        limits = {"max_seqlen_q": 80, "max_seqlen_k": 64}
        result = run_forward(
            CFG, *qkv, **wrong, **limits, check_contents=False, observers=all_checks()
        )
        assert result.emulation is not None
        assert not result.emulation.findings

    def test_statistics_have_a_row_a_head(self) -> None:
        qkv = drawn(*self.LENS, heads=(4, 2))
        o, lse, row_max = forward(
            CFG, *qkv, **packing(*self.LENS), return_lse=True, return_row_max=True
        )
        assert o.shape == qkv[0].shape
        assert lse.shape == row_max.shape == (4, sum(self.LENS[0]))


@pytest.mark.parametrize("cfg", full_after(1, [CFG, config(32), config(128)]), ids=str)
def test_no_keys_give_zeros_and_no_log(cfg: FlashForwardKernelConfig) -> None:
    qkv = drawn(40, 0, d=cfg.d_head)
    o = check(cfg, qkv)
    assert not o.any()
    sinks = np.array([2.0, -3.0], np.float32)
    assert not check(cfg, qkv, sinks=sinks).any()


NOTHING = [
    (drawn(0, 64), {}),
    (drawn(0, 0), {}),
    (drawn(64, 64, batch=0), {}),
    (drawn((), ()), packing((), ())),
    (drawn((0, 0), (3, 5)), packing((0, 0), (3, 5))),
]


@pytest.mark.parametrize(("qkv", "packed"), NOTHING)
def test_where_there_are_no_rows_nothing_is_launched(
    qkv: list[np.ndarray], packed: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "loaded_kernels", None)
    with count_launches() as launches:
        o, lse, row_max = forward(CFG, *qkv, **packed, return_lse=True, return_row_max=True)
        again = np.empty_like(qkv[0])
        assert forward(CFG, *qkv, again, **packed) is again
        assert forward_timed(CFG, *qkv, **packed)[1] is None
    assert launches.total == 0
    assert o.shape == qkv[0].shape
    assert lse.shape == row_max.shape
    assert lse.size == 0


@pytest.mark.parametrize("name", ["return_lse", "return_row_max"])
def test_one_statistic_alone(name: str) -> None:
    qkv = drawn(40, 40)
    o, lse, row_max = forward(CFG, *qkv, return_lse=True, return_row_max=True)
    found, statistic = forward(CFG, *qkv, **{name: True})
    assert np.array_equal(found, o)
    assert np.array_equal(statistic, lse if name == "return_lse" else row_max)
    (timed, also), ms = forward_timed(CFG, *qkv, **{name: True})
    assert ms is None
    assert np.array_equal(timed, o)
    assert np.array_equal(also, statistic)


@pytest.mark.parametrize(
    ("lengths", "options", "semantics"),
    [
        ((64, 32), {}, Semantics()),
        ((63, 32), {}, Semantics(uneven=True)),
        ((64, 31), {}, Semantics(uneven=True)),
        ((64, 32), {"window": (None, None)}, Semantics()),
        ((64, 32), {"window": (None, 0)}, Semantics("causal")),
        ((64, 32), {"causal": True, "window": (4, 9)}, Semantics("window")),
        ((64, 32), {"softcap": 3}, Semantics(softcap=True)),
        ((64, 32), {"sinks": np.zeros(2, np.float32)}, Semantics()),
    ],
)
def test_the_semantics_of_a_call(
    lengths: tuple[int, int],
    options: dict[str, Any],
    semantics: Semantics,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CallOptions(Exception):
        pass

    def note(cfg: Any, arch: int, semantics: Semantics, may_build: Any) -> None:
        raise CallOptions(semantics)

    monkeypatch.setattr(kernel_choice, "loaded_kernels", SimpleNamespace(get=note))
    with pytest.raises(CallOptions) as asked:
        forward(CFG, *drawn(*lengths), **options)
    assert asked.value.args == (semantics,)


def test_packed_sequences_are_estimated_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 sequences of which one is long: far from 8 long ones."""
    lens = (3000, *(1,) * 7)
    qkv = drawn(lens, lens, heads=(1, 1))
    estimated: list[float] = []

    def noting(*arguments: Any) -> float:
        estimated.append(estimate_seconds(*arguments))
        return estimated[-1]

    monkeypatch.setattr(running_time, "estimate_seconds", noting)
    estimated: list[float] = []
    q, k, v = qkv
    request = check_request((q, k, v, None), ForwardOptions(**packing(lens, lens)))
    running_time.check_estimate(request, CFG)
    assert 4 * estimated[0] < running_time.estimate_seconds(CFG, request.problem)


@pytest.mark.torch
def test_torch_tensors_offsets_and_sinks() -> None:
    import torch

    lens = TestPacked.LENS
    qkv, sinks = drawn(*lens), np.array([0.5, -0.5], np.float32)
    packed = packing(*lens)
    expected = forward(CFG, *qkv, **packed, sinks=sinks, causal=True, return_lse=True)
    as_torch = {name: torch.from_numpy(array) for name, array in packed.items()}
    o, lse = forward(
        *(CFG, *map(torch.from_numpy, qkv)),
        **as_torch,
        sinks=torch.from_numpy(sinks),
        causal=True,
        return_lse=True,
    )
    assert np.array_equal(o.numpy(), expected[0])
    assert np.array_equal(lse.numpy(), expected[1])
