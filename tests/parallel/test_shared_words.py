"""The shared words of ranks on one host: two views of one memory, in one process."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith.parallel import shared_words as module  # noqa: E402
from flashsmith.parallel.shared_words import SharedWords  # noqa: E402

TIMEOUT = 0.3


def views(size: int = 2, pids: tuple[int, ...] = ()) -> list[SharedWords]:
    memory = mmap.mmap(-1, 4096)
    for rank, pid in enumerate(pids or size * (os.getpid(),)):
        struct.pack_into("<qq", memory, 16 + 16 * rank, pid, module._began(pid))
    return [SharedWords(memory, rank, size, TIMEOUT) for rank in range(size)]


def test_ranks_hear_whether_all_say_the_same() -> None:
    all_words = views(3)
    for words, same in [
        ((5, 5, 5), True),
        ((5, 5, 6), False),
        ((0, 0, 0), True),
        ((7, 8, 9), False),
    ]:
        answers = [
            shared_words.same(word) for shared_words, word in zip(all_words, words, strict=True)
        ]
        assert [answer() for answer in answers] == [same] * 3


def test_a_rank_may_be_one_question_ahead() -> None:
    zero, one = views()
    first = zero.same(1), one.same(1)
    assert first[0]()
    second = zero.same(2)
    assert first[1]()
    assert one.same(2)()
    assert second()


def test_a_word_that_is_half_written_is_waited_for() -> None:
    zero, one = views()
    asked = zero.same(3)
    place = one._place(1, 1)
    struct.pack_into("<qq", one._memory, place, 3, 1)
    writer = threading.Timer(0.05, lambda: struct.pack_into("<q", one._memory, place + 16, 3 ^ 1))
    writer.start()
    assert asked()
    writer.join()


def test_a_late_rank_is_an_error_from_then_on() -> None:
    zero, one = views()
    with pytest.raises(RuntimeError, match=r"rank 1 did not arrive within 0\.3 s"):
        zero.same(1)()
    one.same(1)
    with pytest.raises(RuntimeError, match="rank 1 did not arrive"):
        zero.same(2)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    # Above the largest number of a process.
    zero, _ = views(pids=(os.getpid(), 2**22 + 1))
    zero.timeout = 1000.0
    assert zero.lost() == "rank 1 has ended"
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        zero.same(1)()
    assert views()[0].lost() == ""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_killed_rank_has_ended_before_its_parent_looks(sleeper: subprocess.Popen[bytes]) -> None:
    zero, _ = views(pids=(os.getpid(), sleeper.pid))
    assert zero.lost() == ""
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    os.kill(sleeper.pid, 0)  # it can still be asked for
    assert zero.lost() == "rank 1 has ended"


def test_another_process_of_the_same_number_is_not_the_rank() -> None:
    zero, one = views()
    pid = os.getpid()
    struct.pack_into("<qq", one._memory, 16 + 16, pid, module._began(pid) - 1)
    assert zero.lost() == "rank 1 has ended"


def test_a_stopped_rank_is_called_that(sleeper: subprocess.Popen[bytes]) -> None:
    zero, _ = views(pids=(os.getpid(), sleeper.pid))
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert zero.lost() == ""
    text = r"rank 1 is stopped by a signal, and did not arrive within 0\.3 s"
    with pytest.raises(RuntimeError, match=text):
        zero.same(1)()


def shared(monkeypatch: pytest.MonkeyPatch, folder: Path, *, other_host: bool = False) -> list:
    """The all_words that two ranks find, each in a thread."""
    monkeypatch.setattr(module, "_FOLDER", folder)
    said, meeting = [b"", b""], threading.Barrier(2)
    found: list[SharedWords | None] = [None, None]

    def run(rank: int) -> None:
        def exchange(mine: bytes) -> bytes:
            given = mine
            if other_host and len(mine) > 1:
                given = mine[:-1] + bytes([mine[-1] ^ 1])
            said[rank] = given
            meeting.wait(10)
            both = b"".join(said)
            meeting.wait(10)
            return both

        found[rank] = SharedWords.shared(rank, 2, TIMEOUT, exchange)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_one_host_share_a_board_and_leave_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    zero, one = shared(monkeypatch, tmp_path)
    answers = zero.same(4), one.same(4)
    assert all(answer() for answer in answers)
    assert not list(tmp_path.iterdir())


def test_ranks_of_other_hosts_have_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shared(monkeypatch, tmp_path, other_host=True) == [None, None]
    assert not list(tmp_path.iterdir())
    assert shared(monkeypatch, tmp_path / "none") == [None, None]


def test_a_rank_that_is_lost_meanwhile_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_FOLDER", tmp_path)

    def exchange(mine: bytes) -> bytes:
        assert list(tmp_path.iterdir())
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        SharedWords.shared(0, 2, TIMEOUT, exchange)
    assert not list(tmp_path.iterdir())


def test_a_full_folder_is_no_board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*given: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.mmap, "mmap", full)
    assert shared(monkeypatch, tmp_path) == [None, None]
    assert not list(tmp_path.iterdir())
