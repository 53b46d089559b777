"""WinnersTable: the entries, by key and measured sizes; finding, merging and recording them."""

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
    Ranked,
    by_time,
    entry_from_json,
    entry_to_json,
    worth_keeping,
)
from flashsmith.chooser.winners.key import WinnerKey, sizes_of
from flashsmith.chooser.winners.lookup import Found, Index
from flashsmith.chooser.winners.storage import is_there, require_user_table_path
from flashsmith.errors import ArgumentError, TableError
from flashsmith.families import DeviceSpec, DType, Problem
from flashsmith.families.gpu_names import same_gpu
from flashsmith.printable import printable, quoted
from flashsmith.system_errors import is_from_system

# Raised when an older reader would misread a table.
SCHEMA = 1

PREFERENCES = ("newer", "faster")
# Of entries that are ignored; more are counted.
MOST_NOTES = 200
# A process holds a table's lock for one read and one write.
LOCK_PATIENCE = 30.0


class WinnersTable:
    """Entries, one for each key and measured sizes (Entry.place).

    ``notes`` say what was ignored when the table was read, and why; ``versions`` are those of the
    files that it was read from, see storage.file_version().
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
        # What a file has beside its entries, to be written back as it was: records that cannot be
        # read, of a later version perhaps, and the environments that they name.
        self._unread: list[Any] = []
        self._their_environments: dict[str, Any] = {}
        self._index: Index | None = None  # of the entries as they are now

    # --- where tables come from ------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path | str) -> WinnersTable:
        """The table in a file. What cannot be used of it is left out and noted.

        Raises TableError when the file cannot be read, is no table, or has another schema.
        """
        version = storage.file_version(Path(path))
        table = cls.from_json(storage.read_json(Path(path)), source=printable(str(path)))
        table.versions = (version,)
        return table

    @classmethod
    def shipped(cls) -> WinnersTable:
        """The tables that came with the package, one file per GPU, as one."""
        return _joined(storage.shipped_files())

    @classmethod
    def user(cls) -> WinnersTable:
        """The user's own table; empty when there is none, or with a note when it is unusable."""
        path = storage.user_table_path()
        return _joined([path] if path is not None and is_there(path) else [])

    @classmethod
    def merged(cls) -> WinnersTable:
        """The shipped tables, with the user's own entries in place of shipped ones.

        Of a family that the user did not measure the shipped figures stay.
        """
        table, own = cls.shipped(), cls.user()
        for entry in own:
            table.put(entry.beside(table._entries.get(entry.place)))
        return cls(list(table), [*table.notes, *own.notes], [*table.versions, *own.versions])

    @classmethod
    def from_json(cls, data: Any, source: str = "table") -> WinnersTable:
        """The table that to_json() wrote; raises TableError as load() does.

        ``data`` is any value of JSON: all that is used of it is checked here.
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

    # --- what is in it ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries.values(), key=lambda entry: entry.place))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ignored(self) -> int:
        """How many entries of its file cannot be used."""
        return len(self._unread)

    def select(
        self, gpu: str | None = None, dtype: str | None = None, d_head: int | None = None
    ) -> WinnersTable:
        """The entries of one GPU (however written), dtype and d_head; None is any.

        Raises ArgumentError when there is no such dtype.
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

    def lookup(self, problem: Problem, device: DeviceSpec) -> list[Found]:
        """The entries that say something about a problem on a device, nearest first.

        See flashsmith.chooser.winners.lookup for what near means.
        """
        if self._index is None:
            self._index = Index(self._entries.values())
        return self._index.by_distance(problem, device)

    def validate(self) -> list[str]:
        """What is wrong with the table, one sentence each; empty when nothing is."""
        return [*self.notes, *(text for entry in self for text in validation.problems_of(entry))]

    def remarks(self) -> list[str]:
        """What is worth knowing of the table though nothing is wrong with it."""
        return staleness.remarks(self)

    # --- changing it -----------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Set an entry; one of the same place is replaced."""
        self._entries[entry.place] = entry
        self._index = None

    def remove(self, entry: Entry) -> None:
        """Take out the entry at the place of this one."""
        self._entries.pop(entry.place, None)
        self._index = None

    def add(self, problem: Problem, device: DeviceSpec, ranked: Sequence[Ranked]) -> Entry:
        """Enter what was measured of ``problem`` on ``device``, in place of what was there of the
        same families.

        Of a long ranking the best are kept, and the best of every tile shape.

        Raises ArgumentError when ``ranked`` is empty or no kernel is made for the problem's d.
        """
        if not ranked:
            raise ArgumentError("ranked=[]: give at least one measured config")
        key = WinnerKey.of(problem, device)
        entry = Entry(key, problem, tuple(worth_keeping(by_time(ranked))))
        entry = entry.beside(self._entries.get(entry.place))
        self.put(entry)
        return entry

    def merge(self, other: WinnersTable, prefer: str = "newer") -> int:
        """Take over the entries of ``other`` that are new or win their place; how many.

        'newer': the entry with the later time of measurement; of two alike, other's. 'faster': the
        one whose best config reaches more TFLOP/s, in any environment. Of a family that
        only one of the two measured, its figures stay.
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
        """The table as JSON values; environments, which many figures share, are there once.

        Records that from_json() could not read follow as they were.
        """
        environments: dict[str, Any] = dict(self._their_environments)
        entries = [entry_to_json(entry, environments) for entry in self]
        return {
            "schema": SCHEMA,
            "environments": dict(sorted(environments.items())),
            "entries": [*entries, *self._unread],
        }

    def save(self, path: Path | str) -> None:
        """Write the table: beside its place, flushed, renamed.

        Raises TableError when that fails; the file is then as it was.
        """
        storage.write_json(Path(path), self.to_json())


def _wins(entry: Entry, mine: Entry, prefer: str) -> bool:
    if prefer == "faster":
        return entry.best.tflops > mine.best.tflops
    return entry.time >= mine.time


def _joined(paths: Sequence[Path]) -> WinnersTable:
    """All files' entries, later ones first; a file that is unusable becomes a note."""
    table = WinnersTable()
    for path in paths:
        try:
            found = WinnersTable.load(path)
        except TableError as error:
            table.notes.append(f"{error}; it is ignored")
            table.versions += (storage.file_version(path),)
            continue
        table.notes += found.notes
        table.versions += found.versions
        for entry in found:
            table.put(entry)
    return table


# --- tables on disk, where other processes may change them too ------------------------------------


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
    """That a table can be read, if there is one, and written.

    Raises TableError when it cannot.
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
    place = WinnerKey.of(problem, device), sizes_of(problem)
    return next((entry for entry in table if entry.place == place), None)


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
    entry as it is then. Raises TableError, and what WinnersTable.add raises.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    dated = [replace(one, environment={"time": now, **one.environment}) for one in ranked]
    entries: list[Entry] = []
    update_table(
        path or require_user_table_path(),
        lambda table: entries.append(table.add(problem, device, dated)),
    )
    return entries[0]
