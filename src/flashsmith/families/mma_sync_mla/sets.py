"""The config set of the mma_sync_mla family, and the candidate configs to use when there are no
measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from flashsmith.families.device import DeviceSpec, device_spec
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.latent import PAIRS
from flashsmith.families.legality import is_legal
from flashsmith.families.mma_sync_mla.config import MmaSyncMlaKernelConfig
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.dtype import DType

# The numbers of CTAs per SM, in order of preference. If there are two, one CTA multiplies while the
# other waits for barriers or scores.
_CTAS = (2, 1)


def candidates(dtype: DType, widths: HeadDims, device: DeviceSpec) -> list[MmaSyncMlaKernelConfig]:
    """Returns the config for d and d_v that has the most stages with which two CTAs fit on an SM
    or, if two never fit, with which one fits. Returns [] for a single width."""
    if not isinstance(widths, HeadPair) or widths not in PAIRS:
        return []
    # For the merge, the rows of o of each part are written in fp32 and read back, which moves 3% as
    # many bytes as 1,024 keys have.
    plain = MmaSyncMlaKernelConfig(dtype, widths.d_head, 32, 2, 1024, 32, True, widths.d_v)
    stages = reversed(plain.family.knob_values["stages"])
    for ctas, count in product(_CTAS, stages):
        cfg = plain.with_knobs(stages=count)
        if is_legal(cfg, device) and cfg.num_ctas_per_sm(device.max_smem_per_sm) >= ctas:
            return [cfg]
    return []


def over_cache(
    cfg: MmaSyncMlaKernelConfig, cache: CacheFormat, device: DeviceSpec
) -> MmaSyncMlaKernelConfig:
    """Returns the config to use instead of `cfg` for a cache of this format; it gives the same
    bits. Rows of 8-bit floats take half the shared memory, so the config has as many stages as fit
    in the shared memory of `cfg`. If `cfg` is already for this format, it is returned unchanged."""
    if cfg.cache == cache:
        return cfg
    stages = reversed(cfg.family.knob_values["stages"]) if cache.is_8bit else (cfg.stages,)
    made = (cfg.with_knobs(cache=cache, stages=count) for count in stages)
    return next(
        one for one in made if one.smem_bytes() <= cfg.smem_bytes() and is_legal(one, device)
    )


def proof_configs(
    dtype: DType, widths: HeadDims, device: DeviceSpec
) -> list[MmaSyncMlaKernelConfig]:
    """The configs that proofs check: the candidates, and one more config, which rescales at once,
    splits short sequences and has larger blocks."""
    found = candidates(dtype, widths, device)
    changes = {"B_c": 64, "stages": 2, "min_keys": 128, "most_parts": 4, "lazy_rescale": False}
    return [*found, *(cfg.with_knobs(**changes) for cfg in found[:1])]


def get_mla_configs(dtypes: Sequence[DType] = tuple(DType)) -> list[MmaSyncMlaKernelConfig]:
    """Returns the set 'latent-mma': for each dtype and d_head, one config for each size of shared
    memory."""
    devices = map(device_spec, ("H200", "A100", "L40S"))
    asked = product(dtypes, PAIRS, devices)
    return list(dict.fromkeys(cfg for dtype, d, gpu in asked for cfg in candidates(dtype, d, gpu)))
