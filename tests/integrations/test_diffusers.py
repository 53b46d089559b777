"""diffusers' attention dispatcher on flashsmith's kernels: its backends of PyTorch call PyTorch's
function, which sdpa() replaces."""

from __future__ import annotations

from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers: it is not installed")
pytestmark = pytest.mark.torch

import flashsmith  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning, fallback_count  # noqa: E402
from flashsmith.runtime import count_launches  # noqa: E402

shared_kernels.want_chosen("b1 s20 h2 d32 fp16 uneven")


@pytest.fixture
def model() -> Any:
    """Two layers, of 12 patches and 8 tokens of text together."""
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[8, 12, 12],
    ).half()


def run(model: Any) -> Any:
    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()

    with torch.no_grad():
        return model(
            hidden_states=drawn(1, 12, 4),
            encoder_hidden_states=drawn(1, 8, 32),
            pooled_projections=drawn(1, 32),
            timestep=torch.tensor([1.0]).half(),
            img_ids=drawn(12, 3),
            txt_ids=drawn(8, 3),
        ).sample


@pytest.fixture
def expected(model: Any) -> Any:
    return run(model)


@pytest.fixture(autouse=True)
def _sdpa_for_pytorchs(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_EMULATE", "1")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", flashsmith.sdpa)


@pytest.mark.parametrize("backend", ["native", "_native_flash"])
def test_every_layer_runs_on_the_kernels(model: Any, expected: Any, backend: str) -> None:
    model.set_attention_backend(backend)
    before = fallback_count()
    with count_launches() as launches:
        output = run(model)
    assert (launches.total, fallback_count() - before) == (2, 0)
    torch.testing.assert_close(output, expected, atol=4e-3, rtol=4e-3)


def test_a_backend_that_names_another_kernel_of_pytorchs_keeps_it(
    model: Any, expected: Any
) -> None:
    model.set_attention_backend("_native_math")
    with pytest.warns(FallbackWarning, match="sdpa_kernel"), count_launches() as launches:
        output = run(model)
    assert launches.total == 0
    torch.testing.assert_close(output, expected, atol=4e-3, rtol=4e-3)
