"""The autotuner: searches a space of configs for the fastest kernel of every problem.

Compile processes build libraries while one measuring process checks and times kernels. Kernels are
timed in rungs: each takes longer than the previous rung and drops the slower kernels. The final
then times the fastest kernels interleaved. A kernel that crashes, hangs or gives wrong results is
dropped, and no other result is lost. Every result is in a journal before the sweep goes on, so that
the sweep can be stopped at any time.
"""

# Re-exported from their former module.
from flashsmith.chooser import (
    Choice,
    attention,
    build_for,
    choose,
    choose_config,
    forget_choices,
)

__all__ = ["Choice", "attention", "build_for", "choose", "choose_config", "forget_choices"]
