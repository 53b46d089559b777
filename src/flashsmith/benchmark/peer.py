"""Peer: the attention of another library, behind one small interface."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flashsmith.families import Problem


class Peer(Protocol):
    """The attention of another library."""

    @property
    def name(self) -> str:
        """The name of the peer in --peers and in tables."""

    def absence(self, problem: Problem) -> str | None:
        """Returns the reason why the peer cannot serve the problem; None if no reason is known
        before the peer is tried."""

    def version(self) -> str:
        """The version of the library that computes the results; valid only if the peer is not
        absent."""

    def prepare(self, workload: Any) -> PeerImplementation:
        """The peer's implementation for a workload, whose tensors are PyTorch tensors.

        If this raises an exception, the peer is absent.
        """


@dataclass(frozen=True)
class PeerImplementation:
    """A peer with the tensors of one workload.

    ``in_q_layout`` converts the value that ``call`` returns. It converts an output to q's layout,
    and gradients to a mapping by name.
    """

    name: str
    call: Callable[[], Any]
    in_q_layout: Callable[[Any], Any]

    def launch(self) -> Any:
        """Enqueues one call."""
        return self.call()

    def output(self) -> Any:
        """Runs one call and returns its output in q's layout."""
        return self.result(self.call())

    def result(self, returned: Any) -> Any:
        """The result of a call in q's layout."""
        return self.in_q_layout(returned)


def torch_absence() -> str | None:
    """Returns the reason why PyTorch cannot use a GPU here; None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    return None


def import_absence(module: str) -> str | None:
    """Returns the reason why a module cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        itself = module == missing or module.startswith(f"{missing}.")
        if itself:
            return f"{missing} is not installed"
        return f"{module} needs {missing}, which is not installed"
    except Exception as error:  # wheels for another PyTorch version fail in many ways
        return f"{module} cannot be imported: {(str(error) or repr(error)).splitlines()[0]}"
    return None


# The reason for the absence of a peer that does not support a cache whose dtype differs from q's.
NO_OTHER_DTYPE = "it takes no cache with scales or of another dtype than 16-bit queries"
