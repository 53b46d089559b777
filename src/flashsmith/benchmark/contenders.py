"""Kernels to be timed, under the name that the docs have had for them."""

from flashsmith.benchmark.implementations import kernel_implementation as kernel_contender

__all__ = ["kernel_contender"]
