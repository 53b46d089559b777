"""torch.onnx.export of models that call flashsmith: PyTorch's function is exported in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
onnx = pytest.importorskip("onnx", reason="needs onnx: it is not installed")
pytest.importorskip("onnxscript", reason="needs onnxscript: it is not installed")
pytestmark = pytest.mark.torch

from onnx.reference import ReferenceEvaluator  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning  # noqa: E402
from flashsmith.integrations.sdpa import pytorch_sdpa  # noqa: E402
from flashsmith.runtime import count_launches  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, q: Any) -> Any:
        return 2 * self.function(q, q, q, **self.options)


def exported(model: Any, *inputs: Any) -> Any:
    return torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False)


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()


def test_sdpa_is_pytorchs() -> None:
    q = drawn(1, 2, 8, 64)
    model = Model(flashsmith.sdpa, is_causal=True, emulate=True)
    with pytest.warns(FallbackWarning, match="query: exported by torch.onnx.export"):
        program = exported(model, q)
    evaluator = ReferenceEvaluator(program.model_proto)
    (output,) = evaluator.run(None, {evaluator.input_names[0]: q.numpy()})
    expected = 2 * pytorch_sdpa(q, q, q, is_causal=True)
    np.testing.assert_allclose(output, expected.numpy(), atol=4e-3)
    # Elsewhere it is still ours.
    with count_launches() as launches:
        model(q)
    assert launches.total == 1


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (flashsmith.attention, {}),
        (flashsmith.flash_attn_func, {}),
        (flashsmith.sdpa, {"strict": True, "emulate": True}),
    ],
)
def test_what_has_no_fallback_is_refused(function: Any, options: dict[str, Any]) -> None:
    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        exported(Model(function, **options), drawn(1, 8, 2, 64))
    assert "which cannot export flashsmith's kernels" in str(caught.value)


@pytest.mark.full
def test_a_transformers_model() -> None:
    pytest.importorskip("transformers", reason="needs transformers: it is not installed")
    from tiny_models import tiny

    import flashsmith.integrations.transformers as flashsmith_transformers

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny("llama", num_hidden_layers=1).half()

        def forward(self, tokens: Any, mask: Any) -> Any:
            return self.model(tokens, attention_mask=mask, use_cache=False).logits

    flashsmith_transformers.register(emulate=True)
    model, tokens = Logits().eval(), torch.arange(1, 9)[None]
    mask = torch.ones_like(tokens)
    expected = model(tokens, mask)
    model.model.set_attn_implementation("flashsmith")
    with count_launches() as launches:
        torch.testing.assert_close(model(tokens, mask), expected, atol=5e-3, rtol=0.0)
    assert launches.total == 1
    program = exported(model, tokens, mask)
    assert "flashsmith" not in {node.domain for node in program.model_proto.graph.node}
    evaluator = ReferenceEvaluator(program.model_proto)
    inputs = dict(zip(evaluator.input_names, (tokens.numpy(), mask.numpy()), strict=False))
    (output,) = evaluator.run(None, inputs)
    np.testing.assert_allclose(output, expected.detach().numpy(), atol=5e-3)
