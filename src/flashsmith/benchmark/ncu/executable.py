"""Finding Nsight Compute's command-line profiler."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from flashsmith import env
from flashsmith.errors import ProfilerError

# Where NVIDIA's installers put it, newest version last when sorted by number.
_INSTALLED = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")


def find_ncu(root: Path = Path("/")) -> Path:
    """The `ncu` on PATH, else CUDA_HOME's, else the newest one installed under `root`.

    Raises ProfilerError that lists where it looked.
    """
    looked = ["PATH"]
    if on_path := shutil.which("ncu"):
        return Path(on_path)
    if home := env.CUDA_HOME.raw():
        own = Path(home) / "bin" / "ncu"
        looked.append(str(own))
        if _usable(own):
            return own
    for pattern in _INSTALLED:
        looked.append(str(root / pattern))
        if found := [path for path in sorted(root.glob(pattern), key=_version) if _usable(path)]:
            return found[-1]
    raise ProfilerError(
        f"ncu: Nsight Compute was not found; looked at {', '.join(looked)}. It comes with a CUDA "
        "toolkit; put its folder on PATH"
    )


def _usable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]
