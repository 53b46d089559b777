"""The public names of flashsmith.families, under the name that the docs have had for them."""

from flashsmith.families import *  # noqa: F403
from flashsmith.families import __all__ as __all__
