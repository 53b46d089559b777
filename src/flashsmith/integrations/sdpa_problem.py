"""Decides from the arguments of a scaled_dot_product_attention call whether the kernels can serve
it.

All functions are pure and take plain values, no tensors, so that every case can be tested without a
GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from flashsmith.families import SUPPORTED_D_HEADS
from flashsmith.families.legality import supported_d_heads
from flashsmith.integrations.fallbacks import Reason
from flashsmith.runtime.arguments import ALIGNMENT_BYTES
from flashsmith.semantics.signature import MAX_UNCAPPED_SCALE, MIN_SCALE

DTYPES = ("float16", "bfloat16")
MAX_D = max(supported_d_heads())
# Only sm_90 has kernels for wider heads, and these kernels require v to be as wide as q and k.
MAX_D_OF_ALL_GPUS = max(SUPPORTED_D_HEADS)
_ALIGNMENT = ALIGNMENT_BYTES // 2  # elements
_RANKS = (2, 3, 4)


class TensorFacts(NamedTuple):
    """The properties of one tensor: (..., heads, length, d), strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # for example "float16"
    device: str  # for example "cuda:0"
    aligned: bool = True  # whether the address is 16-byte aligned; unknown while tracing
    kind: str = "Tensor"  # the type's name, or the layout of a tensor that is not strided


class SdpaProblem(NamedTuple):
    """The arguments of scaled_dot_product_attention."""

    query: TensorFacts
    key: TensorFacts
    value: TensorFacts
    has_mask: bool = False
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def why_not(problem: SdpaProblem) -> Reason | None:
    """Returns why the kernels cannot serve ``problem``; None if they can.

    Calls that PyTorch refuses have a reason, too: they go to PyTorch, so that its error is raised.
    """
    if problem.has_mask:
        return Reason("attn_mask", "a mask tensor; the kernels have causal and window masks only")
    if problem.dropout_p != 0.0:
        return Reason("dropout_p", f"{problem.dropout_p}; the kernels drop no weights")
    return (
        _why_not_tensors(problem)
        or _why_not_shapes(problem)
        or _why_not_scale(problem.scale)
        or _why_not_layouts(problem)
    )


# The dtypes of mask tensors. In a bool mask, True means that the query sees the key; the elements
# of other masks are added to the scores.
MASK_DTYPES = ("bool", "float16", "bfloat16", "float32")


def why_not_mask(mask: TensorFacts, problem: SdpaProblem, *, needs_grad: bool) -> Reason | None:
    """Returns why the kernels cannot apply a mask tensor in ``problem``; None if they can.

    ``needs_grad`` says whether autograd would need the mask's gradient.
    """
    if problem.is_causal:
        return Reason("is_causal", "True with a mask tensor; the kernels apply one of them")
    if mask.kind not in ("Tensor", "Parameter"):
        return Reason("attn_mask", f"a {mask.kind}; the kernels take plain dense tensors")
    if mask.dtype not in MASK_DTYPES:
        return Reason("attn_mask", f"dtype {mask.dtype}; the kernels read {', '.join(MASK_DTYPES)}")
    if mask.device != problem.query.device:
        return Reason("attn_mask", f"on {mask.device}, and query on {problem.query.device}")
    scores = (*problem.query.shape[:-1], problem.key.shape[-2])
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    if len(mask.shape) > len(scores) or any(size not in (1, full) for size, full in sizes):
        return Reason("attn_mask", f"shape {mask.shape}; scores have {scores}")
    if 0 in scores:
        return Reason("attn_mask", "a mask of no scores")
    if needs_grad:
        return Reason(
            "attn_mask", "a mask tensor that requires grad, whose gradient PyTorch computes faster"
        )
    return None


def mask_arguments(
    is_causal: bool, length_q: int, length_k: int
) -> tuple[bool, tuple[int | None, int | None]]:
    """Returns the causal and window arguments with which attention() applies the same mask as
    PyTorch's is_causal.

    PyTorch aligns the causal mask to the top left, attention() to the bottom right. For equal
    lengths, both alignments are the same. With more queries than keys, query i sees keys up to i if
    the window ends length_q - length_k to the right. With fewer queries than keys, no query sees
    the keys from length_q on, so the caller leaves them out.
    """
    if not is_causal:
        return False, (None, None)
    if length_q > length_k:
        return False, (None, length_q - length_k)
    return True, (None, None)


