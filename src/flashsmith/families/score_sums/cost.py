"""Costs of the score_sums family."""

from __future__ import annotations

# How long any config takes to compile, relative to those of other families; 1,000 is about 1.4 s.
COMPILE_COST = 1500.0
# Seconds that the emulator takes to translate a kernel, on one core.
TRANSLATION_SECONDS = 0.2
