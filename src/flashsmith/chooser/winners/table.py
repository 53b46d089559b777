"""WinnersTable: entries by key and measured sizes, with functions to look up, merge and record
them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashsmith.builder.locks import wait_for_lock
from flashsmith.chooser.winners import staleness, storage, validation
from flashsmith.chooser.winners.entry import (
    Entry,
    RankedConfig,
    by_time,
    entry_from_json,
    entry_to_json,
    worth_keeping,
)
from flashsmith.chooser.winners.key import WinnerKey, sizes_of
from flashsmith.chooser.winners.lookup import EntryIndex, NearEntry
from flashsmith.chooser.winners.storage import is_there, require_user_table_path
from flashsmith.errors import ArgumentError, TableError
from flashsmith.families import DeviceSpec, DType, Problem
from flashsmith.families.gpu_names import same_gpu
from flashsmith.printable import printable, quoted
from flashsmith.system_errors import is_from_system

# Increased when the format changes so that an older version would misunderstand a table.
SCHEMA = 1

PREFERENCES = ("newer", "faster")
# Says whether a record of a table's JSON is wanted; None means that all records are.
RecordFilter = Callable[[Any], bool] | None
# At most this many notes on ignored entries are kept; any further ignored entries are only counted.
MOST_NOTES = 200
# How many seconds to wait for the lock of a table; a process holds it while it reads and writes the
# table once.
LOCK_PATIENCE = 30.0


class WinnersTable:
    """The entries of a table, at most one for each place: a key and the sizes of the measured
    problem (Entry.place).

    ``notes`` says which parts were ignored when the table was read, and why. ``versions`` are the
    versions of the files that were read; see storage.file_version().
    """

    def __init__(
        self,
        entries: Sequence[Entry] = (),
        notes: Sequence[str] = (),
        versions: Sequence[Hashable] = (),
    ) -> None:
        self._entries = {entry.place: entry for entry in entries}
        self.notes = list(notes)
        self.versions = tuple(versions)
        # The rest of the file, which is written back unchanged: unreadable records, perhaps of a
        # later version, and the environments that they use.
        self._unread: list[Any] = []
        self._their_environments: dict[str, Any] = {}
        self._index: EntryIndex | None = None  # The index of the current entries

    # --- reading ---------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path | str, only: RecordFilter = None) -> WinnersTable:
        """The table in a file. Unusable parts are left out and noted. ``only`` is a filter: records
        for which it returns false are left out.

        Raises TableError if the file cannot be read, is not a table, or has another schema.
        """
        version = storage.file_version(Path(path))
        table = cls.from_json(storage.read_json(Path(path)), printable(str(path)), only)
        table.versions = (version,)
        return table

    @classmethod
    def shipped(cls) -> WinnersTable:
        """The shipped tables, one file per GPU, as one table."""
        return _joined(storage.shipped_files())

    @classmethod
    def user(cls) -> WinnersTable:
        """The user's table.

        If there is none, it is empty; if it cannot be used, it is empty and has a note.
        """
        path = storage.user_table_path()
        return _joined([path] if path is not None and is_there(path) else [])

    @classmethod
    def merged(cls, only: RecordFilter = None) -> WinnersTable:
        """The shipped tables, in which the user's entries replace shipped ones. ``only`` is a
        filter: shipped records for which it returns false are left out.

        Shipped figures of families that the user did not measure are kept.
        """
        table, own = _joined(storage.shipped_files(), only), cls.user()
        for entry in own:
            table.put(entry.beside(table._entries.get(entry.place)))
        return cls(list(table), [*table.notes, *own.notes], [*table.versions, *own.versions])

    @classmethod
    def from_json(cls, data: Any, source: str = "table", only: RecordFilter = None) -> WinnersTable:
        """The table that to_json() wrote; raises the errors of load().

        ``data`` may be any JSON value, since every part that is used is checked.
        """
        if not isinstance(data, dict) or "schema" not in data or "entries" not in data:
            raise TableError(f"{source}: no table of winners (it has no 'schema' and 'entries')")
        if type(data["schema"]) is not int or data["schema"] != SCHEMA:
            raise TableError(
                f"{source}: schema {quoted(data['schema'])}; this version reads {SCHEMA}. Tune "
                "again "
                "with this version, or use the version that wrote it"
            )
        environments = data.get("environments", {})
        for name, value, kind in (
            ("entries", data["entries"], list), ("environments", environments, dict),
        ):  # fmt: skip
            if not isinstance(value, kind):
                raise TableError(
                    f"{source}: no table of winners ({name} is {quoted(value, 40)}, not a "
                    f"{'list' if kind is list else 'mapping'})"
                )
        table = cls()
        for number, record in enumerate(data["entries"]):
            if only is not None and not only(record):
                continue
            try:
                table.put(entry_from_json(record, environments))
            except ValueError as error:
                table._unread.append(record)
                if len(table._unread) <= MOST_NOTES:
                    table.notes.append(f"{source}: entry {number} is ignored: {error}")
        if len(table._unread) > MOST_NOTES:
            more = len(table._unread) - MOST_NOTES
            table.notes.append(f"{source}: {more:,} more entries are ignored")
        environments = environments if table._unread else {}
        named = json.dumps(table._unread)
        table._their_environments = {
            name: environment
            for name, environment in environments.items()
            if json.dumps(name) in named
        }
        return table

    # --- content ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries.values(), key=lambda entry: entry.place))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ignored(self) -> int:
        """How many entries of the file cannot be used."""
        return len(self._unread)

    def select(
        self, gpu: str | None = None, dtype: str | None = None, d_head: int | None = None
    ) -> WinnersTable:
        """The entries of one GPU (in any spelling), dtype and d_head; None stands for all.

        Raises ArgumentError if there is no such dtype.
        """
        element = None if dtype is None else DType.parse(dtype)
        return WinnersTable(
            [
                entry
                for entry in self
                if (gpu is None or same_gpu(gpu, entry.key.gpu))
                and element in (None, entry.key.element)
                and d_head in (None, entry.key.d_head)
            ],
            self.notes,
            self.versions,
        )

    def lookup(self, problem: Problem, device: DeviceSpec) -> list[NearEntry]:
        """The entries that are relevant to a problem on a device, nearest first.

        flashsmith.chooser.winners.lookup defines the distance.
        """
        if self._index is None:
            self._index = EntryIndex(self._entries.values())
        return self._index.by_distance(problem, device)

    def validate(self) -> list[str]:
        """What is wrong with the table, one sentence each; empty if nothing is."""
        return [*self.notes, *(text for entry in self for text in validation.problems_of(entry))]

    def remarks(self) -> list[str]:
        """Remarks on the table about things that are not wrong."""
        return staleness.remarks(self)

    # --- changes ---------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Enters an entry, which replaces an entry at the same place."""
        self._entries[entry.place] = entry
        self._index = None

    def remove(self, entry: Entry) -> None:
        """Removes the entry at the same place as ``entry``, if there is one."""
        self._entries.pop(entry.place, None)
        self._index = None

    def add(self, problem: Problem, device: DeviceSpec, ranked: Sequence[RankedConfig]) -> Entry:
        """Enters measurements of ``problem`` on ``device``, which replace figures of the same
        families.

        A long ranking is cut to the best configs and the best config of every tile shape.

        Raises ArgumentError if ``ranked`` is empty or no kernel has the problem's d.
        """
        if not ranked:
            raise ArgumentError("ranked=[]: give at least one measured config")
        key = WinnerKey.of(problem, device)
        entry = Entry(key, problem, tuple(worth_keeping(by_time(ranked))))
        entry = entry.beside(self._entries.get(entry.place))
        self.put(entry)
        return entry

    def merge(self, other: WinnersTable, prefer: str = "newer") -> int:
        """Takes over the new and the better entries of ``other``; returns how many.

        With 'newer', the entry that was measured later is better; at equal times, the entry of
        ``other`` is. With 'faster', the entry whose best config has more TFLOP/s is better, in any
        environment. If only one of the two entries has figures of a family, these figures are kept
        in any case.
        """
        if prefer not in PREFERENCES:
            raise ArgumentError(f"prefer={quoted(prefer)}: allowed are {', '.join(PREFERENCES)}")
        taken = 0
        for entry in other:
            mine = self._entries.get(entry.place)
            if mine is None or _wins(entry, mine, prefer):
                merged = entry.beside(mine)
            else:
                merged = mine.beside(entry)
            if merged != mine:
                self.put(merged)
                taken += 1
        return taken

    # --- writing ---------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The table as a JSON value. An environment, which many figures share, is stored once.

        Records that from_json() could not read follow the entries unchanged.
        """
        environments: dict[str, Any] = dict(self._their_environments)
        entries = [entry_to_json(entry, environments) for entry in self]
        return {
            "schema": SCHEMA,
            "environments": dict(sorted(environments.items())),
            "entries": [*entries, *self._unread],
        }

    def save(self, path: Path | str) -> None:
        """Writes the table to a temporary file, flushes it, and renames it to ``path``.

        If that fails, raises TableError; the file is then unchanged.
        """
        storage.write_json(Path(path), self.to_json())


def _wins(entry: Entry, mine: Entry, prefer: str) -> bool:
    if prefer == "faster":
        return entry.best.tflops > mine.best.tflops
    return entry.time >= mine.time


def _joined(paths: Sequence[Path], only: RecordFilter = None) -> WinnersTable:
    """One table with the entries of all files. Entries of later files replace entries of earlier
    files, and an unusable file becomes a note."""
    table = WinnersTable()
    for path in paths:
        try:
            found = WinnersTable.load(path, only)
        except TableError as error:
            table.notes.append(f"{error}; it is ignored")
            table.versions += (storage.file_version(path),)
            continue
        table.notes += found.notes
        table.versions += found.versions
        for entry in found:
            table.put(entry)
    return table


# --- tables on disk, which other processes may change too ----------------------------------------


def update_table(path: Path, change: Callable[[WinnersTable], Any]) -> WinnersTable:
    """Reads the table at ``path`` (or creates one), calls ``change`` with it and writes it, all
    under its lock.

    Raises TableError if the table cannot be read, locked or written. A table that this version
    cannot read is never overwritten.
    """
    if is_there(path):
        WinnersTable.load(path)  # Fails before a lock file is created if the file is no table
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = wait_for_lock(
            path.with_name(path.name + ".lock"), patience=LOCK_PATIENCE, waiting=lambda _: None
        )
    except (OSError, ValueError) as error:  # ValueError: the path is not valid for any file
        if not is_from_system(error):
            raise
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
    """Checks that a table can be written and, if it exists, can be read.

    Raises TableError otherwise.
    """
    if is_there(path):
        WinnersTable.load(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except (OSError, ValueError) as error:
        if not is_from_system(error):
            raise
        raise TableError(f"{path}: cannot be written: {error}; name another file") from error


def join_winners(
    problem: Problem,
    device: DeviceSpec,
    ranked: Sequence[RankedConfig],
    wrong: Collection[str],
    path: Path,
    shipped: WinnersTable | None = None,
) -> None:
    """Enters measurements into the table at ``path``, and keeps the problem's other figures.

    Figures that were not measured again are kept if they come from the same environment as the new
    figures. Figures from another environment are kept only until the best config of the old entry
    is measured again. If the table has no entry for the problem, the same is done with the entry of
    ``shipped``, which the new entry would hide. The configs in ``wrong`` are removed. If the
    existing entry is newer than ``ranked``, removing these configs is all that is done.

    Raises TableError, and the errors of WinnersTable.add.
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
    """The entry at exactly the problem's place in the table; None if there is no such entry."""
    place = WinnerKey.of(problem, device), sizes_of(problem)
    return next((entry for entry in table if entry.place == place), None)


def _untried(
    older: Entry, ranked: Sequence[RankedConfig], wrong: Collection[str]
) -> list[RankedConfig]:
    """Those figures of the older entry that the new ranking does not replace."""
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
    ranked: Sequence[RankedConfig],
    path: Path | None = None,
) -> Entry:
    """Enters measurements into the user's table, or into the table at ``path``.

    If a figure has no time in its environment, the current time is added. Returns the entry as it
    is now. Raises TableError, and the errors of WinnersTable.add.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    dated = [replace(one, environment={"time": now, **one.environment}) for one in ranked]
    entries: list[Entry] = []
    update_table(
        path or require_user_table_path(),
        lambda table: entries.append(table.add(problem, device, dated)),
    )
    return entries[0]
