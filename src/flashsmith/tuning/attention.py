"""attention(q, k, v): a forward pass for people who do not care which kernel computes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashsmith.configs import DType, FlashForwardKernelConfig
from flashsmith.errors import ArgumentError
from flashsmith.runtime import forward
from flashsmith.runtime.tensors import view_tensor

# Tiles (B_r, B_c) in order of preference: more rows reuse each K and V tile more often.
_TILES = ((128, 64), (128, 32), (64, 64), (64, 32))
_N_WARPS = 4
_D_HEADS = (64, 128)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    out: Any = None,
    config: FlashForwardKernelConfig | None = None,
    emulate: bool = False,
) -> Any:
    """softmax(scale q k^T) v, by ``config``'s kernel or one that suits the problem.

    Args:
        q: (batch, seq_q, n_heads, d_head), fp16 or bf16, PyTorch or NumPy; on a GPU or, for the
            emulator, on the host.
        k, v: (batch, seq_k, n_heads, d_head), like q.
        scale: finite and > 0; None is 1/sqrt(d_head).
        out: where to write the result, q's shape and dtype; None allocates it.
        config: the kernel to use; None chooses one by dtype, d_head and lengths.
        emulate: run host tensors in the emulator even when that is estimated above 60 s.

    Returns:
        The output, like q in shape, dtype, framework and device.

    Raises:
        ArgumentError: an argument is unusable, or no kernel serves these tensors.
        The other errors of ``flashsmith.forward``.
    """
    if config is None:
        config = choose_config(q, k)
    return forward(config, q, k, v, out, scale=scale, emulate=emulate)


def choose_config(q: Any, k: Any) -> FlashForwardKernelConfig:
    """The first kernel in order of preference whose tiles divide the lengths of q and k.

    Raises ArgumentError when q or k is no tensor of rank 4, or none serves them.
    """
    q_view, k_view = view_tensor("q", q), view_tensor("k", k)
    for view in (q_view, k_view):
        if len(view.shape) != 4:
            raise ArgumentError(
                f"{view.name}: rank {len(view.shape)} (shape {view.shape}); must be 4: "
                "(batch, seq_len, n_heads, d_head)"
            )
    seq_q, seq_k, d = q_view.shape[1], k_view.shape[1], q_view.shape[3]
    if d not in _D_HEADS:
        raise ArgumentError(
            f"q: d_head {d}; kernels exist for {' and '.join(map(str, _D_HEADS))} (pad q, k and v "
            "with zeros up to one of them and pass scale=1/sqrt(d_head) of the true d_head)"
        )
    for config in _candidates(q_view.dtype, d):
        if seq_q % config.B_r == 0 and seq_k % config.B_c == 0:
            return config
    raise ArgumentError(
        f"q, k: lengths {seq_q} and {seq_k}; kernels exist for seq_q a multiple of "
        f"{min(rows for rows, _ in _TILES)} and seq_k of {min(keys for _, keys in _TILES)}"
    )


def _candidates(dtype: DType, d_head: int) -> Iterator[FlashForwardKernelConfig]:
    """One kernel per tile shape, with every optimisation on."""
    for rows, keys in _TILES:
        # 32 rows a warp leave no registers for a whole block of Q: it is reloaded per step.
        q_loads = 0 if rows == 64 else 2
        yield FlashForwardKernelConfig(
            dtype, d_head, rows, keys, _N_WARPS, True, True, True, q_loads, 2, 2, True, True
        )
