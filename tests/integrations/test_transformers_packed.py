"""Sequences that share a line, in transformers' models: none sees another."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
transformers = pytest.importorskip("transformers", reason="needs transformers: it is not installed")
pytestmark = pytest.mark.torch

from gradients import parameter_gradients  # noqa: E402
from model_runs import assert_same, both  # noqa: E402
from replaced_kernels import Calls  # noqa: E402
from tiny_models import LENGTH, padding, tiny, tokens  # noqa: E402

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]])
STARTS = torch.tensor([0, 4, 10, 11], dtype=torch.int32)
ONES = torch.ones(1, LENGTH, dtype=torch.long)
PACKED = {"input_ids": tokens(1), "position_ids": POSITIONS}


class Layer(torch.nn.Module):
    is_causal = True


def isolated(model: Any) -> Any:
    """What eager attention gives for each sequence alone."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        pieces = tokens(1).split(STARTS.diff().tolist(), 1)
        return torch.cat([model(piece)[0] for piece in pieces], dim=1)


def cache_of(kind: str, model: Any) -> dict[str, Any]:
    if kind == "dynamic":
        return {"past_key_values": transformers.DynamicCache(config=model.config)}
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        return {"past_key_values": cache}
    return {"use_cache": kind == "default"}


@pytest.mark.parametrize("mask", [None, ONES], ids=["no mask", "ones"])
@pytest.mark.parametrize("cache", ["none", "default", "dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_positions_that_start_again(name: str, cache: str, mask: Any, calls: Calls) -> None:
    model = tiny(name)
    expected = isolated(model)
    model.set_attn_implementation("flashsmith")
    with torch.no_grad():
        ours = model(**PACKED, attention_mask=mask, **cache_of(cache, model))[0]
    assert_same(ours, expected)
    assert [call["cu_seqlens_q"].tolist() for call in calls] == [STARTS.tolist()] * 2


def test_positions_need_not_start_at_zero(calls: Calls) -> None:
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q = torch.zeros(1, 1, LENGTH, 32).half()
    flashsmith_attention_forward(Layer(), q, q, q, None, position_ids=POSITIONS + 2)
    flashsmith_attention_forward(
        Layer(), q, q, q, None, position_ids=POSITIONS + 2, is_causal=False
    )
    assert [call["cu_seqlens_k"].tolist() for call in calls] == [STARTS.tolist()] * 2


def test_a_line_may_begin_with_the_rest_of_a_sequence(calls: Calls) -> None:
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q = torch.zeros(1, 1, LENGTH, 32).half()
    positions = torch.tensor([[7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7]])
    flashsmith_attention_forward(Layer(), q, q, q, None, position_ids=positions)
    assert calls[0]["cu_seqlens_q"].tolist() == [0, 3, LENGTH]


@pytest.mark.parametrize("mask", [None, ONES], ids=["no mask", "ones"])
def test_what_is_left_to_pytorch_is_kept_apart_too(mask: Any) -> None:
    from flashsmith.integrations import transformers as ours

    ours.register()
    model = tiny("llama")
    expected = isolated(model)
    model.set_attn_implementation("flashsmith")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(**PACKED, attention_mask=mask)[0]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("real", [LENGTH, 5])
def test_positions_made_of_a_mask_are_of_one_sequence(real: int, calls: Calls) -> None:
    """With left padding they begin 0, 0, 0, 1, or with ones."""
    mask = padding([real], "left")
    for filler in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
        inputs = {"input_ids": tokens(1), "attention_mask": mask, "position_ids": positions}
        expected, ours = both(tiny("llama"), **inputs)
        assert_same(ours, expected, mask.bool())
    starts = [call["cu_seqlens_q"].tolist() for call in calls if "cu_seqlens_q" in call]
    assert starts == ([] if real == LENGTH else [[0, real]] * 4)


@pytest.mark.parametrize(
    "positions",
    [[0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 9, 9, 9, 20, 21, 22, 23]],
    ids=["an image", "gaps"],
)
def test_positions_that_go_on_unevenly_are_of_one_sequence(
    positions: list[int], calls: Calls
) -> None:
    inputs = {"input_ids": tokens(1), "position_ids": torch.tensor([positions])}
    expected, ours = both(tiny("llama"), **inputs, attention_mask=ONES)
    assert_same(ours, expected)
    assert not any("cu_seqlens_q" in call for call in calls)


def test_positions_count_before_a_cache_is_filled_only(calls: Calls) -> None:
    """A chunk over a cache whose positions are equal holds candidates, not sequences."""
    model = tiny("llama")
    logits = {}
    for implementation in ("eager", "flashsmith"):
        model.set_attn_implementation(implementation)
        cache = cache_of("dynamic", model)
        with torch.no_grad():
            model(tokens(1), attention_mask=ONES, **cache)
            positions = torch.tensor([[LENGTH, LENGTH]])
            mask = torch.ones(1, LENGTH + 2, dtype=torch.long)
            logits[implementation] = model(
                tokens(1, 2), attention_mask=mask, position_ids=positions, **cache
            )[0]
    assert_same(logits["flashsmith"], logits["eager"])
    assert not any("cu_seqlens_q" in call for call in calls)


def test_the_host_reads_positions_once(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    right = torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda it: read.append(it) or right(it))
    model = tiny("llama")
    model.set_attn_implementation("flashsmith")
    with torch.no_grad():
        model(tokens(1), attention_mask=ONES)
        # Not at all for batches of several lines, and where one token goes on.
        once = len(read)
        model(tokens(3))
        model.generate(
            tokens(3), max_new_tokens=3, do_sample=False, attention_mask=ONES.expand(3, -1)
        )
    assert once <= 1
    assert len(read) == once


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_sequences_apart(reentrant: bool, calls: Calls) -> None:
    def loss(model: Any) -> Any:
        return model(**PACKED, attention_mask=ONES, use_cache=False)[0].square().sum()

    model = tiny("llama").train()
    model.set_attn_implementation("flashsmith")
    plain = parameter_gradients(model, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = parameter_gradients(model, loss)
    assert [call["cu_seqlens_q"].tolist() for call in calls] == [STARTS.tolist()] * 6
    assert all(torch.equal(again[name], plain[name]) for name in plain)


GIVEN: dict[str, dict[str, Any]] = {
    "all": {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 6, "max_length_k": 6},
    "no lengths": {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS},
    "queries": {"cu_seq_lens_q": STARTS},
    "keys": {"cu_seq_lens_k": STARTS.long()},
    "queries and a length": {"cu_seq_lens_q": STARTS, "max_length_q": 6},
    "one length": {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_k": 6},
}


@pytest.mark.parametrize("mask", [None, ONES], ids=["no mask", "ones"])
@pytest.mark.parametrize("given", GIVEN)
def test_cumulative_lengths_suffice(given: str, mask: Any, calls: Calls) -> None:
    model = tiny("llama")
    expected = isolated(model)
    model.set_attn_implementation("flashsmith")
    with torch.no_grad():
        ours = model(**PACKED, attention_mask=mask, **GIVEN[given])[0]
    assert_same(ours, expected)
    for call in calls:
        assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (6, 6)
        assert call["cu_seqlens_q"].tolist() == call["cu_seqlens_k"].tolist() == STARTS.tolist()


def test_lengths_that_nothing_completes_are_refused(calls: Calls) -> None:
    from flashsmith.errors import ArgumentError
    from flashsmith.integrations.transformers import flashsmith_attention_forward

    q, k = torch.zeros(1, 1, 4, 32).half(), torch.zeros(1, 1, 7, 32).half()
    for given, message in (
        ({"max_length_q": 4}, r"max_length_q=4: given without cu_seq_lens_q"),
        ({"max_length_k": 7}, r"max_length_k=7: .*pass both, or neither"),
        ({"cu_seq_lens_q": STARTS}, r"cu_seq_lens_k: missing, and cu_seq_lens_q .* 4 queries"),
        ({"cu_seq_lens_k": STARTS}, r"cu_seq_lens_q: missing, and cu_seq_lens_k .*7 keys"),
    ):
        with pytest.raises(ArgumentError, match=message):
            flashsmith_attention_forward(Layer(), q, k, k, None, **given)
    assert not calls


@pytest.mark.parametrize("given", ["no lengths", "queries"])
def test_cumulative_lengths_are_traced(given: str) -> None:
    """The longest is not read then; no sequence is longer than the line."""
    from flashsmith.integrations import transformers as ours
    from flashsmith.runtime import count_launches

    ours.register(float32_as=torch.float16, emulate=True)
    model = tiny("llama")
    expected = isolated(model)
    model.set_attn_implementation("flashsmith")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), count_launches() as launches:
        output = compiled(**PACKED, **GIVEN[given])[0]
    assert_same(output, expected)
    assert launches.emulator == 2
    ours.register()
