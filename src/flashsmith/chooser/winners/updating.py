"""Changing a table on disk, where other processes may do so too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashsmith.builder.locks import wait_for_lock
from flashsmith.chooser.winners.entry import Entry, Ranked
from flashsmith.chooser.winners.key import WinnerKey
from flashsmith.chooser.winners.storage import is_there, require_user_table_path
from flashsmith.chooser.winners.table import WinnersTable
from flashsmith.errors import TableError
from flashsmith.families import DeviceSpec, Problem

# Whoever holds the lock does so for one read and one write.
LOCK_PATIENCE = 30.0


def update_table(path: Path, change: Callable[[WinnersTable], Any]) -> WinnersTable:
    """Read the table at ``path`` (or begin one), ``change`` it and write it, under its lock.

    Raises TableError when it cannot be read, locked or written: a table that this version cannot
    read is never overwritten.
    """
    if is_there(path):
        WinnersTable.load(path)  # before a lock is put beside what is no table
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = wait_for_lock(
            path.with_name(path.name + ".lock"), patience=LOCK_PATIENCE, waiting=lambda _: None
        )
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise TableError(f"{path}: cannot be locked: {error}") from error
    if lock is None:
        raise TableError(f"{path}: another process has held its lock for {LOCK_PATIENCE:g} s")
    try:
        table = WinnersTable.load(path) if is_there(path) else WinnersTable()
        change(table)
        table.save(path)
    finally:
        lock.release()
    return table


def check_table(path: Path) -> None:
    """That a table can be read, if there is one, and written.

    Raises TableError when it cannot.
    """
    if is_there(path):
        WinnersTable.load(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot be written: {error}; name another file") from error


def join_winners(
    problem: Problem,
    device: DeviceSpec,
    ranked: Sequence[Ranked],
    wrong: Collection[str],
    path: Path,
    shipped: WinnersTable | None = None,
) -> None:
    """Enter a measured ranking in the table at ``path``, beside what is there for the problem.

    What was not measured again stays: of the same environment always, of another one until its
    best is measured again. Where the table has nothing, the same goes for ``shipped``, which it
    would otherwise hide. The configs in ``wrong`` are taken out. A ranking that is older than what
    is there changes nothing else.

    Raises TableError, and what WinnersTable.add raises.
    """

    def join(table: WinnersTable) -> None:
        own = _standing(table, problem, device)
        older = own or (_standing(shipped, problem, device) if shipped is not None else None)
        newest = max((one.time for one in ranked), default="")
        if own is not None and newest < own.time:
            joined = [one for one in own.ranked if one.config not in wrong]
        elif ranked:
            joined = [*ranked, *(_untried(older, ranked, wrong) if older is not None else ())]
        else:
            return
        if own is not None:
            table.remove(own)
        if joined:
            table.add(problem, device, joined)

    update_table(path, join)


def _standing(table: WinnersTable, problem: Problem, device: DeviceSpec) -> Entry | None:
    """What a table has at the problem's very place."""
    key = WinnerKey.of(problem, device)
    sizes = problem.seq_q, problem.seq_k, problem.batch * problem.heads_q
    return next((entry for entry in table if entry.place == (key, sizes)), None)


def _untried(older: Entry, ranked: Sequence[Ranked], wrong: Collection[str]) -> list[Ranked]:
    """The figures of an entry that a new ranking leaves standing."""
    tried = {one.config for one in ranked} | set(wrong)
    environments = [_undated(one.environment) for one in ranked]
    return [
        one
        for one in older.ranked
        if one.config not in tried
        and (older.best.config not in tried or _undated(one.environment) in environments)
    ]


def _undated(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in environment.items() if name != "time"}


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
