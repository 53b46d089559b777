"""Which kernel for which problem: attention() and its chooser."""

from flashsmith.tuning.attention import attention
from flashsmith.tuning.choice import build_for, choose_config

__all__ = ["attention", "build_for", "choose_config"]
