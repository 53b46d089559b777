"""Which kernel for which problem: attention() and its chooser."""

from flashsmith.tuning.attention import attention, choose_config

__all__ = ["attention", "choose_config"]
