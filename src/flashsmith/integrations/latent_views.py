"""Converts rows of a latent cache, of which FlashAttention 3 takes the rotary columns as K and the
other columns as V."""

from __future__ import annotations

from typing import Any

from flashsmith.errors import ArgumentError


def whole_rows(k_cache: Any, v_cache: Any) -> Any:
    """Returns a view of the PyTorch tensor whose first columns are v_cache and whose next columns
    are k_cache; nothing is copied.

    Raises ArgumentError unless both are such views.
    """
    import torch

    advice = (
        "kernels read latent rows whole: give v_cache=rows[..., :-64] and k_cache=rows[..., -64:] "
        "of one PyTorch tensor"
    )
    if not (isinstance(k_cache, torch.Tensor) and isinstance(v_cache, torch.Tensor)):
        raise ArgumentError(f"qv: k_cache and v_cache are no PyTorch tensors; {advice}")
    apart = k_cache.data_ptr() - v_cache.data_ptr()
    if (
        k_cache.shape[:-1] != v_cache.shape[:-1]
        or k_cache.dtype != v_cache.dtype
        or k_cache.stride() != v_cache.stride()
        or apart != v_cache.shape[-1] * v_cache.element_size()
        or k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr()
    ):
        raise ArgumentError(f"qv: k_cache does not follow v_cache in the same rows; {advice}")
    width = v_cache.shape[-1] + k_cache.shape[-1]
    return v_cache.as_strided((*v_cache.shape[:-1], width), v_cache.stride())


def joined_rows(name: str, rotary: Any, value_name: str, values: Any) -> Any:
    """Makes rows as in a latent cache, by copying: the columns of ``values``, then the columns of
    ``rotary``.

    Raises ArgumentError unless they are PyTorch tensors whose shapes differ only in the columns.
    """
    import torch

    if not (isinstance(rotary, torch.Tensor) and isinstance(values, torch.Tensor)):
        raise ArgumentError(f"{value_name}: with qv, {name} and {value_name} are PyTorch tensors")
    if rotary.shape[:-1] != values.shape[:-1] or rotary.dtype != values.dtype:
        raise ArgumentError(
            f"{value_name}: {values.dtype} of shape {tuple(values.shape)}; must be {name}'s dtype "
            f"and shape, {rotary.dtype} and {tuple(rotary.shape)}, except for the columns"
        )
    return torch.cat((values, rotary), -1)
