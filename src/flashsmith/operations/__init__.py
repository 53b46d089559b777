"""Operations, which define what kernels compute, and problems, each of which is a single case of an
operation.

This package uses only the standard library.
"""

from flashsmith.operations.backward import BACKWARD
from flashsmith.operations.decode import DECODE
from flashsmith.operations.forward import FORWARD
from flashsmith.operations.merge import MERGE
from flashsmith.operations.operation import Call, Operation, TensorSpec
from flashsmith.operations.problem import Problem, ProblemKind, parse_kind, semantic_words
from flashsmith.operations.registry import (
    DEFAULT,
    OPERATIONS,
    find_more_with,
    operation,
    register_operation,
)
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.sizes import Sizes

__all__ = [
    "BACKWARD",
    "DECODE",
    "DEFAULT",
    "FORWARD",
    "MERGE",
    "OPERATIONS",
    "Call",
    "DType",
    "Operation",
    "Problem",
    "ProblemKind",
    "Semantics",
    "Sizes",
    "TensorSpec",
    "find_more_with",
    "operation",
    "parse_kind",
    "register_operation",
    "semantic_words",
]
