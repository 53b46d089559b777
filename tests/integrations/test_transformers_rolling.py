"""bits='canonical' over transformers' rolling caches, which drop the keys before a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers", reason="needs transformers: it is not installed")

from model_runs import assert_same  # noqa: E402
from replaced_kernels import Calls, replaced_kernels  # noqa: E402
from tiny_models import tiny  # noqa: E402
from transformers import masking_utils  # noqa: E402

from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.integrations import transformers as ours  # noqa: E402
from flashsmith.integrations.transformers_masks import flashsmith_mask, hidden_by  # noqa: E402

WINDOW, LENGTH = 4, 23
#: A prefill, chunks of several tokens before and after the first dropped key, decode steps.
CHUNKS = 3, 1, 5, 1, 1, 2, 6, 1, 1, 1, 1
CACHES = ["dynamic", "static"]


def cache_of(name: str, model: Any, length: int) -> Any:
    if name == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=length)


def by_chunks(model: Any, cache: Any, tokens: Any, chunks: Any, real: Any = None) -> Any:
    """The logits of a text that is read in chunks over a cache."""
    found, done = [], 0
    for chunk in chunks:
        asked = {} if real is None else {"attention_mask": real[:, : done + chunk]}
        if real is not None:
            positions = (real.cumsum(1) - 1).clamp(min=0)
            asked["position_ids"] = positions[:, done : done + chunk]
        part = tokens[:, done : done + chunk]
        found.append(model(part, past_key_values=cache, **asked).logits)
        done += chunk
    return torch.cat(found, dim=1)


@pytest.fixture
def calls() -> Iterator[Calls]:
    with replaced_kernels(float32_as=torch.float16, bits="canonical") as seen:
        yield seen


def drawn_tokens(batch: int, length: int = LENGTH) -> Any:
    return torch.randint(1, 64, (batch, length), generator=torch.manual_seed(3))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_calls_say_how_many_keys_were_dropped(name: str, cache: str, calls: Calls) -> None:
    model, tokens = tiny(name), drawn_tokens(2)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(tokens).logits
        model.set_attn_implementation("flashsmith")
        found = by_chunks(model, cache_of(cache, model, LENGTH), tokens, CHUNKS)
    assert_same(found, expected)
    rolled = [call for call in calls if call.get("kv_offset") is not None]
    done, expected_offsets = 0, []
    for chunk in CHUNKS:
        dropped = max(done - WINDOW + 1, 0)
        done += chunk
        expected_offsets += [(dropped, done - dropped)] * bool(dropped)
    layers = sum(call["window"][0] is not None for call in calls) // len(CHUNKS)
    assert [
        (call["kv_offset"].tolist(), call["cache_lens"].tolist()) for call in rolled[::layers]
    ] == [([dropped] * 2, [kept] * 2) for dropped, kept in expected_offsets]
    assert all(call["bits"] == "canonical" for call in calls)


@pytest.mark.parametrize("cache", CACHES)
def test_padding_is_no_key_that_was_dropped(cache: str, calls: Calls) -> None:
    model, tokens = tiny("mistral"), drawn_tokens(4)
    pads = [0, 2, 7, 15]
    real = torch.stack([torch.arange(LENGTH) >= n for n in pads]).long()
    with torch.no_grad():
        model.set_attn_implementation("flashsmith")
        found = by_chunks(model, cache_of(cache, model, LENGTH), tokens, CHUNKS, real)
        for row, n in enumerate(pads):
            expected = model(tokens[row, None, n:]).logits[0]
            assert_same(found[row, n:], expected)
    done = 0
    for chunk, call in zip(CHUNKS, calls[::2], strict=False):
        dropped, done = max(done - WINDOW + 1, 0), done + chunk
        if not dropped:
            assert call.get("kv_offset") is None
            continue
        ends = [max(done - n, 0) for n in pads]
        assert call["kv_offset"].tolist() == [max(dropped - n, 0) for n in pads]
        assert (call["kv_offset"] + call["cache_lens"]).tolist() == ends


@pytest.mark.parametrize("cache", CACHES)
def test_generate_goes_on_past_the_window(cache: str, calls: Calls) -> None:
    model, prompt = tiny("mistral"), drawn_tokens(1, 6)

    def generated() -> Any:
        return model.generate(prompt, max_new_tokens=7, do_sample=False, cache_implementation=cache)

    expected = generated()
    model.set_attn_implementation("flashsmith")
    assert torch.equal(generated(), expected)
    assert [call["kv_offset"].tolist() for call in calls if "kv_offset" in call][-1] == [8]


def test_free_bits_need_no_count() -> None:
    model = tiny("mistral")
    model.set_attn_implementation("flashsmith")
    with replaced_kernels(float32_as=torch.float16, bits="free") as calls, torch.no_grad():
        by_chunks(model, cache_of("dynamic", model, LENGTH), drawn_tokens(1), CHUNKS)
    assert calls
    assert not any("kv_offset" in call for call in calls)


# --- what is refused -----------------------------------------------------------------------------


def masked(calls: Calls, **changes: Any) -> Any:
    window = masking_utils.sliding_window_causal_mask_function(WINDOW)
    asked = {"q_offset": 9, "kv_offset": 6, "mask_function": window, **changes}
    return flashsmith_mask(2, 1, WINDOW, **asked)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q_offset": torch.tensor(9)}, "kv_offset: how many keys .* is known to a device only"),
        ({"kv_offset": torch.tensor(6)}, "kv_offset: how many keys .* is known to a device only"),
        ({"kv_offset": 7, "q_offset": 10, "mask_function": masking_utils.causal_mask_function},
         "kv_offset: the cache has dropped keys that its mask does not hide"),
        ({"q_offset": 8, "kv_offset": 6}, "kv_offset: the cache has dropped keys that its mask"),
        ({"attention_mask": torch.tensor([[1] * 10, [1] * 6 + [0] + [1] * 3]).bool()},
         "attention_mask: has padding behind keys that the cache has dropped"),
        ({"mask_function": lambda b, h, q, k: (q - k) % 3 != 1},
         "kv_offset: a cache whose mask is a pattern has dropped keys"),
    ],
)  # fmt: skip
def test_unknown_positions_are_refused(changes: Any, why: str, calls: Calls) -> None:
    assert hidden_by(masked(calls), 1).dropped.tolist() == [6, 6]
    with pytest.raises(ArgumentError, match=f"bits='canonical': {why}"):
        masked(calls, **changes)


def test_gradients_over_dropped_keys_are_refused(calls: Calls) -> None:
    model = tiny("mistral")
    model.set_attn_implementation("flashsmith")
    cache, tokens = cache_of("dynamic", model, LENGTH), drawn_tokens(1)
    with torch.no_grad():
        model(tokens[:, :9], past_key_values=cache)
    with pytest.raises(ArgumentError, match="cache: has dropped keys, which gradients need"):
        model(tokens[:, 9:10], past_key_values=cache)


def test_a_compiled_layer_reads_the_counts_of_its_mask(calls: Calls) -> None:
    """generate() builds masks outside of the graph, which serves all steps."""

    def counts(q: Any, k: Any, v: Any, *, cache_lens: Any, kv_offset: Any, **others: Any) -> Any:
        return torch.ones_like(q) * torch.stack([cache_lens, kv_offset], 1)[:, None, :, None]

    model, q = tiny("mistral"), torch.ones(2, 2, 1, 32).half()
    k = torch.ones(2, 2, WINDOW, 32).half()
    layer = model.model.layers[0].self_attn

    def attended(mask: Any) -> Any:
        return ours.flashsmith_attention_forward(layer, q, k, k, mask, sliding_window=WINDOW)[0]

    torch._dynamo.reset()
    compiled = torch.compile(attended, fullgraph=True, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "attention_with_cache", counts)
        for dropped in (6, 7, 8):
            offsets = {"q_offset": dropped + WINDOW - 1, "kv_offset": dropped}
            found = compiled(masked(calls, **offsets, config=model.config))
            assert found[:, 0, :, 0].tolist() == [[WINDOW, dropped]] * 2


# --- the bits ------------------------------------------------------------------------------------

D64 = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "sliding_window": 20,
}
shared_kernels.want_chosen(
    "b1 s80 h2:1 d64 fp16 window uneven canonical",
    "decode b1 s1:80 h2:1 d64 fp16 window canonical",
)


def row_by_row(layer: Any, x: Any) -> Any:
    """A linear layer whose rounding depends on neither the number of rows nor their alignment."""
    assert layer.bias is None
    weight, rows = layer.weight.double(), x.reshape(-1, x.shape[-1]).double()
    found = torch.stack([(weight * row).sum(-1) for row in rows])
    return found.to(x.dtype).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("cache", CACHES)
def test_decoding_has_the_log_probabilities_of_training(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window begins in the tile of keys before the query's own, and half of it was dropped."""
    monkeypatch.setattr(torch.nn.Linear, "forward", row_by_row)
    model, tokens = tiny("mistral", **D64), drawn_tokens(1, 76)
    ours.register(emulate=True, float32_as=torch.float16, bits="canonical")
    model.set_attn_implementation("flashsmith")
    try:
        training = model(tokens).logits.log_softmax(-1).detach()
        chunks = (58, 4, 7, *[1] * 7)
        with torch.no_grad():
            found = by_chunks(model, cache_of(cache, model, 76), tokens, chunks)
    finally:
        ours.register()
    assert torch.equal(found.log_softmax(-1), training)
