"""What odd schedules do that even ones do not. What it is good for: test_wgmma_mutants.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ptxlab.machine.bulk_copies import BulkCopies
from ptxlab.machine.random_schedule import RandomSchedule

WAITS = 2000


@pytest.mark.parametrize("number", range(6))
def test_odd_ones_interrupt_waits(number: int) -> None:
    schedule = RandomSchedule(number)
    interrupted = sum(schedule.interrupts_a_wait() for _ in range(WAITS))
    if number % 2:
        assert 0.2 * WAITS < interrupted < 0.3 * WAITS
    else:
        assert interrupted == 0


class Loads(BulkCopies):
    """Three loads under way, two of them of one instruction; ``arrived`` says in which order."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(geometry=None), SimpleNamespace())  # type: ignore[arg-type]
        self.loads.extend([["a"], ["b", "b'"], ["c"]])  # type: ignore[list-item]
        self.arrived: list[str] = []

    def _arrive(self, load: object) -> None:
        self.arrived.append(str(load))

    def deliver_at_random(self, schedule: RandomSchedule) -> None:
        for _ in range(60):
            self.deliver(schedule)


@pytest.mark.parametrize("number", range(12))
def test_odd_ones_hold_a_load_back(number: int) -> None:
    loads = Loads()
    loads.deliver_at_random(RandomSchedule(number))
    if number % 2 == 0:
        assert sorted(loads.arrived) == ["a", "b", "b'", "c"]
        return
    assert len(loads.loads) == 1
    (held,) = loads.loads
    assert not set(map(str, held)) & set(loads.arrived)
    # When nothing else can happen.
    assert loads.deliver(None)
    assert not loads.loads
    assert sorted(loads.arrived) == ["a", "b", "b'", "c"]
    assert not loads.deliver(None)


def test_any_of_them_is_held_back() -> None:
    held: set[str] = set()
    for number in range(1, 40, 2):
        loads = Loads()
        loads.deliver_at_random(RandomSchedule(number))
        held |= set(map(str, loads.loads[0]))
    assert held == {"a", "b", "b'", "c"}


def test_others_come_first_when_something_must_happen() -> None:
    for number in range(1, 40, 2):
        loads, schedule = Loads(), RandomSchedule(number)
        loads.deliver(schedule)
        held = loads.held
        assert held is not None
        while len(loads.loads) > 1:
            assert loads.deliver(None)
            assert held in loads.loads
        assert list(loads.loads) == [held]
