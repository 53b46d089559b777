"""Costs of the slot_write family."""

from __future__ import annotations

# How long any config takes to compile, relative to those of other families; 1,000 is about 1.4 s.
COMPILE_COST = 300.0
# Seconds that the emulator takes to translate a kernel, on one core.
TRANSLATION_SECONDS = 0.05
