"""The wgmma family in the emulator: kernels that show its knobs, and shipped ones, with every two
of what semantics are made of. ``-m full`` takes every shipped config with every semantics; the
cover of the grid is in test_grid.py."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import shared_kernels
from built_kernels import SEMANTICS
from plain_run import full_except
from runs import Run, keywords, options_for, run_for
from test_layouts import laid_out

from flashsmith.builder import library_for
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DType,
    Semantics,
    WgmmaForwardKernelConfig,
    device_spec,
    family_named,
    get_kernel_configs,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import run_forward
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.verify import TILE_KINDS, prove
from ptxlab.checks import Bounds, all_checks

WGMMA = "wgmma"

ARCH = 90
# So few that a CTA computes several tiles, and all its rings go round.
FEW_SMS = replace(device_spec(ARCH), sm_count=2)
SHIPPED = get_kernel_configs("hopper")
LENS_K = (140, 20, 150, 0)


@dataclass(frozen=True)
class Kernel:
    """A config compiled for one semantics."""

    config: WgmmaForwardKernelConfig
    semantics: Semantics

    def __str__(self) -> str:
        shape = self.config.short_form().split(":")[0]
        return f"{shape} {self.semantics}"

    @cached_property
    def run(self) -> Run:
        """Its small problem; the kernel is loaded."""
        self.load()
        return run_for(self.semantics, config=self.config)

    @cached_property
    def outputs(self) -> dict[str, np.ndarray]:
        """What comes of it with the fixed schedule."""
        return self.run(arch=FEW_SMS)

    def load(self) -> None:
        """Builds and loads the kernel, if need be."""
        shared_kernels.load([self.config], self.semantics)

    def problem(self) -> dict[str, Any]:
        """Keywords of prove() for a problem with several tiles and K/V blocks a head."""
        call = options_for(self.semantics) | {"heads": 2, "heads_k": 1, "sinks": True}
        B_r = self.config.B_r
        if self.semantics.packed:
            lens_q = (70, 0, max(200, B_r + 8), 30)
            return call | {"lens_q": lens_q, "lens_k": LENS_K, "d": self.config.d_head - 8}
        seq_k = 300 if self.semantics.uneven else 3 * self.config.B_c
        return call | {"seq": max(230, B_r + 38), "seq_k": seq_k}


def shown(dtype: DType, d_head: int, place: int, semantics: str) -> Kernel:
    config = family_named(WGMMA).proof_configs(dtype, d_head)[place]
    assert isinstance(config, WgmmaForwardKernelConfig)
    return Kernel(config, Semantics.parse(semantics))


# Between them all knobs' values, 1 to 4 warpgroups, every mask.
WINDOW = shown(DType.BF16, 128, 0, "window+uneven")
CAUSAL = shown(DType.FP16, 128, 1, "causal+uneven")
PLAIN = shown(DType.BF16, 128, 1, "plain")
PACKED = shown(DType.FP16, 128, 0, "packed+uneven")
FOUR = Kernel(
    parse_kernel_name_into_config(
        "(FP16, 64, 256, 48, 4wg): tma+stages_2+q_buffers_2+regs_24_112+overlap+pingpong_gemm"
        "+dynamic+longest_first+rescale_8+exp2_fma_25"
    ),
    Semantics.parse("causal+packed+uneven"),
)
KERNELS = [
    WINDOW,
    CAUSAL,
    PLAIN,
    PACKED,
    shown(DType.FP16, 64, 1, "softcap+uneven"),
    shown(DType.BF16, 96, 2, "causal+packed+uneven"),
    shown(DType.FP16, 192, 2, "causal"),
    shown(DType.BF16, 256, 1, "window+packed+uneven"),
    shown(DType.FP16, 512, 0, "causal+uneven"),
    shown(DType.BF16, 512, 1, "window+softcap+packed+uneven"),
    FOUR,
]
UNEVEN = [known for known in KERNELS if known.semantics.uneven]
# With these every two of mask, cap, packed and uneven sequences meet.
PAIRED = ("causal+softcap", "window", "window+softcap+packed+uneven")
SHIPPED_KERNELS = [
    Kernel(SHIPPED[len(SHIPPED) * place // len(PAIRED)], Semantics.parse(semantics))
    for place, semantics in enumerate(PAIRED)
]


# Of d 96, 192, 256 and 512. The plain run has another kernel of d 512, and one of FOUR's semantics.
OF_FULL = [KERNELS[5], KERNELS[6], KERNELS[7], KERNELS[9]]
QUICK = [*SHIPPED_KERNELS, *(known for known in KERNELS if known not in OF_FULL)]
for _known in QUICK:
    shared_kernels.want([_known.config], _known.semantics)


@pytest.mark.parametrize("known", full_except([*SHIPPED_KERNELS, *KERNELS], *QUICK), ids=str)
def test_outputs_are_right_and_nothing_is_found(known: Kernel) -> None:
    known.load()
    verdict = prove(known.config, **known.problem(), sm_count=2, checks=True)
    assert verdict.problem.semantics == known.semantics
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (None, 2, 3, 4))]
)
@pytest.mark.parametrize("known", full_except(KERNELS, WINDOW, PLAIN, FOUR), ids=str)
def test_every_schedule_gives_the_same_bits(known: Kernel, seed: int | None) -> None:
    """However warps take turns and whenever data arrive; and over again."""
    result = known.run.raw(arch=FEW_SMS, schedule_seed=seed, observers=all_checks())
    assert result.emulation is not None
    assert result.emulation.findings == []
    for name, array in known.outputs.items():
        assert getattr(result, name).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("value", "known"),
    [
        pytest.param(value, known, marks=[pytest.mark.full] * (value == math.inf or number > 4))
        for number, known in enumerate(UNEVEN)
        for value in (math.nan, math.inf)
    ],
    ids=str,
)
def test_neighbours_do_not_leak(known: Kernel, value: float) -> None:
    """0 x NaN is NaN: rows of V past a sequence's end must not be read at all."""
    sequence = 2
    assert np.isfinite(known.outputs["o"].astype(np.float32)).all()
    filled = known.run.filled(sequence, value)(arch=FEW_SMS)
    assert known.run.part(filled, sequence) == known.run.part(known.outputs, sequence)


