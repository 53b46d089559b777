"""FlashAttention 2's and 3's own tests of packed sequences and of caches, in their sizes, on a GPU.

The kernels that the chooser takes are built together first, those that serve most cases; cases of
others are left out. With sixteen cores that takes three minutes, and the cases as long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

from peer_suites.calls import check, check_gradients  # noqa: E402
from peer_suites.case import PeerCase  # noqa: E402
from peer_suites.torch_tensors import torch_device  # noqa: E402
from peer_suites.visit import Kernel, chosen_cases, chosen_gradients, kernel_of  # noqa: E402

from flashsmith.families import Semantics  # noqa: E402
from flashsmith.runtime import query_gpu  # noqa: E402

# Compilers of a library's kernels, and libraries at once.
JOBS = 4


def build(kernels: list[Kernel], arch: int) -> None:
    """One library for each family and semantics, several at once."""
    groups: dict[tuple[str, Semantics], list[str]] = defaultdict(list)
    for config, semantics in kernels:
        groups[config.FAMILY, semantics].append(str(config))

    def run(group: tuple[tuple[str, Semantics], list[str]]) -> str:
        (_, semantics), configs = group
        command = [sys.executable, "-m", "flashsmith", "build", "--kernels", ";".join(configs),
                   "--arch", f"sm_{arch}"]  # fmt: skip
        if semantics != Semantics():
            command += ["--semantics", str(semantics)]
        env = {**os.environ, "FLASHSMITH_JOBS": str(JOBS)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        return "" if done.returncode == 0 else f"{command}:\n{done.stderr[-2000:]}"

    largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // JOBS)) as pool:
        failures = [text for text in pool.map(run, largest_first) if text]
    assert not failures, "\n".join(failures)


def run(chosen: Mapping[Kernel, list[PeerCase]], check_one: Callable[..., None]) -> int:
    """How many cases there are. Raises AssertionError that names those that are wrong."""
    device = torch_device("cuda")
    failures, count = [], 0
    for case in (case for cases in chosen.values() for case in cases):
        count += 1
        try:
            check_one(case, device)
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {error}")
    said = "\n".join(failures)
    assert not failures, f"{len(failures)} of {count} cases:\n{said}"
    return count


# One test each, since which kernels there are is known only where the GPU is.


def test_cases_in_their_own_sizes() -> None:
    device = query_gpu(0)
    chosen = chosen_cases(device)
    build(list(chosen), device.arch)
    assert run(chosen, check) >= 250


def test_gradients_in_their_own_sizes() -> None:
    device = query_gpu(0)
    chosen = chosen_gradients(device)
    forward = {kernel_of(case, device) for cases in chosen.values() for case in cases}
    build([*chosen, *forward], device.arch)
    assert run(chosen, check_gradients) >= 30
