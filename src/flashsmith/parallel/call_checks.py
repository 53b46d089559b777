"""Checks the arguments of calls over a group, and the facts that ranks have sent about them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import check_backward_config, resolve_deterministic
from flashsmith.errors import ArgumentError
from flashsmith.integrations.pytorch_state import under_autocast
from flashsmith.parallel.call_options import CallOptions
from flashsmith.parallel.group import Group
from flashsmith.parallel.layout import Layout
from flashsmith.parallel.schedules import _NO_BITS, check_schedule
from flashsmith.printable import quoted
from flashsmith.runtime.bits import cannot_keep, resolve_bits
from flashsmith.semantics.signature import (
    check_flag,
    check_mask,
    check_scale,
    check_softcap,
    whole_number,
)
from flashsmith.semantics.sizes import FREE


def is_capturing(q: Any) -> bool:
    return bool(q.is_cuda and torch.cuda.is_current_stream_capturing())


def cast_tensors(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    for name, it in (("q", q), ("k", k), ("v", v)):
        if not isinstance(it, torch.Tensor):
            raise ArgumentError(
                f"{name}: got {type(it).__name__}; parallel.attention() takes PyTorch's tensors"
            )
    cast: tuple[Any, Any, Any] = under_autocast(q, k, v)
    return cast


def check_call(
    group: Group, q: Any, k: Any, v: Any, asked: CallOptions, facts: dict[str, Any]
) -> tuple[Any, Any]:
    """Checks the arguments of this rank, and enters into ``facts`` the values that ranks compare.

    Returns the lengths of the packed sequences of q and of k, or None for each that is not packed.
    """
    group.check_device("q", q)
    _check_not_capturing(q)
    packed = asked.cu_seqlens_q is not None or asked.cu_seqlens_k is not None
    _check_tensors(q, k, v, packed)
    heads_k, d = k.shape[-2:]
    schedule = _check_schedule(asked.schedule, heads_k, group.size)
    mask = check_mask(asked.causal, asked.window)
    scale = check_scale(asked.scale, d)
    softcap = check_softcap(asked.softcap, scale)
    check_attention_config(asked.config)
    check_backward_config("backward_config", asked.backward_config)
    bits = resolve_bits(asked.bits)
    deterministic = resolve_deterministic(asked.deterministic, q, asked.bits)
    if bits and schedule == "zigzag":
        raise cannot_keep(asked.bits, _NO_BITS)
    flags = {
        name: check_flag(name, getattr(asked, name))
        for name in ("return_lse", "return_row_max", "emulate")
    }
    needs = _check_vectors(q, k, v, asked)
    lens_q, lens_k = _check_lengths(asked, packed)
    configs = {name: getattr(asked, name) for name in ("config", "backward_config")}
    facts.update(
        {
            "schedule": schedule,
            "dtype": str(q.dtype),
            "device": str(q.device),
            "batch": None if packed else q.shape[0],
            "heads": (q.shape[-2], heads_k),
            "d": d,
            "d_v": v.shape[-1],
            "mask": list(mask),
            "scale": scale,
            "softcap": softcap,
            "sinks": asked.sinks is not None,
            "requires_grad": needs,
            # ``bits`` is checked before ``deterministic``, which depends on it, so that an error
            # names ``bits``.
            "bits": bits or FREE,
            "deterministic": deterministic,
            **flags,
            **{name: None if it is None else str(it)[:200] for name, it in configs.items()},
            "cu_seqlens_q": digest(lens_q),
            "cu_seqlens_k": digest(lens_k),
            "q_rows": q.shape[-3],
            "k_rows": k.shape[-3],
        }
    )
    return lens_q, lens_k


def _check_not_capturing(q: Any) -> None:
    if is_capturing(q):
        raise ArgumentError(
            "q: a CUDA graph is being captured, in which ranks cannot agree on a call; leave "
            "parallel.attention() out of the graph"
        )


def _check_schedule(name: str, heads_k: int, ranks: int) -> str:
    schedule = check_schedule(name)
    if schedule == "ulysses" and heads_k % ranks:
        raise ArgumentError(
            f"schedule='ulysses': k has {heads_k} heads, which {ranks} ranks do not divide; take "
            "'zigzag' or 'allgather'"
        )
    return schedule


def _check_tensors(q: Any, k: Any, v: Any, packed: bool) -> None:
    """Checks shapes, dtypes and devices."""
    dims = "(rows, heads, d)" if packed else "(batch, rows, heads, d)"
    for name, it in (("q", q), ("k", k), ("v", v)):
        if it.dim() != (3 if packed else 4):
            raise ArgumentError(f"{name}: has shape {tuple(it.shape)}; must be {dims}")
        if it.dtype not in (torch.float16, torch.bfloat16) or it.dtype != q.dtype:
            raise ArgumentError(
                f"{name}: has dtype {it.dtype}; must be float16 or bfloat16, the same of q, k and v"
            )
        if it.device != q.device:
            raise ArgumentError(f"{name}: on {it.device}, and q on {q.device}; move it there")
    heads_q, d = q.shape[-2:]
    heads_k = k.shape[-2]
    if v.shape[:-1] != k.shape[:-1]:
        raise ArgumentError(
            f"v: has shape {tuple(v.shape)}, and k {tuple(k.shape)}; must be equal, except for the "
            "last dimension"
        )
    if k.shape[-1] != d or (not packed and k.shape[0] != q.shape[0]):
        raise ArgumentError(
            f"k: has shape {tuple(k.shape)}, and q {tuple(q.shape)}; must have q's d"
            f"{'' if packed else ' and batch'}"
        )
    if not 0 < d <= 256 or d % 8:
        raise ArgumentError(f"q: d is {d}; must be a multiple of 8 up to 256")
    if v.shape[-1] != d and (not 0 < v.shape[-1] <= 256 or v.shape[-1] % 8):
        raise ArgumentError(
            f"v: d is {v.shape[-1]}; must be q's, {d}, or a multiple of 8 up to 256"
        )
    if heads_k == 0 or heads_q == 0 or heads_q % heads_k:
        raise ArgumentError(
            f"q: has {heads_q} heads, and k {heads_k}; must be a multiple of k's heads, and not 0"
        )


def _check_lengths(asked: CallOptions, packed: bool) -> list[Any]:
    """The lengths of the packed sequences of q and of k, or None for each that is not packed."""
    lengths: list[Any] = [None, None]
    for place, name in enumerate("qk"):
        limit = getattr(asked, f"max_seqlen_{name}")
        if packed:
            lengths[place] = sequence_lengths(
                f"cu_seqlens_{name}", getattr(asked, f"cu_seqlens_{name}")
            )
            _check_longest(name, limit, lengths[place])
        elif limit is not None:
            raise ArgumentError(f"max_seqlen_{name}: of packed sequences only; leave it out")
    if packed and len(lengths[0]) != len(lengths[1]):
        raise ArgumentError(
            f"cu_seqlens_k: describes {len(lengths[1])} sequences and cu_seqlens_q "
            f"{len(lengths[0])}; must be the same number"
        )
    return lengths


def _check_vectors(q: Any, k: Any, v: Any, asked: CallOptions) -> list[bool]:
    """Checks sinks, out and the memory layout of q. Returns which tensors require a gradient."""
    sinks, out = asked.sinks, asked.out
    heads = q.shape[-2]
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor) or sinks.dtype is not torch.float32:
            what = sinks.dtype if isinstance(sinks, torch.Tensor) else type(sinks).__name__
            raise ArgumentError(f"sinks: got {what}; give a float32 tensor of PyTorch")
        if tuple(sinks.shape) != (heads,) or sinks.device != q.device or not sinks.is_contiguous():
            raise ArgumentError(
                f"sinks: has shape {tuple(sinks.shape)} on {sinks.device}; must be ({heads},), "
                f"one logit a head of q, dense, on {q.device}"
            )
    size = q.element_size()
    if q.numel() and (
        q.stride(-1) != 1 or q.data_ptr() % 16 or any(step * size % 16 for step in q.stride()[:-1])
    ):
        raise ArgumentError(
            f"q: has strides {q.stride()} at address {q.data_ptr():#x}; its last dimension must be "
            "contiguous and its rows 16-byte aligned: give q.contiguous()"
        )
    tensors = q, k, v, sinks
    needs = [torch.is_grad_enabled() and it is not None and it.requires_grad for it in tensors]
    if out is not None:
        if any(needs):
            raise ArgumentError(
                "out: given, and an input requires grad: autograd makes its own outputs; leave it "
                "out, or call under torch.no_grad()"
            )
        if (
            not isinstance(out, torch.Tensor)
            or out.shape != (*q.shape[:-1], v.shape[-1])
            or out.dtype != q.dtype
            or out.device != q.device
        ):
            raise ArgumentError(
                "out: must be a tensor of q's shape with v's last dimension, of q's dtype and "
                "on its device"
            )
    return needs


# A model passes the same offsets to every layer, so each tensor of offsets is read from the GPU
# only once.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def sequence_lengths(name: str, offsets: Any) -> tuple[int, ...]:
    """The lengths of packed sequences, computed from the offsets of the whole sequences."""
    if not isinstance(offsets, torch.Tensor) or offsets.dtype is not torch.int32:
        what = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise ArgumentError(
            f"{name}: got {what}; packed sequences need both, int32 tensors of the whole "
            "sequences' offsets"
        )
    if offsets.dim() != 1 or len(offsets) == 0:
        raise ArgumentError(f"{name}: has shape {tuple(offsets.shape)}; must be (sequences + 1,)")
    version, lengths = _known.get(offsets, (None, None))
    if version is None or version != offsets._version:
        numbers = offsets.tolist()
        lengths = tuple(b - a for a, b in itertools.pairwise(numbers))
        if numbers[0] != 0 or min(lengths, default=0) < 0:
            raise ArgumentError(f"{name}: must begin with 0 and not decrease; got {numbers[:8]}")
        _known[offsets] = offsets._version, lengths
    return lengths


def _check_longest(name: str, limit: Any, lengths: Sequence[int]) -> None:
    if limit is None:
        return
    longest, value = max(lengths, default=0), whole_number(limit)
    if value is None or value < longest:
        raise ArgumentError(
            f"max_seqlen_{name}={quoted(limit)}: the longest sequence has {longest} rows; give at "
            "least as many, or None: over a group no sequence is cut off"
        )


def digest(lengths: Sequence[int] | None) -> str | None:
    return None if lengths is None else hashlib.sha256(repr(lengths).encode()).hexdigest()[:32]


def check_same(said: Sequence[dict[str, Any]], apart: Sequence[str]) -> None:
    """Raises ArgumentError unless all ranks gave the same values.

    The error is the same on every rank.

    Only the values named in ``apart`` may differ.
    """
    for rank, facts in enumerate(said):
        for name in {**said[0], **facts}:
            mine, first = facts.get(name), said[0].get(name)
            if name not in apart and mine != first:
                raise ArgumentError(
                    f"{name}: rank {rank} of the group gave {_shown(mine)}, and rank 0 "
                    f"{_shown(first)}; every rank must give the same"
                )


def _shown(value: Any) -> str:
    return quoted(tuple(value) if isinstance(value, list) else value)


def check_rows(name: str, layout: Layout, rows: Sequence[int]) -> None:
    """Raises ArgumentError unless every rank has exactly the rows of its shard."""
    for rank, count in enumerate(rows):
        if count != layout.rows(rank):
            raise ArgumentError(
                f"{name}: rank {rank} of the group holds {count} rows, and its shard of "
                f"{layout.starts[-1]} over {layout.ranks} ranks has {layout.rows(rank)} (all hold "
                f"{list(rows)}); give what flashsmith.parallel.shard() returns"
            )
