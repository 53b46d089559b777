"""WinnersTable: the entries by key and measured sizes, with lookup, merging and recording."""

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

# Increased when an older reader would misread a table.
SCHEMA = 1

PREFERENCES = ("newer", "faster")
# Whether a record of a table's JSON is wanted; None: all are.
RecordFilter = Callable[[Any], bool] | None
# At most this many notes on ignored entries are kept; further notes are only counted.
MOST_NOTES = 200
# Seconds to wait for a table's lock; a process holds it for one read and one write.
LOCK_PATIENCE = 30.0


class WinnersTable:
    """Entries, one for each place: a key and measured sizes (Entry.place).

    ``notes`` lists what was ignored when the table was read, and why. ``versions`` are the versions
    of the files from which the table was read; see storage.file_version().
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
        # Further content of the file, to be written back unchanged: unreadable records, perhaps of
        # a later version, and the environments that they name.
        self._unread: list[Any] = []
        self._their_environments: dict[str, Any] = {}
        self._index: EntryIndex | None = None  # of the current entries

    # --- reading ---------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path | str, only: RecordFilter = None) -> WinnersTable:
        """The table in a file. Unusable parts are left out and noted. ``only``: leave out the
        records for which this is false.

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
        """The user's table; empty if there is none, and with a note if it is unusable."""
        path = storage.user_table_path()
        return _joined([path] if path is not None and is_there(path) else [])

    @classmethod
    def merged(cls, only: RecordFilter = None) -> WinnersTable:
        """The shipped tables, in which the user's entries replace shipped ones. ``only``: leave out
        the shipped records for which this is false.

        The shipped figures of a family that the user did not measure are kept.
        """
        table, own = _joined(storage.shipped_files(), only), cls.user()
        for entry in own:
            table.put(entry.beside(table._entries.get(entry.place)))
        return cls(list(table), [*table.notes, *own.notes], [*table.versions, *own.versions])

    @classmethod
    def from_json(cls, data: Any, source: str = "table", only: RecordFilter = None) -> WinnersTable:
        """The table that to_json() wrote; raises the errors of load().

        ``data`` may be any JSON value: every part that is used is checked here.
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
        """The number of unusable entries in the table's file."""
        return len(self._unread)

    def select(
        self, gpu: str | None = None, dtype: str | None = None, d_head: int | None = None
    ) -> WinnersTable:
        """The entries of one GPU (in any spelling), dtype and d_head; None means any.

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
        """The table's faults, one sentence each; empty if there are none."""
        return [*self.notes, *(text for entry in self for text in validation.problems_of(entry))]

    def remarks(self) -> list[str]:
        """Remarks on the table that are not faults."""
        return staleness.remarks(self)

    # --- changes ---------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Set an entry, replacing an existing entry at the same place."""
        self._entries[entry.place] = entry
        self._index = None

    def remove(self, entry: Entry) -> None:
        """Remove the entry at the same place as ``entry``, if any."""
        self._entries.pop(entry.place, None)
        self._index = None

    def add(self, problem: Problem, device: DeviceSpec, ranked: Sequence[RankedConfig]) -> Entry:
        """Enter the figures measured for ``problem`` on ``device``, replacing figures of the same
        families.

        Of a long ranking, the best configs and the best of every tile shape are kept.

        Raises ArgumentError if ``ranked`` is empty or there is no kernel for the problem's d.
        """
        if not ranked:
            raise ArgumentError("ranked=[]: give at least one measured config")
        key = WinnerKey.of(problem, device)
        entry = Entry(key, problem, tuple(worth_keeping(by_time(ranked))))
        entry = entry.beside(self._entries.get(entry.place))
        self.put(entry)
        return entry

    def merge(self, other: WinnersTable, prefer: str = "newer") -> int:
        """Adopt the entries of ``other`` that are new or win against this table's; return how many.

        'newer' prefers the entry that was measured later, or the entry of ``other`` if both times
        are equal. 'faster' prefers the entry whose best config reaches more TFLOP/s, in any
        environment. If only one of the two entries has figures of a family, they are kept.
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
        """The table as JSON values; environments, which many figures share, are stored once.

        The records that from_json() could not read are written unchanged after the entries.
        """
        environments: dict[str, Any] = dict(self._their_environments)
        entries = [entry_to_json(entry, environments) for entry in self]
        return {
            "schema": SCHEMA,
            "environments": dict(sorted(environments.items())),
            "entries": [*entries, *self._unread],
        }

    def save(self, path: Path | str) -> None:
        """Write the table to a temporary file, flush it, and rename it into place.

        Raises TableError if that fails; the file is then unchanged.
        """
        storage.write_json(Path(path), self.to_json())


def _wins(entry: Entry, mine: Entry, prefer: str) -> bool:
    if prefer == "faster":
        return entry.best.tflops > mine.best.tflops
    return entry.time >= mine.time


def _joined(paths: Sequence[Path], only: RecordFilter = None) -> WinnersTable:
    """All files' entries; later files replace earlier ones, and unusable files become notes."""
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
    """Read the table at ``path`` (or start one), ``change`` it and write it, holding its lock.

    Raises TableError if the table cannot be read, locked or written. A table that this version
    cannot read is never overwritten.
    """
    if is_there(path):
        WinnersTable.load(path)  # no lock file is created next to a file that is not a table
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = wait_for_lock(
            path.with_name(path.name + ".lock"), patience=LOCK_PATIENCE, waiting=lambda _: None
        )
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
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
    """Check that a table can be written, and read if it exists.

    Raises TableError if the table cannot be written or read.
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
    """Enter a measured ranking in the table at ``path``, keeping other figures of the problem.

    Figures that were not measured again are kept if their environment is the same as the new
    figures', and otherwise until the old entry's best config is measured again. If the table has no
    entry, the same applies to the entry of ``shipped``, which the new entry would otherwise hide.
    The configs in ``wrong`` are removed. If the ranking is older than the existing entry, nothing
    else changes.

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
    """The entry of a table at exactly the problem's place."""
    place = WinnerKey.of(problem, device), sizes_of(problem)
    return next((entry for entry in table if entry.place == place), None)


def _untried(
    older: Entry, ranked: Sequence[RankedConfig], wrong: Collection[str]
) -> list[RankedConfig]:
    """The figures of an entry that a new ranking does not replace."""
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
    """Enter a measured ranking in the user's table, or in the table at ``path``.

    A figure without a time in its environment gets the current time. Returns the resulting entry.
    Raises TableError, and what WinnersTable.add raises.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    dated = [replace(one, environment={"time": now, **one.environment}) for one in ranked]
    entries: list[Entry] = []
    update_table(
        path or require_user_table_path(),
        lambda table: entries.append(table.add(problem, device, dated)),
    )
    return entries[0]
