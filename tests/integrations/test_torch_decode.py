"""attention_with_cache() in PyTorch: its ops, torch.compile, and no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import shared_kernels

from flashsmith import parse_kernel_name_into_config
from flashsmith.errors import ArgumentError
from flashsmith.families import Semantics

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

import flashsmith  # noqa: E402
import flashsmith.integrations.torch_decode  # noqa: E402

pytestmark = pytest.mark.torch

CFG = parse_kernel_name_into_config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
shared_kernels.want([CFG], Semantics("causal"))


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    shared_kernels.load([CFG], Semantics("causal"))


def tensors(seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=random).half()

    return {
        "q": normal(2, 1, 2, 64),
        "k_cache": normal(2, 70, 1, 64),
        "v_cache": normal(2, 70, 1, 64),
        "cache_lens": torch.tensor([5, 69], dtype=torch.int32),
        "k": normal(2, 1, 1, 64),
        "v": normal(2, 1, 1, 64),
    }


def appending(q: Any, k_cache: Any, v_cache: Any, cache_lens: Any, k: Any, v: Any) -> Any:
    """A step of a model, with something before and after."""
    o, lse = flashsmith.attention_with_cache(
        *(q + 0, k_cache, v_cache),
        cache_lens=cache_lens,
        k=k,
        v=v,
        return_lse=True,
        config=CFG,
    )
    return o * 2, lse + 1, cache_lens + 1


@pytest.mark.parametrize(
    "backend", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_a_compiled_step_appends_and_returns_what_an_eager_one_does(backend: str) -> None:
    eager, compiled = tensors(), tensors()
    expected = appending(**eager)
    step = torch.compile(appending, fullgraph=True, backend=backend)
    for one, other in zip(step(**compiled), expected, strict=True):
        assert torch.equal(one, other)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(compiled[name], eager[name])
        assert not torch.equal(compiled[name], tensors()[name])


def test_a_compiled_step_writes_where_it_is_told() -> None:
    call = tensors()
    del call["k"], call["v"]
    expected = flashsmith.attention_with_cache(**call, config=CFG)

    def step(out: Any) -> Any:
        return flashsmith.attention_with_cache(**call, config=CFG, out=out)

    out = torch.zeros_like(expected)
    torch.compile(step, fullgraph=True, backend="aot_eager")(out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", ["attention_with_cache", "attention_with_cache_appended"])
def test_the_ops_are_what_pytorch_expects_of_one(name: str, return_lse: bool) -> None:
    call = tensors()
    new = (call["k"], call["v"]) if name.endswith("appended") else ()
    arguments = (*list(call.values())[:4], None, *new)
    keywords = {"return_lse": return_lse, "config": str(CFG)}
    op = getattr(torch.ops.flashsmith, name).default
    assert set(torch.library.opcheck(op, arguments, keywords).values()) == {"SUCCESS"}


def test_only_the_op_that_appends_says_that_it_writes() -> None:
    ops = torch.ops.flashsmith
    written = [
        {argument.name for argument in op.default._schema.arguments if argument.alias_info}
        for op in (ops.attention_with_cache, ops.attention_with_cache_appended)
    ]
    assert written == [set(), {"k_cache", "v_cache"}]


@pytest.mark.parametrize("name", ["q", "k", "k_cache"])
def test_a_tensor_that_requires_grad_is_an_error_that_says_what_to_do(name: str) -> None:
    call = tensors()
    call[name].requires_grad_()
    with pytest.raises(ArgumentError, match=rf"{name}: requires grad.* torch\.no_grad\(\), or det"):
        flashsmith.attention_with_cache(**call, config=CFG)
    op = torch.ops.flashsmith.attention_with_cache_appended
    arguments = (*list(call.values())[:4], None, call["k"], call["v"])
    with pytest.raises(ArgumentError, match=f"{name}: requires grad, and attention over a cache"):
        op(*arguments, config=str(CFG))
    with torch.no_grad():
        flashsmith.attention_with_cache(**call, config=CFG)


def test_a_compiled_step_with_gradients_is_an_error_too() -> None:
    call = tensors()
    call["q"].requires_grad_()
    step = torch.compile(appending, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="q: requires grad, and attention over a cache has no grad"):
        step(**call)


def test_vmap_is_an_error() -> None:
    call = tensors()

    def one(q: Any) -> Any:
        return flashsmith.attention_with_cache(**{**call, "q": q}, config=CFG)

    with pytest.raises(ArgumentError, match=r"inside torch\.vmap"):
        torch.vmap(one)(torch.stack([call["q"]] * 2))
