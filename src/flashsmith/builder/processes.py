"""Runs several compilers in parallel, and leaves none running after a failure."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashsmith import env
from flashsmith.errors import CacheError, CompileError
from flashsmith.system_errors import is_from_system

_POLL_SECONDS = 0.02
# The watchdog has its own session, and waits until its parent, process $1, has died. Then it kills
# all processes whose TMPDIR is $2, which are the compilers and their children. (A death signal set
# by prctl would reach only nvcc, not its children.) The watchdog is a script for sh, which nvcc
# needs as well.
_WATCHDOG = """
while read -r _ _ _ parent _ < /proc/$$/stat && [ "$parent" = "$1" ]; do sleep 0.3; done
for attempt in 1 2 3 4 5 6 7 8; do
    for found in $(grep -lzxF -e "TMPDIR=$2" /proc/[0-9]*/environ); do
        found=${found#/proc/}
        kill -9 "${found%/environ}"
    done
    sleep 0.2
done
"""
_SHOWN_CHARACTERS = 6000
# The compilers that the threads of this process run now.
_RUNNING: set[_Running] = set()


@dataclass(frozen=True)
class Command:
    """One invocation of a compiler: the name of its output, and its arguments."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Finished:
    """An invocation that succeeded: its wall time in seconds, and what the compiler printed."""

    command: Command
    seconds: float
    output: str


class _Running:
    def __init__(self, command: Command, cwd: Path) -> None:
        self.command = command
        self.start = time.monotonic()
        # The output goes to memory, because a file on a full disk could not store the compiler's
        # error message.
        try:
            self.words = os.fdopen(os.memfd_create(command.name), "w+b")
        except OSError as error:
            if not is_from_system(error):
                raise
            raise CompileError(f"{command.name}: no memory for its output: {error}") from error
        try:
            # It has its own session, so that killing the process group also kills the children of
            # nvcc. Ctrl-C then reaches only Python, which kills the compilers.
            self.process = subprocess.Popen(
                command.arguments,
                cwd=cwd,
                env=env.compiler_environment(str(cwd)),
                stdin=subprocess.DEVNULL,
                stdout=self.words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self.words.close()
            if not is_from_system(error):
                raise
            raise CompileError(
                f"{command.name}: {command.arguments[0]} does not run: {error}"
            ) from error

    def kill(self) -> None:
        _end(self.process)
        self.words.close()

    def finish(self) -> Finished:
        seconds = time.monotonic() - self.start
        with self.words:
            self.words.seek(0)
            output = self.words.read().decode(errors="replace")
        if self.process.returncode != 0:
            raise _failure(self.command, self.process.returncode, output)
        return Finished(self.command, seconds, output)


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[None]:
    """Makes sure that the compilers in ``folder`` are killed when this process ends, even if this
    process is killed."""
    try:
        # If /proc belongs to another PID namespace, this PID stands for another process there.
        watchable = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        watchable = False
    if not watchable:
        yield
        return
    try:
        watchdog = subprocess.Popen(
            ("/bin/sh", "-c", _WATCHDOG, "watchdog", str(os.getpid()), str(folder)),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        if not is_from_system(error):
            raise
        raise CompileError(f"/bin/sh: does not run, and nvcc needs it: {error}") from error
    try:
        yield
    finally:
        _end(watchdog)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session, and all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    commands: Sequence[Command],
    *,
    cwd: Path,
    jobs: int,
    finished: Callable[[Finished], None],
) -> None:
    """Runs ``commands`` in order, at most ``jobs`` in parallel.

    After each command, ``finished`` is called in the calling thread.

    If this process ends or is killed, the commands end soon after. ``cwd`` must not be used by any
    other process. If a command fails, the others are killed, and CompileError is raised with the
    output of the compiler, or CacheError if the output reports a full disk.
    """
    waiting = list(commands)
    running: list[_Running] = []
    with _watched(cwd):
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Running(waiting.pop(0), cwd))
                    _RUNNING.add(running[-1])
                ended = [run for run in running if run.process.poll() is not None]
                running = [run for run in running if run not in ended]
                _RUNNING.difference_update(ended)
                for run in ended:
                    finished(run.finish())
                if not ended:
                    time.sleep(_POLL_SECONDS)
        finally:
            _RUNNING.difference_update(running)
            for run in running:
                run.kill()


def end_all() -> None:
    """Kills the compilers of all threads. Each ``run_all`` that was running one raises
    CompileError."""
    for run in tuple(_RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)


def _failure(command: Command, code: int, output: str) -> CompileError | CacheError:
    words = output.strip() or "(no output)"
    if "No space left on device" in words:
        return CacheError(
            f"{command.name}: the disk is full: {words[-500:]}\n"
            "Free some space, or set TMPDIR, where compilers work, to a folder on another disk"
        )
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "Killed" in words:
        how += " (out of memory? FLASHSMITH_JOBS=1 needs the least)"
    if len(words) > _SHOWN_CHARACTERS:
        # The first error is the cause; the last lines show where the compiler stopped.
        half = _SHOWN_CHARACTERS // 2
        words = f"{words[:half]}\n[...]\n{words[-half:]}"
    return CompileError(
        f"{command.name}: {command.arguments[0]} {how}:\n{words}\n"
        f"The command was: {shlex.join(command.arguments)}"
    )
