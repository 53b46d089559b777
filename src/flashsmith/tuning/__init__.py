"""The autotuner: searches a space of configs for the fastest kernel of every problem.

Compile processes build libraries while one measuring process proves kernels and times them, in
rungs of growing length that thin the field; in the end the near-winners take turns. A kernel that
crashes, hangs or lies costs itself only. Whatever is found out is in a journal before the sweep
goes on, so that it can be stopped at any time.
"""

# Where it was documented before it moved.
from flashsmith.chooser import forget_choices

__all__ = ["forget_choices"]
