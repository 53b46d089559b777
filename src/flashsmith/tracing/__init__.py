"""Tracing: turns a caller's score and mask functions into a program that kernels compute.

A function is called once with symbols. Operators, functions of PyTorch and NumPy, and reads from
tensors then build typed expressions. PyTorch is imported only if the process has already imported
it.
"""

from flashsmith.semantics.program import BoundProgram
from flashsmith.tracing.binding import BoundFunctions, bind, table_function, table_reader
from flashsmith.tracing.tracer import trace

__all__ = ["BoundFunctions", "BoundProgram", "bind", "table_function", "table_reader", "trace"]
