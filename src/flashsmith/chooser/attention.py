"""attention(q, k, v): a forward pass with an automatically chosen kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from flashsmith.chooser.backward import (
    check_backward_config,
    check_config_for,
    check_deterministic_flag,
)
from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.functions import CallFunctions, bound_functions, sizes_of
from flashsmith.families import KernelConfig
from flashsmith.operations import DEFAULT
from flashsmith.runtime import ForwardOptions, cached_calls, run_call
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.runtime.forward_pass import attention_call
from flashsmith.runtime.tensors import Array, TensorT
from flashsmith.semantics.signature import NO_WINDOW
from flashsmith.tracing.part_keys import PartKeys

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashsmith.runtime.keywords import AttentionKeywords


@overload
def attention(
    q: TensorT,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = ...,
    return_row_max: Literal[False] = ...,
    partial: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> TensorT: ...


@overload
def attention(
    q: TensorT,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_row_max: Literal[False] = ...,
    partial: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def attention(
    q: TensorT,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = ...,
    return_row_max: Literal[True],
    partial: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def attention(
    q: TensorT,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_row_max: Literal[True],
    partial: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> tuple[TensorT, TensorT, TensorT]: ...


@overload
def attention(
    q: TensorT,
    k: Array,
    v: Array,
    *,
    return_lse: bool = ...,
    return_row_max: Literal[False] = ...,
    partial: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def attention(
    q: TensorT,
    k: Array,
    v: Array,
    *,
    return_lse: bool = ...,
    return_row_max: bool = ...,
    partial: bool = ...,
    **keywords: Unpack[AttentionKeywords],
) -> Any: ...


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask: Any = None,
    bias: Array | None = None,
    positions: str = "start",
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    partial: bool = False,
    seqused_k: Array | None = None,
    k_begin: Array | None = None,
    bits: str | None = None,
    config: KernelConfig | None = None,
    backward_config: KernelConfig | None = None,
    deterministic: bool | None = None,
    emulate: bool = False,
) -> Any:
    """softmax(scale q k^T) v with optional masks and softcap, by a kernel that suits the problem.

    Differentiable in PyTorch with respect to q, k, v, sinks and bias, through the output and the
    log-sum-exp. The gradient of sinks has their dtype.

    Tensors on a GPU run there, on PyTorch's or CuPy's current stream for their device, and the call
    returns without waiting. JAX exposes no stream, so the call blocks for its arrays. Host tensors
    run in the emulator. Query i of seq_q is at key position i + seq_k - seq_q: masks are aligned to
    the bottom right. A row that sees no key gives 0.

    Args:
        q: (batch, seq_q, heads_q, d), or (total_q, heads_q, d) if packed; fp16 or bf16. A PyTorch
            tensor, or a NumPy, CuPy or JAX array (bf16 as ml_dtypes.bfloat16). The last dimension
            must be contiguous, rows 16-byte aligned, and d a multiple of 8; lengths may be 0. d is
            at most 512, above 256 on sm_90 only.
        k, v: (batch, seq_k, heads_k, d) or (total_k, heads_k, d), like q. heads_q must be a
            multiple of heads_k: heads_q / heads_k heads of q share one head of k and v. v may have
            its own d, also a multiple of 8, up to 256; o then has the d of v.
        causal: whether a query attends only to keys up to its own position.
        window: (left, right): how many keys before and after its own position a query attends to;
            None means no limit. With causal the right limit is 0.
        softcap: above 0, scaled scores become softcap * tanh(score / softcap).
        scale: the factor on q k^T, finite and > 0; None means 1/sqrt(d). scale and softcap may also
            be 0-dimensional tensors on the host, and window a tensor of two numbers.
        sinks: (heads_q,) fp32, fp16 or bf16: one logit per head that joins the softmax of its rows;
            None for no sinks.
        score_mod: a function (score, b, h, q_idx, kv_idx) that gives the score that enters the
            softmax, as in FlexAttention: score is scaled and capped. docs/programs.md says what it
            may do. It may capture numbers and tensors.
        mask_mod: a function (b, h, q_idx, kv_idx): whether the query sees the key.
        mask: another mask: a function, a value of ``flashsmith.masks``, a PyTorch BlockMask, or a
            bool tensor (batch or 1, heads_q or 1, seq_q or 1, seq_k or 1). A query sees a key only
            if causal, window, mask_mod and mask all show it.
        bias: an fp16, bf16 or fp32 tensor whose dimensions are as for a mask tensor; it is added to
            the scores after score_mod. It has a gradient in PyTorch.
        positions: 'start': q_idx of a sequence's first query is 0. 'end': it is seq_k - seq_q, as
            for causal. Rows of tensors always count from the first query.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32: packed sequence b of q (of k and v) has rows
            cu_seqlens[b] to cu_seqlens[b + 1] - 1. On a device their contents are not checked. The
            kernel clamps them, and does not write rows of the output that belong to no sequence.
        max_seqlen_q, max_seqlen_k: an upper bound on the packed sequences' lengths; longer
            sequences are cut off. None computes it, and a call on a device waits once for that.
        out: a tensor for the result, with q's shape (but v's d) and dtype; None allocates one.
        return_lse: also return the log-sum-exp of the scores and the sink: fp32, (batch, heads_q,
            seq_q) or (heads_q, total_q). It is -inf for a row without keys and sink.
        return_row_max: also return the maximum of each row's scaled and capped scores, without the
            sink, in the same shape; -inf for a row without keys.
        partial: whether to compute a part for ``flashsmith.merge_attention``. It returns (o, lse)
            with o in fp32, not rounded, without sinks and gradients. Only parts take seqused_k and
            k_begin. kv_idx counts from the sequence's first key: of cu_seqlens_k, or of k.
        seqused_k: (batch,) int32: how many keys of each sequence count; None counts all from
            k_begin on. On a device only the kernel reads it.
        k_begin: (batch,) int32: the row of k where each sequence's keys begin; None is the
            sequence's first row. In a packed k it may be any row, independent of cu_seqlens_k. For
            every mask, the last query has the position of the last key that counts, k_begin +
            seqused_k - 1.
        bits: 'canonical' makes a row's output and log-sum-exp depend only on its own query, the
            keys and values that it attends to, and what is computed (mask, scores, sinks,
            dtype, d). The bits are then the same in training, prefill, any chunks of a prompt, and
            attention_with_cache(), in any batch and with any kernel. V must be finite. 'free' lets
            each kernel sum in its own order. None is FLASHSMITH_BITS, or 'free'. docs/bits.md has
            the contract.
        config: the kernel to use; None chooses one by dtype, d, lengths and device. If the chosen
            kernel is not built and must not be built now (FLASHSMITH_JIT=0, CUDA graph capture), a
            built kernel is used.
        backward_config: the kernel for the gradients, a FlashBackwardKernelConfig, or None.
        deterministic: True requires gradients with the same bits in every run; None means True with
            canonical bits, else PyTorch's are_deterministic_algorithms_enabled() at this call. Only
            the bits of dq can differ between runs otherwise.
        emulate: run host tensors in the emulator even when the estimated time is above 60 s.

    Returns:
        o, (o, lse), (o, row_max) or (o, lse, row_max), in the framework and on the device of q.

    Raises:
        ArgumentError: an argument is invalid, or no kernel serves these tensors.
        The other errors of ``flashsmith.forward``.
    """
    if config is not None:  # This saves a function call in the usual case
        check_attention_config(config)
    check_backward_config("backward_config", backward_config)
    check_deterministic_flag(deterministic)
    program = None
    if not (score_mod is None and mask_mod is None and mask is None and bias is None):
        functions = CallFunctions(score_mod, mask_mod, mask, bias, positions)
        sizes = sizes_of(q, k, cu_seqlens_q)
        part = PartKeys(seqused_k, k_begin, cu_seqlens_k)
        program, causal, window = bound_functions(functions, (causal, window), sizes, part)
    options = ForwardOptions(
        *(causal, window, softcap, scale, sinks, cu_seqlens_q, cu_seqlens_k),
        *(max_seqlen_q, max_seqlen_k, return_lse, return_row_max, partial, seqused_k, k_begin),
        *(bits, program),
    )
    return run_call(config or choose_config, (q, k, v, out), options, emulate, "out")


def remember_attention(arguments: tuple[Any, ...], names: tuple[str, ...]) -> None:
    """Remembers a call that attention() has just served, so that run_repeated can serve equivalent
    calls.

    ``arguments`` are q, k and v, followed by the values of the keywords in ``names``.
    """
    groups = cached_calls.repeated
    found = cached_attention(arguments, names)
    if found is not None:
        call, tensors = found
        cached_calls.remember_repeated(groups, arguments, names, tensors, call.run)


def cached_attention(
    arguments: tuple[Any, ...], names: tuple[str, ...]
) -> tuple[CachedCall, tuple[Any, ...]] | None:
    """Returns the cached call for arguments with which attention() was just called, and the tensors
    of the call (None for each tensor that was not given).

    Returns None if no call is cached, or if a tensor requires grad, because autograd may be enabled
    in later calls.
    """
    keywords = dict(zip(names, arguments[3:], strict=True))
    out, config = keywords.pop("out", None), keywords.pop("config", None)
    emulate = keywords.pop("emulate", False)
    for name in ("backward_config", "deterministic"):
        keywords.pop(name, None)
    tensors = (*arguments[:3], out)
    asked = attention_call(config or choose_config, tensors, ForwardOptions(**keywords), emulate)
    _, call = cached_calls.find(asked)
    if asked is None or call is None or any(it.requires_grad for it in asked.given()):
        return None
    return call, asked.tensors


def check_attention_config(config: KernelConfig | None) -> None:
    """Raises ArgumentError unless ``config`` is None or a config of the forward pass."""
    check_config_for(DEFAULT, "config", config)
