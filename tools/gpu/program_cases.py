"""Functions, kinds of kernels and problems, for programs.py and program_gradients.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsmith import scores
from flashsmith.chooser.choice import choose_config
from flashsmith.families import DeviceSpec, DType, Problem, Semantics
from flashsmith.tracing import BoundProgram, trace
from flashsmith.verify.attention_semantics import Attention, offsets

# The sizes that `check` takes each kind's config from.
CHECKED = 2, 4096, 4096, 16, 4
DOCUMENTS = 8
CAP = 30.0
Function = Callable[..., Any]


# --- functions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Functions:
    """A score and a mask function of FlexAttention's form; None for none."""

    score: Function | None = None
    mask: Function | None = None

    def bound(self) -> BoundProgram:
        return trace(self.score, self.mask)


@dataclass(frozen=True)
class Shape:
    """The sizes that functions capture tensors for."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int


Tensor = Callable[[np.ndarray], Any]  # puts an array where the call's tensors are
Make = Callable[[Shape, np.random.Generator, Tensor], Functions]


def alibi(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    slopes = tensor((2.0 ** (-8 * np.arange(1, shape.heads + 1) / shape.heads)).astype(np.float32))
    return Functions(lambda score, b, h, q, k: score + slopes[h] * (k - q))


def squared(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    strength = float(draw.uniform(1e-7, 1e-5))
    return Functions(lambda score, b, h, q, k: score - strength * ((q - k) * (q - k)))


def softcap(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    import torch

    return Functions(lambda score, b, h, q, k: CAP * torch.tanh(score / CAP))


def table(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    """A bias by head and relative position."""
    reach = max(shape.seq_q, shape.seq_k)
    bias = tensor(draw.standard_normal((shape.heads, 2 * reach)).astype(np.float32))
    return Functions(lambda score, b, h, q, k: score + bias[h, k - q + reach])


def t5(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    """T5's bias of 32 buckets: most tiles are beyond its table."""
    embedding = tensor(draw.standard_normal((32, shape.heads)).astype(np.float32))
    return Functions(scores.t5(embedding, bidirectional=True))


