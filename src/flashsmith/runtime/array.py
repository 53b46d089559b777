"""Array: what attention() and forward() take for a tensor, as type checkers see it."""

from __future__ import annotations

from typing import Any, Protocol


class Array(Protocol):
    """A torch.Tensor, or a NumPy, CuPy or JAX array: whatever has a shape, a dtype and DLPack."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *args: Any, **keywords: Any) -> Any: ...
