"""Earlier names of public classes, which still work and raise a DeprecationWarning.

A module offers them by ``__getattr__``, so that imports and pickles with an earlier name work, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """A class's present module and name, and the version that removes the earlier name."""

    module: str
    name: str
    removal: str


EARLIER = {
    "HopperBackwardKernelConfig": Renamed(
        "flashsmith.families.wgmma_backward.config", "WgmmaBackwardKernelConfig", "0.3.0"
    ),
    "HopperDqKernelConfig": Renamed(
        "flashsmith.families.wgmma_dq.config", "WgmmaDqKernelConfig", "0.3.0"
    ),
    "HopperForwardKernelConfig": Renamed(
        "flashsmith.families.wgmma.config", "WgmmaForwardKernelConfig", "0.3.0"
    ),
}


def getter(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that offers earlier names.

    For all other names it raises AttributeError, like Python itself.
    """

    def earlier(name: str) -> Any:
        if name not in EARLIER:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        renamed = EARLIER[name]
        warnings.warn(
            f"{module}.{name} is deprecated and will be removed in {renamed.removal}: use "
            f"{renamed.name}",
            DeprecationWarning,
            stacklevel=2,
        )
        # Relative, because a copy of the package may have another name.
        module_name = renamed.module.removeprefix("flashsmith.families")
        return getattr(import_module(module_name, __package__), renamed.name)

    return earlier
