"""Peer: what the benchmark needs of somebody else's attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flashsmith.families import Problem


class Peer(Protocol):
    """Somebody else's attention."""

    @property
    def name(self) -> str:
        """As --peers and the tables call it."""

    def absence(self, problem: Problem) -> str | None:
        """Why it cannot take part, None if it can as far as is known before it is tried."""

    def version(self) -> str:
        """Of what computes, if it takes part."""

    def prepare(self, workload: Any) -> PeerContender:
        """The contender on a Workload, or that of another operation, whose tensors are PyTorch's.
        What it raises is an absence."""


@dataclass(frozen=True)
class PeerContender:
    """A peer on one workload. ``in_q_layout`` turns what ``call`` returns into q's layout."""

    name: str
    call: Callable[[], Any]
    in_q_layout: Callable[[Any], Any]

    def launch(self) -> Any:
        """Enqueues one call."""
        return self.call()

    def output(self) -> Any:
        """What one call computes, in q's layout."""
        return self.in_q_layout(self.call())


def torch_absence() -> str | None:
    """Why PyTorch cannot be used on a GPU here, None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    return None
