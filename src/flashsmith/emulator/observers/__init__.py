"""What watches an emulated launch: checks, which report findings, and measurements."""

from __future__ import annotations

from flashsmith.emulator.interface import Observer
from flashsmith.emulator.observers.bank_conflicts import BankConflicts, Wavefronts
from flashsmith.emulator.observers.bounds import Bounds
from flashsmith.emulator.observers.in_flight import InFlight
from flashsmith.emulator.observers.instruction_mix import instruction_mix
from flashsmith.emulator.observers.races import Races
from flashsmith.emulator.observers.rules import Rules
from flashsmith.emulator.observers.uninitialised import Uninitialised

__all__ = [
    "BankConflicts",
    "Bounds",
    "InFlight",
    "Races",
    "Rules",
    "Uninitialised",
    "Wavefronts",
    "all_checks",
    "instruction_mix",
]


def all_checks() -> list[Observer]:
    """Fresh observers of every check: what a correct kernel passes without a finding."""
    return [Bounds(), Uninitialised(), InFlight(), Races(), Rules()]
