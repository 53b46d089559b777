"""Random problems, whatever their sizes: right, without findings, and the same in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from built_kernels import SEMANTICS, built, marked
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashsmith.families import KernelConfig, Semantics
from flashsmith.verify import INPUT_KINDS, TILE_KINDS, prove

MMA_SYNC, WGMMA = "mma_sync", "wgmma"

LIMITS = st.none() | st.integers(0, 250)
# The emulator's time goes with d_head; the larger ones have the grid.
LARGEST_D_HEAD = 128


def property_test(examples: int) -> Callable[..., Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


ARCHS = {MMA_SYNC: 80, WGMMA: 90}


def configs_of(semantics: Semantics, family: str, whole: bool) -> list[KernelConfig]:
    configs = built(semantics, ARCHS[family], family, whole)
    return [config for config in configs if config.d_head <= LARGEST_D_HEAD]


@st.composite
def attentions(draw: st.DrawFn, semantics: Semantics) -> dict[str, Any]:
    """Keywords of forward() that want kernels with these semantics."""
    call: dict[str, Any] = {"causal": False, "window": (None, None), "softcap": 0.0}
    if semantics.mask == "causal":
        call |= {"causal": True, "window": (None, draw(LIMITS))}
    if semantics.mask == "window":
        left, right = draw(LIMITS), draw(LIMITS)
        call |= {"causal": draw(st.booleans()), "window": (left, right)}
        unlimited = left is None and (call["causal"] or right in (None, 0))
        if unlimited:
            call["window"] = (draw(st.integers(0, 250)), right)
    if semantics.softcap:
        call["softcap"] = draw(st.floats(0.5, 100))
    return call


@st.composite
def sizes(draw: st.DrawFn, semantics: Semantics, config: KernelConfig) -> dict[str, Any]:
    """Lengths, heads and d that such a kernel serves."""
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    call: dict[str, Any] = {"heads": heads_k * group, "heads_k": heads_k}
    if semantics.packed:
        lens = draw(st.lists(st.tuples(lengths(130), lengths(170)), min_size=1, max_size=5))
        lens_q, lens_k = zip(*lens, strict=True)
        return call | {"d": draw(head_dimensions(config)), "lens_q": lens_q, "lens_k": lens_k}
    call["batch"] = draw(st.integers(1, 2))
    if not semantics.uneven:
        seq, seq_k = draw(st.integers(1, 3)) * config.B_r, draw(st.integers(1, 4)) * config.B_c
        return call | {"seq": seq, "seq_k": seq_k}
    call |= {
        "d": draw(head_dimensions(config)),
        "seq": draw(lengths(150)),
        "seq_k": draw(lengths(200)),
    }
    assume(not config.fills_tiles(call["seq"], call["seq_k"], call["d"]))
    return call


def lengths(longest: int) -> st.SearchStrategy[int]:
    """Lengths from 0, tiles' own and their neighbours among them."""
    near_tiles = st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
    return st.integers(0, longest) | near_tiles.filter(lambda length: length <= longest)


def head_dimensions(config: KernelConfig) -> st.SearchStrategy[int]:
    return st.integers(1, config.d_head // 8).map(lambda eighth: 8 * eighth)


@st.composite
def problems(
    draw: st.DrawFn, semantics: Semantics, family: str = MMA_SYNC, whole: bool = True
) -> tuple[KernelConfig, dict]:
    """A config and keywords of prove()."""
    config = draw(st.sampled_from(configs_of(semantics, family, whole)))
    call = draw(sizes(semantics, config)) | draw(attentions(semantics))
    call["sinks"] = draw(st.booleans())
    call["seed"] = draw(st.integers(0, 1000))
    call["scale"] = draw(st.none() | st.floats(0.01, 2))
    longest = max(call["lens_k"]) if semantics.packed else call["seq_k"]
    kinds = [k for k in INPUT_KINDS if k not in TILE_KINDS or longest > config.B_c]
    call["inputs"] = draw(st.sampled_from(kinds))
    return config, call


@pytest.mark.parametrize("semantics", marked(SEMANTICS), ids=str)
def test_random_problems_are_right_and_have_no_findings(semantics: Semantics) -> None:
    @property_test(examples=2)
    @given(problems(semantics, whole=False))
    def check(problem: tuple[KernelConfig, dict]) -> None:
        config, call = problem
        verdict = prove(config, **call, checks=True)
        assert verdict.problem.semantics == semantics
        assert verdict.ok, str(verdict)

    check()


@pytest.mark.full
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_many_random_problems_are_right(semantics: Semantics) -> None:
    @settings(property_test(examples=150), derandomize=False)
    @given(problems(semantics))
    def check(problem: tuple[KernelConfig, dict]) -> None:
        config, call = problem
        verdict = prove(config, **call)
        assert verdict.ok, str(verdict)

    check()


@pytest.mark.full
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_random_problems_of_wgmma_are_right_and_have_no_findings(semantics: Semantics) -> None:
    """Whatever the schedule: of tiles over SMs, and of warps."""

    @property_test(examples=20)
    @given(
        problems(semantics, WGMMA),
        st.sampled_from([1, 2, None]),
        st.none() | st.integers(0, 9),
    )
    def check(
        problem: tuple[KernelConfig, dict], sm_count: int | None, schedule_seed: int | None
    ) -> None:
        config, call = problem
        verdict = prove(config, **call, checks=True, sm_count=sm_count, schedule_seed=schedule_seed)
        assert verdict.problem.semantics == semantics
        assert verdict.ok, str(verdict)

    check()
