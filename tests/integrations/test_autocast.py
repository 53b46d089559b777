"""float32 weights under torch.autocast: q and k often float32, after rotation, and v of 16 bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import shared_kernels

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytest.importorskip("transformers", reason="needs transformers: it is not installed")
pytestmark = pytest.mark.torch

from gradients import parameter_gradients  # noqa: E402
from replaced_kernels import Calls, replaced_kernels  # noqa: E402
from tiny_models import LENGTH, padding, tiny, tokens  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith import parse_kernel_name_into_config  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import Semantics  # noqa: E402

CFG = parse_kernel_name_into_config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
shared_kernels.want([CFG], Semantics("causal"))
DTYPES = ("float16", "bfloat16")
MODELS = ["bert", "bart", "llama", "mistral", "gemma2", "gpt_oss", "modernbert"]


@pytest.fixture
def calls() -> Iterator[Calls]:
    with replaced_kernels(strict=True) as seen:
        yield seen


def inputs_of(name: str) -> dict[str, Any]:
    ids = {"input_ids": tokens(), "attention_mask": padding([LENGTH, 5, 8], "right")}
    return ids | ({"decoder_input_ids": tokens()} if name == "bart" else {})


# --- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_served(name: str, dtype: str, calls: Calls) -> None:
    model, to = tiny(name), getattr(torch, dtype)
    found = {}
    for implementation in ("eager", "flashsmith"):
        model.config._attn_implementation = implementation
        with torch.no_grad(), torch.autocast("cpu", dtype=to):
            found[implementation] = model(**inputs_of(name))[0]
    expected, ours = found["eager"], found["flashsmith"]
    assert calls
    assert all(call[it].dtype is to for call in calls for it in "qkv")
    assert ours.dtype is expected.dtype
    real = inputs_of(name)["attention_mask"].bool() if name != "bart" else ...
    steps = 16 if dtype == "bfloat16" else 2
    torch.testing.assert_close(ours[real], expected[real], atol=4e-3 * steps, rtol=4e-3 * steps)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains(name: str, calls: Calls) -> None:
    model = tiny(name)

    def loss(model: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**inputs_of(name))[0]
        share = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        return (output * share)[inputs_of(name)["attention_mask"].bool()].sum()

    found = []
    for implementation in ("eager", "flashsmith"):
        model.config._attn_implementation = implementation
        found.append(parameter_gradients(model, loss))
    expected, ours = found
    assert calls
    assert ours.keys() == expected.keys()
    norm = torch.cat([it.flatten() for it in expected.values()]).norm()
    for which, right in expected.items():
        assert ours[which].dtype is torch.float32
        # Gradients of the keys' biases are 0; routers of experts choose by rounded scores.
        assert (ours[which] - right).norm() <= 0.05 * right.norm() + 0.01 * norm, which


def test_attention_comes_out_as_pytorchs_does(calls: Calls) -> None:
    """Of mixed dtypes too, and where autocast's differs from all of them."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from flashsmith.integrations.transformers import flashsmith_attention_forward

    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    q = torch.randn(2, 2, 5, 32)
    for dtypes in (("float32", "float32", "bfloat16"), ("bfloat16", "float32", "float16")):
        given = [q.to(getattr(torch, dtype)) for dtype in dtypes]
        for to in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=to):
                expected, _ = sdpa_attention_forward(module, *given, None)
                ours, _ = flashsmith_attention_forward(module, *given, None)
            assert ours.dtype is expected.dtype is to
            torch.testing.assert_close(ours, expected, atol=0.02, rtol=0.02)
    assert len(calls) == 4


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generation(name: str, cache: str, calls: Calls) -> None:
    model, generated = tiny(name), {}
    for implementation in ("eager", "flashsmith"):
        model.config._attn_implementation = implementation
        with torch.autocast("cpu", dtype=torch.float16):
            generated[implementation] = model.generate(
                tokens(),
                attention_mask=padding([LENGTH, 5, 8], "left"),
                max_new_tokens=4,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            ).tolist()
    assert generated["flashsmith"] == generated["eager"]
    assert len(calls) == 2 * 4


# --- over a KV cache -----------------------------------------------------------------------------


