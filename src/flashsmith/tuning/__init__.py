"""The autotuner: searches a space of configs for the fastest kernel of every problem.

Compile processes build libraries while one measuring process proves kernels and times them, in
rungs of growing length, each of which drops the slower ones; the final times the fastest
interleaved. A kernel that crashes, hangs or gives wrong results is dropped, and nothing else is
lost. Every finding is in a journal before the sweep goes on, so that it can be stopped at any time.
"""

# Where they were before they moved.
from flashsmith.chooser import (
    Choice,
    attention,
    build_for,
    choose,
    choose_config,
    forget_choices,
)

__all__ = ["Choice", "attention", "build_for", "choose", "choose_config", "forget_choices"]