def documents(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    length = max(shape.seq_q, shape.seq_k)
    doc = tensor(np.sort(draw.integers(0, 8, (shape.batch, length)), axis=1).astype(np.int32))
    return Functions(mask=lambda b, h, q, k: doc[b, q] == doc[b, k])


def window_and_global(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    width, first = int(draw.integers(1, 500)), int(draw.integers(0, 100))
    return Functions(mask=lambda b, h, q, k: ((q - k < width) & (k - q < width)) | (k < first))


def block_table(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    """Random visible blocks of 128 x 128 by head; some rows of blocks see nothing."""
    rows, columns = (-(-n // 128) or 1 for n in (shape.seq_q, shape.seq_k))
    seen = draw.random((shape.heads, rows, columns)) < draw.choice([0.1, 0.5, 0.9])
    seen[:, rows // 2] = False
    visible = tensor(seen)
    return Functions(mask=lambda b, h, q, k: visible[h, q // 128, k // 128])


def alibi_in_documents(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    one, other = alibi(shape, draw, tensor), documents(shape, draw, tensor)
    return Functions(one.score, other.mask)


FUNCTIONS: dict[str, Make] = {
    it.__name__: it
    for it in (
        *(alibi, squared, softcap, table, t5, documents, window_and_global, block_table),
        alibi_in_documents,
    )
}


# --- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for."""

    function: str
    d: int
    dtype: DType = DType.BF16
    mask: str = "none"
    packed: bool = False
    softcap: bool = False
    family: str | None = None

    def config(self, device: DeviceSpec) -> Any:
        """The config whose kernel `check` uses for all problems of this kind."""
        return choose_config(self.problem(*CHECKED), device, self.family)

    def problem(self, *sizes: int) -> Problem:
        """The problem of these sizes: batch, seq_q, seq_k, heads_q and heads_k."""
        shape = Shape(1, sizes[3], 128, 128)
        program = FUNCTIONS[self.function](shape, np.random.default_rng(0), on_host).bound().program
        semantics = Semantics(self.mask, self.softcap, self.packed, True, False, program)
        return Problem(*sizes, self.d, self.dtype, semantics)


@dataclass(frozen=True)
class Case:
    """Sizes at which functions are timed, and what else is timed."""

    name: str
    kind: Kind
    batch: int
    seq: int
    heads: int
    heads_k: int
    plain: str = ""  # the contender without a function: 'plain', 'softcap' or 'packed'

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """batch, seq_q, seq_k, heads_q and heads_k."""
        return self.batch, self.seq, self.seq, self.heads, self.heads_k

    def without_function(self) -> Problem:
        """The problem that the case is timed against."""
        semantics, sizes = Semantics(self.kind.mask, self.plain == "softcap"), self.sizes
        if self.plain == "packed":
            semantics = Semantics(self.kind.mask, packed=True, uneven=True)
            sizes = DOCUMENTS, *sizes[1:]
        return Problem(*sizes, self.kind.d, self.kind.dtype, semantics)


# --- drawn problems ------------------------------------------------------------------------------


def on_gpu(array: np.ndarray) -> Any:
    """A tensor on the GPU."""
    import torch

    return torch.from_numpy(array).cuda()


def on_host(array: np.ndarray) -> Any:
    """A host tensor of PyTorch."""
    import torch

    return torch.from_numpy(array)


def as_numpy(tensor: Any) -> np.ndarray:
    """A tensor's elements on the host; bfloat16 has the type of ml_dtypes."""
    import ml_dtypes
    import torch

    host = tensor.detach().cpu()
    if host.dtype is torch.bfloat16:
        bits: np.ndarray = host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return bits
    array: np.ndarray = host.numpy()
    return array


class DrawnProblem:
    """A random problem of a kind: its tensors on the GPU and its options.

    names: the tensors to draw, of 'q', 'k', 'v' and 'do'.
    """

    def __init__(self, kind: Kind, draw: np.random.Generator, names: tuple[str, ...]) -> None:
        self.kind = kind
        self.heads_k = int(draw.choice([1, 2, 3]))
        heads = int(draw.choice([1, 2, 4, 6])) * self.heads_k
        self.d = kind.d - int(draw.choice([0, 8, 16]))
        self.lens: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        if kind.packed:
            self.lens = _drawn_lengths_of_both(draw)
            self.shape = Shape(len(self.lens[0]), heads, *map(max, self.lens))
        else:
            seq_q, seq_k = (max(1, _drawn_lengths(draw, 1)[0]) for _ in range(2))
            self.shape = Shape(int(draw.integers(1, 4)), heads, seq_q, seq_k)
        self.bound = FUNCTIONS[kind.function](self.shape, draw, on_gpu).bound()
        self.tensors = {name: self._drawn(name, draw) for name in names}
        has_sinks = draw.random() < 0.3
        self.sinks = on_gpu(draw.standard_normal(heads).astype(np.float32)) if has_sinks else None
        window = int(draw.integers(0, 300)), int(draw.integers(0, 50))
        self.options: dict[str, Any] = {
            "causal": kind.mask == "causal",
            "window": window if kind.mask == "window" else (None, None),
            "softcap": 20.0 if kind.softcap else 0.0,
        }

    def _drawn(self, name: str, draw: np.random.Generator) -> Any:
        is_query = name in ("q", "do")
        rows = (self.shape.batch, self.shape.seq_q if is_query else self.shape.seq_k)
        if self.lens is not None:
            rows = (sum(self.lens[0 if is_query else 1]),)
        size = (*rows, self.shape.heads if is_query else self.heads_k, self.d)
        return self.of_dtype(draw.standard_normal(size))

    def of_dtype(self, array: np.ndarray) -> Any:
        """A tensor on the GPU in the kind's dtype."""
        import torch

        dtype = torch.bfloat16 if self.kind.dtype is DType.BF16 else torch.float16
        return on_gpu(array.astype(np.float32)).to(dtype)

    @property
    def packing(self) -> dict[str, Any]:
        """The options of packed sequences; none for others."""
        if self.lens is None:
            return {}
        of = dict(zip("qk", self.lens, strict=True))
        return {
            **{f"cu_seqlens_{name}": on_gpu(offsets(lens)) for name, lens in of.items()},
            **{f"max_seqlen_{name}": max(lens) for name, lens in of.items()},
        }

    def attention(self) -> Attention:
        """The semantics for the reference, with the program's tensors on the host."""
        lens_q, lens_k = self.lens or (None, None)
        of_host = self.bound._replace(tensors=tuple(map(as_numpy, self.bound.tensors)))
        return Attention(
            self.d**-0.5, **self.options, lens_q=lens_q, lens_k=lens_k, program=of_host
        )

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.shape} heads_k={self.heads_k} d={self.d} {self.options} {self.lens}"
        )


def _drawn_lengths(draw: np.random.Generator, count: int) -> list[int]:
    longest = int(draw.choice([1, 64, 130, 500, 1500]))
    return [int(it) for it in draw.integers(0, longest + 1, count)]


def _drawn_lengths_of_both(
    draw: np.random.Generator,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of q and k; the first sequence has at least one row of each."""
    count = int(draw.integers(1, 6))
    both = _drawn_lengths(draw, count), _drawn_lengths(draw, count)
    lens_q, lens_k = ((max(it[0], 1), *it[1:]) for it in both)
    return lens_q, lens_k
