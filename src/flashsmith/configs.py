"""The public names of flashsmith.families, under an older documented module name."""

from flashsmith.families import *  # noqa: F403
from flashsmith.families import __all__ as __all__
