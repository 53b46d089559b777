"""The config set of the wgmma_mla family, and its candidates if nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.legality import is_legal
from flashsmith.families.wgmma_mla.config import WgmmaMlaKernelConfig
from flashsmith.semantics.dtype import DType

D_HEADS: tuple[int, ...] = WgmmaMlaKernelConfig.__dataclass_fields__["d_head"].metadata["values"]


def candidates(dtype: DType, d_head: int, device: DeviceSpec) -> list[WgmmaMlaKernelConfig]:
    """The kernels for d_head that are legal on a device, in order of preference."""
    if d_head not in D_HEADS:
        return []
    lazy = WgmmaMlaKernelConfig(dtype, d_head, 512, 16, rescale_threshold=8)
    return [cfg for cfg in (lazy,) if is_legal(cfg, device)]


def proof_configs(dtype: DType, d_head: int, device: DeviceSpec) -> list[WgmmaMlaKernelConfig]:
    """The candidates, and a config that rescales at once and splits short sequences."""
    eager = WgmmaMlaKernelConfig(dtype, d_head, 128, 4)
    return [*candidates(dtype, d_head, device), eager]


def get_mla_configs(dtypes: Sequence[DType] = tuple(DType)) -> list[WgmmaMlaKernelConfig]:
    """The set 'latent': for each dtype and d_head a kernel."""
    device = device_spec("H200")
    return [cfg for dtype, d in product(dtypes, D_HEADS) for cfg in candidates(dtype, d, device)]
