"""Proofs: seeded inputs, float64 references, the tolerance rule, the verdict on one config."""

from flashsmith.verify.attention import Attention
from flashsmith.verify.inputs import INPUT_KINDS, TILE_KINDS, Inputs, InputSpec, make_inputs
from flashsmith.verify.prove import BACKENDS, Verdict, prove
from flashsmith.verify.reference import References, compute_references, inputs_and_references
from flashsmith.verify.rule import Comparison, Location, compare, heads_for_enough_outputs

__all__ = [
    "BACKENDS",
    "INPUT_KINDS",
    "TILE_KINDS",
    "Attention",
    "Comparison",
    "InputSpec",
    "Inputs",
    "Location",
    "References",
    "Verdict",
    "compare",
    "compute_references",
    "heads_for_enough_outputs",
    "inputs_and_references",
    "make_inputs",
    "prove",
]
