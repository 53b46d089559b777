"""The FlashAttention packages: 2 (flash_attn), 3 (its hopper folder) and 4 (flash_attn.cute)."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.peers.peer import PeerContender, torch_absence
from flashsmith.benchmark.workload import Workload
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem

_THEIR_NAMES = {"window": "window_size"}
# Without these it would compute something else.
_NEEDED = {"causal", "window_size", "softcap"}
_DENSE, _PACKED = "flash_attn_func", "flash_attn_varlen_func"


@dataclass(frozen=True)
class FlashAttnPeer:
    """One generation: the modules that may hold its functions, the distributions it comes in."""

    name: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]

    def absence(self, problem: Problem) -> str | None:
        # First what takes no time: without PyTorch none of them imports.
        if absent := torch_absence():
            return absent
        found = self._function(_PACKED if problem.semantics.packed else _DENSE)
        return found if isinstance(found, str) else None

    def version(self) -> str:
        for name in self.distributions:
            try:
                return f"{name} {importlib.metadata.version(name)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return ""

    def prepare(self, workload: Workload) -> PeerContender:
        function = self._function(_PACKED if workload.packed else _DENSE)
        tensors, options = (workload.q, workload.k, workload.v), workload.options
        options = {_THEIR_NAMES.get(name, name): value for name, value in options.items()}
        # Which of the keywords there are depends on the version.
        known = inspect.signature(function).parameters
        if lacking := sorted(_NEEDED & options.keys() - known.keys()):
            raise ArgumentError(f"{function.__name__} has no {' and no '.join(lacking)}")
        options = {name: value for name, value in options.items() if name in known}

        def call() -> Any:
            return function(*tensors, **options)

        return PeerContender(self.name, call, _output)

    def _function(self, name: str) -> Any:
        """The function, or why it is not there."""
        reasons = []
        for module in self.modules:
            try:
                return getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:
                missing = error.name or module
                itself = module == missing or module.startswith(f"{missing}.")
                reasons.append(
                    f"{missing} is not installed"
                    if itself
                    else f"{module} needs {missing}, which is not installed"
                )
            except AttributeError:
                reasons.append(f"{module} has no {name}")
            except Exception as error:  # a wheel for another PyTorch fails in many ways
                reasons.append(f"{module} cannot be imported: {str(error).splitlines()[0]}")
        return "; ".join(reasons)


def _output(returned: Any) -> Any:
    """o: some versions return the LSE as well."""
    return returned[0] if isinstance(returned, tuple) else returned
