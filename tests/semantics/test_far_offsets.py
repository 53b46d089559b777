"""Offsets beyond 2^31 elements: the same bits as close together, whichever stride leads there.

On the host the distance is address space only; on a GPU it is memory.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
from built_kernels import built
from runs import keywords, run_for

from flashsmith.families import Semantics
from flashsmith.runtime import query_gpu, run_forward
from ptxlab.checks import Bounds

FAR = 2**31  # elements
_NORESERVE = 0x4000  # Linux: no promise of memory behind what is never touched
KINDS = [Semantics("causal", uneven=True), Semantics("window", packed=True, uneven=True)]
TENSORS = ["q", "k", "v", "o"]


def far_strides(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], int]:
    """Strides (elements) of ``shape`` whose last step along ``axis`` ends beyond FAR, and how many
    elements that spans; the other dimensions are dense."""
    strides = [0] * len(shape)
    step = 1
    for place in reversed([i for i in range(len(shape)) if i != axis]):
        strides[place], step = step, step * shape[place]
    stride = max(step, FAR // (shape[axis] - 1) + 8) // 8 * 8
    strides[axis] = stride
    assert (shape[axis] - 1) * stride >= FAR
    return tuple(strides), (shape[axis] - 1) * stride + step


def far_on_host(array: np.ndarray, axis: int) -> np.ndarray:
    """A copy of ``array`` with FAR elements between its ends."""
    strides, elements = far_strides(array.shape, axis)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    room = np.frombuffer(mmap.mmap(-1, elements * array.itemsize, flags), array.dtype)
    steps = tuple(stride * array.itemsize for stride in strides)
    far = np.lib.stride_tricks.as_strided(room, array.shape, steps)
    far[:] = array
    return far


def axis_of(dimension: str, packed: bool) -> int:
    return {"batch": 0, "seq": 1, "head": 2}[dimension] - packed


def dimensions(semantics: Semantics) -> list[str]:
    return ["seq", "head"] if semantics.packed else ["batch", "seq", "head"]


CASES = [
    pytest.param(semantics, dimension, tensor, id=f"{semantics}-{dimension}-{tensor}")
    for semantics in KINDS
    for dimension in dimensions(semantics)
    for tensor in TENSORS
]


@pytest.mark.parametrize(("semantics", "dimension", "tensor"), CASES)
def test_far_strides_give_the_same_bits(semantics: Semantics, dimension: str, tensor: str) -> None:
    run = run_for(semantics)
    expected = run()["o"]
    axis = axis_of(dimension, semantics.packed)
    tensors = {name: np.array(getattr(run.inputs, name)) for name in "qkv"}
    tensors["o"] = np.full_like(tensors["q"], math.nan)
    tensors[tensor] = far_on_host(tensors[tensor], axis)
    bounds = Bounds()
    result = run_forward(run.config, *tensors.values(), **keywords(run), observers=[bounds])
    assert result.o is tensors["o"]
    assert result.o.tobytes() == expected.tobytes()
    assert bounds.findings == []


# ---- on a GPU ----


def to_gpu(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array.copy()).cuda()


def far_on_gpu(tensor: Any, axis: int) -> Any:
    import torch

    strides, elements = far_strides(tuple(tensor.shape), axis)
    room = torch.empty(elements, dtype=tensor.dtype, device="cuda")
    return torch.as_strided(room, tensor.shape, strides).copy_(tensor)


@pytest.fixture
def empty_gpu() -> Any:
    """Gives PyTorch's cached memory back, before for this test and after it for the others."""
    import torch

    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.usefixtures("empty_gpu")
@pytest.mark.parametrize(("semantics", "dimension", "tensor"), CASES)
def test_far_strides_give_the_same_bits_on_the_gpu(
    semantics: Semantics, dimension: str, tensor: str
) -> None:
    import torch

    run = run_for(semantics, on_gpu=True)
    axis = axis_of(dimension, semantics.packed)
    tensors = {name: to_gpu(getattr(run.inputs, name)) for name in "qkv"}
    tensors["o"] = torch.full_like(tensors["q"], math.nan)
    near = run_forward(run.config, *tensors.values(), **keywords(run, to_gpu)).o.clone()
    tensors["o"].fill_(math.nan)
    tensors[tensor] = far_on_gpu(tensors[tensor], axis)
    result = run_forward(run.config, *tensors.values(), **keywords(run, to_gpu)).o
    assert torch.equal(result, near)


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.usefixtures("empty_gpu")
def test_more_than_two_to_the_31_elements_of_keys_on_the_gpu() -> None:
    """Dense K and V of 16.8 million rows; a window looks at the last of them."""
    import torch

    semantics = Semantics("window", uneven=True)
    config = next(c for c in built(semantics, query_gpu(0).arch) if c.d_head <= 128)
    d, seen = config.d_head, 100
    rows = FAR // d + seen
    dtype = torch.float16 if config.dtype.name == "FP16" else torch.bfloat16
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(count: int) -> Any:
        return torch.randn(1, count, 1, d, generator=generator, device="cuda").to(dtype)

    q, k, v = draw(40), draw(seen), draw(seen)
    far = [torch.empty(1, rows, 1, d, dtype=dtype, device="cuda") for _ in range(2)]
    for room, tensor in zip(far, (k, v), strict=True):
        assert room.numel() > FAR
        room[:, -seen:] = tensor
    call = {"window": (50, 0), "return_lse": True}
    near = run_forward(config, q, k, v, **call)
    result = run_forward(config, q, *far, **call)
    # Tiles begin at other keys there: sums are taken in another order.
    torch.testing.assert_close(result.o, near.o, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(result.lse, near.lse, rtol=1e-5, atol=1e-5)
