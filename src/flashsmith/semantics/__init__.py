"""Masks, scores, dtypes and sizes of attention, as values. Uses only the standard library."""

from flashsmith.semantics.compiled import FLAGS, Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.mask import CAUSAL, MASKS, NONE, UNLIMITED, WINDOW, Mask
from flashsmith.semantics.program import Program
from flashsmith.semantics.score import PLAIN, SOFTCAP, Score
from flashsmith.semantics.sizes import Sizes

__all__ = [
    "CAUSAL",
    "FLAGS",
    "MASKS",
    "NONE",
    "PLAIN",
    "SOFTCAP",
    "UNLIMITED",
    "WINDOW",
    "DType",
    "Mask",
    "Program",
    "Score",
    "Semantics",
    "Sizes",
]
