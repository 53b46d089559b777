"""With installed kernels that serve in place of the chosen ones, nothing is built, and later calls
skip the checks. No GPU: host tensors stand for a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import half, refuse_checks  # noqa: E402
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402

from flashsmith import attention, attention_with_cache  # noqa: E402
from flashsmith.chooser.package_contents import package_contents  # noqa: E402
from flashsmith.runtime import (  # noqa: E402
    backward_pass,
    decode_pass,
    fallback_kernels,
    forward_pass,
    kernel_choice,
)

pytestmark = pytest.mark.torch
KINDS = "causal", "backward causal", "decode causal"


@pytest.fixture(scope="module")
def kernels() -> list[tuple[Any, Any]]:
    """The causal kernels of d 64 that a package for sm_90 holds."""
    found = package_contents(90, d_heads=(64,), kinds=KINDS).kernels
    return [(cfg, semantics) for semantics, configs in found.items() for cfg in configs]


@pytest.fixture
def gpu(kernels: list[tuple[Any, Any]]) -> Iterator[PretendedGpu]:
    """A GPU with these kernels; each other kernel fails the test, since it would be built."""
    keys = {(cfg, 90, semantics) for cfg, semantics in kernels}
    # The inner context ends first, because both replace the loaded kernels.
    with pretended_gpu() as made, pytest.MonkeyPatch.context() as patch:

        def get(cfg: Any, arch: int, semantics: Any, may_build: Callable[[], bool]) -> Any:
            assert (cfg, arch, semantics) in keys, f"{cfg} [{semantics}] would be built"
            return made.kernel(cfg, arch, semantics, may_build)

        loaded = SimpleNamespace(get=get, is_found=lambda key: key in keys)
        for module in (kernel_choice, forward_pass):
            patch.setattr(module, "loaded_kernels", loaded)
        fresh = fallback_kernels.FallbackKernels()
        for module in (kernel_choice, forward_pass, backward_pass):
            patch.setattr(module, "fallback_kernels", fresh)
        for module in (kernel_choice, fallback_kernels):
            patch.setattr(module, "installed_package", lambda arch: object())
        patch.setattr(fallback_kernels, "built_kernels", lambda *, arch: iter(kernels))
        yield made


def three(length: int, dtype: Any, needs_grad: bool = False) -> tuple[Any, ...]:
    return tuple(half(2, length, 4, 64).to(dtype).requires_grad_(needs_grad) for _ in range(3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_second_call_is_not_checked(
    dtype: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = three(1024, getattr(torch, dtype))
    attention(q, k, v, causal=True)
    refuse_checks(monkeypatch, forward_pass)
    attention(q, k, v, causal=True)
    first, second = gpu.launches
    assert (first.config, first.semantics) == (second.config, second.semantics)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_neither_is_the_second_call_with_gradients(
    dtype: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = three(1024, getattr(torch, dtype), needs_grad=True)

    def step() -> None:
        o = attention(q, k, v, causal=True)
        torch.autograd.grad(o, (q, k, v), torch.zeros_like(o))

    step()
    launched = len(gpu.launches)
    refuse_checks(monkeypatch, forward_pass, backward_pass)
    step()
    assert len(gpu.launches) == 2 * launched


@pytest.mark.parametrize("split", ["invariant", "free"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_over_a_cache_nothing_is_built(
    dtype: str, split: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the package has the kernel for whole tiles, nor where it has only the one for
    any lengths."""
    q, cache = (half(2, n, 4, 64).to(getattr(torch, dtype)) for n in (1, 2048))
    lens = torch.full((2,), 1000, dtype=torch.int32)
    for _ in range(2):
        attention_with_cache(q, cache, cache, cache_lens=lens, split=split)
        refuse_checks(monkeypatch, decode_pass)
    assert len({(it.config, it.semantics) for it in gpu.launches}) == 1
