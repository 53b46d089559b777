"""A PeerCase's arrays as PyTorch's tensors, on the host or on a GPU, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from peer_suites.calls import Device


def torch_device(where: str) -> Device:
    """'cpu' or 'cuda'."""

    def put(array: np.ndarray) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).to(where).view(torch.bfloat16)
        return torch.from_numpy(array).to(where)

    return Device(put, _on_the_host, on_gpu=where == "cuda")


def _on_the_host(tensor: Any) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).cpu().numpy()
        return bits.view(ml_dtypes.bfloat16)
    found: np.ndarray = tensor.cpu().numpy()
    return found
