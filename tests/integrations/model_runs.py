"""Runs of transformers' models, beside eager attention and with the warnings they give."""

from __future__ import annotations

import warnings
from typing import Any

import torch


def both(model: Any, **inputs: Any) -> tuple[Any, Any]:
    """The model's first output with eager attention and with ours."""
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs)[0]
        model.set_attn_implementation("flashsmith")
        return expected, model(**inputs)[0]


def assert_same(ours: Any, expected: Any, where: Any = ...) -> None:
    torch.testing.assert_close(ours[where], expected[where], atol=4e-3, rtol=4e-3)


def quietly(model: Any, **inputs: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = model(**inputs)[0]
    return output, [str(w.message) for w in caught if "flashsmith" in str(w.message)]
