"""A family of kernels in a package of its own, with an operation of its own."""

from first_row.family import FirstRowFamily, FirstRowKernelConfig
from first_row.operation import FIRST_ROW
from flashsmith.families.family import register_family
from flashsmith.operations import register_operation

__all__ = ["FIRST_ROW", "FirstRowFamily", "FirstRowKernelConfig", "register"]


def register() -> None:
    """Makes both known to flashsmith; what the package's entry point names."""
    register_operation(FIRST_ROW)
    register_family(FirstRowFamily())


register()
