"""Selects the candidate configs of a problem; the documented entry point to search spaces."""

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

# The space of the newest family that runs on a device, plus a few configs of the others.
ALL_FAMILIES = "both"
_FEW = 8
# The shipped tables' configs for a problem: their margin to the best one, and their maximum number.
KNOWN = "known"
_KNOWN_MARGIN, _MOST_KNOWN = 0.03, 4
# This many configs per family also get split-KV variants, with up to three split counts each.
_MOST_IN_PARTS = 4
# Sets that are searched at every dtype and head dimension; 'B_r,B_c' selects from tune.
_SCHEDULES = re.compile(r"tune|prog|prog-all|all|\s*\d+\s*,\s*\d+\s*", re.ASCII)


def space_keys() -> tuple[str, ...]:
    """The keys of search spaces. It is worthwhile to refine the best configs of a space."""
    return (*(family.space_key for family in families() if family.space_key), ALL_FAMILIES)


def check_space(key: str) -> None:
    """Raises SelectionError or ConfigParseError when a key is neither the key of a space nor valid
    for KERNELS. Only search_space() checks whether the key has configs for a problem."""
    if key not in (*space_keys(), KNOWN):
        get_kernel_configs(key)


def default_space(device: DeviceSpec) -> str:
    """The key of the space that is searched on a device by default.

    Raises ArgumentError when no family with a space runs there.
    """
    searched = _searched(device)
    return ALL_FAMILIES if len(searched) > 1 else searched[0].space_key


def _searched(device: DeviceSpec) -> list[Family]:
    """The families whose spaces are searched on a device; families for the newest GPUs come
    first."""
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
    """The configs that may serve `problem` on `device`, without duplicates; some may be illegal.

    `key` selects the space:

    - The key of a family's space: 'space' for the mma.sync family, 'hopper' for the wgmma family.
    - 'both': the newest family's space and a few configs of the others, the configs of the shipped
      tables first.
    - 'known': the few best configs by the shipped tables, for a GPU similar to one in them.
    - None: the key of default_space().
    - A KERNELS key. The configs of tune, prog, prog-all, all and block sizes like '64,32' take the
      problem's dtype and head dimension. Other sets contribute only configs that match both.

    Spaces are searched at the problem's dtype and head dimension. If few tiles leave SMs idle, a
    family's space also has some split-KV configs. For a problem with canonical bits, each config
    is replaced by its counterpart that keeps the canonical order.

    Raises:
        SelectionError: the key is unknown or selects nothing, or none of its configs has the
            problem's dtype and head dimension, or bits.
        ArgumentError: no kernel exists for the problem's d; or the key is 'both' or None and no
            family with a space runs on the device; or it is 'known' and no kernel serves the
            problem.
    """
    key = key or default_space(device)
    found = _of_any_order(problem, device, key)
    if not problem.bits:
        return found
    kept = [cfg if version_of(cfg) else cfg.family.canonical(cfg, device) for cfg in found]
    canonical = list(dict.fromkeys(cfg for cfg in kept if cfg is not None))
    if not canonical:
        raise SelectionError(
            f"space={key!r}: no config of {ORDER} on {device.name} takes the place of any in this "
            f"space, but {problem} needs one; leave the problem out, or take another space"
        )
    return canonical


def _of_any_order(problem: Problem, device: DeviceSpec, key: str) -> list[KernelConfig]:
    """The configs of search_space(), regardless of the problem's bits."""
    if key == KNOWN:
        return _known(problem, device)
    d_head = d_head_for(problem)
    asked = [family for family in families() if family.space_key == key]
    of = asked[0].operation if asked else DEFAULT if key == ALL_FAMILIES else None
    if of == DEFAULT != problem.operation:
        # The key names attention's kernels, so it does not restrict another operation's kernels.
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
    """The configs that attention() uses for `problem` on `device` without a user's table.

    That is the winner of the GPU's shipped table or of the nearest GPU with a shipped table, else
    the cost model's choice. A second config follows if deterministic=True uses another one. The
    list is empty if no kernel serves the problem there.
    """
    try:
        choice = choose(problem, device, table=_shipped())
    except ArgumentError:
        return []
    repeatable = [] if choice.repeatable is None else [choice.repeatable.config]
    return [choice.config, *repeatable]


def _known(problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """The configs that are about as fast as the best one. The evidence is the nearest entry of the
    shipped tables for a GPU like the device, or else the cost model. Deterministic kernels are also
    ranked among themselves."""
    found: dict[KernelConfig, None] = {}
    for deterministic in (False, True):
        evidence = gather(problem, device, _shipped(), deterministic=deterministic)
        expected = sorted(evidence.expected, key=lambda one: one.ms)
        limit = expected[0].ms * (1 + _KNOWN_MARGIN)
        near = [one.config for one in expected if one.ms <= limit]
        found.update(dict.fromkeys(near[:_MOST_KNOWN]))
    return list(found)


def _few(family: Family, problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """A few of the family's configs, enough to compare it with another family."""
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
    """``found`` and, if the problem has few tiles, split-KV and pack-GQA configs.

    These are variants of the ``asked`` families' fastest configs by the table or the cost model.
    """
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
    # The user's table is ignored because it changes while a sweep runs, and a resumed sweep must
    # have the same space.
    return WinnersTable.shipped()


def _masked(problem: Problem) -> bool:
    return problem.semantics.key_mask.hides


def _whole(asked: Sequence[Family], problem: Problem, d_head: int, key: str) -> list[KernelConfig]:
    """The whole spaces of families of one operation."""
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
