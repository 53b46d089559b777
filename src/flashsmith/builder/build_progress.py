"""The progress events of a build."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flashsmith.builder.manifest import KernelEntry

_log = logging.getLogger("flashsmith")

Stage = Literal["wait", "reuse", "compile", "host", "link", "publish", "warn", "done"]


@dataclass(frozen=True)
class BuildEvent:
    """One step of a build.

    ``done`` of ``total`` steps have finished: one for each config, for each file of host code that
    the cache does not hold, and for linking. A "compile" event carries its kernel (``entry``)
    except the first one, which announces what will be compiled. "host": a file of host code is
    compiled. "wait": another process builds the same library. "reuse": it was in the cache. "warn":
    something to look at that does not stop the build, such as spills. "done": it is published.
    ``seconds_left`` is an estimate of the rest of the build.
    """

    stage: Stage
    message: str
    done: int
    total: int
    entry: KernelEntry | None = None
    seconds_left: float = 0.0


Progress = Callable[[BuildEvent], None]


def silent(event: BuildEvent) -> None:
    """The progress function when none is given: warnings go to the log."""
    if event.stage == "warn":
        _log.warning("flashsmith: %s", event.message)
