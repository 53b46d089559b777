"""The autotuner: searches a set of configs for the fastest kernel of each problem.

Compile processes build libraries while a separate process checks and times kernels. Kernels are
timed in rungs: each rung spends more time per kernel than the rung before, and drops the slower
kernels. At the end, a final times the fastest kernels, interleaved. A kernel that crashes, hangs or
gives wrong results is dropped; the results of other kernels are kept. Every result is written to a
journal before the sweep continues, so that the sweep can be stopped at any time and continued
later.
"""

# These names are exported here because they were once defined in this module.
from flashsmith.chooser import (
    Choice,
    attention,
    build_for,
    choose,
    choose_config,
    forget_choices,
)

__all__ = ["Choice", "attention", "build_for", "choose", "choose_config", "forget_choices"]
