"""From configs to C++ text: the instantiation shards and the map that finds them."""

from __future__ import annotations

from flashsmith.codegen.cost import balance, expected_cost
from flashsmith.codegen.instantiations import (
    GeneratedSources,
    generate_kernel_instantiations,
    sorted_configs,
)

__all__ = [
    "GeneratedSources",
    "balance",
    "expected_cost",
    "generate_kernel_instantiations",
    "sorted_configs",
]
