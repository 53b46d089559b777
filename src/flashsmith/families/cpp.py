"""CppNames: the C++ names of a family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CppNames:
    """The names by which generated code and the host path refer to a family's C++; see family.csrc.

    Args:
        config_header: the include path of the header that declares the config's struct, such as
            'mma_sync/config.cuh'; the struct has the Python class's name.
        kernel_header: the header that declares the kernels.
        kernel: the main kernel's template.
        static_config: the template that turns a config and semantics into the kernels' template
            argument.
        function: the type of a pointer to a main kernel.
        plan_header: the header that declares `plan_function`.
        plan_function: a function of type 'Plan (const Config&, NumberReader&, Tensors, const
            DeviceSpec&, const Semantics&)'. Launches in the Plan name kernels by their index in
            family.kernel_templates().
    """

    config_header: str
    kernel_header: str
    kernel: str
    static_config: str
    function: str
    plan_header: str
    plan_function: str = "plan_forward"
