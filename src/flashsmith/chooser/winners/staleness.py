"""Whether figures were measured with the CUDA sources that are here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from flashsmith.builder.sources import equivalent_sources, source_hash, tree_hash
from flashsmith.chooser.winners.entry import Entry

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
    installation's, and of none that compile to the same kernels."""
    measured = measured_sources(environment)
    return bool(measured) and measured not in _as_good_as_here(family)


def remarks(entries: Iterable[Entry]) -> list[str]:
    """What is to be said of entries whose best figure is of other CUDA sources; they serve all the
    same, since most changes of the sources do not change which kernel is fastest."""
    best = [entry.best for entry in entries]
    found = [one for one in best if is_of_other_sources(one.environment, one.family)]
    if not found:
        return []
    theirs = sorted({measured_sources(one.environment) for one in found})
    ours = sorted({sources_here(one.family) for one in found})
    count = f"{len(found)} {'entry was' if len(found) == 1 else 'entries were'}"
    return [
        f"{count} measured with other CUDA sources (csrc {', '.join(theirs)}) than those here "
        f"({', '.join(ours)}): the figures may have shifted; `flashsmith tune` measures them anew"
    ]


@cache
def sources_here(family: str) -> str:
    """The hash of a family's CUDA sources in this installation, as figures carry it."""
    return source_hash(family)[:DIGITS]


@cache
def _as_good_as_here(family: str) -> frozenset[str]:
    """Hashes of sources whose kernels are this installation's: its own, and older ones."""
    here = source_hash(family)
    older = (then for then, now in equivalent_sources().items() if now.get(family) == here)
    return frozenset(known[:DIGITS] for known in (here, tree_hash(), *older))
