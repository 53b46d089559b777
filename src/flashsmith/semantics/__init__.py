"""What attention computes, as values: masks, scores, dtypes and sizes. Standard library only."""

from flashsmith.semantics.compiled import FLAGS, MASKS, Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.sizes import Sizes

__all__ = ["FLAGS", "MASKS", "DType", "Semantics", "Sizes"]
