"""A large matrix product by cuBLAS, through PyTorch: what a tuned library gets out of the GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashsmith.benchmark.roofline.microbenchmark import (
    Absent,
    Machine,
    Microbenchmark,
    Running,
    check_error,
)
from flashsmith.families import DType

SIZE = 8192
_CHECKED_ROWS = (0, 1, SIZE // 2, SIZE - 1)
# The result is rounded to 16 bits: half a unit in the last place, and cuBLAS's own choice of how
# to add up.
_ERROR_BOUND = {DType.FP16: 1e-3, DType.BF16: 8e-3}
_SEED = 22


class LibraryProduct(Running):
    """An SIZE^3 product; a turn is one call."""

    first_turns = 2

    def __init__(self, dtype: DType, machine: Machine) -> None:
        self._torch: Any = _torch()
        self.dtype = dtype
        self.work = 2 * SIZE**3
        torch = self._torch
        generator = torch.Generator("cuda").manual_seed(_SEED)
        kind = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
        self.a, self.b = (
            torch.randn(SIZE, SIZE, dtype=kind, device="cuda", generator=generator)
            for _ in range(2)
        )
        self.c = torch.empty_like(self.a)

    def launch(self, turns: int) -> None:
        for _ in range(turns):
            self._torch.matmul(self.a, self.b, out=self.c)

    def check(self) -> float:
        self.c.fill_(float("nan"))
        self.launch(1)
        rows = list(_CHECKED_ROWS)
        expected = self.a[rows].double() @ self.b.double()
        error = (self.c[rows].double() - expected).norm() / expected.norm()
        return check_error(float(error), _ERROR_BOUND[self.dtype])


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise Absent("PyTorch is not installed, and cuBLAS is called through it") from None
    if not torch.cuda.is_available():
        raise Absent(f"PyTorch {torch.__version__} sees no GPU, and cuBLAS is called through it")
    return torch


LIBRARY_PRODUCTS = tuple(
    Microbenchmark(f"matmul_{dtype.name.lower()}", "TFLOP/s", "", partial(LibraryProduct, dtype))
    for dtype in (DType.FP16, DType.BF16)
)
