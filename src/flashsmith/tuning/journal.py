"""Journal: the file with the results of a sweep so far; each result is on disk before the sweep
continues."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashsmith.builder.safe_files import no_follow
from flashsmith.errors import ArgumentError
from flashsmith.safe_json import UnusableTextError, parse_json
from flashsmith.tuning.trial import Record

FORMAT = 2
# Formats that can no longer be read, because field names had other meanings in them.
_OLDER_FORMATS = (1,)


class Journal:
    """A file to which records are appended, one per line. They are on disk when `add` returns.

    Each line names the environment for which it is valid; `part` returns the records for one
    environment. Records for other environments or other CUDA sources are ignored, and so are lines
    that cannot be read. `foreign` is the number of such records, and `damaged` the number of such
    lines. A last line that was cut off is removed. Only one process can write to a journal at a
    time.

    Raises ArgumentError if the file cannot be written, if another sweep is writing to it, or if an
    older version wrote it.
    """

    def __init__(self, path: Path, *environments: str, fresh: bool = False) -> None:
        self.path = path
        self.foreign = self.damaged = 0
        self._parts = {name: JournalPart(self, name) for name in environments}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", opener=no_follow)  # noqa: SIM115
        except OSError as error:
            raise ArgumentError(
                f"out={str(path.parent)!r}: cannot be written ({error.strerror}); "
                "give another folder"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ArgumentError(
                f"out={str(path.parent)!r}: another sweep is writing there; wait for it, or give "
                "another folder"
            ) from None
        if fresh:
            self._file.truncate(0)
        try:
            self._read()
        except ArgumentError:
            self._file.close()
            raise

    @property
    def records(self) -> list[Record]:
        """All valid records, in groups by environment."""
        return [record for part in self._parts.values() for record in part.records]

    def part(self, environment: str) -> JournalPart:
        """The records for the environment ``environment``."""
        return self._parts[environment]

    def add(self, environment: str, records: Sequence[Record]) -> None:
        """Appends records, and waits until they are on disk.

        Raises ArgumentError if the disk is full.
        """
        if not records:
            return
        stamp = {"format": FORMAT, "environment": environment}
        lines = (json.dumps({**stamp, **record.to_json()}) + "\n" for record in records)
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ArgumentError(
                f"out={str(self.path.parent)!r}: cannot be written ({error.strerror}); make room, "
                "or give another folder, and run again to continue"
            ) from error

    def close(self) -> None:
        """Closes the file, so that another sweep can write to it."""
        # `add` has already reported that the disk is full.
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for line in content[:whole].splitlines():
            found = None
            with contextlib.suppress(UnicodeDecodeError, UnusableTextError):
                found = parse_json(line.decode())
            if not isinstance(found, dict) or found.get("format") not in (FORMAT, *_OLDER_FORMATS):
                self.damaged += 1
            elif found["format"] in _OLDER_FORMATS:
                raise ArgumentError(
                    f"out={str(self.path.parent)!r}: an older version of flashsmith wrote its "
                    f"{self.path.name}; continue with that version, give another folder, or "
                    "start over with --fresh"
                )
            elif found.get("environment") not in self._parts:
                self.foreign += 1
            else:
                self._read_record(self._parts[found["environment"]], found)

    def _read_record(self, part: JournalPart, found: dict[str, Any]) -> None:
        try:
            record = Record.from_json(found)
        except (ValueError, TypeError, KeyError):
            self.damaged += 1
            return
        if record is None:
            self.foreign += 1
        else:
            part.records.append(record)


class JournalPart:
    """The records of a journal for one environment, as read when the journal was opened."""

    def __init__(self, journal: Journal, environment: str) -> None:
        self.records: list[Record] = []
        self._journal, self._environment = journal, environment

    def add(self, records: Sequence[Record]) -> None:
        """See Journal."""
        self._journal.add(self._environment, records)
