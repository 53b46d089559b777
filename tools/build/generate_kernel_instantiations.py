#!/usr/bin/env python3
"""Writes the C++ sources of a kernel library into a folder, for reading or for another build.

    python tools/build/generate_kernel_instantiations.py --kernels prog --out generated

``flashsmith build`` generates the same sources; this script only writes them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flashsmith.builder.generate import generate_kernel_instantiations
from flashsmith.errors import FlashsmithError
from flashsmith.families import Semantics, get_kernel_configs, get_kernels_to_build


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernels", help="configs, as in the variable KERNELS; default: get_kernels_to_build()"
    )
    parser.add_argument("--semantics", default="plain", help="such as causal+uneven")
    parser.add_argument("--out", type=Path, default=Path("generated"), help="folder to write into")
    parser.add_argument("--shards", type=int, default=1, help="number of .cu files")
    options = parser.parse_args(argv)
    try:
        configs = get_kernel_configs(options.kernels) if options.kernels else get_kernels_to_build()
        sources = generate_kernel_instantiations(
            configs,
            options.out,
            semantics=Semantics.parse(options.semantics),
            n_shards=options.shards,
        )
    except FlashsmithError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in (
        *sources.shards,
        sources.semantics_header,
        sources.map_header,
        sources.library,
    ):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
