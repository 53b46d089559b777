"""Draw docs/ladder.svg: the table that `flashsmith run` prints, as a picture.

Usage: python tools/docs/ladder.py [--out docs/ladder.svg]

It runs the main job as on a machine without a GPU, so that everybody draws the same picture;
tests/cli/test_ladder_picture.py fails while the picture is another than a run's.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.run import run_kernels
from flashsmith.benchmark.run_table import print_report
from flashsmith.benchmark.tasks import default_size
from flashsmith.families import get_kernel_configs
from flashsmith.runtime.target import choose_target

# Columns of the drawn terminal: the kernels get numbers, and the picture stays legible on a page.
WIDTH = 92


def draw_ladder(out: Path) -> None:
    """Run the ladder in the emulator and write the table's picture to `out`."""
    target = choose_target("sm_80", emulate=True)
    with Narrator() as narrator:
        report = run_kernels(
            get_kernel_configs("prog"), target, task=default_size(target), narrator=narrator
        )
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, highlight=False
    )
    print_report(console, report)
    # A fixed id: drawing the same table again changes no byte.
    console.save_svg(
        str(out), title="$ flashsmith run", theme=MONOKAI, unique_id="ladder", clear=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/ladder.svg"))
    draw_ladder(parser.parse_args().out)
