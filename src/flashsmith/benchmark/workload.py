"""Workload: the tensors of one problem, and the check of an implementation's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from flashsmith.benchmark.tensor_memory import TensorMemory, gpu_memory
from flashsmith.chooser import attention
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem
from flashsmith.operations import BACKWARD, DECODE, DEFAULT, TensorSpec
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.runtime import forward, prepare_operation
from flashsmith.runtime.bits import named_bits
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.verify import Comparison, ProofCase, reference_of
from flashsmith.verify.attention_semantics import NO_WINDOW, offsets
from flashsmith.verify.backward_reference import BackwardReference
from flashsmith.verify.engine import gpu_engine_pays
from flashsmith.verify.forward_reference import ForwardReference
from flashsmith.verify.proof_inputs import check_seed, numpy_dtype
from flashsmith.verify.tolerance import MIN_OUTPUTS

# If a head has more scores than this, only its first, middle and last rows are checked, because
# checking all would take too long.
SCORES_ON_GPU = 1 << 28
SCORES_ON_HOST = 1 << 23
_BLOCKS = 3
# For a cache: the maximum number of groups of heads that are checked, and of the keys that they
# have together. A verdict needs a minimum number of outputs, for which enough groups are always
# checked.
MOST_GROUPS, MOST_KEYS = 64, 1 << 19
# The seed of do is the problem's seed plus this number, so that it differs from the seeds of q, k,
# v and o.
_SEED_OF_DO = 1 << 31


# q, k and v of the rows that are checked.
_Tensors = tuple[np.ndarray, np.ndarray, np.ndarray]


class _Sample(NamedTuple):
    """Some rows of one head: the index of the sequence, the head, and the rows within the
    sequence."""

    sequence: int
    head: int
    rows: slice


@dataclass
class Workload:
    """q, k and v of ``problem`` with standard normal values, and an output ``o``.

    In a packed problem all sequences have the lengths of the problem, and tensors are (total,
    heads, d). The limits of a window and a softcap have the typical values that Problem gives. With
    partial semantics, the part of the keys that is used consists of all keys. ``memory`` allocates
    the tensors, on GPU 0 unless a test gives another memory.

    Raises ArgumentError for a problem with nothing to compute.
    """

    problem: Problem
    seed: int = 0
    memory: TensorMemory = field(default_factory=gpu_memory)

    def __post_init__(self) -> None:
        p = self.problem
        _check(p, self.seed)
        shape_q, shape_k = self._shapes()
        shape_v, shape_o = (*shape_k[:-1], p.d_v), (*shape_q[:-1], p.d_v)
        self.q, self.k, self.v, self.o = (
            self.memory.draw(shape, p.dtype, 4 * self.seed + number)
            for number, shape in enumerate((shape_q, shape_k, shape_v, shape_o))
        )
        if p.semantics.partial:
            self.o = self.memory.put(np.zeros(shape_o, np.float32))
        self._cases: dict[int, tuple[tuple[_Sample, ...], ProofCase]] = {}
        self.cu_seqlens_q = self.cu_seqlens_k = None
        if self.packed:
            self.cu_seqlens_q, self.cu_seqlens_k = (
                self.memory.put(offsets((seq,) * p.batch)) for seq in (p.seq_q, p.seq_k)
            )

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.problem.semantics.packed

    @property
    def causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""
        return self.problem.semantics.causal

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of forward() and attention() for this problem."""
        asked = self.problem.keywords | named_bits(self.problem.bits)
        if self.problem.semantics.partial:
            asked["partial"] = True
        if self.packed:
            asked |= {
                "cu_seqlens_q": self.cu_seqlens_q,
                "cu_seqlens_k": self.cu_seqlens_k,
                "max_seqlen_q": self.problem.seq_q,
                "max_seqlen_k": self.problem.seq_k,
            }
        return asked

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors of a call by the names of the operation, outputs included."""
        return self._named("q", "k", "v", "o", "cu_seqlens_q", "cu_seqlens_k")

    @property
    def call_options(self) -> dict[str, Any]:
        """The options of the operation by name."""
        left, right = self.problem.window or NO_WINDOW
        return {"left": left, "right": right, "softcap": self.problem.softcap}

    def call(self, config: KernelConfig) -> Callable[[], Any]:
        """A function that calls the kernel of a config, which writes o."""
        return partial(forward, config, self.q, self.k, self.v, self.o, **self.options)

    @property
    def output(self) -> Any:
        """The tensor that a call writes, which is o."""
        return self.o

    def poison(self) -> None:
        """Fills o with NaN."""
        self.memory.poison(self.o)

    def check(
        self, output: Any, scores: int | None = None, ours: Comparison | None = None
    ) -> Comparison:
        """Checks two heads by flashsmith.verify's tolerance rule: the first head of the first
        sequence and the last head of the last sequence. All other outputs must be finite, because
        the references for these inputs are finite.

        ``output`` has the layout of q. If a head has more than ``scores`` scores, only some rows
        are checked; None stands for the default limit. ``ours``, for a peer's output, is the
        comparison of flashsmith's output on this workload: see Comparison.compared_with().
        """
        samples, case = self._case_of(scores or self._most_scores)
        rows = [self._rows(output, self.problem.seq_q, sample) for sample in samples]
        return self._if_finite(case.verdict({"o": np.concatenate(rows)}), [output], ours)

    def _if_finite(
        self, found: Comparison, outputs: Iterable[Any], ours: Comparison | None
    ) -> Comparison:
        """Returns ``found``, the verdict on the outputs that were compared, or a failure if any
        other output is NaN or infinite."""
        found = found if ours is None else found.compared_with(ours)
        wrong = sum(map(self.memory.nonfinite, outputs)) if found.ok else 0
        if not wrong:
            return found
        return replace(found, reasons=(f"{wrong} outputs are NaN or infinite",))

    def _named(self, *names: str) -> dict[str, Any]:
        """The attributes with these names, except those that are None."""
        return {name: it for name in names if (it := getattr(self, name)) is not None}

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        p = self.problem
        if self.packed:
            return (p.batch * p.seq_q, p.heads_q, p.d), (p.batch * p.seq_k, p.heads_k, p.d)
        return (p.batch, p.seq_q, p.heads_q, p.d), (p.batch, p.seq_k, p.heads_k, p.d)

    def _rows(self, tensor: Any, seq: int, sample: _Sample) -> np.ndarray:
        """The rows of a sample from a tensor whose sequences have length ``seq``: (rows, 1, d)."""
        rows = self.memory.head(tensor, self._sequence(sample.sequence, seq), sample.head)
        return rows[sample.rows, None]

    def _sequence(self, number: int, seq: int) -> tuple[int | slice, ...]:
        return (slice(number * seq, (number + 1) * seq),) if self.packed else (number,)

    @cached_property
    def _on_gpu(self) -> bool:
        return gpu_engine_pays(self.problem.seq_q * self.problem.seq_k)

    @property
    def _most_scores(self) -> int:
        return SCORES_ON_GPU if self._on_gpu else SCORES_ON_HOST

    def _case_of(self, scores: int) -> tuple[tuple[_Sample, ...], ProofCase]:
        """The samples that are checked, and the proof case with their rows in the same order."""
        if scores not in self._cases:
            p = self.problem
            blocks = row_blocks(p.seq_q, p.seq_k, scores)
            heads = dict.fromkeys(((0, 0), (p.batch - 1, p.heads_q - 1)))
            samples = tuple(_Sample(*head, rows) for head in heads for rows in blocks)
            self._cases[scores] = samples, self._case_of_rows(map(self._tensors, samples))
        return self._cases[scores]

    def _case_of_rows(self, parts: Iterable[_Tensors]) -> ProofCase:
        """The proof case for these rows of the forward pass, with the mask and the numbers (such as
        the scale) of the problem."""
        return ForwardReference().given_rows(
            self.problem, parts, self.problem.keywords, on_gpu=self._on_gpu
        )

    def _tensors(self, sample: _Sample) -> _Tensors:
        """q, k and v of a sample."""
        p = self.problem
        head_k = sample.head * p.heads_k // p.heads_q
        of_keys = sample._replace(head=head_k, rows=self._keys(sample.rows))
        return (
            self._rows(self.q, p.seq_q, sample),
            self._rows(self.k, p.seq_k, of_keys),
            self._rows(self.v, p.seq_k, of_keys),
        )

    def _keys(self, rows: slice) -> slice:
        """The keys for rows that end at ``rows.stop``: with a mask, the keys up to the last row's
        own key, so that the mask is aligned to the bottom right; otherwise all keys."""
        p = self.problem
        masked = p.semantics.key_mask.hides
        end = rows.stop + p.seq_k - p.seq_q if masked else p.seq_k
        return slice(0, max(0, end))


class BackwardWorkload(Workload):
    """The tensors of a problem of the backward pass.

    The tensors of Workload, ``do``, ``o`` and ``lse`` from attention(), and the gradients among dq,
    dk and dv that the problem needs.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        p = self.problem
        shape = *self._shapes()[0][:-1], p.d_v
        self.do = self.memory.draw(shape, p.dtype, self.seed + _SEED_OF_DO)
        self.o, self.lse = attention(self.q, self.k, self.v, return_lse=True, **self.options)
        needed = [it.name for it in p.computed.outputs if it.is_of_kind(p)]
        self.gradients = {
            f"d{name}": self.memory.put(np.zeros(tuple(tensor.shape), numpy_dtype(p.dtype)))
            for name, tensor in (("q", self.q), ("k", self.k), ("v", self.v))
            if f"d{name}" in needed
        }

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors of the forward pass, do, lse and the gradients."""
        return {**super().tensors, **self._named("do", "lse"), **self.gradients}

    def call(self, config: KernelConfig) -> Callable[[], Any]:
        """A function that calls the kernels of a config, which write the gradients."""
        return prepare_operation(config, self.problem, self.tensors, options=self.call_options).run

    @property
    def has_autograd(self) -> bool:
        """Whether PyTorch holds the tensors."""
        return hasattr(self.q, "requires_grad_")

    def differentiated(self, forward: Callable[[Any, Any, Any], Any]) -> Callable[[], Any]:
        """A function that computes the problem's gradients of ``forward`` with PyTorch's autograd;
        it can be called repeatedly.

        This measures only the kernels, not the accumulation into .grad.
        """
        import torch

        tensors = {f"d{name}": getattr(self, name).detach() for name in "qkv"}
        leaves = [tensors[name].requires_grad_() for name in self.gradients]
        with torch.enable_grad():
            o = forward(*tensors.values())
        return partial(torch.autograd.grad, o, leaves, self.do, retain_graph=True)

    def by_name(self, gradients: Sequence[Any]) -> dict[str, Any]:
        """The gradients that the function of ``differentiated`` returns, by name."""
        return dict(zip(self.gradients, gradients, strict=True))

    @property
    def output(self) -> dict[str, Any]:
        """The tensors that a call writes, which are the gradients by name."""
        return self.gradients

    def poison(self) -> None:
        """Fills the gradients with NaN."""
        for gradient in self.gradients.values():
            self.memory.poison(gradient)

    def check(
        self, output: Mapping[str, Any], scores: int | None = None, ours: Comparison | None = None
    ) -> Comparison:
        """Checks the gradients of two heads of k, and of the heads of q that share them, by
        flashsmith.verify's tolerance rule. These are the first head of the first sequence and the
        last head of the last sequence. All other gradients must be finite.

        ``scores`` is ignored, because gradients depend on whole sequences.
        """
        got = {name: self._of_groups(output[name], name) for name in self.gradients}
        outputs = [output[name] for name in self.gradients]
        return self._if_finite(self._case.verdict(got), outputs, ours)

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """The (sequence, head of k) pairs that are checked."""
        p = self.problem
        return list(dict.fromkeys(((0, 0), (p.batch - 1, p.heads_k - 1))))

    @cached_property
    def _case(self) -> ProofCase:
        """The proof case for the checked groups, which become the sequences of a batch."""
        p = self.problem
        left, right = p.window or NO_WINDOW
        inputs = {name: self._of_groups(getattr(self, name), name) for name in ("do", *"qkvo")}
        inputs["lse"] = self._statistics_of_groups()
        problem = replace(
            p,
            batch=len(self._groups),
            heads_q=p.heads_q // p.heads_k,
            heads_k=1,
            semantics=replace(p.semantics, packed=False),
        )
        unneeded = tuple(name for name in ("dq", "dk", "dv") if name not in self.gradients)
        options = {"left": left, "right": right, "softcap": p.softcap, "unneeded": unneeded}
        return BackwardReference().given(problem, inputs, options)

    def _heads_of(self, head_k: int) -> range:
        """The heads of q that use this head of k."""
        group = self.problem.heads_q // self.problem.heads_k
        return range(head_k * group, (head_k + 1) * group)

    def _of_groups(self, tensor: Any, name: str) -> np.ndarray:
        """The rows of a tensor for the groups: (groups, seq, heads, d)."""
        of_keys = name.removeprefix("d") in "kv"
        seq = self.problem.seq_k if of_keys else self.problem.seq_q
        return np.stack(
            [
                np.stack(
                    [
                        self.memory.head(tensor, self._sequence(number, seq), head)
                        for head in ([head_k] if of_keys else self._heads_of(head_k))
                    ],
                    axis=1,
                )
                for number, head_k in self._groups
            ]
        )

    def _statistics_of_groups(self) -> np.ndarray:
        """The lse of the groups: (groups, heads, seq_q)."""
        lse, seq = self.memory.fetch(self.lse), self.problem.seq_q
        parts = []
        for number, head_k in self._groups:
            heads = lse if self.packed else lse[number]
            first = number * seq if self.packed else 0
            parts.append(heads[list(self._heads_of(head_k)), first : first + seq])
        return np.stack(parts)


class DecodeWorkload(Workload):
    """q and a cache that the sequences of the problem fill, with standard normal values, and an
    output ``o``. Scales of the cache are 1.

    In a packed problem, all sequences have the same number of queries. Pages are in a random order.
    ``k`` and ``v`` are other names of the caches, for implementations that use them.
    """

    def __post_init__(self) -> None:
        p = self.problem
        _check(p, self.seed)
        shapes = {
            tensor.name: p.computed.shape(tensor, p)
            for tensor in p.computed.tensors
            if tensor.is_required(p)
        }
        formats = {"q": CacheFormat.PLAIN, "k_cache": p.cache_format, "v_cache": p.cache_format}
        drawn: dict[str, Any] = {
            name: self.memory.draw(shapes[name], p.dtype, 4 * self.seed + number, cache)
            for number, (name, cache) in enumerate(formats.items())
            if name in shapes
        }
        self.q, self.k_cache = drawn["q"], drawn["k_cache"]
        self.v_cache: Any = drawn.get("v_cache")
        self.k, self.v = self.k_cache, self.v_cache
        self.o = self.memory.put(np.zeros(shapes["o"], numpy_dtype(p.dtype)))
        self.cache_lens = self.memory.put(np.full(p.batch, p.seq_k, np.int32))
        self.page_table = self.cu_seqlens_q = self.cu_seqlens_k = None
        if p.page:
            order = np.random.default_rng(self.seed).permutation(shapes["k_cache"][0])
            self.pages = order.astype(np.int32).reshape(shapes["page_table"])
            self.page_table = self.memory.put(self.pages)
        if self.packed:
            self.cu_seqlens_q = self.memory.put(offsets((p.seq_q,) * p.batch))

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of attention_with_cache() for this problem."""
        asked = {"cache_lens": self.cache_lens, **self.problem.keywords}
        asked |= named_bits(self.problem.bits)
        if self.problem.cache:
            asked["k_scale"] = 1.0
        if self.problem.page:
            asked["page_table"] = self.page_table
        if self.packed:
            asked |= {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": self.problem.seq_q}
        return asked

    @property
    def tensors(self) -> dict[str, Any]:
        """q, the cache with its lengths and pages, and o."""
        names = ("q", "k_cache", "v_cache", "cache_lens", "o", "page_table", "cu_seqlens_q")
        return self._named(*names)

    def call(self, config: KernelConfig) -> Callable[[], Any]:
        """A function that calls the kernels of a config, which write o."""
        return prepare_operation(config, self.problem, self.tensors, options=self.call_options).run

    def check(
        self, output: Any, scores: int | None = None, ours: Comparison | None = None
    ) -> Comparison:
        """Checks groups of heads that share a head of k by flashsmith.verify's tolerance rule. The
        groups are spread from the first to the last sequence. All other outputs must be finite.
        ``scores`` is ignored."""
        groups, case = self._expected_groups
        got = np.concatenate([self._rows_of(output, *group) for group in groups])
        return self._if_finite(case.verdict({"o": got}), [output], ours)

    @cached_property
    def _expected_groups(self) -> tuple[list[tuple[int, int]], ProofCase]:
        """Evenly spread (sequence, head of k) pairs, and the proof case with their rows in the same
        order. K and V are copied to the host for only one group at a time."""
        p = self.problem
        rows = p.seq_q * p.heads_q // p.heads_k
        most = min(MOST_GROUPS, MOST_KEYS // p.seq_k, self._most_scores // (rows * p.seq_k))
        enough = max(2, -(-MIN_OUTPUTS // (rows * p.d_v)), most)
        every = p.batch * p.heads_k
        chosen = np.linspace(0, every - 1, min(every, enough)).round().astype(int).tolist()
        groups = [divmod(number, p.heads_k) for number in chosen]
        return groups, self._case_of_rows(map(self._tensors_of, groups))

    def _tensors_of(self, group: tuple[int, int]) -> _Tensors:
        """q, k and v of a group."""
        return (
            self._rows_of(self.q, *group),
            self._keys_of(self.k_cache, *group)[:, None],
            self._keys_of(self.v_cache, *group)[:, None],
        )

    def _rows_of(self, tensor: Any, sequence: int, head_k: int) -> np.ndarray:
        """The rows of those heads of q that use a head of k: (seq_q, group, d)."""
        of_group = self.problem.heads_q // self.problem.heads_k
        at = self._sequence(sequence, self.problem.seq_q)
        heads = range(head_k * of_group, (head_k + 1) * of_group)
        return np.stack([self.memory.head(tensor, at, head) for head in heads], axis=1)

    def _keys_of(self, cache: Any, sequence: int, head_k: int) -> np.ndarray:
        """The keys (or values) of one head of one sequence: (seq_k, d), or (seq_k, d_v)."""
        at = self.pages[sequence].tolist() if self.problem.page else sequence
        rows = self.memory.head(cache, (at,), head_k)
        rows = rows.astype(numpy_dtype(self.problem.dtype), copy=False)
        return rows.reshape(-1, rows.shape[-1])[: self.problem.seq_k]


class LatentDecodeWorkload(DecodeWorkload):
    """q and a latent cache that the sequences of the problem fill, and an output ``o``."""

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of attention_with_cache() for this problem."""
        p = self.problem
        return {**super().options, "v_width": p.d_v, "scale": p.d**-0.5}

    @property
    def call_options(self) -> dict[str, Any]:
        """The options of the operation by name."""
        known = self.problem.computed.options
        return {name: it for name, it in super().call_options.items() if name in known}

    def _tensors_of(self, group: tuple[int, int]) -> _Tensors:
        """q, k and v of a group; the values are the first columns of the keys."""
        keys = self._keys_of(self.k_cache, *group)[:, None]
        return self._rows_of(self.q, *group), keys, keys[..., : self.problem.d_v]


class OperationWorkload:
    """A problem of any operation: the tensors that its reference draws, and its outputs.

    ``memory`` allocates the tensors, on GPU 0 unless a test gives another memory.

    All outputs are checked, so the reference must be able to compute the problem in seconds.

    Raises ArgumentError for a problem with nothing to compute.
    """

    def __init__(self, problem: Problem, seed: int = 0, memory: TensorMemory | None = None) -> None:
        _check(problem, seed)
        self.problem, self.seed, self.memory = problem, seed, memory or gpu_memory()
        self._reference = reference_of(problem.computed)
        options = self._reference.options(problem, seed=seed)
        drawn = self._reference.draw(problem, self._reference.kinds[0], seed)
        written = [
            tensor
            for tensor in problem.computed.outputs
            if tensor.is_required(problem) and tensor.is_written(drawn)
        ]
        case = self._reference.given(problem, drawn, options)
        expected = case.expected.only({tensor.name for tensor in written})
        self._case = replace(case, expected=expected)
        self.inputs = {name: self.memory.put(array) for name, array in drawn.items()}
        blank = {
            tensor.name: self.memory.put(self._blank(tensor))
            for tensor in written
            if tensor.name not in self.inputs
        }
        self.output = {**blank, **{t.name: self.inputs[t.name] for t in written if t.role != "out"}}
        # Tensors of integers cannot hold NaN.
        self._poisonable = [
            blank[t.name] for t in written if t.name in blank and "float" in t.dtype_of(problem)
        ]

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors of a call by the names of the operation, outputs included."""
        return {**self.inputs, **self.output}

    @property
    def call_options(self) -> dict[str, Any]:
        """The operation's options, keyed by name, in the form the reference uses."""
        return self._reference.call_options(self.problem, self._case.options)

    def call(self, config: KernelConfig) -> Callable[[], Any]:
        """A function that calls the kernel of a config, which writes the outputs."""
        return prepare_operation(config, self.problem, self.tensors, options=self.call_options).run

    def poison(self) -> None:
        """Fills the outputs with NaN, except the ones that the kernel also reads."""
        for tensor in self._poisonable:
            self.memory.poison(tensor)

    def check(
        self, output: Mapping[str, Any], scores: int | None = None, ours: Comparison | None = None
    ) -> Comparison:
        """The verdict of the reference on the outputs (by name); ``scores`` is ignored."""
        arrays = {name: self.memory.fetch(tensor) for name, tensor in output.items()}
        found = self._case.verdict(arrays)
        return found if ours is None else found.compared_with(ours)

    def _blank(self, tensor: TensorSpec) -> np.ndarray:
        shape = self._case.expected.exact[tensor.name].shape
        return np.zeros(shape, NUMPY_DTYPES[tensor.dtype_of(self.problem)])


AnyWorkload = Workload | OperationWorkload
# The workload classes of operations, by name; all others use OperationWorkload.
_WORKLOADS: dict[str, Callable[..., AnyWorkload]] = {
    DEFAULT: Workload,
    BACKWARD.name: BackwardWorkload,
    DECODE.name: DecodeWorkload,
    LATENT_DECODE.name: LatentDecodeWorkload,
}


def workload_of(problem: Problem, seed: int = 0, memory: TensorMemory | None = None) -> AnyWorkload:
    """The workload for a problem of any operation. If ``memory`` is None, it is GPU 0's."""
    memory = memory or gpu_memory()
    return _WORKLOADS.get(problem.operation, OperationWorkload)(problem, seed, memory)


def _check(problem: Problem, seed: int) -> None:
    """Raises ArgumentError for a problem with nothing to compute, or an invalid seed."""
    if not problem.attn_flop():
        raise ArgumentError(f"problem='{problem}': there is nothing to compute; give sizes above 0")
    check_seed(seed)


def row_blocks(seq_q: int, seq_k: int, scores: int) -> list[slice]:
    """The rows to check: all rows or, if there are more than ``scores`` scores, the first, the
    middle and the last rows."""
    if seq_q * seq_k <= scores:
        return [slice(0, seq_q)]
    rows = max(1, scores // (_BLOCKS * seq_k))
    if _BLOCKS * rows >= seq_q:
        return [slice(0, seq_q)]
    middle = (seq_q - rows) // 2
    return [slice(start, start + rows) for start in (0, middle, seq_q - rows)]
