"""Proofs: seeded inputs, float64 references, the tolerance rule, and the verdict on a config."""

from flashsmith.verify.attention_semantics import Attention
from flashsmith.verify.operation_reference import OperationReference, ProofCase
from flashsmith.verify.proof_inputs import INPUT_KINDS, TILE_KINDS, Inputs, InputSpec, make_inputs
from flashsmith.verify.prove import BACKENDS, Verdict, describe_problem, prove, reference_of
from flashsmith.verify.reference import References, compute_references, inputs_and_references
from flashsmith.verify.tolerance import (
    Comparison,
    ErrorLocation,
    ExpectedOutputs,
    compare,
    heads_for_enough_outputs,
)

# Earlier documents use this name.
prove_problem = prove

__all__ = [
    "BACKENDS",
    "INPUT_KINDS",
    "TILE_KINDS",
    "Attention",
    "Comparison",
    "ErrorLocation",
    "ExpectedOutputs",
    "InputSpec",
    "Inputs",
    "OperationReference",
    "ProofCase",
    "References",
    "Verdict",
    "compare",
    "compute_references",
    "describe_problem",
    "heads_for_enough_outputs",
    "inputs_and_references",
    "make_inputs",
    "prove",
    "prove_problem",
    "reference_of",
]
