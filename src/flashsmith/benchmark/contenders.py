"""The documented old name of ``implementations.kernel_implementation``."""

from flashsmith.benchmark.implementations import kernel_implementation as kernel_contender

__all__ = ["kernel_contender"]
