"""What the package ships: the kernels that attention() takes without anybody having measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from flashsmith.chooser.spills import replacements
from flashsmith.chooser.winners.storage import SHIPPED_FOLDER
from flashsmith.families import (
    KernelConfig,
    Problem,
    Semantics,
    families,
    parse_kernel_name_into_config,
)

ShippedKernel = tuple[KernelConfig, Semantics]


@cache
def shipped_kernels(tables: Path = SHIPPED_FOLDER) -> frozenset[ShippedKernel]:
    """The configs that are shipped, with what they are compiled for: what their families ship, for
    each problem of a shipped table those that it ranks, and those in the place of ones that spill.
    """
    named: set[ShippedKernel] = {kernel for family in families() for kernel in family.shipped()}
    named.update(replacements())
    for path in sorted(tables.glob("*.json")):
        for entry in json.loads(path.read_text())["entries"]:
            problem = Problem.parse(entry["problem"])
            for ranked in entry["ranked"]:
                cfg = parse_kernel_name_into_config(ranked["config"])
                named.add((cfg, problem.required_semantics(cfg)))
    return frozenset(named)
