"""Whether figures were measured with the CUDA sources that are here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from flashsmith.builder.sources import equivalent_sources, source_hash, tree_hash
from flashsmith.chooser.winners.entry import Entry, Ranked
from flashsmith.counted import counted
from flashsmith.errors import ArgumentError
from flashsmith.families import Family, family_named

# Of the sources' hash, as figures carry it.
DIGITS = 12
_PREFIX = "csrc "
_HASH = re.compile(r"[0-9a-f]{1,64}")


def measured_sources(environment: Mapping[str, Any]) -> str:
    """The hash of the CUDA sources that a figure was measured with; '' when that is not known."""
    revision = str(environment.get("revision", ""))
    known = revision.removeprefix(_PREFIX) if revision.startswith(_PREFIX) else ""
    found = str(environment.get("csrc", known))
    return found if _HASH.fullmatch(found) else ""


def is_of_other_sources(environment: Mapping[str, Any], family: str) -> bool:
    """Whether a figure of a family's kernel is known to be of other CUDA sources than this
    installation's, and of none that compile to the same kernels; so is every figure of a family
    that is not here."""
    measured, here = measured_sources(environment), _whole_hash(family)
    return bool(measured) and not (here and measured in _as_good_as(family, here))


def remarks(entries: Iterable[Entry]) -> list[str]:
    """What is to be said of entries whose best figure is of other CUDA sources; they serve all the
    same, since most changes of the sources do not change which kernel is fastest. Of several
    versions each family's are counted, not named: a table grows over many."""
    best = [entry.best for entry in entries]
    found = [one for one in best if is_of_other_sources(one.environment, one.family)]
    if not found:
        return []
    theirs = sorted({measured_sources(one.environment) for one in found})
    if len(theirs) > 1:
        return [
            f"{len(found)} of {len(best)} entries were measured with other CUDA sources than those "
            f"here, and serve all the same: {_by_family(found)}; most changes leave the ranking as "
            "it is, and `flashsmith tune` measures them again on that GPU"
        ]
    ours = sorted({sources_here(one.family) or f"none of {one.family}" for one in found})
    count = f"{len(found)} {'entry was' if len(found) == 1 else 'entries were'}"
    return [
        f"{count} measured with other CUDA sources (csrc {theirs[0]}) than those here "
        f"({', '.join(ours)}): the figures may have shifted; `flashsmith tune` measures them again"
    ]


def _by_family(found: Iterable[Ranked]) -> str:
    """'wgmma 136 (6 versions), ...', most first."""
    versions: dict[str, list[str]] = {}
    for one in found:
        versions.setdefault(one.family, []).append(measured_sources(one.environment))
    most_first = sorted(versions.items(), key=lambda item: (-len(item[1]), item[0]))
    return ", ".join(
        f"{family} {len(of)} ({counted(len(set(of)), 'version')})" for family, of in most_first
    )


def sources_here(family: str) -> str:
    """The hash of a family's CUDA sources in this installation, as figures carry it; '' where there
    is no such family."""
    return _whole_hash(family)[:DIGITS]


def _whole_hash(family: str) -> str:
    try:
        return _hash_of(family_named(family))
    except ArgumentError:
        return ""


@cache
def _hash_of(family: Family) -> str:
    # Of the family and not of its name, which another may be registered under.
    return source_hash(family.name)


@cache
def _as_good_as(family: str, here: str) -> frozenset[str]:
    """Hashes of sources whose kernels are those of ``here``: itself, and older ones."""
    older = (then for then, now in equivalent_sources().items() if now.get(family) == here)
    return frozenset(known[:DIGITS] for known in (here, tree_hash(), *older))
