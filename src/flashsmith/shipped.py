"""The registry of shipped kernels, which the builder reads.

The package's own shipped kernels are in the chooser's tables, which the builder may not import;
flashsmith's __init__ registers them here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

# Pairs of a config and the semantics it is compiled for.
Kernels = Collection[tuple[Any, Any]]

_providers: list[Callable[[], Kernels]] = []


def register_shipped_kernels(provider: Callable[[], Kernels]) -> None:
    """Adds what ``provider`` returns to the shipped kernels; it is called at every query."""
    _providers.append(provider)


def ships(config: Any, semantics: Any) -> bool:
    """Whether the kernel of ``config``, compiled for ``semantics``, is one that ships."""
    return any((config, semantics) in provider() for provider in _providers)
