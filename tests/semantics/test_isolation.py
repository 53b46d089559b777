"""The same bits every time, whatever lies beside a sequence, and whatever cu_seqlens say."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from built_kernels import SEMANTICS, marked
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import LENS_Q, run_for

from flashsmith.families import Semantics
from flashsmith.runtime.frameworks.device_array import DeviceArray
from ptxlab.checks import Bounds, InFlight, Uninitialised

PACKED = [semantics for semantics in SEMANTICS if semantics.packed]
# On a GPU all of them, for it is fast.
EVERYWHERE = [
    *(
        pytest.param(*it.values, False, id=f"{it.values[0]}-emulator", marks=it.marks)
        for it in marked(SEMANTICS)
    ),
    *(pytest.param(it, True, id=f"{it}-gpu", marks=pytest.mark.gpu) for it in SEMANTICS),
]
SEQUENCE = 2


def bits(outputs: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in outputs.items()}


@pytest.mark.parametrize(("semantics", "on_gpu"), EVERYWHERE)
def test_repeats_give_the_same_bits(semantics: Semantics, on_gpu: bool) -> None:
    run = run_for(semantics, on_gpu)
    first = bits(run(on_gpu))
    for _ in range(10 if on_gpu else 2):
        assert bits(run(on_gpu)) == first


@pytest.mark.parametrize(("semantics", "on_gpu"), EVERYWHERE)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_neighbours_do_not_change_a_sequence(
    semantics: Semantics, value: float, on_gpu: bool
) -> None:
    run = run_for(semantics, on_gpu)
    among = run(on_gpu)
    assert np.isfinite(among["o"].astype(np.float32)).all()
    expected = run.part(among, SEQUENCE)
    assert run.part(run.filled(SEQUENCE, value)(on_gpu), SEQUENCE) == expected


@pytest.mark.parametrize(("semantics", "on_gpu"), EVERYWHERE)
def test_a_sequence_alone_gives_the_same_bits(semantics: Semantics, on_gpu: bool) -> None:
    run = run_for(semantics, on_gpu)
    alone = run.alone(SEQUENCE)
    assert bits(alone(on_gpu)) == run.part(run(on_gpu), SEQUENCE)


# ---- unchecked contents of cu_seqlens ----

TOTAL = sum(LENS_Q)
GARBAGE = [
    (0, 0, 0, 0, 0),
    (0, 90, 40, 212, 212),
    (-7, 50, 100, 150, 212),
    (0, 50, 100, 150, 5000),
    (212, 150, 100, 50, 0),
    (-(2**31), 2**31 - 1, -(2**31), 2**31 - 1, 0),
    (2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1),
    (100, 100, 60, 300, -1),
    (211, 212, 213, 212, 211),
    (0, 212, 0, 212, 0),
]
INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-5, TOTAL + 5)


def reached(garbage: tuple[int, ...], total: int, longest: int) -> np.ndarray:
    """The rows that some sequence has once everything is clamped."""
    rows = np.zeros(total, bool)
    for begin, end in itertools.pairwise(garbage):
        begin = min(max(begin, 0), total)
        end = min(max(end, begin), total)
        rows[begin : min(end, begin + longest)] = True
    return rows


def check_garbage(
    semantics: Semantics, q: tuple[int, ...], k: tuple[int, ...], max_q: int, max_k: int
) -> None:
    # Not for races: sequences that overlap write the same rows of o, each what it computes.
    checks = [Bounds(), Uninitialised(), InFlight()]
    run = run_for(semantics)
    result = run.raw(
        cu_seqlens_q=np.array(q, np.int32),
        cu_seqlens_k=np.array(k, np.int32),
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        check_contents=False,
        observers=checks,
    )
    assert result.emulation is not None
    assert result.emulation.findings == []
    written = ~np.isnan(result.o.astype(np.float32)).all(axis=(1, 2))
    np.testing.assert_array_equal(written, reached(q, TOTAL, max_q))
    np.testing.assert_array_equal(~np.isnan(result.lse).all(axis=0), written)
    assert not np.isnan(result.o[written].astype(np.float32)).any()


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_garbage_in_cu_seqlens_leads_nowhere(garbage: tuple[int, ...], side: str) -> None:
    right_q, right_k = (0, 37, 37, 167, 212), (0, 50, 70, 140, 140)
    semantics = Semantics("window", True, True, True)
    q = right_q if side == "k" else garbage
    k = right_k if side == "q" else garbage
    check_garbage(semantics, q, k, 130, 70)


@pytest.mark.parametrize("semantics", marked(PACKED), ids=str)
def test_random_garbage_leads_nowhere(semantics: Semantics) -> None:
    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(
        st.tuples(*[INT32] * 5), st.tuples(*[INT32] * 5), st.integers(1, 212), st.integers(0, 140)
    )
    def check(q: Any, k: Any, max_q: int, max_k: int) -> None:
        check_garbage(semantics, q, k, max_q, max_k)

    check()


@pytest.mark.gpu
@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@pytest.mark.parametrize("semantics", PACKED, ids=str)
def test_garbage_in_cu_seqlens_leads_nowhere_on_the_gpu(
    semantics: Semantics, garbage: tuple[int, ...]
) -> None:
    run = run_for(semantics, on_gpu=True)
    result = run.raw(
        DeviceArray.from_host,
        cu_seqlens_q=DeviceArray.from_host(np.array(garbage, np.int32)),
        cu_seqlens_k=DeviceArray.from_host(np.array(garbage[::-1], np.int32)),
        max_seqlen_q=130,
        max_seqlen_k=70,
    )
    written = ~np.isnan(result.o.to_host().astype(np.float32)).all(axis=(1, 2))
    np.testing.assert_array_equal(written, reached(garbage, TOTAL, 130))
