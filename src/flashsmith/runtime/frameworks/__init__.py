"""Finds the framework of a tensor: PyTorch, NumPy, CuPy, JAX, or flashsmith itself."""

from __future__ import annotations

from flashsmith.runtime.frameworks.base import Framework
from flashsmith.runtime.frameworks.cupy import CupyArrays
from flashsmith.runtime.frameworks.device_array import DeviceArrays
from flashsmith.runtime.frameworks.jax import JaxArrays
from flashsmith.runtime.frameworks.numpy import NumpyArrays
from flashsmith.runtime.frameworks.torch import TorchTensors

FRAMEWORKS: tuple[type[Framework], ...] = (
    TorchTensors,
    NumpyArrays,
    DeviceArrays,
    CupyArrays,
    JaxArrays,
)

_adapters: dict[type[Framework], Framework] = {}
# The framework of a type is looked up once and then cached, because every call needs it.
_by_type: dict[type, Framework | None] = {}


def framework_of(kind: type) -> Framework | None:
    """Returns the framework whose tensors have type ``kind``; None if ``kind`` is not a tensor
    type.

    A framework is imported only if the caller already holds one of its tensors.
    """
    try:
        return _by_type[kind]
    except KeyError:
        owner = next((framework for framework in FRAMEWORKS if framework.owns(kind)), None)
        found = None if owner is None else _adapter(owner)
        _by_type[kind] = found
        return found


def why_refused(kind: type) -> str | None:
    """Returns why objects of type ``kind``, which belong to a framework, are refused; None for
    all other types."""
    reasons = (framework.refusal(kind) for framework in FRAMEWORKS)
    return next((reason for reason in reasons if reason is not None), None)


def _adapter(owner: type[Framework]) -> Framework:
    if owner not in _adapters:
        # All threads share one adapter per framework, because views compare equal only with the
        # same adapter.
        _adapters.setdefault(owner, owner())
    return _adapters[owner]
