"""The public names of flashsmith.families, under the name that earlier versions documented."""

from flashsmith.families import *  # noqa: F403
from flashsmith.families import __all__ as __all__
