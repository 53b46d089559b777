#!/usr/bin/env python3
"""Proves a kernel variant with all memory accesses checked, and shows the error for an illegal
variant."""

from __future__ import annotations

import flashsmith
from flashsmith.errors import IllegalConfigError
from flashsmith.verify import prove

VARIANT = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
ILLEGAL = "(FP16, 128, 64, 64, 3): async+load_0_0_0_tiles"  # three warps do not divide 64 rows


def main() -> None:
    config = flashsmith.parse_kernel_name_into_config(VARIANT)
    verdict = prove(config, seq=128, checks=True)
    print(verdict)
    assert verdict.ok

    try:
        prove(flashsmith.parse_kernel_name_into_config(ILLEGAL))
    except IllegalConfigError as error:
        print(f"refused before anything is compiled: {error}")
    else:
        raise AssertionError("an illegal config was not refused")


if __name__ == "__main__":
    main()
