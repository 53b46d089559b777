"""Measures how long the host takes to choose a config: in the first call for a problem, and in
later calls.

    python tools/benchmark/chooser_cost.py

No GPU is needed: the choices are for an H200, by its shipped tables.
"""

from __future__ import annotations

import argparse
import time
import timeit

from flashsmith.chooser import choose_config, forget_choices
from flashsmith.families import Problem, device_spec

DEVICE = device_spec("H200")
TEXT = "b16 s4096 h32:8 d128 bf16 causal"
LOOPS = 10_000


def milliseconds_of(problem: Problem) -> float:
    start = time.perf_counter()
    choose_config(problem, DEVICE)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser("chooser_cost.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()
    forget_choices()
    problem, equal = Problem.parse(TEXT), Problem.parse(TEXT)
    print(f"first choice, including reading the tables: {milliseconds_of(problem):.2f} ms")
    others = [Problem.parse(f"b1 s{seq} h32:8 d128 bf16") for seq in range(64, 6464, 64)]
    print(f"first choice for another problem: {sorted(map(milliseconds_of, others))[50]:.3f} ms")
    for name, again in (("the same", problem), ("an equal", equal)):
        runs = timeit.repeat(lambda p=again: choose_config(p, DEVICE), number=LOOPS, repeat=9)
        print(f"{name} problem again: {sorted(runs)[4] / LOOPS * 1e6:.2f} us")


if __name__ == "__main__":
    main()