@pytest.mark.parametrize("known", [WINDOW, PACKED, PLAIN], ids=str)
@pytest.mark.parametrize("backwards", [False, True])
def test_any_strides_give_the_same_bits(known: Kernel, backwards: bool) -> None:
    """With NaN between the rows, heads and sequences, and no two tensors with the same strides."""
    run = known.run
    arrays = {name: getattr(run.inputs, name) for name in "qkv"}
    arrays["o"] = np.full_like(run.inputs.q, math.nan)
    order = tuple(range(run.inputs.q.ndim - 1))
    order = order[::-1] if backwards else order
    tensors = {
        name: laid_out(array, order, (2, 1 + more, 3 - more % 2, 1 + more))
        for more, (name, array) in enumerate(arrays.items())
    }
    for axis in range(len(order)):
        assert len({array.strides[axis] for array in tensors.values()}) == 4
    bounds = Bounds()
    # Asked for the maxima too, or a lazy kernel would rescale less often than before.
    call = keywords(run) | {"return_lse": True, "return_row_max": True}
    result = run_forward(run.config, *tensors.values(), **call, arch=FEW_SMS, observers=[bounds])
    assert bounds.findings == []
    for name, array in known.outputs.items():
        assert getattr(result, name).tobytes() == array.tobytes()


@pytest.mark.parametrize("known", [WINDOW, PACKED], ids=str)
@pytest.mark.parametrize("rows", [0, 1])
def test_hardly_any_keys(known: Kernel, rows: int) -> None:
    """A tensor without rows has no strides and no address that a map could have."""
    known.load()
    packed = known.semantics.packed
    call = {"lens_q": (70, 1), "lens_k": (rows, 0)} if packed else {"seq": 70, "seq_k": rows}
    options = options_for(known.semantics) | {"heads": 2, "sinks": True}
    verdict = prove(known.config, **call, **options, checks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("inputs", ["large_scores", *TILE_KINDS])
@pytest.mark.parametrize("known", [PLAIN, CAUSAL], ids=str)
def test_lazy_rescaling(known: Kernel, inputs: str) -> None:
    """Maxima that outgrow the threshold and such that do not; the row maxima are not requested."""
    assert known.config.rescale_threshold
    known.load()
    verdict = prove(
        known.config, **known.problem(), inputs=inputs, row_max=False, checks=True, sm_count=2
    )
    assert verdict.ok, str(verdict)


def test_a_nan_score_is_passed_on() -> None:
    """Whichever way its exponential is computed: each sequence has a NaN in another key, between
    them in all that a thread looks at."""
    config = FOUR.config
    assert config.exp2_fma_share
    FOUR.load()
    columns = [8 * pair + key for pair in range(config.B_c // 8) for key in range(2)]
    rng = np.random.default_rng(2)
    q, k, v = (
        rng.standard_normal((len(columns) * rows, 1, config.d_head)).astype(np.float16)
        for rows in (1, config.B_c, config.B_c)
    )
    for sequence, column in enumerate(columns):
        k[sequence * config.B_c + column] = math.nan
    ends = np.arange(len(columns) + 1, dtype=np.int32)
    result = run_forward(
        config, q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends * config.B_c, causal=True,
        return_lse=True, emulate=True, arch=FEW_SMS,
    )  # fmt: skip
    assert np.isnan(result.o).all()
    assert np.isnan(result.lse).all()


BROADCAST = {
    "head": lambda array: np.broadcast_to(array[..., :1, :], array.shape),
    "row": lambda array: np.broadcast_to(array[..., :1, :, :], array.shape),
}


@pytest.mark.parametrize("known", [WINDOW, PACKED], ids=str)
@pytest.mark.parametrize("dimension", BROADCAST)
def test_steps_that_tma_cannot_take_are_refused(known: Kernel, dimension: str) -> None:
    tensors = {name: np.array(getattr(known.run.inputs, name)) for name in "qkv"}
    tensors["v"] = BROADCAST[dimension](tensors["v"])
    strides = re.escape(str(tuple(step // 2 for step in tensors["v"].strides)))
    with pytest.raises(ArgumentError, match=f"^v: strides {strides} .* takes positive strides"):
        run_forward(known.config, **tensors, **keywords(known.run))


@pytest.mark.full
# One semantics after the other: all kernels of one are a library.
@pytest.mark.parametrize("config", SHIPPED, ids=str)
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_every_shipped_config_with_every_semantics(
    config: WgmmaForwardKernelConfig, semantics: Semantics
) -> None:
    known = Kernel(config, semantics)
    loaded_kernels.add(library_for(SHIPPED, arch=ARCH, semantics=semantics))
    for seed, row_max in ((None, True), (3, False)):
        verdict = prove(
            config,
            **known.problem(),
            sm_count=2,
            checks=True,
            schedule_seed=seed,
            row_max=row_max,
        )
        assert verdict.ok, str(verdict)
