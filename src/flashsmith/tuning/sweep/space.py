"""Which configs are candidates for a problem: the documented place where a search space begins."""

from __future__ import annotations

import re
from dataclasses import replace

from flashsmith.configs import (
    DeviceSpec,
    KernelConfig,
    Problem,
    compiled_d_head,
    get_kernel_configs,
    get_search_space_configs,
)
from flashsmith.errors import SelectionError

DEFAULT_SPACE = "space"
# Sets that say how to schedule, whatever the dtype and the head dimension; 'B_r,B_c' is of tune.
_SCHEDULES = re.compile(r"tune|prog|prog-all|all|\s*\d+\s*,\s*\d+\s*", re.ASCII)


def search_space(
    problem: Problem, device: DeviceSpec, key: str = DEFAULT_SPACE
) -> list[KernelConfig]:
    """The configs that may serve `problem` on `device`, each once; some may turn out illegal there.

    `key` is a KERNELS key. 'space' is searched at the problem's own dtype and head dimension, and
    so are tune, its block sizes ('64,32'), prog, prog-all and all, whose configs get them put in.
    Of any other set those count that have them already.

    Raises:
        SelectionError: the key is unknown or selects nothing, or none of its configs has the
            problem's dtype and head dimension.
        ArgumentError: no kernel is made for the problem's d.
    """
    d_head = compiled_d_head(problem.d)
    if key == DEFAULT_SPACE:
        return list(get_search_space_configs((problem.dtype,), (d_head,)))
    configs = get_kernel_configs(key)
    if _SCHEDULES.fullmatch(key):
        configs = [replace(cfg, dtype=problem.dtype, d_head=d_head) for cfg in configs]
    fitting = [cfg for cfg in configs if (cfg.dtype, cfg.d_head) == (problem.dtype, d_head)]
    if not fitting:
        raise SelectionError(
            f"space={key!r}: none of its {len(configs)} configs is for {problem.dtype.name} and "
            f"d_head {d_head}, which {problem} needs; leave the problem out, or take another space"
        )
    return list(dict.fromkeys(fitting))
