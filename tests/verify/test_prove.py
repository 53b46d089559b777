"""Real kernels, proven in the emulator: right ones pass, broken ones fail, every hard input too."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import shared_kernels
from shared_kernels import with_every_value

from flashsmith.errors import ArgumentError
from flashsmith.families import (
    FlashForwardKernelConfig,
    Problem,
    Semantics,
    get_cover_configs,
    get_kernel_configs,
    get_kernel_progression_configs,
    is_legal,
)
from flashsmith.verify import INPUT_KINDS, TILE_KINDS, prove
from ptxlab.interface import Finding, Observer

PROGRESSION = get_kernel_progression_configs()
BEST = PROGRESSION[-2]
EVERYTHING = Semantics("window", softcap=True, packed=True, uneven=True)
shared_kernels.want(PROGRESSION)
for _semantics in (Semantics(uneven=True), Semantics(packed=True, uneven=True), EVERYTHING):
    shared_kernels.want([BEST], _semantics)


def built_together(configs: list[FlashForwardKernelConfig]) -> list[FlashForwardKernelConfig]:
    """The same configs, their kernels loaded from one library: far quicker than one by one."""
    shared_kernels.load(configs)
    return configs


@pytest.fixture(scope="module")
def progression() -> list[FlashForwardKernelConfig]:
    return built_together(PROGRESSION)


def assert_right(cfg: FlashForwardKernelConfig, **problem: Any) -> None:
    verdict = prove(cfg, **problem)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_the_progression_is_right_on_every_kind_of_input(
    progression: list[FlashForwardKernelConfig], kind: str
) -> None:
    for cfg in progression:
        assert_right(cfg, seq=128, inputs=kind)


def test_several_batches_heads_and_unequal_lengths(
    progression: list[FlashForwardKernelConfig],
) -> None:
    for cfg in progression:
        assert_right(cfg, seq=128, seq_k=192, batch=2, heads=3, scale=0.2, seed=7)


def test_everything_at_once() -> None:
    verdict = prove(
        BEST, heads=4, heads_k=2, d=40, causal=True, window=(30, 5), softcap=20.0, sinks=True,
        lens_q=(70, 0, 3), lens_k=(90, 5, 0), checks=True,
    )  # fmt: skip
    assert verdict.ok, str(verdict)
    assert verdict.row_max_error is not None
    problem = verdict.problem
    assert str(problem.semantics) == "window+softcap+packed+uneven"
    assert (problem.batch, problem.seq_q, problem.seq_k, problem.d) == (3, 70, 90, 40)
    assert (problem.heads_q, problem.heads_k) == (4, 2)
    assert "causal, window (30, 5), softcap 20, lens 70+0+3:90+5+0" in str(verdict)


def test_few_outputs_are_repeated_over_grouped_heads() -> None:
    problem = prove(BEST, seq=1, seq_k=5, heads=4, heads_k=2, d=8).problem
    assert (problem.heads_q, problem.heads_k) == (512, 256)


@pytest.mark.parametrize("lengths", [(0, 64), (64, 0), (0, 0)])
def test_empty_problems_are_right(lengths: tuple[int, int]) -> None:
    verdict = prove(BEST, seq=lengths[0], seq_k=lengths[1], checks=True)
    assert verdict.ok, str(verdict)
    assert (verdict.outputs == 0) is (lengths[0] == 0)


def test_a_verdict_contains_what_was_run(progression: list[FlashForwardKernelConfig]) -> None:
    verdict = prove(BEST, seq=64, checks=True)
    assert verdict.ok
    assert (verdict.backend, verdict.arch, verdict.inputs) == ("emulator", 80, "random")
    assert (verdict.problem.seq_q, verdict.problem.heads_q) == (64, 1)
    assert verdict.findings == ()
    assert verdict.emulation is not None
    assert 0 < verdict.max_error < verdict.bound
    assert verdict.lse_error is not None
    assert "right" in str(verdict)


class TestBrokenKernels:
    """What a broken kernel would hand back, injected between the run and the judgement."""

    @pytest.fixture
    def breaking(self, monkeypatch: pytest.MonkeyPatch, progression: list[Any]) -> Any:
        module = importlib.import_module("flashsmith.verify.forward_reference")
        run = module.run_forward

        def install(damage: Any) -> None:
            def broken(*args: Any, **options: Any) -> Any:
                result = run(*args, **options)
                damage(result.o, result.lse)
                return result

            monkeypatch.setattr(module, "run_forward", broken)

        return install

    @staticmethod
    def failing(**problem: Any) -> Any:
        verdict = prove(BEST, heads=2, **{"seq": 128} | problem)
        assert not verdict.ok
        assert "WRONG" in str(verdict)
        return verdict

    def test_a_wrong_row(self, breaking: Any) -> None:
        def damage(o: np.ndarray, lse: np.ndarray) -> None:
            o[0, 100, 1] = o[0, 101, 1]

        breaking(damage)
        where = self.failing().first_mismatch
        assert (where.row, where.head, where.tile, where.warp) == (100, 1, 1, 2)

    def test_a_scaled_output(self, breaking: Any) -> None:
        def damage(o: np.ndarray, lse: np.ndarray) -> None:
            o *= np.float16(1.02)

        breaking(damage)
        self.failing()

    def test_an_element_never_written(self, breaking: Any) -> None:
        def damage(o: np.ndarray, lse: np.ndarray) -> None:
            o[0, 127, 1, 127] = math.nan

        breaking(damage)
        where = self.failing().first_mismatch
        assert (where.row, where.column) == (127, 127)

    def test_swapped_heads(self, breaking: Any) -> None:
        def damage(o: np.ndarray, lse: np.ndarray) -> None:
            o[:] = o[:, :, ::-1].copy()

        breaking(damage)
        self.failing()

    def test_swapped_heads_on_constant_inputs(self, breaking: Any) -> None:
        """Constants differ between heads, or this would go unseen."""

        def damage(o: np.ndarray, lse: np.ndarray) -> None:
            o[:] = o[:, :, ::-1].copy()

        breaking(damage)
        self.failing(inputs="constant", seed=1)

    def test_a_wrong_row_of_a_packed_sequence(self, breaking: Any) -> None:
        def damage(o: np.ndarray, lse: np.ndarray) -> None:
            o[100, 1] = o[101, 1]

        breaking(damage)
        where = self.failing(lens_q=(60, 0, 68)).first_mismatch
        assert (where.batch, where.row, where.packed_row, where.head) == (2, 40, 100, 1)
        assert (where.tile, where.warp) == (0, 2)

    def test_a_wrong_lse(self, breaking: Any) -> None:
        def damage(o: np.ndarray, lse: np.ndarray) -> None:
            lse[0, 1, 5] *= np.float32(1.01)

        breaking(damage)
        assert self.failing().mismatches == 0

    def test_a_wrong_scale(self, monkeypatch: pytest.MonkeyPatch, progression: list[Any]) -> None:
        module = importlib.import_module("flashsmith.verify.forward_reference")
        run = module.run_forward
        monkeypatch.setattr(
            module,
            "run_forward",
            lambda *args, scale, **options: run(*args, scale=1.1 * scale, **options),
        )
        self.failing()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ArgumentError, match="backend='cuda': allowed are emulator, gpu"):
        prove(BEST, backend="cuda")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"heads": 0}, "heads_q=0"),
        ({"seq": -1}, "seq_q=-1"),
        ({"scale": -1.0}, r"scale=-1\.0"),
        ({"inputs": "low_first_tile", "seq_k": 64}, "at least two key tiles"),
    ],
)
def test_problems_that_cannot_be_proven_are_refused(problem: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        prove(BEST, **problem)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ArgumentError, match="seed=-1: give a whole number, at least 0"):
        prove(BEST, seed=-1)


def test_a_finding_fails_a_verdict_whose_numbers_are_right(
    progression: list[FlashForwardKernelConfig],
) -> None:
    class Complaining(Observer):
        def end(self) -> None:
            self.findings.append(Finding("race", "two warps", "softmax.cuh:12", 345))

    verdict = prove(BEST, observers=[Complaining()])
    assert verdict.reasons == ()
    assert not verdict.ok
    assert "softmax.cuh:12: race: two warps" in str(verdict)


COVER = get_cover_configs()


FEW = with_every_value(COVER)
shared_kernels.want(FEW)


@pytest.mark.parametrize("cfg", FEW, ids=str)
def test_every_value_of_every_knob_is_right(cfg: FlashForwardKernelConfig) -> None:
    assert_right(cfg, seq=cfg.B_r, seq_k=3 * cfg.B_c)


@pytest.fixture(scope="module")
def cover() -> None:
    built_together(COVER)


@pytest.mark.full
@pytest.mark.usefixtures("cover")
@pytest.mark.parametrize("cfg", COVER, ids=str)
def test_every_pair_of_values_is_right(cfg: FlashForwardKernelConfig) -> None:
    assert_right(cfg, seq=2 * cfg.B_r, seq_k=4 * cfg.B_c, heads=1)


def d_head_64(configs: list[FlashForwardKernelConfig]) -> list[FlashForwardKernelConfig]:
    return [cfg for cfg in (replace(cfg, d_head=64) for cfg in configs) if is_legal(cfg)]


@pytest.mark.full
@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("name", ["tune", "tune, d_head 64", "prog-all", "cover"])
def test_every_config_is_right(name: str, kind: str) -> None:
    key, _, small = name.partition(",")
    configs = get_kernel_configs(key)
    for cfg in built_together(d_head_64(configs) if small else configs):
        for seq in (128, 256):
            if kind not in TILE_KINDS or seq > cfg.B_c:
                assert_right(cfg, seq=seq, inputs=kind)


def test_a_problem_or_what_describes_one() -> None:
    problem = Problem.parse("b1 s64 h1 d128 fp16 causal")
    described = prove(BEST, seq=64, causal=True)
    given = prove(BEST, problem)
    assert described.problem == given.problem
    assert (described.max_error, described.bound) == (given.max_error, given.bound)
    with pytest.raises(ArgumentError, match=r"^seq: problem='b1 s64 .*leave it out"):
        prove(BEST, problem, seq=64)
    with pytest.raises(TypeError, match="casual"):
        prove(BEST, seq=64, casual=True)
