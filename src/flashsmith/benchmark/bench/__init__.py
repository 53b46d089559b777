"""`flashsmith bench`: kernels of ours beside other people's attention, problem by problem.

A cell is one problem. Its contenders get the same tensors, each proves its output on them, and
those that did are timed together.
"""

from flashsmith.benchmark.bench.cells import CELL_SETS, cell_problems
from flashsmith.benchmark.bench.files import RowFiles
from flashsmith.benchmark.bench.plan import BenchPlan
from flashsmith.benchmark.bench.problems import Shapes, default_problem
from flashsmith.benchmark.bench.suite import run_bench
from flashsmith.benchmark.bench.table import print_rows

__all__ = [
    "CELL_SETS",
    "BenchPlan",
    "RowFiles",
    "Shapes",
    "cell_problems",
    "default_problem",
    "print_rows",
    "run_bench",
]
