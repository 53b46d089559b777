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
    """Returns the legal candidates for d and d_v on a device, in order of preference; [] for a
    single width."""
    if not isinstance(widths, HeadPair) or widths not in PAIRS:
        return []
    # With shorter parts, a few sequences use more SMs. With many sequences, a CTA computes several
    # parts; a quarter of the time is spent on the rows of o of all parts, which are written in fp32
    # and read back.
    lazy = WgmmaMlaKernelConfig(
        dtype, widths.d_head, 1024, 16, rescale_threshold=8, d_v=widths.d_v, run_keys=4096
    )
    return [lazy] if is_legal(lazy, device) else []


def proof_configs(dtype: DType, widths: HeadDims, device: DeviceSpec) -> list[WgmmaMlaKernelConfig]:
    """The configs that proofs check: the candidates, and variants of each that split short
    sequences. One rescales at once and computes one part per CTA; one computes scores ahead."""
    found = candidates(dtype, widths, device)
    short = {"min_keys": 128, "most_parts": 4}
    at_once = {**short, "rescale_threshold": 0, "run_keys": 0}
    ahead = {**short, "panel_waits": True, "panels_ahead": 3, "evict_keys": True}
    return [*found, *(cfg.with_knobs(**changes) for cfg in found for changes in (at_once, ahead))]


def get_mla_configs(dtypes: Sequence[DType] = tuple(DType)) -> list[WgmmaMlaKernelConfig]:
    """Returns the set 'latent': the candidates for each dtype and each pair of widths."""
    device = device_spec("H200")
    return [cfg for dtype, d in product(dtypes, PAIRS) for cfg in candidates(dtype, d, device)]
