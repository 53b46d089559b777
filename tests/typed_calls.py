"""Public calls for a type checker: what it accepts, and what it refuses. Nothing here is run.

An ignore that is not needed is an error, so each line of refused() has to be one.
"""

from typing import Any

import numpy as np
import torch

import flashsmith


def accepted(tensor: torch.Tensor, weights: torch.nn.Parameter, array: np.ndarray) -> None:
    flashsmith.attention(tensor, tensor, weights, sinks=tensor, out=tensor, window=(3, None))
    flashsmith.attention(array, array, array, causal=True, cu_seqlens_q=array, cu_seqlens_k=array)
    config = flashsmith.choose("b1 s64 h1 d64 fp16").config
    flashsmith.attention(tensor, tensor, tensor, config=config)
    flashsmith.forward(config, array, array, array, array)
    flashsmith.flash_attn_func(tensor, tensor, tensor, window_size=(-1, 0))
    flashsmith.flash_attn_varlen_func(tensor, tensor, tensor, tensor, tensor, 3, 3)
    flashsmith.sdpa(tensor, tensor, tensor, tensor)


def refused(a: np.ndarray, config: Any) -> None:
    flashsmith.attention(1, a, a)  # type: ignore[arg-type]
    flashsmith.attention(a, "x", a)  # type: ignore[arg-type]
    flashsmith.attention(a, a, None)  # type: ignore[arg-type]
    flashsmith.attention(a, a, [[1.0]])  # type: ignore[arg-type]
    flashsmith.attention(a, a, a, sinks=1.0)  # type: ignore[arg-type]
    flashsmith.attention(a, a, a, cu_seqlens_q=[0, 3])  # type: ignore[arg-type]
    flashsmith.attention(a, a, a, out="o")  # type: ignore[arg-type]
    flashsmith.attention(a, a, a, casual=True)  # type: ignore[call-arg]
    flashsmith.attention(a, a, a, config="tune")  # type: ignore[arg-type]
    flashsmith.forward("x", a, a, a)  # type: ignore[arg-type]
    flashsmith.forward(config, a, a, 3)  # type: ignore[arg-type]
    flashsmith.forward_timed(config, a, a, 3)  # type: ignore[arg-type]
    flashsmith.flash_attn_func(a, a, 3)  # type: ignore[arg-type]
    flashsmith.flash_attn_varlen_func(a, a, a, None, a, 3, 3)  # type: ignore[arg-type]
    flashsmith.choose(3)  # type: ignore[arg-type]
