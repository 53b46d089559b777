"""The plan of a package with everything is exact: it has what is chosen for each problem that it
promises, and nothing else. No kernel is compiled here.

The default run takes one kind of calls of each operation; ``-m full`` takes all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flashsmith.chooser import choose_config
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.chooser.package_contents import (
    BACKWARD_KINDS,
    CACHE_SIZES,
    DECODE_KINDS,
    FORWARD_KINDS,
    HEADS,
    LATENT_HEADS,
    LATENT_KINDS,
    LATENT_SIZES,
    MERGE_KINDS,
    SIZES,
    SMALLEST_D_HEAD,
    WRITE_KINDS,
    package_contents,
    widths_of,
)
from flashsmith.chooser.package_scope import PackageScope
from flashsmith.chooser.prebuild import TOLERANCE, CallSizes
from flashsmith.chooser.winners import WinnersTable
from flashsmith.chooser.winners.validation import device_of
from flashsmith.chooser.write_slots import write_config
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, Semantics, device_spec
from flashsmith.families.device import DeviceSpec
from flashsmith.families.head_dims import HeadDims, HeadPair

Planned = tuple[KernelConfig, Semantics]
EVERYTHING = PackageScope(everything=True)
DEVICES = {80: ("A100",), 90: ("H100", "H200")}
WIDTHS = {
    "forward": (64, 72, 80, 96, 128, 192, 256),
    "backward": (64, 72, 80, 96, 128, 192, 256),
    "decode": (64, 96, 128, 192, 256, 512),
    "merge": (64, 96, 128, 192, 256),
    "write_slots": (64, 96, 128, 192, 256, 512),
}
PAIRS = tuple(HeadPair(*it) for it in ((64, 128), (128, 64), (192, 128), (256, 128), (256, 256)))
LATENT_PAIRS = (HeadPair(320, 256), HeadPair(576, 512))
# Over caches; the kernels of 96 serve vision transformers, too.
SMALLER = (72, 80, 88, 120, 168, 200)
SMALLER_PAIRS = (HeadPair(120, 56), HeadPair(160, 128))


def expected_widths(arch: int, operation: str) -> tuple[HeadDims, ...]:
    if operation == "latent_decode":
        return LATENT_PAIRS
    wide = (512,) if arch == 90 and operation in ("forward", "backward") else ()
    return (*WIDTHS[operation], *wide, *(() if operation == "merge" else PAIRS))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("operation", [*WIDTHS, "latent_decode"])
def test_the_widths_are_those_with_kernels(arch: int, operation: str) -> None:
    assert widths_of(arch, operation) == expected_widths(arch, operation)


def has_8bit_cache(kind: str) -> bool:
    return kind.endswith(("cache_e4m3", "cache_e5m2"))


def smaller_widths(kind: str) -> tuple[HeadDims, ...]:
    """Widths below the kernels' own. Rows of 8-bit floats are multiples of 16 bytes."""
    step = 16 if has_8bit_cache(kind) else 8
    return (
        *(d for d in SMALLER if d % step == 0),
        *(pair for pair in SMALLER_PAIRS if not any(d % step for d in pair)),
    )


def problems_of(
    kind: str,
    d: HeadDims,
    sizes: Sequence[CallSizes],
    heads: Sequence[tuple[int, int]],
) -> Iterator[Problem]:
    if d == HeadPair(256, 256):  # it is for calls with two widths
        d = HeadPair(256, 240 if has_8bit_cache(kind) else 248)
    for (heads_q, heads_k), (batch, seq_q, seq_k) in product(heads, sizes):
        if kind.startswith("merge"):
            heads_k, seq_k = heads_q, 1
        words = f"b{batch} s{seq_q}:{seq_k} h{heads_q}:{heads_k} d{d} bf16 {kind}"
        yield Problem.parse(words)


def measured(kind: str, arch: int) -> Iterator[tuple[Problem, DeviceSpec]]:
    """Problems in the shipped tables that differ from a kind only in sizes."""

    def words(problem: Problem) -> Problem:
        semantics = problem.semantics
        semantics = replace(semantics, uneven=semantics.packed or semantics.partial)
        sizes = {"batch": 1, "seq_q": 1, "seq_k": 1, "heads_q": 1, "heads_k": 1, "page": 0}
        return replace(problem, semantics=semantics, window_keys=0, d=64, d_v=64, **sizes)

    for entry in WinnersTable.shipped():
        device = device_of(entry.key)
        if entry.key.arch != arch or device is None or entry.problem.dtype is not DType.BF16:
            continue
        is_narrow = entry.problem.d < SMALLEST_D_HEAD
        if not is_narrow and words(entry.problem) == words(Problem.parse(f"s1 d64 bf16 {kind}")):
            yield entry.problem, device


def as_planned(config: KernelConfig, problem: Problem, *, and_uneven: bool = False) -> set[Planned]:
    semantics = problem.required_semantics(config)
    also = {(config, replace(semantics, uneven=True))} if and_uneven else set()
    return {(config, semantics), *also}


