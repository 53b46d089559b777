"""Shared words: memory in which each rank of a group on one host writes a word that the others
read.

An exchange through shared memory takes some microseconds; over a socket it takes hundreds.
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

# A folder whose files are kept in memory (tmpfs).
_FOLDER = Path("/dev/shm")
_PATH, _TOKEN = 240, 16
# The id and the start time of a process, which together identify it.
_PROCESS = struct.Struct("<qq")
# The layout of an entry: a word, the number of its exchange, and the xor of both, which reveals an
# entry that is only partly written.
_WORD = struct.Struct("<qqq")
# A waiting rank checks whether the others are alive after this many seconds, and then again at this
# interval.
_PATIENCE = 0.2
_SPINS = 200

Exchange = Callable[[bytes], bytes]


class SharedWords:
    """The shared words, as one of the ranks uses them."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout: float) -> None:
        self._memory, self._rank, self.timeout = memory, rank, timeout
        self._size, self._number, self._lost = size, 0, ""
        self._others = [it for it in range(size) if it != rank]

    @staticmethod
    def shared(rank: int, size: int, timeout: float, exchange: Exchange) -> SharedWords | None:
        """Creates or opens the shared words of a group; returns None if the ranks are on different
        hosts. All ranks must call this."""
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
        shared_words = None
        if memory is not None and all_have:
            shared_words = SharedWords(memory, rank, size, timeout)
        # Processes in different namespaces may share the folder but cannot check whether the others
        # are alive.
        sees_all = shared_words is not None and all(shared_words._lives(it) for it in range(size))
        return shared_words if exchange(bytes([sees_all])) == b"\1" * size else None

    def same(self, word: int) -> Callable[[], bool]:
        """Writes a 63-bit word, which will be compared with the words of the other ranks.

        Returns a function that waits for their words and returns whether all are equal. The
        function raises RuntimeError if a rank has ended or is late.
        """
        if self._lost:
            raise RuntimeError(self._lost)
        self._number = number = self._number + 1
        self._write(word, number)
        return lambda: {self._read(rank, number) for rank in self._others} <= {word}

    def _place(self, rank: int, number: int) -> int:
        # Two slots are used alternately, because a rank may be one exchange ahead of another that
        # is still reading.
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
            # At first this yields only to other threads of this process, and after a while to other
            # processes too.
            time.sleep(0 if now - begin < 0.002 else 0.0001)
            if now - max(begin, looked) > _PATIENCE:
                looked = now
                if not self._lives(rank):
                    self._lose(f"rank {rank} has ended")
                if now - begin > self.timeout:
                    stopped = self._state(rank) in _STOPPED
                    self._lose(
                        f"rank {rank} {'is stopped by a signal, and ' if stopped else ''}"
                        f"did not arrive within {self.timeout:g} s"
                    )

    def lost(self) -> str:
        """Says which rank has ended; '' if all are alive."""
        return next((f"rank {it} has ended" for it in self._others if not self._lives(it)), "")

    def _lose(self, why: str) -> None:
        self._lost = why
        raise RuntimeError(why)

    def _lives(self, rank: int) -> bool:
        return self._state(rank) not in _ENDED

    def _state(self, rank: int) -> str:
        """The state of a rank's process as _status() gives it; '' if it has ended."""
        pid, began = _PROCESS.unpack_from(self._memory, _TOKEN + rank * _PROCESS.size)
        state, since = _status(pid)
        return state if since == began else ""


# The states of a process that has ended (none, zombie, dead), and of one that a signal or a
# debugger has stopped.
_ENDED = ("", "Z", "X")
_STOPPED = ("T", "t")


def _status(pid: int) -> tuple[str, int]:
    """The state of a process (one letter) and its start time in clock ticks; '' and 0 if there is
    no such process."""
    try:
        # The name of the process, which comes first, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def _began(pid: int) -> int:
    return _status(pid)[1]


def _bytes_of(size: int) -> int:
    return _TOKEN + size * (_PROCESS.size + 2 * _WORD.size)


def _made(size: int) -> tuple[str, bytes, mmap.mmap | None]:
    """Makes a file.

    Returns the file's path, first bytes and memory; all are empty if it cannot be made.
    """
    if _FOLDER.is_dir():
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="flashsmith-", dir=_FOLDER)
            try:
                with open(handle, "r+b") as file:
                    token = secrets.token_bytes(_TOKEN)
                    # If the folder is full, writing raises an error here; setting the size would
                    # not.
                    file.write(token.ljust(_bytes_of(size), b"\0"))
                    file.flush()
                    return path, token, mmap.mmap(file.fileno(), _bytes_of(size))
            except OSError:
                os.unlink(path)
    return "", b"", None


def _found(path: str, token: bytes, size: int) -> mmap.mmap | None:
    """The memory of the file that rank 0 has made; None if that file is not on this host."""
    if path:
        with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _bytes_of(size))
            if memory[:_TOKEN] == token:
                return memory
    return None
