#!/usr/bin/env python3
"""Runs a script as if PyTorch were not installed, so that NumPy computes its references.

    compute-sanitizer --tool initcheck python tools/gpu/without_torch.py SCRIPT ARGUMENTS...

initcheck would take minutes for PyTorch's own copies, and report them.
"""

import runpy
import sys
from pathlib import Path

if len(sys.argv) < 2:
    sys.exit("usage: without_torch.py SCRIPT ARGUMENTS...")
# If sys.modules has None for a module, importing it fails.
sys.modules["torch"] = None  # type: ignore[assignment]
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
