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

    ``done`` of ``total`` steps have finished. The steps are the configs, the files of host code
    that the cache lacks, and linking. A "compile" event has the compiled kernel as its ``entry``,
    except for the first such event, which announces what will be compiled. The other stages:

    - "wait": another process is building the same library.
    - "reuse": the library was in the cache.
    - "host": a file of host code has been compiled.
    - "link" and "publish": the library is being linked or published.
    - "warn": there is a problem that does not stop the build, such as spills.
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
    """The default progress function: logs warnings and ignores all other events."""
    if event.stage == "warn":
        _log.warning("flashsmith: %s", event.message)
