"""Whether this is a copy of flashsmith that brings its kernels along, in a folder of the kernels
hub.

Such a copy runs under another name, may be loaded together with an installed flashsmith, and
compiles nothing. `flashsmith hub` writes it, with other values in this file.
"""

from __future__ import annotations

from pathlib import Path

# The version of the copy. None in an installed flashsmith, whose metadata has the version.
VERSION: str | None = None
# The namespace of PyTorch's operators; each copy in a process needs its own.
OPERATORS = "flashsmith"
# For each family, the hash of the sources from which the copy's kernels were made.
SOURCES: dict[str, str] = {}

# The folder of a copy's kernels, in the layout of an installed package of kernels.
KERNELS = Path(__file__).with_name("kernels")


def is_copy() -> bool:
    """Whether this is a copy that brings its kernels along."""
    return VERSION is not None
