"""Registers flashsmith in torch.nn.attention's registry of flash implementations.

flashsmith then serves PyTorch's own calls to flash attention, including calls by
torch.nn.MultiheadAttention and varlen_attn.

    import flashsmith.integrations.flash_registry as flash_registry

    flash_registry.register()
    torch.nn.attention.activate_flash_attention_impl("flashsmith")

Calls that the kernels cannot serve go to PyTorch's own flash attention, with one warning for each
reason. torch.nn.attention.restore_flash_attention_impl() deactivates flashsmith.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import flashsmith
from flashsmith.chooser.backward import resolve_deterministic
from flashsmith.errors import ArgumentError, DependencyError
from flashsmith.integrations.fallbacks import Reason, note_fallback
from flashsmith.integrations.pytorch_state import check_emulate, why_not_on
from flashsmith.integrations.sdpa import known_why_not, tensor_facts
from flashsmith.integrations.sdpa_problem import SdpaProblem
from flashsmith.runtime.bits import cannot_keep, resolve_bits

NAME = "flashsmith"
_CALLER = f"the flash implementation {NAME!r}"


def register(*, emulate: bool | None = None, bits: str | None = None) -> None:
    """Adds "flashsmith" to the registry.

    torch.nn.attention.activate_flash_attention_impl activates it.

    Args:
        emulate: run host tensors in the slow emulator instead of leaving them to PyTorch. None
            reads the variable FLASHSMITH_EMULATE, 0 unless set, at every call.
        bits: as for attention(). With 'canonical', calls that the kernels cannot serve are errors.

    Raises:
        ArgumentError: emulate or bits has an invalid value.
        DependencyError: this version of PyTorch has no such registry.
    """
    check_emulate(emulate)
    if bits is not None:
        resolve_bits(bits)
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None:
        raise DependencyError(
            f"PyTorch {torch.__version__} has no registry of flash implementations; install 2.11 "
            "or later, or call flashsmith.sdpa()"
        )
    add(NAME, register_fn=lambda: _Activated(emulate, bits))


class _LeftToPyTorch(Exception):
    """Raised for a call that the kernels cannot serve, before anything is computed."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Activated:
    """Replaces PyTorch's flash-attention kernels with flashsmith's, until remove() is called.

    Results have the strides of PyTorch's fake kernels, since compiled code relies on them. Tensors
    of the scaled_dot_product operators are (batch, heads, length, d). Tensors of the other
    operators are (batch, length, heads, d), or packed (total, heads, d).
    """

    def __init__(self, emulate: bool | None, bits: str | None = None) -> None:
        self._emulate, self._bits = emulate, bits
        self._library: Any = torch.library.Library("aten", "IMPL")
        for operator, devices, ours in (
            ("_scaled_dot_product_flash_attention", ("CUDA",), self._sdpa),
            ("_scaled_dot_product_flash_attention_backward", ("CUDA",), self._sdpa_backward),
            ("_scaled_dot_product_flash_attention_for_cpu", ("CPU",), self._sdpa_on_the_host),
            (
                "_scaled_dot_product_flash_attention_for_cpu_backward",
                ("CPU",),
                self._sdpa_on_the_host_backward,
            ),
            ("_flash_attention_forward", ("CUDA", "CPU"), self._forward),
            ("_flash_attention_backward", ("CUDA", "CPU"), self._backward),
        ):
            for device in devices:
                kernel = _with_fallback(f"aten::{operator}", device, ours, bits)
                with warnings.catch_warnings():
                    # PyTorch warns that its kernels are replaced, which is intended here.
                    warnings.filterwarnings("ignore", "Warning only once for all operators")
                    self._library.impl(operator, kernel, device, with_keyset=True)

    def remove(self) -> None:
        """Restores PyTorch's kernels."""
        self._library = None

    def _sdpa(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        if return_debug_mask:
            raise _LeftToPyTorch(Reason("return_debug_mask", "the kernels store no probabilities"))
        output, lse = self._heads_first(query, key, value, dropout_p, is_causal, scale=scale)
        return output, lse, None, None, query.shape[2], key.shape[2], *_no_dropout(query)

    def _sdpa_backward(
        self,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Any,
        philox_offset: Any,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        tensors = grad_out, query, key, value, out, logsumexp
        gradients = self._sdpa_on_the_host_backward(*tensors, dropout_p, is_causal, scale=scale)
        return _laid_out_like((query, key, value), gradients)

    def _sdpa_on_the_host(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> tuple[Any, Any]:
        arguments = dropout_p, is_causal, attn_mask, scale
        output, lse = self._heads_first(query, key, value, *arguments)
        return output, lse.transpose(1, 2).contiguous().transpose(1, 2)

    def _heads_first(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float,
        is_causal: bool,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> tuple[Any, Any]:
        self._check(query, key, value, dropout_p, scale, is_causal, attn_mask)
        output = torch.empty_like(query)
        q, k, v, out = _swapped(query, key, value, output)
        _, lse = self._attention(q, k, v, causal=is_causal, scale=scale, out=out)
        return output, lse

    def _sdpa_on_the_host_backward(
        self,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        self._check(query, key, value, dropout_p, scale, is_causal, attn_mask)
        tensors = (*_swapped(grad_out, query, key, value, out), logsumexp)
        return _swapped(*self._gradients(*tensors, causal=is_causal, scale=scale))

    def _forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        num_splits: int | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        others["return_debug_mask"] = return_debug_mask or None
        for name, value_of in others.items():
            if value_of is not None:
                raise _LeftToPyTorch(Reason(name, "the kernels have no such argument"))
        self._check_rows(query, key, value, cum_seq_q, cum_seq_k, dropout_p, scale)
        packing = _packing(cum_seq_q, cum_seq_k, max_q, max_k)
        window = _limit(window_size_left), _limit(window_size_right)
        output, lse = self._attention(
            query, key, value, causal=is_causal, window=window, scale=scale, **packing
        )
        return *_laid_out_like((query,), (output,)), lse, *_no_dropout(query)

    def _backward(
        self,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Any,
        unused: Any,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Any, ...]:
        self._check_rows(query, key, value, cum_seq_q, cum_seq_k, dropout_p, scale)
        tensors = grad_out, query, key, value, out, logsumexp
        packing = _packing(cum_seq_q, cum_seq_k, max_q, max_k)
        window = _limit(window_size_left), _limit(window_size_right)
        gradients = self._gradients(
            *tensors, causal=is_causal, window=window, scale=scale, **packing
        )
        return _laid_out_like((query, key, value), gradients)

    def _check(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float,
        scale: float | None,
        is_causal: bool = False,
        mask: Any = None,
    ) -> None:
        """Raises _LeftToPyTorch if the kernels cannot serve a call.

        Tensors are (..., heads, length, d).
        """
        if value.shape[-1] != query.shape[-1]:
            raise _LeftToPyTorch(
                Reason("value", "another d than query's, unlike PyTorch's kernels")
            )
        problem = SdpaProblem(
            tensor_facts(query, False),
            tensor_facts(key, False),
            tensor_facts(value, False),
            mask is not None,
            dropout_p,
            is_causal,
            scale,
            enable_gqa=True,
        )
        reason = known_why_not(problem)
        if reason is None and is_causal and query.shape[-2] != key.shape[-2]:
            # PyTorch's implementations align such masks to different corners.
            reason = Reason("is_causal", "with different lengths of query and key")
        # PyTorch may compute gradients later, by a separate operator.
        reason = reason or why_not_on(
            query.device, self._emulate, query.shape[-1], with_gradients=True
        )
        if reason is not None:
            raise _LeftToPyTorch(reason)

    def _check_rows(
        self, query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *scores: Any
    ) -> None:
        if (starts_q is None) != (starts_k is None):
            raise _LeftToPyTorch(Reason("cum_seq_q", "without cum_seq_k, or the reverse"))
        self._check(*(tensor.transpose(-3, -2) for tensor in (query, key, value)), *scores)

    def _attention(self, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        # The tensors may require grad, but PyTorch computes gradients with a separate operator.
        with torch.no_grad():
            return flashsmith.attention(
                *(q, k, v),
                return_lse=True,
                bits=self._bits,
                emulate=q.device.type == "cpu",
                **keywords,
            )

    def _gradients(self, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            gradients = flashsmith.backward(
                *(do, q, k, v, o, lse.contiguous()),
                deterministic=resolve_deterministic(None, q, self._bits),
                emulate=q.device.type == "cpu",
                **keywords,
            )
        return gradients.dq, gradients.dk, gradients.dv


def _with_fallback(
    operator: str, device: str, ours: Callable[..., Any], bits: str | None
) -> Callable[..., Any]:
    """Returns a kernel that calls ``ours`` and, only if this raises _LeftToPyTorch, PyTorch's
    kernel.

    With canonical bits the kernel raises an error instead of calling PyTorch's kernel, which gives
    other bits.
    """
    theirs: Any = None
    # PyTorch has no kernel for packed sequences on the host; builds without CUDA have none for
    # GPUs.
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator, device):
        theirs = torch.library.get_kernel(operator, device)

    def kernel(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return ours(*arguments, **keywords)
        except _LeftToPyTorch as left:
            reason = left.reason
        if resolve_bits(bits):
            raise cannot_keep(
                bits, f"{reason}; and PyTorch's kernel, which would take over, has other bits"
            )
        if theirs is None:
            raise ArgumentError(f"{reason}; and PyTorch has no kernel for it here")
        note_fallback(_CALLER, *reason)
        return theirs.call_boxed(keys, *arguments, **keywords)

    return kernel


def _swapped(*tensors: Any) -> tuple[Any, ...]:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _laid_out_like(tensors: tuple[Any, ...], ours: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the tensors ``ours``, with the strides that torch.empty_like would choose for
    ``tensors``."""
    found = []
    for tensor, one in zip(tensors, ours, strict=True):
        strides = torch.empty_like(tensor, device="meta").stride()
        found.append(one if one.stride() == strides else torch.empty_like(tensor).copy_(one))
    return tuple(found)


def _packing(starts_q: Any, starts_k: Any, longest_q: int, longest_k: int) -> dict[str, Any]:
    if starts_q is None:
        return {}
    starts = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    return {**starts, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}


def _limit(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _no_dropout(query: Any) -> tuple[Any, Any, Any]:
    """Returns the additional results that PyTorch expects from a call without dropout: the seed and
    the offset of the random numbers, and the debug mask."""
    state, offset = (
        torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())
    )
    return state, offset, query.new_empty(0)
