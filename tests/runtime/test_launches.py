"""Launches are counted where they happen, by every thread, and per backend."""

from __future__ import annotations

import threading
from dataclasses import asdict

import pytest

from flashsmith.runtime.launch_counter import count_launches, launch_count, note_launch


def test_a_block_counts_its_own() -> None:
    note_launch("gpu")
    with count_launches() as outer:
        note_launch("emulator")
        with count_launches() as inner:
            note_launch("gpu")
            note_launch("gpu")
    note_launch("gpu")
    assert asdict(inner) == {"gpu": 2, "emulator": 0}
    assert asdict(outer) == {"gpu": 2, "emulator": 1}
    assert outer.total == 3


def test_a_block_that_fails_has_counted() -> None:
    counted = []

    def fail() -> None:
        with count_launches() as launches:
            counted.append(launches)
            note_launch("emulator")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert counted[0].total == 1


def test_every_thread_counts() -> None:
    def work() -> None:
        for _ in range(1000):
            note_launch("gpu")

    threads = [threading.Thread(target=work) for _ in range(4)]
    with count_launches() as launches:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert launches.gpu == 4000


def test_the_total_is_a_copy() -> None:
    before = launch_count()
    note_launch("gpu")
    assert launch_count().gpu == before.gpu + 1
