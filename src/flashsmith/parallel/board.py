"""A board that the ranks of a group on one host write on: a word of each, in memory that all see.

A word on it takes some microseconds, and over a socket hundreds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Where files are memory.
_FOLDER = Path("/dev/shm")
_PATH, _TOKEN = 240, 16
# Of a process its number and when it began, which together no later one has.
_PROCESS = struct.Struct("<qq")
# A word, the number of the question that it answers, and both xor: a half-written one fits nothing.
_WORD = struct.Struct("<qqq")
# Seconds until a rank that waits looks whether the others live, and between looks.
_PATIENCE = 0.2
_SPINS = 200

Exchange = Callable[[bytes], bytes]


class Board:
    """One rank's view of the board."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout: float) -> None:
        self._memory, self._rank, self.timeout = memory, rank, timeout
        self._size, self._number, self._lost = size, 0, ""
        self._others = [it for it in range(size) if it != rank]

    @staticmethod
    def shared(rank: int, size: int, timeout: float, exchange: Exchange) -> Board | None:
        """The board of these ranks; None where they are not on one host. All of them call this."""
        path, token, memory = _made(size) if rank == 0 else ("", b"", None)
        try:
            given = exchange(path.encode().ljust(_PATH, b"\0") + token.ljust(_TOKEN, b"\0"))
            if rank:
                memory = _found(
                    given[:_PATH].rstrip(b"\0").decode(), given[_PATH : _PATH + _TOKEN], size
                )
            if memory is not None:
                process = os.getpid(), _began(os.getpid())
                _PROCESS.pack_into(memory, _TOKEN + rank * _PROCESS.size, *process)
            all_have = exchange(bytes([memory is not None])) == b"\1" * size
        finally:
            if path:
                os.unlink(path)
        board = None
        if memory is not None and all_have:
            board = Board(memory, rank, size, timeout)
        # Processes of other namespaces may share a folder, and cannot look after each other.
        sees_all = board is not None and all(board._lives(it) for it in range(size))
        return board if exchange(bytes([sees_all])) == b"\1" * size else None

    def same(self, word: int) -> Callable[[], bool]:
        """Writes a number of 63 bits; the result waits for the others', and says whether all are
        the same. RuntimeError where a rank has ended, or is late."""
        if self._lost:
            raise RuntimeError(self._lost)
        self._number = number = self._number + 1
        self._write(word, number)
        return lambda: {self._read(rank, number) for rank in self._others} <= {word}

    def _place(self, rank: int, number: int) -> int:
        # By turns: a rank may be one question ahead of one that still reads.
        first = _TOKEN + self._size * _PROCESS.size
        return first + (number % 2 * self._size + rank) * _WORD.size

    def _write(self, word: int, number: int) -> None:
        place = self._place(self._rank, number)
        _WORD.pack_into(self._memory, place, word, number, word ^ number)

    def _read(self, rank: int, number: int) -> int:
        place, memory, begin = self._place(rank, number), self._memory, 0.0
        spins, looked = 0, 0.0
        while True:
            word, theirs, both = _WORD.unpack_from(memory, place)
            if theirs == number and word ^ theirs == both:
                return int(word)
            spins += 1
            if spins < _SPINS:
                continue
            now = time.monotonic()
            begin = begin or now
            # Other threads of this process go on; after a while other processes, too.
            time.sleep(0 if now - begin < 0.002 else 0.0001)
            if now - max(begin, looked) > _PATIENCE:
                looked = now
                if not self._lives(rank):
                    self._lose(f"rank {rank} has ended")
                if now - begin > self.timeout:
                    stopped = self._state(rank) in _STOPPED
                    self._lose(
                        f"rank {rank} {'is stopped by a signal, and ' if stopped else ''}"
                        f"did not come within {self.timeout:g} s"
                    )

    def lost(self) -> str:
        """Which rank has ended; '' where none has."""
        return next((f"rank {it} has ended" for it in self._others if not self._lives(it)), "")

    def _lose(self, why: str) -> None:
        self._lost = why
        raise RuntimeError(why)

    def _lives(self, rank: int) -> bool:
        return self._state(rank) not in _ENDED

    def _state(self, rank: int) -> str:
        """The letter of a rank's process, as _status() gives it."""
        pid, began = _PROCESS.unpack_from(self._memory, _TOKEN + rank * _PROCESS.size)
        state, since = _status(pid)
        return state if since == began else ""


# What a process that is no more is, or one that only waits for its parent to look; one that a
# signal or a debugger has stopped.
_ENDED = ("", "Z", "X")
_STOPPED = ("T", "t")


def _status(pid: int) -> tuple[str, int]:
    """A process's state, a letter, and when it began, in ticks; '' for one that is not there."""
    try:
        # The name before these may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def _began(pid: int) -> int:
    return _status(pid)[1]


def _bytes_of(size: int) -> int:
    return _TOKEN + size * (_PROCESS.size + 2 * _WORD.size)


def _made(size: int) -> tuple[str, bytes, mmap.mmap | None]:
    """A new file, what it begins with, and its memory; nothing where there is no such folder."""
    if _FOLDER.is_dir():
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="flashsmith-", dir=_FOLDER)
            try:
                with open(handle, "r+b") as file:
                    token = secrets.token_bytes(_TOKEN)
                    # Written, not truncated: a folder that is full is an error here, not later.
                    file.write(token.ljust(_bytes_of(size), b"\0"))
                    file.flush()
                    return path, token, mmap.mmap(file.fileno(), _bytes_of(size))
            except OSError:
                os.unlink(path)
    return "", b"", None


def _found(path: str, token: bytes, size: int) -> mmap.mmap | None:
    """The memory of rank 0's file, if this is the host that has it."""
    if path:
        with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _bytes_of(size))
            if memory[:_TOKEN] == token:
                return memory
    return None
