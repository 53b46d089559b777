"""CppNames: the names that a family uses in C++."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CppNames:
    """The names of the C++ code in family.csrc to which generated code and host code refer.

    Args:
        config_header: the include path of the header that defines the config's struct, such as
            'mma_sync/config.cuh'. The struct has the same name as the Python class.
        kernel_header: the header that declares the kernels.
        kernel: the template of the main kernel.
        static_config: the template that turns a config and semantics into the template argument of
            the kernels.
        function: the type of pointers to the main kernel.
        plan_header: the header that declares `plan_function`.
        plan_function: the function that plans a call, of type 'Plan (const Config&, NumberReader&,
            Tensors, const DeviceSpec&, const Semantics&)'. Each launch in the Plan identifies its
            kernel by an index into family.kernel_templates().
    """

    config_header: str
    kernel_header: str
    kernel: str
    static_config: str
    function: str
    plan_header: str
    plan_function: str = "plan_forward"
