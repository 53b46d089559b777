"""The kernels that ship: the builder asks for them, and whoever ships kernels registers them.

What the package itself ships is in the chooser's tables, to the builder's right; flashsmith's
__init__ registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

# Pairs of a config and the semantics it is compiled for.
Kernels = Collection[tuple[Any, Any]]

_providers: list[Callable[[], Kernels]] = []


def register_shipped_kernels(provider: Callable[[], Kernels]) -> None:
    """Adds what ``provider`` returns, which is called whenever somebody asks, to what ships."""
    _providers.append(provider)


def ships(config: Any, semantics: Any) -> bool:
    """Whether the kernel of ``config``, compiled for ``semantics``, is one that ships."""
    return any((config, semantics) in provider() for provider in _providers)
