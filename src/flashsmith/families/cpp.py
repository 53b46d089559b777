"""CppFamily: what a family's C++ is called and where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE_CSRC = Path(__file__).parents[1] / "csrc"


@dataclass(frozen=True)
class CppFamily:
    """A family's C++, as generated code and the host path take it.

    Args:
        csrc: the folder of its sources, which may lie outside the package. Includes name it
            ('mma_sync/plan.h'); its .cc files are compiled into every library.
        config_header, kernel_header, plan_header: what declares the config's struct, the kernels
            and `plan_function`, as an include.
        static_config: the template that turns a config and semantics into a kernel's argument.
        function: the type of a pointer to a main kernel.
        kernels: the names of a config's kernel templates by their role, the main one first.
        plan_function: 'Plan (const Config&, NumberReader&, Tensors, const DeviceSpec&, const
            Semantics&)'; its launches name kernels by their place in `kernels`.
        operation: the name of the operation whose calls it plans.
    """

    csrc: Path
    config_header: str
    kernel_header: str
    static_config: str
    function: str
    kernels: Callable[[Any], Mapping[str, str]]
    plan_header: str
    plan_function: str
    operation: str = "forward"


CPP_FAMILIES = {
    "mma_sync": CppFamily(
        csrc=_PACKAGE_CSRC / "mma_sync",
        config_header="mma_sync/flash_attention.cuh",
        kernel_header="mma_sync/forward_kernel.cuh",
        static_config="StaticForwardKernelConfig",
        function="forward_kernel_fn",
        kernels=lambda cfg: {"main": "flash_forward_kernel"},
        plan_header="mma_sync/plan.h",
        plan_function="plan_forward",
    ),
    "wgmma": CppFamily(
        csrc=_PACKAGE_CSRC / "wgmma",
        config_header="wgmma/config.cuh",
        kernel_header="wgmma/forward_kernel.cuh",
        static_config="StaticHopperKernelConfig",
        function="hopper_forward_kernel_fn",
        kernels=lambda cfg: {"main": "hopper_forward_kernel"},
        plan_header="wgmma/plan.h",
        plan_function="plan_forward",
    ),
}
