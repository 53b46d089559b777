"""The functions that choose a kernel automatically, such as attention(); the chooser that they use;
and the table of winners."""

from flashsmith.chooser.attention import attention, cached_attention, remember_attention
from flashsmith.chooser.backward import backward, remember_backward
from flashsmith.chooser.choice import (
    Choice,
    build_for,
    choose,
    choose_config,
    forget_choices,
)
from flashsmith.chooser.decode import attention_with_cache, remember_attention_with_cache
from flashsmith.chooser.merge import merge_attention
from flashsmith.chooser.write_slots import write_slots

__all__ = [
    "Choice",
    "attention",
    "attention_with_cache",
    "backward",
    "build_for",
    "cached_attention",
    "choose",
    "choose_config",
    "forget_choices",
    "merge_attention",
    "remember_attention",
    "remember_attention_with_cache",
    "remember_backward",
    "write_slots",
]
