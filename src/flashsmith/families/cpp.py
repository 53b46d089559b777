"""Cpp: the C++ names of a family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CppNames:
    """The names by which generated code and the host path refer to a family's C++; see family.csrc.

    Args:
        config_header: declares the config's struct, which is called like the Python class; an
            include, 'mma_sync/config.cuh'.
        kernel_header: declares the kernels.
        kernel: the main kernel's template.
        static_config: the template that turns a config and semantics into the kernels' argument.
        function: the type of a pointer to a main kernel.
        plan_header: declares `plan_function`.
        plan_function: 'Plan (const Config&, NumberReader&, Tensors, const DeviceSpec&, const
            Semantics&)'. Its launches call kernels by their index in family.kernel_templates().
    """

    config_header: str
    kernel_header: str
    kernel: str
    static_config: str
    function: str
    plan_header: str
    plan_function: str = "plan_forward"
