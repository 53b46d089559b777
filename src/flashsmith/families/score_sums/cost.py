"""The compile and translation times of the score_sums family."""

from __future__ import annotations

# The compile time of any config, relative to configs of other families; 1,000 is about 1.4 s.
COMPILE_COST = 1500.0
# Seconds that the emulator takes to translate a kernel, on one core.
TRANSLATION_SECONDS = 0.2
