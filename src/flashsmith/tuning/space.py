"""Which configs are candidates for a problem: the documented place where a search space begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from flashsmith.chooser.candidates import by_preference
from flashsmith.chooser.choice import choose
from flashsmith.chooser.evidence import gather
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import ArgumentError, SelectionError
from flashsmith.families import (
    DeviceSpec,
    Family,
    KernelConfig,
    Problem,
    d_head_for,
    families,
    get_kernel_configs,
    is_legal,
    serves_gradients,
)
from flashsmith.families.canonical import ORDER, version_of
from flashsmith.operations import DEFAULT

# The space of the newest family that runs on a device, and a few configs of the others.
ALL_FAMILIES = "both"
_FEW = 8
# What the shipped tables have for a problem: those this near the best of them there.
KNOWN = "known"
_KNOWN_MARGIN, _MOST_KNOWN = 0.03, 4
# Of a family's configs those that are also tried in parts of the keys, each in up to three numbers.
_MOST_IN_PARTS = 4
# Sets that are searched at every dtype and head dimension; 'B_r,B_c' is of tune.
_SCHEDULES = re.compile(r"tune|prog|prog-all|all|\s*\d+\s*,\s*\d+\s*", re.ASCII)


def space_keys() -> tuple[str, ...]:
    """The keys of search spaces, whose best are worth refining."""
    return (*(family.space_key for family in families() if family.space_key), ALL_FAMILIES)


def check_space(key: str) -> None:
    """Raises SelectionError or ConfigParseError when a key is neither a space's nor one that
    KERNELS may have; whether it has configs for a problem is for search_space() to say."""
    if key not in (*space_keys(), KNOWN):
        get_kernel_configs(key)


def default_space(device: DeviceSpec) -> str:
    """The key of the space that is searched on a device unless another is asked for.

    Raises ArgumentError when no family with a space runs there.
    """
    searched = _searched(device)
    return ALL_FAMILIES if len(searched) > 1 else searched[0].space_key


def _searched(device: DeviceSpec) -> list[Family]:
    """The families whose spaces are searched on a device, those for the newest GPUs first."""
    known = [family for family in by_preference() if family.space_key]
    found = [family for family in known if family.runs_on(device)]
    if not found:
        needed = ", ".join(f"{one.name} (needs sm_{one.oldest_arch})" for one in known)
        raise ArgumentError(
            f"device: no family has a search space for {device.name} (sm_{device.arch}); there are "
            f"{needed}; name another GPU"
        )
    return found


def search_space(
    problem: Problem, device: DeviceSpec, key: str | None = None
) -> list[KernelConfig]:
    """The configs that may serve `problem` on `device`, each once; some may turn out illegal there.

    `key` is that of a family's space ('space' is the mma.sync family's, 'hopper' the wgmma
    family's), 'both' (the newest family's, and of the others a few, those of the shipped tables
    first), 'known' (the best few by the shipped tables, for a GPU like one of theirs), None for
    default_space(), or a KERNELS key. A space is searched at the problem's own
    dtype and head dimension, and so are tune, its block sizes ('64,32'), prog, prog-all and all,
    whose configs get them put in. Of any other set those count that have them already. Where few
    tiles leave SMs idle, a family's space has some configs that split keys besides. For a problem
    with canonical bits each config is the one that keeps that order in its place.

    Raises:
        SelectionError: the key is unknown or selects nothing, or none of its configs has the
            problem's dtype and head dimension, or bits.
        ArgumentError: no kernel is made for the problem's d, 'both' or None is asked for and no
            family with a space runs on the device, or 'known' and no kernel serves the problem.
    """
    key = key or default_space(device)
    found = _of_any_order(problem, device, key)
    if not problem.bits:
        return found
    kept = [cfg if version_of(cfg) else cfg.family.canonical(cfg, device) for cfg in found]
    canonical = list(dict.fromkeys(cfg for cfg in kept if cfg is not None))
    if not canonical:
        raise SelectionError(
            f"space={key!r}: no config of {ORDER} on {device.name} takes the place of one of it, "
            f"which {problem} needs; leave the problem out, or take another space"
        )
    return canonical


def _of_any_order(problem: Problem, device: DeviceSpec, key: str) -> list[KernelConfig]:
    """The same, whatever the bits."""
    if key == KNOWN:
        return _known(problem, device)
    d_head = d_head_for(problem)
    asked = [family for family in families() if family.space_key == key]
    of = asked[0].operation if asked else DEFAULT if key == ALL_FAMILIES else None
    if of == DEFAULT != problem.operation:
        # A key that stands for attention's kernels says nothing about another operation's.
        asked = list(families(problem.operation))
    elif asked and of != problem.operation:
        raise SelectionError(
            f"space={key!r}: its kernels compute {of}, and '{problem}' is of the operation "
            f"{problem.operation}; take another space"
        )
    if asked:
        found = _whole(asked, problem, d_head, key)
        return _with_parts(found, asked, problem, device)
    if key == ALL_FAMILIES:
        newest, *others = _searched(device)
        found = list(newest.search_space(problem.dtype, d_head, _masked(problem)))
        for other in others:
            found += _few(other, problem, device)
        return _with_parts(found, [newest], problem, device)
    configs = get_kernel_configs(key)
    if _SCHEDULES.fullmatch(key) and problem.operation == DEFAULT:
        configs = [cfg.with_knobs(dtype=problem.dtype, d_head=d_head) for cfg in configs]
    wanted = problem.operation, problem.dtype, d_head
    fitting = [
        cfg
        for cfg in configs
        if (cfg.family.operation, cfg.dtype, cfg.d_head) == wanted
        and serves_gradients(cfg, problem)
    ]
    if not fitting:
        raise SelectionError(
            f"space={key!r}: none of its configs ({len(configs)}) is for {problem.dtype.name} and "
            f"d_head {d_head}, which {problem} needs; leave the problem out, or take another space"
        )
    return list(dict.fromkeys(fitting))


def shipped_choices(problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """What attention() takes for `problem` on `device` where its user has tuned nothing: the winner
    of the GPU's own shipped table, or of the nearest GPU's that has one, else the cost model's
    choice; and what deterministic=True takes where that differs. Empty where no kernel serves the
    problem there."""
    try:
        choice = choose(problem, device, table=_shipped())
    except ArgumentError:
        return []
    repeatable = [] if choice.repeatable is None else [choice.repeatable.config]
    return [choice.config, *repeatable]


def _known(problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """What the shipped tables say is about as fast as the best, of deterministic kernels too: by
    the nearest entry of a GPU like the device; without any what is on paper."""
    found: dict[KernelConfig, None] = {}
    for deterministic in (False, True):
        evidence = gather(problem, device, _shipped(), deterministic=deterministic)
        expected = sorted(evidence.expected, key=lambda one: one.ms)
        limit = expected[0].ms * (1 + _KNOWN_MARGIN)
        near = [one.config for one in expected if one.ms <= limit]
        found.update(dict.fromkeys(near[:_MOST_KNOWN]))
    return list(found)


def _few(family: Family, problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """Enough to compare the family with another; its whole space is for another sweep."""
    d_head, masked = d_head_for(problem), _masked(problem)
    sound = [
        cfg
        for cfg in family.candidates(problem.dtype, d_head, device, masked)
        or family.search_space(problem.dtype, d_head, masked)
        if is_legal(cfg, device)
    ]
    if not sound:
        return []
    evidence = gather(problem, device, _shipped(), family.name)
    measured = [one.config for one in evidence.expected]
    return list(dict.fromkeys([*measured, *sound]))[:_FEW]


def _with_parts(
    found: Sequence[KernelConfig], asked: Sequence[Family], problem: Problem, device: DeviceSpec
) -> list[KernelConfig]:
    """The same and, where a problem's tiles are few, configs that split keys or have the heads of a
    group in a tile, of those of the ``asked`` families that are the fastest on paper otherwise, or
    that a table has."""
    names = {cfg.FAMILY for cfg in found}
    variants = [
        other
        for family in asked
        if family.name in names and family.has_cost_model and family.runs_on(device)
        for one in gather(problem, device, _shipped(), family.name).expected[:_MOST_IN_PARTS]
        for other in (
            one.config,
            *family.split_variants(one.config, problem, device),
            *family.pack_variants(one.config, problem, device),
        )
        if other is not one.config or family.splits_keys(other)
    ]
    return list(dict.fromkeys([*found, *variants]))


@lru_cache(maxsize=1)
def _shipped() -> WinnersTable:
    # Not the user's own, which changes while a sweep runs: a resumed sweep has the same space.
    return WinnersTable.shipped()


def _masked(problem: Problem) -> bool:
    return problem.semantics.key_mask.hides


def _whole(asked: Sequence[Family], problem: Problem, d_head: int, key: str) -> list[KernelConfig]:
    """The spaces of families of one operation."""
    masked = _masked(problem)
    space = (
        family.for_gradients(cfg, problem.gradients)
        for family in asked
        for cfg in family.search_space(problem.dtype, d_head, masked)
    )
    found = list(dict.fromkeys(cfg for cfg in space if serves_gradients(cfg, problem)))
    if not found:
        others = [one.space_key for one in families(problem.operation) if one not in asked]
        named = [f"space={other!r}" for other in others if other]
        raise SelectionError(
            f"space={key!r}: it has no kernels of d_head {d_head}, which {problem} needs; leave "
            f"the problem out, or take {' or '.join(named) or 'configs by name'}"
        )
    return found
