"""The old name of ``implementations.kernel_implementation``, kept because it was documented."""

from flashsmith.benchmark.implementations import kernel_implementation as kernel_contender

__all__ = ["kernel_contender"]
