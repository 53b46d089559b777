"""Candidates: the few good configs among which the cost model chooses when there are no
measurements."""

from __future__ import annotations

from functools import lru_cache

from flashsmith.families import DeviceSpec, DType, Family, KernelConfig, families
from flashsmith.families.head_dims import HeadDims


def by_preference(operation: str = "forward") -> tuple[Family, ...]:
    """The families of an operation; families that need the newest GPUs come first."""
    return tuple(sorted(families(operation), key=lambda family: -family.oldest_arch))


def candidates(
    dtype: DType,
    d_head: HeadDims,
    device: DeviceSpec,
    masked: bool = False,
    operation: str = "forward",
    gradients: str = "",
) -> tuple[KernelConfig, ...]:
    """Returns the configs to compare for a head dimension on a device, from all families of an
    operation and in order of preference. A later config is chosen only for a sufficient gain,
    because its kernel may have to be built first.

    ``masked``: whether some rows see fewer keys than other rows.
    ``gradients``: the value of Problem.gradients for the gradients that are needed.
    """
    return _candidates(by_preference(operation), dtype, d_head, device, masked, gradients)


# The families are arguments, so that they are in the key of the cache: more families may be
# registered at any time.
@lru_cache(maxsize=512)
def _candidates(
    asked: tuple[Family, ...],
    dtype: DType,
    d_head: HeadDims,
    device: DeviceSpec,
    masked: bool,
    gradients: str,
) -> tuple[KernelConfig, ...]:
    found = (
        family.for_gradients(config, gradients)
        for family in asked
        if family.has_cost_model
        for config in family.candidates(dtype, d_head, device, masked)
    )
    serving = (it for it in found if it.family.gradients_of(it) in ("", gradients))
    return tuple(dict.fromkeys(serving))
