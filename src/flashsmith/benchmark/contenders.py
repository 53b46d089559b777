"""Kernels to be timed, under the names that the docs have had for them."""

from flashsmith.benchmark.implementations import OURS
from flashsmith.benchmark.implementations import KernelImplementation as KernelContender
from flashsmith.benchmark.implementations import attention_implementation as attention_contender
from flashsmith.benchmark.implementations import kernel_implementation as kernel_contender

__all__ = ["OURS", "KernelContender", "attention_contender", "kernel_contender"]
