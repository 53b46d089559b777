"""Whether figures were measured with the CUDA sources that are here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from flashsmith.builder.recipe import package_sources, source_hash
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


def is_of_other_sources(environment: Mapping[str, Any]) -> bool:
    """Whether a figure is known to be of other CUDA sources than this installation's."""
    return measured_sources(environment) not in ("", sources_here())


def remarks(entries: Iterable[Entry]) -> list[str]:
    """What is to be said of entries whose best figure is of other CUDA sources; they serve all the
    same, since most changes of the sources do not change which kernel is fastest."""
    found = [entry for entry in entries if is_of_other_sources(entry.best.environment)]
    if not found:
        return []
    theirs = sorted({measured_sources(entry.best.environment) for entry in found})
    count = f"{len(found)} {'entry was' if len(found) == 1 else 'entries were'}"
    return [
        f"{count} measured with other CUDA sources (csrc {', '.join(theirs)}) than those here "
        f"({sources_here()}): the figures may have shifted; `flashsmith tune` measures them anew"
    ]


@lru_cache(maxsize=1)
def sources_here() -> str:
    """The hash of this installation's CUDA sources, as figures carry it."""
    return source_hash(package_sources())[:DIGITS]
