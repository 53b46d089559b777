"""What watches an emulated launch: checks, which report findings, and measurements."""

from __future__ import annotations

from flashsmith.emulator.checks.bank_conflicts import BankConflicts, Wavefronts
from flashsmith.emulator.checks.bounds import Bounds
from flashsmith.emulator.checks.check import Rules
from flashsmith.emulator.checks.in_flight import InFlight
from flashsmith.emulator.checks.instruction_mix import instruction_mix
from flashsmith.emulator.checks.races import Races
from flashsmith.emulator.checks.uninitialised import Uninitialised
from flashsmith.emulator.interface import Observer

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


def all_checks(deterministic: bool = False) -> list[Observer]:
    """Fresh observers of every check: what a correct kernel passes without a finding.

    ``deterministic``: the kernel must order its floating-point sums.
    """
    return [Bounds(), Uninitialised(), InFlight(), Races(orders_sums=deterministic), Rules()]
