"""Lets this folder's tests share padded_attention.py, see calls of transformers' models, and get
every fallback's warning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashsmith.integrations.fallbacks import forget_warnings

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _every_fallback_warns_anew() -> None:
    forget_warnings()


@pytest.fixture
def calls() -> Iterator[Any]:
    """A plain attention() in the kernels' place."""
    import torch
    from replaced_kernels import replaced_kernels

    with replaced_kernels(float32_as=torch.float16, strict=True) as seen:
        yield seen
