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
    # Shorter parts let a few sequences use more SMs. With many, their rows of o, written and read
    # again in fp32, would cost a quarter of the time.
    lazy = WgmmaMlaKernelConfig(dtype, d_head, 1024, 16, rescale_threshold=8)
    return [lazy] if is_legal(lazy, device) else []


def proof_configs(dtype: DType, d_head: int, device: DeviceSpec) -> list[WgmmaMlaKernelConfig]:
    """The candidates, and a config that rescales at once and splits short sequences."""
    eager = WgmmaMlaKernelConfig(dtype, d_head, 128, 4)
    return [*candidates(dtype, d_head, device), eager]


def get_mla_configs(dtypes: Sequence[DType] = tuple(DType)) -> list[WgmmaMlaKernelConfig]:
    """The set 'latent': for each dtype and d_head a kernel."""
    device = device_spec("H200")
    return [cfg for dtype, d in product(dtypes, D_HEADS) for cfg in candidates(dtype, d, device)]
