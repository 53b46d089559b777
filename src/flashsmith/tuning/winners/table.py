"""WinnersTable: the entries, by key and measured sizes; adding, merging and finding them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashsmith.configs import DeviceSpec, DType, Problem
from flashsmith.errors import ArgumentError, TableError
from flashsmith.printable import quoted
from flashsmith.tuning.winners import staleness, storage, validation
from flashsmith.tuning.winners.entry import Entry, Ranked, by_time
from flashsmith.tuning.winners.key import WinnerKey, gpu_name, parse_class, same_gpu
from flashsmith.tuning.winners.lookup import Found, Index
from flashsmith.tuning.winners.trimming import worth_keeping

# Raised when an older reader would misread a table.
SCHEMA = 1

PREFERENCES = ("newer", "faster")


class WinnersTable:
    """Entries, one for each key and measured sizes (Entry.place).

    ``notes`` say what was ignored when the table was read, and why.
    """

    def __init__(self, entries: Sequence[Entry] = (), notes: Sequence[str] = ()) -> None:
        self._entries = {entry.place: entry for entry in entries}
        self.notes = list(notes)
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
        return cls.from_json(storage.read_json(Path(path)), source=str(path))

    @classmethod
    def shipped(cls) -> WinnersTable:
        """The tables that came with the package, one file per GPU, as one."""
        return _joined(storage.shipped_files())

    @classmethod
    def user(cls) -> WinnersTable:
        """The user's own table; empty when there is none, or with a note when it is unusable."""
        path = storage.user_table_path()
        return _joined([path] if path is not None and path.exists() else [])

    @classmethod
    def merged(cls) -> WinnersTable:
        """The shipped tables, with the user's own entries in place of shipped ones.

        Of a family that the user did not measure the shipped figures stay.
        """
        table, own = cls.shipped(), cls.user()
        for entry in own:
            table.put(entry.beside(table._entries.get(entry.place)))
        return cls(list(table), [*table.notes, *own.notes])

    @classmethod
    def from_json(cls, data: Any, source: str = "table") -> WinnersTable:
        """The table that to_json() wrote; raises TableError as load() does."""
        if not isinstance(data, dict) or "schema" not in data or "entries" not in data:
            raise TableError(f"{source}: no table of winners (it has no 'schema' and 'entries')")
        if data["schema"] != SCHEMA:
            raise TableError(
                f"{source}: schema {quoted(data['schema'])}; this version reads {SCHEMA}. Tune "
                "again "
                "with this version, or use the version that wrote it"
            )
        table = cls()
        for number, record in enumerate(data["entries"]):
            try:
                table.put(_entry(record, data.get("environments", {})))
            except (ArgumentError, ValueError, TypeError, KeyError, AttributeError) as error:
                words = f"lacks {error}" if isinstance(error, KeyError) else error
                table.notes.append(f"{source}: entry {number} is ignored: {words}")
                table._unread.append(record)
        environments = data.get("environments") if table._unread else None
        environments = environments if isinstance(environments, dict) else {}
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
        )

    def lookup(self, problem: Problem, device: DeviceSpec) -> list[Found]:
        """The entries that say something about a problem on a device, nearest first.

        See flashsmith.tuning.winners.lookup for what near means.
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
        """Set an entry in place of whatever has its place."""
        self._entries[entry.place] = entry
        self._index = None

    def remove(self, entry: Entry) -> None:
        """Take out whatever has the place of an entry."""
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
        one whose best config reaches more TFLOP/s, whatever the environments. Of a family that
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
        """The table as JSON values; environments, which many figures share, stand there once.

        Records that from_json() could not read follow as they were.
        """
        environments: dict[str, Mapping[str, Any]] = dict(self._their_environments)
        entries = []
        for entry in self:
            ranked = []
            for one in entry.ranked:
                name = storage.short_digest(one.environment)
                environments[name] = dict(one.environment)
                ranked.append(
                    {
                        "family": one.family,
                        "config": one.config,
                        "ms": float(f"{one.ms:.6g}"),
                        "tflops": float(f"{one.tflops:.6g}"),
                        "environment": name,
                    }
                )
            entries.append({**entry.key.to_json(), "problem": str(entry.problem), "ranked": ranked})
        return {
            "schema": SCHEMA,
            "environments": environments,
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


def _entry(record: dict[str, Any], environments: Mapping[str, Any]) -> Entry:
    """Raises what makes the record unusable."""
    names = ("gpu", "arch", "dtype", "d_head", "semantics", "seq_q", "seq_k", "batch_heads")
    key = WinnerKey(**{name: record[name] for name in names})
    key = replace(key, gpu=gpu_name(key.gpu), dtype=key.element.name.lower())
    parse_class(key.semantics)
    ranked = [
        Ranked(
            one["family"],
            one["config"],
            one["ms"],
            one["tflops"],
            environments[one["environment"]],
        )
        for one in record["ranked"]
    ]
    return Entry(key, Problem.parse(record["problem"]), tuple(ranked))


def _joined(paths: Sequence[Path]) -> WinnersTable:
    """All files' entries, later ones first; a file that is unusable becomes a note."""
    table = WinnersTable()
    for path in paths:
        try:
            found = WinnersTable.load(path)
        except TableError as error:
            table.notes.append(f"{error}; it is ignored")
            continue
        table.notes += found.notes
        for entry in found:
            table.put(entry)
    return table
