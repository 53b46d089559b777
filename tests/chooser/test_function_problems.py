"""Problems whose texts name score and mask functions: the kernels that calls with them use."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flashsmith
from flashsmith import masks, scores
from flashsmith.chooser.function_problems import ANY_SIZES, parse_with_functions
from flashsmith.chooser.named_functions import MASKS, SCORES, Sizes, mask_named, score_named
from flashsmith.chooser.prebuild import choose_for_any_length, parse_any_length
from flashsmith.cli import app
from flashsmith.errors import ArgumentError
from flashsmith.families import device_spec
from flashsmith.tracing import trace

SEQ, HEADS, D = 70, 4, 64
TEXT = f"b2 s{SEQ} h{HEADS} d{D} fp16"
ids = np.sort(np.random.default_rng(0).integers(0, 3, SEQ)).astype(np.int16)


def stripes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 0.5 + (kv_idx % 3)


def own_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ids[q_idx] == ids[kv_idx]


HERE = __name__


class Asked(Exception):
    """Raised in place of choosing a kernel."""


def problem_of_call(monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> Any:
    """The problem for which attention() chooses its kernel."""

    def refuse(problem: Any, device: Any) -> Any:
        raise Asked(problem)

    attention_module = importlib.import_module("flashsmith.chooser.attention")
    monkeypatch.setattr(attention_module, "choose_config", refuse)
    q = np.zeros((2, SEQ, HEADS, D), np.float16)
    with pytest.raises(Asked) as caught:
        attention_module.attention(q, q, q, **keywords)
    return caught.value.args[0]


SLOPES, NUMBERS = np.ones(HEADS, np.float32), np.zeros(SEQ, np.int64)
CALLS: dict[str, dict[str, Any]] = {
    "score=alibi": {"score_mod": scores.alibi(SLOPES)},
    "score=alibi+softcap": {"score_mod": scores.alibi(SLOPES) + scores.softcap(3.0)},
    "mask=documents&causal": {"mask": masks.documents(NUMBERS) & masks.causal()},
    "mask=documents(int32[b,s])": {"mask": masks.documents(np.zeros((2, SEQ), np.int32))},
    "mask=causal": {"mask": masks.causal()},
    "mask=window(9)": {"mask": masks.window(9)},
    "causal mask=chunks(16)": {"mask": masks.chunks(5), "causal": True},
    "score=bias": {"bias": np.zeros((2, HEADS, SEQ, SEQ), np.float32)},
    "canonical score=alibi mask=documents": {
        "score_mod": scores.alibi(SLOPES),
        "mask": masks.documents(NUMBERS),
        "bits": "canonical",
    },
    "mask=bool[q,k]": {"mask": np.ones((SEQ, SEQ), bool)},
    "bias=float16[1,1,q,k] positions=end": {
        "bias": np.zeros((1, 1, SEQ, SEQ), np.float16),
        "positions": "end",
    },
    f"score={HERE}:stripes mask={HERE}:own_documents": {
        "score_mod": stripes,
        "mask": own_documents,
    },
    f"mask={HERE}:own_documents|~causal": {
        "mask": masks.MaskValue(own_documents) | ~masks.causal()
    },
}


@pytest.mark.parametrize("words", CALLS)
def test_the_problem_of_the_call(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    found = parse_with_functions(f"{TEXT} {words}").problem
    assert found == problem_of_call(monkeypatch, **CALLS[words])
    assert (
        found.semantics.to_json()
        == problem_of_call(monkeypatch, **CALLS[words]).semantics.to_json()
    )


CACHE_CALLS: dict[str, dict[str, Any]] = {
    "causal score=alibi": {"score_mod": scores.alibi(SLOPES)},
    "mask=causal": {"mask": masks.causal(), "causal": False},
    "causal page16 mask=chunks(16)": {
        "mask": masks.chunks(5),
        "page_table": np.zeros((2, 5), np.int32),
    },
    "mask=window(9)": {"mask": masks.window(9), "causal": False},
    "causal canonical score=alibi": {"score_mod": scores.alibi(SLOPES), "bits": "canonical"},
}


@pytest.mark.parametrize("words", CACHE_CALLS)
def test_the_problem_of_a_call_over_a_cache(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def refuse(problem: Any, device: Any) -> Any:
        raise Asked(problem)

    decode = importlib.import_module("flashsmith.chooser.decode")
    monkeypatch.setitem(decode.CHOOSERS, "invariant", refuse)
    q, k = np.zeros((2, 1, HEADS, D), np.float16), np.zeros((2, SEQ, HEADS, D), np.float16)
    given = CACHE_CALLS[words]
    if "page_table" in given:
        k = np.zeros((5, 16, HEADS, D), np.float16)
    with pytest.raises(Asked) as caught:
        decode.attention_with_cache(q, k, k.copy(), cache_lens=np.full(2, SEQ, np.int32), **given)
    found = parse_with_functions(f"b2 s1:{SEQ} h{HEADS} d{D} fp16 decode {words}").problem
    wanted = caught.value.args[0]
    kind = found.semantics, found.operation, found.page, found.window_keys
    assert kind == (wanted.semantics, wanted.operation, wanted.page, wanted.window_keys)


def test_the_problem_of_a_call_over_a_latent_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: Any, device: Any) -> Any:
        raise Asked(problem)

    decode = importlib.import_module("flashsmith.chooser.decode")
    monkeypatch.setitem(decode.CHOOSERS, "invariant", refuse)
    q, k = np.zeros((2, 1, HEADS, 320), np.float16), np.zeros((2, SEQ, 1, 320), np.float16)
    given = {"v_width": 256, "scale": 0.1, "score_mod": scores.alibi(SLOPES)}
    with pytest.raises(Asked) as caught:
        decode.attention_with_cache(q, k, cache_lens=np.full(2, SEQ, np.int32), **given)
    text = f"b2 s1:{SEQ} h{HEADS}:1 d320:256 fp16 latent_decode causal score=alibi"
    assert parse_with_functions(text).problem == caught.value.args[0]


def test_a_built_call_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After flashsmith build, the call and its gradients need no compiler."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    text = f"b1 s{SEQ} h2 d32 fp16"
    words = f"score=alibi+{HERE}:stripes mask=documents&causal"
    commands = [word for kind in ("", " backward") for word in ("--for", f"{text}{kind} {words}")]
    result = CliRunner().invoke(app, ["build", "--arch", "80", *commands])
    assert result.exit_code == 0, result.output
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    q = torch.ones((1, SEQ, 2, 32), dtype=torch.float16, requires_grad=True)
    o = flashsmith.attention(
        *(q, q, q),
        score_mod=scores.alibi(torch.rand(2)) + stripes,
        mask=masks.documents(torch.zeros(SEQ, dtype=torch.int64)) & masks.causal(),
    )
    o.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    with pytest.raises(flashsmith.errors.FlashsmithError, match="FLASHSMITH_JIT"):
        flashsmith.attention(q, q, q, score_mod=lambda s, b, h, i, j: stripes(s, b, h, i, j) - 7)


def test_any_length() -> None:
    """The kernels of all sizes have the program."""
    parsed = parse_with_functions("h4 d64 fp16 mask=documents", parse_any_length, ANY_SIZES)
    sizes = [(1, 64, 64), (4, 1000, 1000)]
    found = choose_for_any_length(parsed.problem, device_spec(90), sizes=sizes)
    assert parsed.program is not None
    assert {it.program for it in found.configs} == {parsed.program.program}


@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_every_value_has_a_name(name: str) -> None:
    sizes = Sizes(2, HEADS, SEQ, SEQ)
    score = score_named(name, sizes) if name in SCORES else None
    mask = mask_named(name, sizes) if name in MASKS else None
    made = trace(score, mask)
    assert (made.program.score is None) == (score is None)
    assert (made.program.mask is None) == (mask is None)
    known = (*scores.__all__, *masks.__all__)
    assert {*SCORES, *MASKS} == set(known) - {"MaskValue", "ScoreValue"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("score=alibo", "score='alibo': 'alibo' is unknown; did you mean 'alibi'"),
        ("score=alibi(float33[h])", "'float33' is no dtype of tensors"),
        ("score=alibi(float32[0])", r"\[0\] has sizes that are not"),
        ("score=alibi(1,2)", "takes 1 positional argument"),
        ("score=alibi&softcap", "scores have no such operator"),
        ("mask=causal+chunks", "masks have no such operator"),
        ("mask=causal(", "not readable"),
        ("mask=nowhere_at_all:f", "mask: 'nowhere_at_all:f' cannot be loaded"),
        (f"mask={HERE}:SEQ", "70 is not a function"),
        ("score=alibi score=alibi", "each at most once"),
        ("bias=alibi", "bias='alibi': give a tensor, such as"),
        ("bias=bool[q,k]", "give it as mask"),
        ("colour=red", "'colour=red': give score=NAME"),
        ("positions=middle mask=causal", "positions='middle'"),
        ("merge mask=causal", "given for merge; only attention"),
        ("decode positions=end mask=causal", "positions='end': given for decode"),
    ],
)
def test_refused(words: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_with_functions(f"{TEXT} {words}")


def test_ranks_take_no_functions() -> None:
    command = ["build", "--for", f"{TEXT} mask=causal", "--ranks", "2"]
    with pytest.raises(ArgumentError, match="--ranks: given with a score or mask function"):
        raise CliRunner().invoke(app, command).exception or SimpleNamespace()
