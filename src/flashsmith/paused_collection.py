"""Pauses Python's garbage collection where thousands of lasting objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses the collection of cycles inside the block, for imports and tables.

    The objects made there are long-lived, so a collection would find nothing. It would take a third
    of the time until the first result of a process, because it also examines PyTorch's objects.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
