"""The autotuner: searches a space of configs for the fastest kernel of every problem.

Compile processes build libraries while one measuring process proves kernels and times them, in
rungs of growing length that thin the field; in the end the near-winners take turns. A kernel that
crashes, hangs or lies costs itself only. Whatever is found out is in a journal before the sweep
goes on, so that it can be stopped at any time.
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
