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

    ``done`` is the number of the ``total`` steps that have finished. The steps are: one for each
    config, one for each host source file whose object is not in the cache, and linking. The
    ``entry`` of a "compile" event is the entry of the kernel that was compiled. The first "compile"
    event has no ``entry``; its message says what will be compiled. The other kinds of events:

    - "wait": another process is building the same library.
    - "reuse": the library was in the cache.
    - "host": a host source file was compiled.
    - "link" and "publish": the library is being linked or published.
    - "warn": something is wrong, such as spills, but the build continues.
    - "done": the library is published.

    ``seconds_left`` is the estimated time for the rest of the build.
    """

    stage: Stage
    message: str
    done: int
    total: int
    entry: KernelEntry | None = None
    seconds_left: float = 0.0


Progress = Callable[[BuildEvent], None]


def silent(event: BuildEvent) -> None:
    """The default for ``progress``: logs warnings and ignores all other events."""
    if event.stage == "warn":
        _log.warning("flashsmith: %s", event.message)
