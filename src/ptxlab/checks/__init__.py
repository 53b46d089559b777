"""Observers of an emulated launch: checks, which report findings, and measurements."""

from __future__ import annotations

from ptxlab.checks.bank_conflicts import BankConflicts, Wavefronts
from ptxlab.checks.bounds import Bounds
from ptxlab.checks.check import Rules
from ptxlab.checks.in_flight import InFlight
from ptxlab.checks.instruction_mix import instruction_mix
from ptxlab.checks.races import Races
from ptxlab.checks.uninitialised import Uninitialised
from ptxlab.interface import Observer

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
    """Returns a new observer for every check. A correct kernel causes no findings.

    ``deterministic``: the kernel must also order its floating-point sums.
    """
    return [Bounds(), Uninitialised(), InFlight(), Races(orders_sums=deterministic), Rules()]
