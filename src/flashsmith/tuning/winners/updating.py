"""Changing a table on disk, where other processes may do so too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashsmith.builder.locks import wait_for_lock
from flashsmith.configs import DeviceSpec, Problem
from flashsmith.errors import TableError
from flashsmith.tuning.winners.entry import Entry, Ranked
from flashsmith.tuning.winners.storage import require_user_table_path
from flashsmith.tuning.winners.table import WinnersTable

# Whoever holds the lock does so for one read and one write.
LOCK_PATIENCE = 30.0


def update_table(path: Path, change: Callable[[WinnersTable], Any]) -> WinnersTable:
    """Read the table at ``path`` (or begin one), ``change`` it and write it, under its lock.

    Raises TableError when it cannot be read, locked or written: a table that this version cannot
    read is never overwritten.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = wait_for_lock(
            path.with_name(path.name + ".lock"), patience=LOCK_PATIENCE, waiting=lambda _: None
        )
    except OSError as error:
        raise TableError(f"{path}: cannot be locked: {error}") from error
    if lock is None:
        raise TableError(f"{path}: another process has held its lock for {LOCK_PATIENCE:g} s")
    try:
        table = WinnersTable.load(path) if path.exists() else WinnersTable()
        change(table)
        table.save(path)
    finally:
        lock.release()
    return table


def record_winners(
    problem: Problem,
    device: DeviceSpec,
    ranked: Sequence[Ranked],
    path: Path | None = None,
) -> Entry:
    """Enter a measured ranking in the user's table, or in the one at ``path``.

    A figure whose environment does not say when it was measured was measured now. Returns the
    entry that now stands there. Raises TableError, and what WinnersTable.add raises.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    dated = [replace(one, environment={"time": now, **one.environment}) for one in ranked]
    entries: list[Entry] = []
    update_table(
        path or require_user_table_path(),
        lambda table: entries.append(table.add(problem, device, dated)),
    )
    return entries[0]
