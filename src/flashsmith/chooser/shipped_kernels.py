"""What the package ships: the kernels that attention() takes without anybody having measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from flashsmith.chooser.winners.storage import SHIPPED_FOLDER
from flashsmith.families.family import KernelConfig
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.families.wgmma.config import HopperForwardKernelConfig
from flashsmith.families.wgmma.sets import get_hopper_configs
from flashsmith.operations.problem import Problem
from flashsmith.operations.semantics import Semantics

Kernel = tuple[KernelConfig, Semantics]


@cache
def shipped_hopper_kernels(tables: Path = SHIPPED_FOLDER) -> frozenset[Kernel]:
    """The wgmma configs that are shipped, with what they are compiled for.

    Those of the set 'hopper' for plain and causal attention on whole tiles, which they were chosen
    for; and for each problem of a shipped table those that it ranks.
    """
    named: set[Kernel] = {
        (cfg, semantics)
        for cfg in get_hopper_configs()
        for semantics in (Semantics(), Semantics("causal"))
    }
    for path in sorted(tables.glob("*.json")):
        for entry in json.loads(path.read_text())["entries"]:
            problem = Problem.parse(entry["problem"])
            for ranked in entry["ranked"]:
                if ranked["family"] == HopperForwardKernelConfig.FAMILY:
                    cfg = parse_kernel_name_into_config(ranked["config"])
                    named.add((cfg, problem.required_semantics(cfg)))
    return frozenset(named)
