#!/usr/bin/env python3
"""Writes docs/environment.md: every environment variable of flashsmith.env.VARIABLES.

Usage: python tools/docs/environment.py [--out docs/environment.md]

A test compares docs/environment.md with this script's output.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashsmith.env import VARIABLES

ROOT = Path(__file__).parents[2]
HEAD = """# Environment variables

<!-- Written by tools/docs/environment.py from flashsmith.env: edit that, then run it. -->

These are flashsmith's settings; `flashsmith env` prints them with your values. An empty value
means unset. Every command refuses an invalid switch, number or order, even one that it does not
use. Paths and `KERNELS` are checked when they are used.

| variable | values | default | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole document."""
    rows = (
        (f"`{variable.name}`", variable.values, variable.default, variable.meaning)
        for variable in VARIABLES
    )
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "environment.md")
    parser.parse_args().out.write_text(page(), encoding="utf-8")
