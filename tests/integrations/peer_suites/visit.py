"""Which cases a visit to a GPU runs, in the peers' own sizes, and by which kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics
from flashsmith.operations.backward import BACKWARD
from flashsmith.operations.decode import DECODE
from flashsmith.semantics.signature import check_mask
from peer_suites.calls import Drawn, every
from peer_suites.case import PeerCase
from peer_suites.flash_attention import FLASH_ATTENTION_2, FLASH_ATTENTION_3

FUNCTIONS = {"varlen_qkvpacked", "varlen_output", "varlen_causal", "kvcache"}
# Beyond it drawing a case's numbers takes longer than all else.
LONGEST = 20_000
MOST_KERNELS, MOST_CASES_EACH = 96, 5
# The same of gradients, whose references take longer.
LONGEST_BACKWARD, MOST_BACKWARD_KERNELS, MOST_BACKWARD_CASES_EACH = 1025, 20, 3
Kernel = tuple[KernelConfig, Semantics]


@cache
def chosen_cases(device: DeviceSpec) -> dict[Kernel, list[PeerCase]]:
    """A few cases of each of the kernels that serve most."""
    found: dict[Kernel, list[PeerCase]] = defaultdict(list)
    suites = (FLASH_ATTENTION_2, FLASH_ATTENTION_3)
    for case in every([test for suite in suites for test in suite if test.function in FUNCTIONS]):
        if max(case.lengths) <= LONGEST and not case.leftpad:
            found[kernel_of(case, device)].append(case)
    return _most_used(found, MOST_KERNELS, MOST_CASES_EACH)


@cache
def chosen_gradients(device: DeviceSpec) -> dict[Kernel, list[PeerCase]]:
    """Of those cases some that are differentiated, by their kernels of the backward pass."""
    found: dict[Kernel, list[PeerCase]] = defaultdict(list)
    for case in (case for cases in chosen_cases(device).values() for case in cases):
        if case.has_gradients and max(case.lengths) <= LONGEST_BACKWARD:
            problem = replace(problem_of(case)[0], operation=BACKWARD.name)
            config = choose_config(problem, device)
            found[config, problem.required_semantics(config)].append(case)
    return _most_used(found, MOST_BACKWARD_KERNELS, MOST_BACKWARD_CASES_EACH)


def _most_used(
    found: Mapping[Kernel, list[PeerCase]], kernels: int, cases_each: int
) -> dict[Kernel, list[PeerCase]]:
    """The kernels that serve most, with cases spread evenly over the tests and their draws."""
    most = sorted(found, key=lambda kernel: (-len(found[kernel]), str(kernel)))[:kernels]
    steps = {kernel: max(1, len(found[kernel]) // cases_each) for kernel in most}
    return {kernel: found[kernel][:: steps[kernel]][:cases_each] for kernel in most}


def kernel_of(case: PeerCase, device: DeviceSpec) -> Kernel:
    """What the chooser takes for a case's call."""
    problem, split = problem_of(case)
    config = CHOOSERS[split](problem, device) if split else choose_config(problem, device)
    return config, problem.required_semantics(config)


def problem_of(case: PeerCase) -> tuple[Problem, str]:
    """The problem that a case's call is, and over a cache how its keys are split."""
    drawn = Drawn(case)
    mask = check_mask(case.causal, drawn.window).kind
    packed = case.call == "packed" or case.packed_queries
    queries = max(drawn.lens_q) if packed else case.lengths[0]
    keys = max(drawn.lens_k) if case.call == "packed" else case.lengths[1]
    shape = drawn.heads, drawn.heads_k, -(-case.d // 8) * 8, drawn.kind
    if case.call == "cache" or case.page:
        if case.page:
            keys = -(-keys // case.page) * case.page
        semantics = Semantics(mask, case.softcap > 0, packed, uneven=packed)
        split = "free" if case.splits > 1 else "invariant"
        return Problem(case.batch, queries, keys, *shape, semantics, DECODE.name, case.page), split
    part = case.used
    semantics = Semantics(mask, case.softcap > 0, packed, uneven=packed or part, partial=part)
    return Problem(case.batch, queries, keys, *shape, semantics), ""
