"""Kernels of both families through the same calls: results, choices, prepared calls, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import shared_kernels

from flashsmith import attention
from flashsmith.errors import ArgumentError, IllegalConfigError, KernelNotBuiltError
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    Problem,
    Semantics,
    device_spec,
)
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime import driver, forward, libraries, plan_forward, run_forward
from flashsmith.runtime.libraries import LoadedKernels, nearest_built
from flashsmith.verify import InputSpec, compare, compute_references, make_inputs
from flashsmith.verify.proof_inputs import default_scale

HOPPER = parse(
    "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+rescale_8"
)
MMA_SYNC = parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles")
H200 = device_spec("H200")
shared_kernels.want([HOPPER, MMA_SYNC])
shared_kernels.want([MMA_SYNC], arch=90)
D = 128


def drawn(seq_q: int = 200, seq_k: int = 256, heads: int = 2) -> list[np.ndarray]:
    spec = InputSpec("random", HOPPER.dtype, 1, seq_q, seq_k, heads, D, default_scale(D))
    inputs = make_inputs(spec)
    return [inputs.q, inputs.k, inputs.v]


def test_a_config_of_either_family_computes_the_same_on_the_host() -> None:
    """Each on the first architecture that it runs on: by default."""
    qkv = drawn(seq_q=192)
    references = compute_references(*qkv, default_scale(D))
    for cfg in (HOPPER, MMA_SYNC):
        o, lse = forward(cfg, *qkv, return_lse=True)
        checked = compare(cfg, o, lse, references)
        assert checked.ok, (cfg, checked.reasons)
        assert np.array_equal(attention(*qkv, config=cfg), o)


def test_plans_of_both_for_one_device() -> None:
    problem = Problem.parse("b1 s256 h2 d128 fp16")
    hopper, mma_sync = (plan_forward(cfg, problem, H200) for cfg in (HOPPER, MMA_SYNC))
    assert (len(hopper.tensor_maps), hopper.workspace_bytes) == (4, 4)
    assert (len(mma_sync.tensor_maps), mma_sync.workspace_bytes) == (0, 0)
    assert hopper.block == (512, 1, 1)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 89, 100])
def test_another_architecture_is_refused_by_name(arch: int) -> None:
    name = device_spec(arch).name
    with pytest.raises(IllegalConfigError) as caught:
        run_forward(HOPPER, *drawn(), arch=arch)
    message = str(caught.value)
    assert f"config {HOPPER} is illegal:" in message
    assert f"needs a GPU of compute capability 9.0: only sm_90a has wgmma (here {name}" in message
    assert f"no change of its knobs makes it legal on {name}; the mma_sync family has" in message
    with pytest.raises(IllegalConfigError, match=f"makes it legal on {name}"):
        plan_forward(HOPPER, Problem.parse("b1 s256 h2 d128 fp16"), device_spec(arch))


def test_tensors_that_tma_cannot_copy_are_refused_with_the_reason() -> None:
    q, k, v = drawn()
    broadcast = np.broadcast_to(k[:, :, :1], k.shape)
    with pytest.raises(ArgumentError) as caught:
        forward(HOPPER, q, broadcast, v)
    message = str(caught.value)
    assert message.startswith("k: strides (")
    assert "TMA, which takes positive strides" in message
    assert "make it contiguous, or use a FlashForwardKernelConfig" in message
    assert forward(MMA_SYNC, q[:, :192], broadcast, v).shape == (1, 192, 2, D)


@pytest.mark.parametrize("call", [forward, lambda cfg, *qkv: attention(*qkv, config=cfg)])
def test_what_no_kernel_of_the_config_serves(call: Any) -> None:
    q, k, v = drawn()
    with pytest.raises(ArgumentError, match="q: dtype FP16; the config's kernel is for BF16"):
        call(replace(HOPPER, dtype=DType.BF16), q, k, v)
    with pytest.raises(ArgumentError, match="q: d_head 128; the config's kernel is for up to 64"):
        call(replace(HOPPER, d_head=64), q, k, v)
    for wrong in (str(HOPPER), "hopper", HOPPER.to_ints()):
        with pytest.raises(ArgumentError, match="FlashForwardKernelConfig or a WgmmaForwardKer"):
            call(wrong, q, k, v)


# --- what is built -------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["jit", "capture"])
def test_a_miss_names_the_config_its_own_familys_neighbours_and_the_command(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = replace(HOPPER, q_buffers=1), replace(HOPPER, B_c=64, kv_stages=3, q_buffers=1)
    monkeypatch.setattr(libraries, "built_configs", lambda **kwargs: (MMA_SYNC, far, near))
    monkeypatch.setattr(libraries, "find_library", lambda *args, **kwargs: None)
    monkeypatch.setenv("FLASHSMITH_JIT", "0" if why == "jit" else "1")
    with pytest.raises(KernelNotBuiltError) as caught:
        LoadedKernels().get(HOPPER, 90, Semantics("causal", uneven=True), lambda: why == "jit")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"config {HOPPER} [causal+uneven] is not built for sm_90, and ")
    assert [line.strip() for line in lines[2:4]] == [str(near), str(far)]
    assert str(MMA_SYNC) not in str(caught.value)
    assert lines[-1] == (
        f'Build it with: flashsmith build --kernels "{HOPPER}" --arch 90 --semantics causal+uneven'
    )
    assert nearest_built(MMA_SYNC, 90) == [MMA_SYNC]


# --- on a GPU that is not there ------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


def tensors(seq: int = 256) -> list[Any]:
    return [torch.zeros(2, seq, 4, D, dtype=torch.float16) for _ in range(3)]


@pytest.mark.torch
def test_cached_calls_of_both_families_are_distinguished(gpu: PretendedGpu) -> None:
    places = []
    for _ in range(3):
        for cfg in (HOPPER, MMA_SYNC):
            qkv = tensors()
            o = attention(*qkv, config=cfg)
            places.append((cfg, *(tensor.data_ptr() for tensor in (*qkv, o))))
            # Alive until the end, so that no address is used twice.
            gpu.launches[-1].__dict__["alive"] = (*qkv, o)
    launched = [(launch.config, *launch.addresses[:4]) for launch in gpu.launches]
    assert launched == places
    assert len(gpu.kernels) == 2


@pytest.mark.torch
def test_a_choice_between_families_is_followed_and_forgotten(gpu: PretendedGpu) -> None:
    from flashsmith.runtime import forget_cached_launches, run_call
    from flashsmith.semantics.signature import ForwardOptions

    turn: list[Any] = [HOPPER]

    def choose(problem: Problem, device: Any, *_: Any) -> Any:
        assert device is H200
        return turn[0]

    def call() -> None:
        run_call(choose, (*tensors(), None), ForwardOptions(), False, "out")

    for cfg in (HOPPER, MMA_SYNC):
        turn[0] = cfg
        forget_cached_launches()
        call()
        call()
    assert [launch.config for launch in gpu.launches] == [HOPPER] * 2 + [MMA_SYNC] * 2


@pytest.mark.torch
@pytest.mark.parametrize("name", ["A100", "B200"])
def test_a_gpu_of_another_architecture_is_refused_before_anything_is_launched(
    gpu: PretendedGpu, name: str
) -> None:
    with mock.patch.object(driver, "query_gpu", return_value=device_spec(name)):
        for _ in range(2):
            with pytest.raises(IllegalConfigError, match=f"makes it legal on {name}"):
                attention(*tensors(), config=HOPPER)
        attention(*tensors(), config=MMA_SYNC)
    assert [launch.config for launch in gpu.launches] == [MMA_SYNC]


@pytest.mark.torch
def test_every_option_reaches_a_kernel_for_it(gpu: PretendedGpu) -> None:
    qkv = tensors()
    offsets = torch.tensor([0, 100, 512], dtype=torch.int32)
    packed = [tensor.flatten(0, 1) for tensor in qkv]
    limits: dict[str, Any] = {"max_seqlen_q": 412, "max_seqlen_k": 412}
    calls: list[tuple[list[Any], dict[str, Any], Semantics]] = [
        (qkv, {}, Semantics()),
        (qkv, {"causal": True, "return_lse": True}, Semantics("causal")),
        (qkv, {"window": (30, 5)}, Semantics("window")),
        (qkv, {"softcap": 9.0, "sinks": torch.zeros(4)}, Semantics(softcap=True)),
        (tensors(250), {}, Semantics(uneven=True)),
        (
            packed,
            {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **limits},
            Semantics(packed=True, uneven=True),
        ),
    ]
    for arguments, options, semantics in calls:
        attention(*arguments, config=HOPPER, **options)
        assert gpu.launches[-1].semantics == semantics
        assert isinstance(gpu.launches[-1].config, type(HOPPER))
    assert not isinstance(HOPPER, FlashForwardKernelConfig)
