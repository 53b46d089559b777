"""Plans of decode calls over a grid of problems and GPUs, as hashes; decode_plans.json has those of
an earlier version.

    python tests/csrc/decode_plans.py    # records them
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared_kernels

from flashsmith.families import (
    KernelConfig,
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import prepare_operation
from flashsmith.runtime.launch_plan import LaunchPlan

FILE = Path(__file__).with_name("decode_plans.json")
# What test_decode.py has, too: with full tiles, and of warps with rows of their own.
CONFIGS = (
    "(FP16, 64, 16, 64, 4): decode+stages_2+least_64+parts_2",
    "(FP16, 64, 16, 64, 4): decode+stages_2+least_64+parts_2+full",
    "(FP16, 64, 32, 32, 2): decode+stages_3+least_64+parts_2+own_rows",
)
GPUS = ("A100", "H100", "H200")
BATCHES = (1, 2, 3, 5, 8, 9, 12, 16, 20, 24, 33, 40, 64, 100, 160, 512)
CAPACITIES = (64, 512, 1024, 2500, 4096, 8192, 65536)
HEADS_K = (1, 2, 8)
GROUPS = (1, 4, 16)


def plans_of(
    cfg: KernelConfig, batch: int, capacity: int, heads_k: int, heads: int
) -> list[LaunchPlan]:
    """For each of GPUS, of dense caches for which there is no memory behind them."""
    d = cfg.d_head
    problem = Problem.parse(f"b{batch} s1:{capacity} h{heads}:{heads_k} d{d} fp16 decode")
    q, cache = (np.zeros((1, 1, number, d), np.float16) for number in (heads, heads_k))
    cache = np.broadcast_to(cache, (batch, capacity, heads_k, d))
    tensors = {
        "q": np.broadcast_to(q, (batch, 1, heads, d)),
        "k_cache": cache,
        "v_cache": cache,
        "cache_lens": np.zeros(batch, np.int32),
    }
    made = prepare_operation(cfg, problem, tensors, emulate=True)
    assert made.kernel is not None
    # The same addresses in each process.
    places = enumerate(made.call.addresses, 1)
    call = made.call._replace(addresses=tuple(4096 * n if it else 0 for n, it in places))
    # The host code is the same for all architectures.
    return [made.kernel.plan(call._replace(device=device_spec(gpu))) for gpu in GPUS]


def as_text(plan: LaunchPlan) -> str:
    """All but the names of kernels and classes."""
    launches = [
        (it.grid, it.block, it.cluster, it.smem_bytes, bytes(it.argument_bytes).hex())
        for it in plan.launches
    ]
    workspaces = [(it.name, it.nbytes, it.contents.name) for it in plan.workspaces]
    return repr((launches, workspaces))


def hashes() -> dict[str, str]:
    """By config, GPU and heads, of the plans of all batches and capacities."""
    configs = [parse_kernel_name_into_config(text) for text in CONFIGS]
    shared_kernels.load(configs, Semantics())
    return dict(_hashes(configs))


def _hashes(configs: list[KernelConfig]) -> Iterator[tuple[str, str]]:
    for cfg, heads_k, group in product(configs, HEADS_K, GROUPS):
        heads = heads_k * group
        plans = [
            plans_of(cfg, batch, capacity, heads_k, heads)
            for batch, capacity in product(BATCHES, CAPACITIES)
        ]
        for gpu, of_gpu in zip(GPUS, zip(*plans, strict=True), strict=True):
            text = "\n".join(map(as_text, of_gpu)).encode()
            yield (
                f"{cfg}, {gpu}, h{heads}:{heads_k}",
                hashlib.sha256(text).hexdigest()[:16],
            )


if __name__ == "__main__":
    FILE.write_text(json.dumps(hashes(), indent=0) + "\n")
