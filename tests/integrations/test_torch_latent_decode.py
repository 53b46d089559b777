"""attention_with_cache(v_width=) in PyTorch: its ops, torch.compile, and no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import shared_kernels

from flashsmith import parse_kernel_name_into_config
from flashsmith.errors import ArgumentError
from flashsmith.families import Semantics

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

import flashsmith  # noqa: E402
import flashsmith.integrations.torch_latent_decode  # noqa: E402
from flashsmith import masks  # noqa: E402

pytestmark = pytest.mark.torch

CONFIG = parse_kernel_name_into_config(
    "(FP16, 320:256, 32): latent_mma+stages_2+least_128+parts_4+lazy"
)
shared_kernels.want([CONFIG], Semantics("causal"))
NAMES = ("attention_with_latent_cache", "attention_with_latent_cache_appended")
OPTIONS: dict[str, Any] = {"v_width": 256, "scale": 0.07}


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    shared_kernels.load([CONFIG], Semantics("causal"))


def tensors() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=random).half()

    return {
        "q": normal(2, 1, 4, 320),
        "k_cache": normal(2, 70, 1, 320),
        "cache_lens": torch.tensor([5, 69], dtype=torch.int32),
        "k": normal(2, 1, 1, 320),
    }


def step(q: Any, k_cache: Any, cache_lens: Any, k: Any, **options: Any) -> Any:
    """A step of a model, with something before and after."""
    o, lse = flashsmith.attention_with_cache(
        q + 0, k_cache, cache_lens=cache_lens, k=k, return_lse=True, config=CONFIG, **options
    )
    return o * 2, lse + 1, cache_lens + 1


@pytest.mark.parametrize(
    "backend", ["aot_eager", "eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_a_compiled_step_appends_and_returns_what_an_eager_one_does(backend: str) -> None:
    eager, compiled = tensors(), tensors()
    expected = step(**eager, **OPTIONS)
    assert expected[0].shape == (2, 1, 4, 256)
    found = torch.compile(step, fullgraph=True, backend=backend)(**compiled, **OPTIONS)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(compiled["k_cache"], eager["k_cache"])
    assert not torch.equal(compiled["k_cache"], tensors()["k_cache"])


def test_a_compiled_step_reads_pages_and_writes_where_it_is_told() -> None:
    call = tensors()
    call["k_cache"] = call["k_cache"].view(20, 7, 1, 320)
    call["page_table"] = torch.arange(20, dtype=torch.int32).flip(0).view(2, 10)
    del call["k"]
    expected = flashsmith.attention_with_cache(**call, **OPTIONS, config=CONFIG, window=(50, 0))

    def read(out: Any) -> Any:
        return flashsmith.attention_with_cache(
            **call, **OPTIONS, config=CONFIG, window=(50, 0), out=out
        )

    out = torch.zeros_like(expected)
    torch.compile(read, fullgraph=True, backend="aot_eager")(out)
    assert torch.equal(out, expected)


def test_flash_mla_is_traced_whole() -> None:
    from flashsmith.integrations.flash_mla import flash_mla_with_kvcache

    call = tensors()
    arguments = call["q"], call["k_cache"], None, call["cache_lens"], 256
    graph = torch.compile(flash_mla_with_kvcache, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, graph(*arguments), flash_mla_with_kvcache(*arguments)))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_ops_are_what_pytorch_expects_of_one(name: str, return_lse: bool) -> None:
    *arguments, new = tensors().values()
    arguments += [None, new] if name.endswith("appended") else [None]
    op = getattr(torch.ops.flashsmith, name).default
    keywords = {**OPTIONS, "return_lse": return_lse, "config": str(CONFIG)}
    assert set(torch.library.opcheck(op, tuple(arguments), keywords).values()) == {"SUCCESS"}


@pytest.mark.parametrize("where", ["outside", "within"])
def test_functions_in_compiled_code(where: str) -> None:
    """One op; the tensor that the functions read is an input."""
    slopes, later = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.arange(75) // 9

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    def call(ids: Any, **given: Any) -> Any:
        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (ids[q] == ids[k]) | (k % 7 == 0)

        functions = {"mask": masks.documents(ids) | masks.chunks(7)}
        if where == "within":
            functions = {"mask_mod": mask}
        return step(**given, **OPTIONS, score_mod=score, **functions)

    eager, compiled = tensors(), tensors()
    expected = call(later, **eager)
    assert not torch.equal(expected[0], step(**tensors(), **OPTIONS)[0])
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(later, **compiled)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(compiled["k_cache"], eager["k_cache"])


def test_only_the_op_that_appends_says_that_it_writes() -> None:
    written = [
        [it.name for it in getattr(torch.ops.flashsmith, name).default._schema.arguments
         if it.alias_info]
        for name in NAMES
    ]  # fmt: skip
    assert written == [[], ["k_cache"]]


def test_a_traced_call_refuses_what_latent_caches_do_not_have() -> None:
    graph = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"softcap=3.0: attention over a latent cache \(v_width\)"):
        graph(**tensors(), **OPTIONS, softcap=3.0)


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_tensor_that_requires_grad_is_an_error_that_says_what_to_do(name: str) -> None:
    call = tensors()
    call[name].requires_grad_()
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match=f"{name}: requires grad, .* no gradient"):
            run(**call, **OPTIONS)


def test_vmap_is_an_error() -> None:
    call = tensors()

    def one(q: Any) -> Any:
        return step(**{**call, "q": q}, **OPTIONS)

    with pytest.raises(ArgumentError, match=r"inside torch\.vmap"):
        torch.vmap(one)(torch.stack([call["q"]] * 2))
