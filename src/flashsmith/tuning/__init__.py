"""Which kernel for which problem: attention(), its chooser, and the table of winners."""

from flashsmith.tuning.attention import attention
from flashsmith.tuning.choice import build_for, choose, choose_config, forget_choices
from flashsmith.tuning.chosen import Choice

__all__ = ["Choice", "attention", "build_for", "choose", "choose_config", "forget_choices"]
