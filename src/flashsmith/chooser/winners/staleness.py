"""Staleness: whether figures were measured with the installed CUDA sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from flashsmith.builder.sources import equivalent_sources, source_hash, tree_hash
from flashsmith.chooser.winners.entry import Entry, RankedConfig
from flashsmith.errors import ArgumentError
from flashsmith.families import Family, family_named
from flashsmith.pluralize import pluralize

# Figures store this many digits of the hash of the sources.
DIGITS = 12
_PREFIX = "csrc "
_HASH = re.compile(r"[0-9a-f]{1,64}")


def measured_sources(environment: Mapping[str, Any]) -> str:
    """The hash of the CUDA sources with which a figure was measured; '' if unknown."""
    revision = str(environment.get("revision", ""))
    known = revision.removeprefix(_PREFIX) if revision.startswith(_PREFIX) else ""
    found = str(environment.get("csrc", known))
    return found if _HASH.fullmatch(found) else ""


def is_of_other_sources(environment: Mapping[str, Any], family: str) -> bool:
    """Whether a figure was measured with CUDA sources that differ from the installed ones.

    False if the figure's sources are unknown, or are known to compile to the same kernels as the
    installed ones. True if the family is not installed.
    """
    measured, here = measured_sources(environment), _whole_hash(family)
    return bool(measured) and not (here and measured in _as_good_as(family, here))


def remarks(entries: Iterable[Entry]) -> list[str]:
    """Remarks on the entries whose best figure was measured with other CUDA sources.

    These entries are still used, because most changes of the sources do not change which kernel is
    fastest. If the entries were measured with several versions of the sources, the versions are
    counted for each family but not named, since a table may have many.
    """
    best = [entry.best for entry in entries]
    found = [one for one in best if is_of_other_sources(one.environment, one.family)]
    if not found:
        return []
    theirs = sorted({measured_sources(one.environment) for one in found})
    if len(theirs) > 1:
        return [
            f"{len(found)} of {len(best)} entries were measured with other CUDA sources than those "
            f"here and stay in use: {_by_family(found)}; most changes leave the ranking as "
            "it is, and `flashsmith tune` measures them again on that GPU"
        ]
    ours = sorted({sources_here(one.family) or f"none of {one.family}" for one in found})
    count = f"{len(found)} {'entry was' if len(found) == 1 else 'entries were'}"
    return [
        f"{count} measured with other CUDA sources (csrc {theirs[0]}) than those here "
        f"({', '.join(ours)}): the figures may have shifted; `flashsmith tune` measures them again"
    ]


def _by_family(found: Iterable[RankedConfig]) -> str:
    """A string such as 'wgmma 136 (6 versions), ...', the most frequent family first."""
    versions: dict[str, list[str]] = {}
    for one in found:
        versions.setdefault(one.family, []).append(measured_sources(one.environment))
    most_first = sorted(versions.items(), key=lambda item: (-len(item[1]), item[0]))
    return ", ".join(
        f"{family} {len(of)} ({pluralize(len(set(of)), 'version')})" for family, of in most_first
    )


def sources_here(family: str) -> str:
    """The hash of the installed CUDA sources of a family, with as many digits as figures have; ''
    if there is no such family."""
    return _whole_hash(family)[:DIGITS]


def _whole_hash(family: str) -> str:
    try:
        return _hash_of(family_named(family))
    except ArgumentError:
        return ""


@cache
def _hash_of(family: Family) -> str:
    # The key of the cache is the Family itself, since another Family may be registered later under
    # the same name.
    return source_hash(family.name)


@cache
def _as_good_as(family: str, here: str) -> frozenset[str]:
    """The hashes of sources that compile to the same kernels as ``here``: ``here`` itself and older
    ones."""
    older = (then for then, now in equivalent_sources().items() if now.get(family) == here)
    return frozenset(known[:DIGITS] for known in (here, tree_hash(), *older))