def over_cache(**changes: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    shapes = {
        "q": (2, 1, 2, 64),
        "k_cache": (2, 70, 1, 64),
        "v_cache": (2, 70, 1, 64),
        "k": (2, 1, 1, 64),
        "v": (2, 1, 1, 64),
    }
    call = {name: torch.randn(shape, generator=random).half() for name, shape in shapes.items()}
    for name, dtype in changes.items():
        call[name] = call[name].to(dtype)
    return call | {"cache_lens": torch.tensor([5, 69], dtype=torch.int32)}


def step(**call: Any) -> Any:
    return flashsmith.attention_with_cache(**call, config=CFG)


@pytest.mark.parametrize("way", ["eager", "compiled", "dispatched"])
def test_a_step_over_a_cache_of_autocasts_dtype(way: str) -> None:
    shared_kernels.load([CFG], Semantics("causal"))
    expected = step(**over_cache())
    wide = {"q": torch.float32, "k": torch.float32, "v": torch.bfloat16}
    half = over_cache(v=torch.bfloat16)
    right = step(**half | {"v": half["v"].half()})
    assert (expected - right).abs().max() < 0.1
    run = torch.compile(step, fullgraph=True, backend="eager") if way == "compiled" else step
    for _ in range(3):
        call = over_cache(**wide)
        with torch.autocast("cpu", dtype=torch.float16):
            if way == "dispatched":
                from torch.utils.flop_counter import FlopCounterMode

                with FlopCounterMode(display=False):
                    found = run(**call)
            else:
                found = run(**call)
        assert found.dtype is torch.float16
        assert torch.equal(found, right)
        assert torch.equal(call["k_cache"], half["k_cache"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_of_another_dtype_is_refused_by_name(dtype: str) -> None:
    cache = dict.fromkeys(("k_cache", "v_cache"), getattr(torch, dtype))
    wide = over_cache(q=torch.float32, k=torch.float32, v=torch.float32, **cache)
    said = rf"^k_cache: dtype torch\.{dtype}, .*autocast.*in torch\.float16$"
    with torch.autocast("cpu", dtype=torch.float16):
        with pytest.raises(ArgumentError, match=said):
            step(**wide)
        with pytest.raises(ArgumentError, match=said):
            flashsmith.flash_attn_with_kvcache(
                *(wide[it] for it in ("q", "k_cache", "v_cache", "k", "v")),
                cache_seqlens=wide["cache_lens"],
            )


def test_what_has_the_caches_dtype_is_not_cast() -> None:
    shared_kernels.load([CFG], Semantics("causal"))
    expected = step(**over_cache())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(**over_cache())
    assert torch.equal(found, expected)


def test_flash_attn_with_kvcache() -> None:
    names = "q", "k_cache", "v_cache", "k", "v"
    wide = dict.fromkeys("qkv", torch.float32)

    def run(**changes: Any) -> Any:
        call = over_cache(**changes)
        return flashsmith.flash_attn_with_kvcache(
            *(call[name] for name in names), cache_seqlens=call["cache_lens"], causal=True
        )

    expected = run()
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(run(**wide), expected)


# --- attention() in parts ------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the kernels would have been given: the dtypes of q, k and v, call by call."""
    from flashsmith.integrations import traceable

    seen = []

    def attention(q: Any, k: Any, v: Any, **_: Any) -> Any:
        seen.append([it.dtype for it in (q, k, v)])
        return q

    monkeypatch.setattr(traceable.chooser, "attention", attention)
    return seen


MIXED = torch.float16, torch.float32, torch.bfloat16


def mixed() -> list[Any]:
    return [torch.zeros(1, 20, 1, 32, dtype=dtype) for dtype in MIXED]


@pytest.mark.parametrize("how", [{}, {"partial": True}, {"seqused_k": torch.tensor([3])}])
def test_attention_casts_each_tensor_for_itself(how: Any, kernels: list[list[str]]) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        flashsmith.attention(*mixed(), **how)
    flashsmith.attention(*mixed(), **how)
    assert kernels == [[torch.float16] * 3, [*MIXED]]


def test_parallel_casts_each_tensor_for_itself(kernels: list[list[str]]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            for _ in range(2):
                flashsmith.parallel.attention(*mixed())
        with pytest.raises(ArgumentError, match=r"^k: has dtype "):
            flashsmith.parallel.attention(*mixed())
    finally:
        dist.destroy_process_group()
    assert kernels == [[torch.float16] * 3] * 2
