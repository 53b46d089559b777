"""What the cost model chooses among where nothing was measured: few configs, each a sound one."""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families import DeviceSpec, DType, Family, KernelConfig, families


def by_preference(operation: str = "forward") -> tuple[Family, ...]:
    """The families of an operation, those for the newest GPUs first."""
    return tuple(sorted(families(operation), key=lambda family: -family.oldest_arch))


@lru_cache(maxsize=512)
def candidates(
    dtype: DType, d_head: int, device: DeviceSpec, masked: bool = False
) -> tuple[KernelConfig, ...]:
    """The configs of all families worth weighing for a head dimension on a device, in order of
    preference: a small gain on paper is not to make another kernel, which may have to be built
    first. ``masked``: whether some rows see fewer keys than others."""
    return tuple(
        config
        for family in by_preference()
        if family.has_cost_model
        for config in family.candidates(dtype, d_head, device, masked)
    )
