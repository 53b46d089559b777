"""The autotuner: searches a space of configs for the fastest kernel of every problem.

Compile processes build libraries while one measuring process proves kernels and times them, in
rungs of growing length that thin the field; in the end the near-winners take turns. A kernel that
crashes, hangs or lies costs itself only. Whatever is found out is in a journal before the sweep
goes on, so that it can be stopped at any time.
"""

from flashsmith.tuning.sweep.entry import make_race
from flashsmith.tuning.sweep.halving import DEFAULT_HALVING, Halving, Rung
from flashsmith.tuning.sweep.journal import Journal
from flashsmith.tuning.sweep.problems import default_problems, read_problems
from flashsmith.tuning.sweep.runner import Build, Compiled, Proof, Runner
from flashsmith.tuning.sweep.space import SPACES, default_space, search_space
from flashsmith.tuning.sweep.sweep import Settings, Sweep

__all__ = [
    "DEFAULT_HALVING",
    "SPACES",
    "Build",
    "Compiled",
    "Halving",
    "Journal",
    "Proof",
    "Rung",
    "Runner",
    "Settings",
    "Sweep",
    "default_problems",
    "default_space",
    "make_race",
    "read_problems",
    "search_space",
]
