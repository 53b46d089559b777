"""Defines the namespace of the ops, and OpOptions: the arguments of attention() that both passes
need, except the tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashsmith.bundle import OPERATORS
from flashsmith.chooser.attention import check_attention_config
from flashsmith.chooser.backward import check_backward_config
from flashsmith.families import KernelConfig, parse_kernel_name_into_config
from flashsmith.semantics.signature import ForwardOptions, check_pair

OPS = getattr(torch.ops, OPERATORS)


class OpOptions(NamedTuple):
    """The arguments of attention() that both passes need, except the tensors.

    ``options`` requests the log-sum-exp if a backward pass may need it.
    """

    options: ForwardOptions
    config: KernelConfig | None = None
    backward_config: KernelConfig | None = None
    deterministic: bool = False
    emulate: Any = False

    def of_op(self, config: KernelConfig | None) -> dict[str, Any]:
        """Returns the arguments that the forward and backward ops share, with the given config."""
        options = {name: getattr(self.options, name) for name in _OF_OPS}
        left, right = check_pair(self.options.window)
        return options | {
            "window_left": left,
            "window_right": right,
            "config": None if config is None else str(config),
            "emulate": self.emulate,
        }


_OF_OPS = ("causal", "softcap", "scale", "max_seqlen_q", "max_seqlen_k")


def call_options(
    window_left: Any = None,
    window_right: Any = None,
    config: str | None = None,
    backward_config: str | None = None,
    deterministic: bool = False,
    emulate: bool = False,
    **options: Any,
) -> OpOptions:
    """Returns the OpOptions of a forward op's arguments."""
    forward, backward = (
        None if it is None else parse_kernel_name_into_config(it)
        for it in (config, backward_config)
    )
    check_attention_config(forward)
    check_backward_config("backward_config", backward)
    opts = ForwardOptions(window=(window_left, window_right), **options)
    return OpOptions(opts, forward, backward, deterministic, emulate)


def call_options_backward(config: str | None = None, **options: Any) -> OpOptions:
    """Returns the OpOptions of a backward op's arguments; ``config`` is for the backward pass."""
    backward = None if config is None else parse_kernel_name_into_config(config)
    check_backward_config("config", backward)
    return call_options(**options)._replace(backward_config=backward)
