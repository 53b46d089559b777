"""The scales of a KV cache: the tensors and options by which an operation takes them."""

from __future__ import annotations

from types import MappingProxyType

from flashsmith.errors import ArgumentError
from flashsmith.operations.operation import Call, TensorSpec

SCALES = ("k_scale", "v_scale")
# A tensor of scales has either one number or one number per K/V head.
SCALE_TENSORS = tuple(
    TensorSpec(name, (f"{name}s",), "float32", presence="optional", alignment=4) for name in SCALES
)
# The options for scales of keys and values that a caller passes as numbers instead of tensors.
SCALE_OPTIONS = MappingProxyType({f"{name}_value": 1.0 for name in SCALES})
# The tensor and the option for a cache that has a single scale because its rows are both key and
# value.
K_SCALE_TENSOR = SCALE_TENSORS[0]
K_SCALE_OPTION = MappingProxyType({"k_scale_value": 1.0})
# In measurements, a tensor of scales has one number.
MEASURED_SCALES = MappingProxyType({f"{name}s": 1 for name in SCALES})


def scale_numbers(call: Call) -> tuple[int | float, ...]:
    """Returns numbers for the C++ host path: the scales of keys and of values if these are numbers,
    and for each of the two a flag that says whether its tensor has one number per head.

    Raises ArgumentError unless the number of scales in a tensor is 1 or the number of K/V heads.
    """
    counts = [call.sizes.get(f"{name}s", 1) for name in SCALES]
    heads = call.problem.heads_k
    for name, count in zip(SCALES, counts, strict=True):
        if count not in (1, heads):
            raise ArgumentError(
                f"{name}: {count} scales, and the cache has {heads} heads; give one, or one for "
                "each head"
            )
    values = (call.options[f"{name}_value"] for name in SCALES)
    return (*values, *(int(count > 1) for count in counts))
