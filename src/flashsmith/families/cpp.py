"""CppNames: the names that a family uses in C++."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CppNames:
    """The names by which generated code and host code refer to a family's C++ code, whose sources
    are in family.csrc.

    Args:
        config_header: the include path of the header with the struct of the config, such as
            'mma_sync/config.cuh'. The struct has the name of the Python class.
        kernel_header: the header that declares the kernels.
        kernel: the template of the main kernel.
        static_config: the template that makes the kernels' template argument from a config and
            semantics.
        function: the type of pointers to the main kernel.
        plan_header: the header that declares `plan_function`.
        plan_function: the function that plans a call, of type 'Plan (const Config&, NumberReader&,
            Tensors, const DeviceSpec&, const Semantics&)'. A launch in the Plan names its kernel by
            the index in family.kernel_templates().
    """

    config_header: str
    kernel_header: str
    kernel: str
    static_config: str
    function: str
    plan_header: str
    plan_function: str = "plan_forward"