def check_cache_plan(arch: int, kind: str, operation: str) -> None:
    """Over caches the plan has exactly what is chosen."""
    plan = package_contents(arch, dtypes=(DType.BF16,), kinds=(kind,), scope=EVERYTHING)
    planned = {(config, it) for it, configs in plan.kernels.items() for config in configs}
    is_latent = operation == "latent_decode"
    heads, sizes = (LATENT_HEADS, LATENT_SIZES) if is_latent else (HEADS, CACHE_SIZES)
    choose = CHOOSERS["invariant"]
    needed: set[Planned] = set()
    for name in DEVICES[arch]:
        device = device_spec(name)
        for d in expected_widths(arch, operation):
            for problem in problems_of(kind, d, sizes, heads):
                config = choose(problem, device)
                needed |= as_planned(config, problem, and_uneven=not is_latent)
        for d in () if is_latent else smaller_widths(kind):
            for problem in problems_of(kind, d, sizes[::7], heads):
                config = choose(problem, device)
                assert as_planned(config, problem) <= planned, problem
    for problem, device in measured(kind, arch):
        needed |= as_planned(choose(problem, device), problem)
    assert planned == needed


def chosen(
    problem: Problem, device: DeviceSpec, deterministic: bool, *among: KernelConfig
) -> KernelConfig | None:
    """What is chosen among these configs within TOLERANCE, or without them of all; None if there is
    no kernel."""
    within: dict[str, Any] = {"among": among, "tolerance": TOLERANCE} if among else {}
    try:
        found: KernelConfig = choose_config(problem, device, deterministic=deterministic, **within)
    except ArgumentError:
        return None
    return found


def check_plan(arch: int, kind: str, operation: str) -> None:
    """Elsewhere the plan has, for each problem, a kernel within TOLERANCE of the chosen one, and
    each of its kernels is needed for some problem."""
    plan = package_contents(arch, dtypes=(DType.BF16,), kinds=(kind,), scope=EVERYTHING)
    planned = {(config, it) for it, configs in plan.kernels.items() for config in configs}
    semantics = Problem.parse(f"s1 d64 bf16 {kind}").semantics
    assert {it for _, it in planned} <= {semantics, replace(semantics, uneven=True)}
    widths = expected_widths(arch, operation)
    assert {config.head_dims for config, _ in planned} == set(widths)
    idle = {config for config, _ in planned}
    repeatable = (False, True) if operation == "backward" else (False,)
    for d, name, deterministic in product(widths, DEVICES[arch], repeatable):
        device = device_spec(name)
        held = {config for config, it in planned if config.head_dims == d and it.uneven}
        if deterministic:
            held = {config for config in held if config.family.is_deterministic(config)}
        for problem in problems_of(kind, d, SIZES, HEADS):
            best = chosen(problem, device, deterministic)
            if best is not None:
                found = chosen(problem, device, deterministic, *sorted(held, key=str), best)
                assert found in held, problem
                needed = (
                    it for it in idle & held if chosen(problem, device, False, it, best) == it
                )
                idle -= {best, *needed}
    for problem, device in measured(kind, arch):
        for deterministic in repeatable:
            idle = idle - {chosen(problem, device, deterministic)}
    assert not idle


def check_write_plan(arch: int, kind: str) -> None:
    """One kernel of each width writes to caches, and the same serves a smaller d."""
    plan = package_contents(arch, dtypes=(DType.BF16,), kinds=(kind,), scope=EVERYTHING)
    planned = {(config, it) for it, configs in plan.kernels.items() for config in configs}
    needed: set[Planned] = set()
    for d in expected_widths(arch, "write_slots"):
        for problem in problems_of(kind, d, SIZES, HEADS):
            needed |= as_planned(write_config(problem), problem, and_uneven=True)
    assert planned == needed
    for d in smaller_widths(kind):
        (problem, *_) = problems_of(kind, d, SIZES, HEADS)
        assert as_planned(write_config(problem), problem) <= planned


QUICK = (
    *((80, "decode causal"), (90, "causal"), (80, "merge"), (80, "write_slots")),
    *((90, "decode causal packed cache_e4m3"), (90, "write_slots cache_e5m2")),
)
KINDS = (
    *(*FORWARD_KINDS, *BACKWARD_KINDS, *DECODE_KINDS, *LATENT_KINDS, *MERGE_KINDS),
    *WRITE_KINDS,
)


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        pytest.param(arch, kind, marks=() if (arch, kind) in QUICK else pytest.mark.full)
        for arch in (80, 90)
        for kind in KINDS
    ],
)
def test_the_plan_is_exact(arch: int, kind: str) -> None:
    operation = Problem.parse(f"s1 d64 fp16 {kind}").operation
    if operation in ("decode", "latent_decode"):
        check_cache_plan(arch, kind, operation)
    elif operation == "write_slots":
        check_write_plan(arch, kind)
    else:
        check_plan(arch, kind, operation)
