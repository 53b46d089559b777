"""CUDA graphs of PyTorch's, as tests capture them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of ``call``, and what it gave: the memory that every replay fills again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # PyTorch's own stream for captures stays on the GPU that was current at the first.
    with torch.cuda.graph(graph, stream=side):
        output = call()
    return graph, output
