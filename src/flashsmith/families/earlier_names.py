"""Former names of public classes, which still work but raise a DeprecationWarning.

A module provides these names through ``__getattr__``, so that imports and pickles that use a former
name still work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """The current module and name of a class, and the version that will remove the former name."""

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
    """Returns the function ``__getattr__`` for a module that provides former names.

    For a name that is not a former name, this function raises AttributeError, as Python does.
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
        # The import is relative, because the name of a copy of the package may not be flashsmith.
        module_name = renamed.module.removeprefix("flashsmith.families")
        return getattr(import_module(module_name, __package__), renamed.name)

    return earlier
