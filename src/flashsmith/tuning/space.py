"""Selects the candidate configs for a problem; this is the documented interface to search
spaces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from flashsmith.chooser.batch_invariant import adapt_to_queries, for_free_split, without_batch
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
from flashsmith.families.head_dims import HeadDims, split_dims
from flashsmith.operations import DEFAULT

# The key for the space of the newest family that runs on the device, plus a few configs of other
# families.
ALL_FAMILIES = "both"
_FEW = 8
# The key for the configs that the shipped tables have for a problem. A config is used if it takes
# at most the fraction _KNOWN_MARGIN longer than the best config; at most _MOST_KNOWN configs are
# used.
KNOWN = "known"
_KNOWN_MARGIN, _MOST_KNOWN = 0.03, 4
# The number of configs of each family for which split-KV variants are added: up to three variants
# for each config, with different numbers of splits.
_MOST_IN_PARTS = 4
# The keys of sets that exist for every dtype and head dimension; 'B_r,B_c' selects configs from
# tune.
_SCHEDULES = re.compile(r"tune|prog|prog-all|all|\s*\d+\s*,\s*\d+\s*", re.ASCII)


def space_keys() -> tuple[str, ...]:
    """The keys of the search spaces.

    Refining the best configs makes sense for a space, but not for a set.
    """
    return (*(family.space_key for family in families() if family.space_key), ALL_FAMILIES)


def check_space(key: str) -> None:
    """Raises SelectionError or ConfigParseError if a key neither names a space nor is valid for
    KERNELS. Only search_space() checks whether a key has configs for a problem."""
    if key not in (*space_keys(), KNOWN):
        get_kernel_configs(key)


def default_space(device: DeviceSpec) -> str:
    """The key of the space that is searched on a device by default.

    Raises ArgumentError if no family that has a space runs on the device.
    """
    searched = _searched(device)
    return ALL_FAMILIES if len(searched) > 1 else searched[0].space_key


def _searched(device: DeviceSpec) -> list[Family]:
    """Returns the families whose spaces are searched on a device. Families for the newest GPUs come
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
    """The configs that may serve `problem` on `device`, without duplicates. Some may be illegal.

    `key` selects them:

    - the key of a family's space: 'space' for mma_sync, 'hopper' for wgmma.
    - 'both': the space of the newest family and a few configs of others; configs in the shipped
      tables come first.
    - 'known': the few best configs in the shipped tables for a similar GPU.
    - None: the key that default_space() gives.
    - a key for KERNELS. The configs of tune, prog, prog-all, all and of block sizes such as '64,32'
      get the dtype and head dimension of the problem. From other sets, only the configs with this
      dtype and this head dimension are used.

    Spaces always have the dtype and head dimension of the problem. If there are so few tiles that
    SMs would be idle, the space of a family also has some configs with split KV. For a problem with
    canonical bits, each config is replaced by its counterpart that computes in the canonical order.
    For a problem whose cache has scales, every space consists of the configs that give the same
    bits as the config that attention_with_cache() uses for a cache in q's dtype. These configs
    differ in stages and in other knobs that have no influence on the order of operations.

    Raises:
        SelectionError: the key is unknown, selects nothing, or selects no config with the problem's
            dtype, head dimension and bits.
        ArgumentError: no kernel has the problem's d; or the key is 'both' or None and no family
            that has a space runs on the device; or it is 'known' and no kernel serves the problem.
    """
    key = key or default_space(device)
    if problem.cache and key in (*space_keys(), KNOWN):
        return _over_cache(problem, device)
    found = _of_any_order(problem, device, key)
    if problem.cache:
        found = list(dict.fromkeys(adapt_to_queries(cfg, problem, device) for cfg in found))
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


def _over_cache(problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """Returns the configs for a cache with scales that give the same bits as the chosen config for
    a plain cache."""
    found: dict[KernelConfig, None] = {}
    for alike in (without_batch(problem), for_free_split(problem)):
        chosen = gather(alike, device, _shipped()).expected[0].config
        config = adapt_to_queries(chosen, problem, device)
        near = (one for one in config.family.neighbours(config) if is_legal(one, device))
        found.update(dict.fromkeys((config, *near)))
    return list(found)


def _of_any_order(problem: Problem, device: DeviceSpec, key: str) -> list[KernelConfig]:
    """The configs that search_space() returns for a problem without canonical bits."""
    if key == KNOWN:
        return _known(problem, device)
    d_head = d_head_for(problem)
    asked = [family for family in families() if family.space_key == key]
    of = asked[0].operation if asked else DEFAULT if key == ALL_FAMILIES else None
    if of == DEFAULT != problem.operation:
        # The key names kernels of attention, so it does not restrict another operation's kernels.
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
        configs = [
            cfg.with_knobs(**split_dims({"dtype": problem.dtype, "d_head": d_head}))
            for cfg in configs
        ]
    wanted = problem.operation, problem.dtype, d_head
    fitting = [
        cfg
        for cfg in configs
        if (cfg.family.operation, cfg.dtype, cfg.head_dims) == wanted
        and serves_gradients(cfg, problem)
    ]
    if not fitting:
        raise SelectionError(
            f"space={key!r}: none of its configs ({len(configs)}) is for {problem.dtype.name} and "
            f"d_head {d_head}, which {problem} needs; leave the problem out, or take another space"
        )
    return list(dict.fromkeys(fitting))


def shipped_choices(problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """The configs that attention() uses for `problem` on `device` when the user has no table of
    winners.

    The first config is the winner in the shipped table of this GPU or of the nearest GPU with a
    table, or else the choice of the cost model. If deterministic=True uses another config, this is
    the second one. The result is empty if no kernel serves the problem on the device.
    """
    try:
        choice = choose(problem, device, table=_shipped())
    except ArgumentError:
        return []
    repeatable = [] if choice.repeatable is None else [choice.repeatable.config]
    return [choice.config, *repeatable]


def _known(problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """Returns the configs that are about as fast as the best one.

    Their times come from the nearest entry of the shipped tables for a similar GPU, or else from
    the cost model. Deterministic kernels are also ranked separately.
    """
    found: dict[KernelConfig, None] = {}
    for deterministic in (False, True):
        try:
            evidence = gather(problem, device, _shipped(), deterministic=deterministic)
        except ArgumentError:
            if found:
                break  # no kernel for this d gives the same bits in every run
            raise
        expected = sorted(evidence.expected, key=lambda one: one.ms)
        limit = expected[0].ms * (1 + _KNOWN_MARGIN)
        near = [one.config for one in expected if one.ms <= limit]
        found.update(dict.fromkeys(near[:_MOST_KNOWN]))
    return list(found)


def _few(family: Family, problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """Returns a few configs of a family, which are enough to compare it with another family."""
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
    """The configs in ``found``; if the problem has few tiles, also configs with split KV and
    pack_gqa.

    The added configs are variants of the fastest configs of the families in ``asked``, according to
    the table or the cost model.
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
    # The user's table is not used: it changes during a sweep, and a sweep that is continued must
    # have the same space.
    return WinnersTable.shipped()


def _masked(problem: Problem) -> bool:
    return problem.semantics.key_mask.hides


def _whole(
    asked: Sequence[Family], problem: Problem, d_head: HeadDims, key: str
) -> list[KernelConfig]:
    """The complete spaces of the families of one operation."""
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
