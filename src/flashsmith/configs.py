"""The public names of flashsmith.families, under the name that earlier versions documented."""

from typing import TYPE_CHECKING

from flashsmith.families import *  # noqa: F403
from flashsmith.families import __all__ as __all__
from flashsmith.families.earlier_names import getter

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any attribute
    __getattr__ = getter(__name__)
