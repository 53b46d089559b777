"""Whether figures were measured with the CUDA sources that are here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from flashsmith.builder.recipe import package_sources, source_hash

# Of the sources' hash, as figures carry it.
DIGITS = 12
_PREFIX = "csrc "


def measured_sources(environment: Mapping[str, Any]) -> str:
    """The hash of the CUDA sources that a figure was measured with; '' when that is not known."""
    revision = str(environment.get("revision", ""))
    known = revision.removeprefix(_PREFIX) if revision.startswith(_PREFIX) else ""
    return str(environment.get("csrc", known))


def is_of_other_sources(environment: Mapping[str, Any]) -> bool:
    """Whether a figure is known to be of other CUDA sources than this installation's."""
    return measured_sources(environment) not in ("", sources_here())


@lru_cache(maxsize=1)
def sources_here() -> str:
    """The hash of this installation's CUDA sources, as figures carry it."""
    return source_hash(package_sources())[:DIGITS]
