"""Draws docs/run.svg, a picture of the table that `flashsmith run` prints.

Usage: python tools/docs/run_picture.py [--out docs/run.svg]

The kernels always run in the emulator, so that the picture is the same on every machine.
tests/cli/test_run_picture.py fails if the picture is not what a run prints.
"""

from __future__ import annotations

import argparse
import inspect
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.run import run_kernels
from flashsmith.benchmark.run_table import print_report
from flashsmith.benchmark.tasks import default_size
from flashsmith.families import get_kernel_configs
from flashsmith.runtime.target import choose_target

# The columns of the terminal in the picture; with more, it could not be read on a page. Kernels are
# numbered.
WIDTH = 92
# The template of rich, without the fonts that a browser would load from another host.
RICH_FORM = inspect.signature(Console.export_svg).parameters["code_format"].default
FORM = re.sub(r"@font-face \{\{.*?\}\}\s*", "", RICH_FORM, flags=re.DOTALL)


def draw_run(out: Path) -> None:
    """Runs the set `prog` in the emulator, and writes a picture of the table to `out`."""
    target = choose_target("sm_80", emulate=True)
    with ProgressReporter() as reporter:
        report = run_kernels(
            get_kernel_configs("prog"), target, task=default_size(target), reporter=reporter
        )
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, highlight=False
    )
    print_report(console, report)
    # A fixed id, so that drawing the same table again gives the same bytes.
    console.save_svg(
        str(out), title="$ flashsmith run", theme=MONOKAI, code_format=FORM, unique_id="run"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/run.svg"))
    draw_run(parser.parse_args().out)
