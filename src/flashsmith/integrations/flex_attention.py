"""flex_attention(): PyTorch's FlexAttention on flashsmith's kernels, without torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig
from flashsmith.integrations.traceable import attention, without_torchscript
from flashsmith.integrations.translated_calls import Translated, run_translated
from flashsmith.printable import quoted
from flashsmith.semantics.signature import check_flag


@without_torchscript
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, with its signature and meaning.

    The functions are traced, and compiled into a kernel once: other lengths, and other values of
    captured numbers and tensors, need no recompilation. docs/programs.md says what functions may
    do. The output has gradients, also for float tensors that score_mod captures. Tensors on the
    host run in the emulator.

    Args:
        query: (batch, heads, seq_q, d), fp16 or bf16; d as for ``attention``.
        key, value: (batch or 1, heads_k, seq_k, d); heads_k below heads needs enable_gqa.
        score_mod: a function (score, b, h, q_idx, kv_idx) of the scaled score, or None.
        block_mask: a BlockMask. Keys in blocks that its lists omit are hidden, whatever its
            mask_mod says; mask_mod decides in partial blocks. None hides nothing.
        scale: the factor on q k^T; None means 1/sqrt(d).
        enable_gqa: whether heads may be a multiple of heads_k.
        return_lse: also return the log-sum-exp of each row: fp32, (batch, heads, seq_q).
        kernel_options: {'config': KernelConfig} selects the kernel. PyTorch's own options are
            ignored.
        return_aux: an AuxRequest: also return an AuxOutput with lse and max_scores as requested.

    Returns:
        The output, like query; or (output, lse); or (output, AuxOutput). A row that sees no key is
        0, and its log-sum-exp -inf.

    Raises:
        ArgumentError: an argument is unusable.
        TraceError: a function does something that kernels cannot compute.
        The errors of ``flashsmith.attention``.
    """
    query, key, value = _check_tensors(query, key, value, enable_gqa)
    wants_lse, wants_max = _wanted(return_lse, return_aux)
    keywords = {
        "score_mod": score_mod,
        "mask": block_mask,
        "scale": scale,
        "return_lse": wants_lse,
        "return_row_max": wants_max,
        "config": _config(kernel_options),
    }
    tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    found = run_translated(Translated(attention, tensors, keywords, (), _NAMES))
    output, *statistics = found if isinstance(found, tuple) else (found,)
    output = output.transpose(1, 2)
    if return_aux is None:
        return (output, statistics[0]) if wants_lse else output
    return output, _aux_output(statistics, wants_lse=wants_lse, wants_max=wants_max)


_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "block_mask", "config": "kernel_options"}


def _wanted(return_lse: bool, return_aux: Any) -> tuple[bool, bool]:
    """Whether a call returns the log-sum-exp and the maximum scores."""
    wants_lse = check_flag("return_lse", return_lse)
    if return_aux is None:
        return wants_lse, False
    if wants_lse:
        raise ArgumentError("return_lse=True: given with return_aux; leave return_lse out")
    return bool(return_aux.lse), bool(return_aux.max_scores)


def _aux_output(statistics: Sequence[Any], *, wants_lse: bool, wants_max: bool) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput

    return AuxOutput(
        lse=statistics[0] if wants_lse else None, max_scores=statistics[-1] if wants_max else None
    )


def _check_tensors(query: Any, key: Any, value: Any, enable_gqa: Any) -> tuple[Any, Any, Any]:
    """Returns the tensors, with key and value expanded to the batch of query. Raises ArgumentError
    unless they are (batch, heads, seq, d)."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            shape = getattr(tensor, "shape", None)
            found = quoted(tensor) if shape is None else f"shape {tuple(shape)}"
            raise ArgumentError(f"{name}: {found}; give a PyTorch tensor (batch, heads, seq, d)")
    heads, heads_k = query.shape[1], key.shape[1]
    if not check_flag("enable_gqa", enable_gqa) and heads != heads_k:
        raise ArgumentError(
            f"enable_gqa=False: query has {heads} heads and key {heads_k}; give enable_gqa=True "
            "if query heads share key heads"
        )
    batch = query.shape[0]
    if key.shape[0] == 1 != batch and value.shape[0] == 1:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    return query, key, value


def _config(kernel_options: Mapping[str, Any] | None) -> KernelConfig | None:
    config = (kernel_options or {}).get("config")
    if config is not None and not isinstance(config, KernelConfig):
        raise ArgumentError(
            f"kernel_options={quoted(kernel_options)}: 'config' is a config of flashsmith, such as "
            "parse_kernel_name_into_config() returns"
        )
    return config
