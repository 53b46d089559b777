"""Tracing: turns a caller's score and mask functions into a program of kernels.

A function is called once with symbols. Operators, PyTorch's and NumPy's functions and reads from
tensors then build typed expressions. Imports PyTorch only if the process already has it.
"""

from flashsmith.semantics.program import BoundProgram
from flashsmith.tracing.binding import BoundFunctions, bind, table_function, table_reader
from flashsmith.tracing.tracer import trace

__all__ = ["BoundFunctions", "BoundProgram", "bind", "table_function", "table_reader", "trace"]
