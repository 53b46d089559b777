"""Costs of the slot_write family."""

from __future__ import annotations

# Relative compile time of any config; 1,000 is about 1.4 s.
COMPILE_COST = 300.0
# Seconds that the emulator needs to translate a kernel on one core.
TRANSLATION_SECONDS = 0.05
