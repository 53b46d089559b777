"""Adapts functions for attention to a part of the keys: kernels count keys from the part's first
key, but functions count keys from the sequence's first key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flashsmith.semantics.program import B, BoundProgram
from flashsmith.semantics.typed import Typed, read, typed_constant


class PartKeys(NamedTuple):
    """The keywords of partial attention that select the keys to use: int32 vectors or None."""

    seqused_k: Any = None
    k_begin: Any = None
    cu_seqlens_k: Any = None

    @property
    def has_range(self) -> bool:
        """Whether the number of keys is in a tensor that only the kernels can read."""
        return self.seqused_k is not None or self.k_begin is not None

    @property
    def vectors(self) -> dict[str, Any]:
        """The vectors that first_key() reads, by name. There are none if every part begins with its
        sequence."""
        if self.k_begin is None:
            return {}
        named = {"k_begin": self.k_begin, "cu_seqlens_k": self.cu_seqlens_k}
        return {name: it for name, it in named.items() if it is not None}


def first_key(vectors: tuple[str, ...]) -> Typed:
    """Returns the index of a part's first key in its sequence, from the named vectors of the call.
    Without cu_seqlens_k the sequence begins with k."""
    begin, *own = [read(name, "int32", B) for name in vectors] or [typed_constant(0)]
    return begin - own[0] if own else begin


def with_vectors(bound: BoundProgram | None, vectors: Mapping[str, Any]) -> BoundProgram | None:
    """Replaces, among a program's tensors, the names of a call's vectors by the vectors."""
    if bound is None or not vectors:
        return bound
    tensors = (vectors[it] if isinstance(it, str) else it for it in bound.tensors)
    return bound._replace(tensors=tuple(tensors))