def _named(problem: SdpaProblem) -> tuple[tuple[str, TensorFacts], ...]:
    return ("query", problem.query), ("key", problem.key), ("value", problem.value)


def _why_not_tensors(problem: SdpaProblem) -> Reason | None:
    query = problem.query
    for name, facts in _named(problem):
        if facts.kind != "Tensor":
            return Reason(name, f"a {facts.kind}; the kernels take plain dense tensors")
        if facts.dtype not in DTYPES:
            return Reason(name, f"dtype {facts.dtype}; the kernels are for {' and '.join(DTYPES)}")
        if facts.dtype != query.dtype:
            return Reason(name, f"dtype {facts.dtype}, and query's is {query.dtype}")
        if facts.device != query.device:
            return Reason(name, f"on {facts.device}, and query on {query.device}")
        if facts.device.partition(":")[0] not in ("cpu", "cuda"):
            return Reason(name, f"on {facts.device}; the kernels run on cuda and emulated on cpu")
    return None


def _why_not_shapes(problem: SdpaProblem) -> Reason | None:
    query, key, value = (facts.shape for _, facts in _named(problem))
    for name, facts in _named(problem):
        if len(facts.shape) not in _RANKS or len(facts.shape) != len(query):
            return Reason(name, f"shape {facts.shape}; the kernels take (batch, heads, length, d)")
    d = query[-1]
    if d % 8 or not 8 <= d <= MAX_D:
        return Reason("query", f"d {d}; the kernels take multiples of 8 from 8 to {MAX_D}")
    if key[-1] != d:
        return Reason("key", f"d {key[-1]}, and query's is {d}")
    if value[-1] % 8 or not 8 <= value[-1] <= MAX_D:
        said = f"d {value[-1]}; the kernels take multiples of 8 from 8 to {MAX_D}"
        return Reason("value", said)
    if value[-1] != d and max(d, value[-1]) > MAX_D_OF_ALL_GPUS:
        said = f"d {value[-1]}, and query's is {d}; above {MAX_D_OF_ALL_GPUS} both must be the same"
        return Reason("value", said)
    if value[:-1] != key[:-1]:
        return Reason("value", f"shape {value}, and key's is {key}")
    return _why_not_heads(query, key, problem.enable_gqa)


def _why_not_heads(query: tuple[int, ...], key: tuple[int, ...], enable_gqa: bool) -> Reason | None:
    if len(query) == 4 and key[0] != query[0] and key[0] != 1:
        return Reason("key", f"batch {key[0]}, and query's is {query[0]}")
    if len(query) < 3:
        return None
    heads_q, heads_k = query[-3], key[-3]
    if heads_q < 1 or heads_k < 1:
        return Reason("query" if heads_q < 1 else "key", "no heads")
    # PyTorch broadcasts a single KV head, which is multi-query attention.
    if heads_q == heads_k or heads_k == 1 or (enable_gqa and heads_q % heads_k == 0):
        return None
    return Reason("key", f"{heads_k} heads, and query has {heads_q}, enable_gqa={enable_gqa}")


def _why_not_scale(scale: float | None) -> Reason | None:
    if scale is None or MIN_SCALE <= scale <= MAX_UNCAPPED_SCALE:
        return None
    return Reason("scale", f"{scale}; the kernels need a finite scale above 0, at most 2**27")


def _why_not_layouts(problem: SdpaProblem) -> Reason | None:
    for name, facts in _named(problem):
        if facts.strides[-1] != 1:
            return Reason(name, f"stride {facts.strides[-1]} of the last dimension; must be 1")
        if not facts.aligned:
            return Reason(name, f"address not a multiple of {ALIGNMENT_BYTES} bytes")
        for size, stride in zip(facts.shape[:-1], facts.strides[:-1], strict=True):
            if stride % _ALIGNMENT and size > 1:
                return Reason(name, f"stride {stride}; the kernels need multiples of {_ALIGNMENT}")
    return None
