"""The types of the public functions: type checkers as users run them, who have PyTorch's own."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashsmith
from flashsmith.runtime import keywords

CALLS = Path(__file__).with_name("typed_calls.py")
# What is to be caught, and nothing else.
USERS = """
import numpy as np
import torch

import flashsmith


def careless(t: torch.Tensor, a: np.ndarray) -> None:
    flashsmith.attention(t, t, t).foo()  # wrong
    flashsmith.attention(a, a, a).foo()  # wrong
    flashsmith.attention(t, t, t, return_lse=True).foo()  # wrong
    flashsmith.sdpa(t, t, t).foo()  # wrong
    flashsmith.flash_attn_func(t, t, t).foo()  # wrong
    flashsmith.flash_attn_with_kvcache(t, t, t, return_softmax_lse=True).foo()  # wrong
    flashsmith.attention_with_cache(t, t, t, cache_lens=t).foo()  # wrong
    flashsmith.merge_attention([t], [t], dtype=torch.float16)[0].foo()  # wrong
    flashsmith.choose("b1 s64 h1 d64 fp16").config.foo()  # wrong
    flashsmith.atention(t, t, t)  # wrong
    flashsmith.attention(1, "x", t)  # wrong
    flashsmith.attention(t, t, None)  # wrong
    flashsmith.attention(t, t, t, casual=True)  # wrong
    flashsmith.sdpa(1, t, t)  # wrong
    flashsmith.parallel.attention(t, t, t).foo()  # wrong
    flashsmith.merge_attention([t], [t], dtype=3)  # wrong


def careful(t: torch.Tensor, p: torch.nn.Parameter, a: np.ndarray) -> None:
    o: torch.Tensor = flashsmith.attention(p, p, t, causal=True, sinks=t, out=t)
    o, lse = flashsmith.attention(t, t, t, return_lse=True)
    lse.exp().sum()
    flashsmith.backward(o, t, t, t, o, lse, grad_dtype=torch.float32).dq.sum()
    flashsmith.sdpa(t, t, t, is_causal=True).sum().backward()
    flashsmith.attention(a, a, a).astype(np.float32)
    flashsmith.flash_attn_varlen_func(t, t, t, t, t, 3, 3, 0.0, None, True).sum()
    config = flashsmith.choose("b1 s64 h1 d64 fp16").config
    flashsmith.forward(config, t, t, t).sum()
    print(config.d_head, config.dtype, flashsmith.__version__)
"""
WRONG = {number for number, line in enumerate(USERS.split("\n"), 1) if line.endswith("# wrong")}


def checked_by(checker: str, folder: Path, *arguments: str) -> str:
    """What a type checker prints about USERS."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"needs {checker}: it is not installed")
    users = folder / "users.py"
    users.write_text(USERS)
    done = subprocess.run(
        [sys.executable, "-m", checker, *arguments, str(users)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
    )
    return done.stdout


@pytest.mark.full
@pytest.mark.torch
def test_mypy_catches_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    options = ["--config-file=", "--warn-unused-ignores", "--cache-dir", str(tmp_path / "cache")]
    said = checked_by("mypy", tmp_path, *options, str(CALLS))
    found = re.findall(r"^(\S+?):(\d+): error", said, re.MULTILINE)
    assert {name for name, _ in found} == {"users.py"}, said
    assert {int(number) for _, number in found} == WRONG, said


@pytest.mark.full
@pytest.mark.torch
def test_pyright_catches_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    said = checked_by("pyright", tmp_path, "--outputjson", "--pythonpath", sys.executable)
    found = json.loads(said)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == WRONG, said


# The keywords that the overloads share, the parameters that they spell out, and the function.
SHARED = [
    (keywords.AttentionKeywords, "q k v return_lse return_row_max partial", flashsmith.attention),
    (
        keywords.ForwardKeywords,
        "cfg q k v o return_lse return_row_max partial",
        flashsmith.forward,
    ),
    (
        keywords.CacheKeywords,
        "q k_cache v_cache cache_lens return_lse",
        flashsmith.attention_with_cache,
    ),
    (
        keywords.FlashAttnKeywords,
        "q k v dropout_p softmax_scale causal window_size return_attn_probs",
        flashsmith.flash_attn_func,
    ),
    (
        keywords.FlashVarlenKeywords,
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
        "window_size return_attn_probs",
        flashsmith.flash_attn_varlen_func,
    ),
    (
        keywords.FlashCacheKeywords,
        "q k_cache v_cache k v return_softmax_lse",
        flashsmith.flash_attn_with_kvcache,
    ),
]


@pytest.mark.torch
def test_overloads_over_ranks_have_every_keyword() -> None:
    from flashsmith.parallel.attention_keywords import ParallelKeywords

    parameters = inspect.signature(flashsmith.parallel.attention).parameters
    spelled_out = {"q", "k", "v", "return_lse", "return_row_max"}
    assert {*ParallelKeywords.__annotations__, *spelled_out} == set(parameters)
    for name, hint in ParallelKeywords.__annotations__.items():
        assert hint.__forward_arg__ == parameters[name].annotation, name


@pytest.mark.parametrize(("shared", "spelled_out", "function"), SHARED)
def test_overloads_have_every_keyword_of_their_function(
    shared: Any, spelled_out: str, function: Any
) -> None:
    parameters = inspect.signature(function).parameters
    assert {*shared.__annotations__, *spelled_out.split()} == set(parameters)
    for name, hint in shared.__annotations__.items():
        assert hint.__forward_arg__ == parameters[name].annotation, name
