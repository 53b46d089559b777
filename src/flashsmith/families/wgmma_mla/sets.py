"""The config set of the wgmma_mla family, and the candidate configs to use when there are no
measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.latent import PAIRS
from flashsmith.families.legality import is_legal
from flashsmith.families.wgmma_mla.config import WgmmaMlaKernelConfig
from flashsmith.semantics.dtype import DType


def candidates(dtype: DType, widths: HeadDims, device: DeviceSpec) -> list[WgmmaMlaKernelConfig]:
    """The configs for d and d_v that are legal on a device, in order of preference; empty for a
    single width."""
    if not isinstance(widths, HeadPair) or widths not in PAIRS:
        return []
    # Shorter parts let a few sequences use more SMs. With many sequences, a CTA computes several,
    # and the parts' rows of o, written and read again in fp32, cost a quarter of the time.
    lazy = WgmmaMlaKernelConfig(
        dtype, widths.d_head, 1024, 16, rescale_threshold=8, d_v=widths.d_v, run_keys=4096
    )
    return [lazy] if is_legal(lazy, device) else []


def proof_configs(dtype: DType, widths: HeadDims, device: DeviceSpec) -> list[WgmmaMlaKernelConfig]:
    """The candidates, and a variant of each that rescales at once, splits short
    sequences and computes one part in a CTA."""
    found = candidates(dtype, widths, device)
    changes = {"min_keys": 128, "most_parts": 4, "rescale_threshold": 0, "run_keys": 0}
    return [*found, *(cfg.with_knobs(**changes) for cfg in found)]


def get_mla_configs(dtypes: Sequence[DType] = tuple(DType)) -> list[WgmmaMlaKernelConfig]:
    """The set 'latent': one config for each dtype and d_head."""
    device = device_spec("H200")
    return [cfg for dtype, d in product(dtypes, PAIRS) for cfg in candidates(dtype, d, device)]
