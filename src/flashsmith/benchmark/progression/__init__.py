"""The ladder: what each optimisation did to the kernel before it, in time and in work.

A step's registers and spills are the compiler's, its instructions and bank conflicts the
emulator's; times, and the share of FlashAttention-2, need a GPU. A ladder is stored as JSON.
"""

from __future__ import annotations

from flashsmith.benchmark.progression.change import Change, change_between
from flashsmith.benchmark.progression.ladder import Ladder, Step, StepTime

__all__ = ["Change", "Ladder", "Step", "StepTime", "change_between"]
