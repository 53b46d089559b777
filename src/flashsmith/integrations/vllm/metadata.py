"""StepMetadata: the tensors and numbers that all layers of a step share."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch


@dataclass
class StepMetadata:
    """A step's tensors, all of which belong to the engine.

    num_actual_tokens: the number of rows in the step; further rows of the query tensor are padding.
    max_query_len: an upper bound on the rows of one request.
    query_start_loc: (requests + 1,).
    seq_lens: (requests,), keys of each request, this step's included.
    block_table: (requests, most blocks).
    causal: whether a query sees no later key.
    is_distributed: whether the step uses decode context parallelism.
    local_keys: (requests,), with decode context parallelism: how many keys from before the step
        are in this rank's cache.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    local_keys: torch.Tensor | None = None
    is_distributed: bool = False

    def __post_init__(self) -> None:
        # The properties of a step that select a launch, together with the tensors' layouts.
        self.sizes = self.num_actual_tokens, self.max_query_len, self.causal

    def with_block_table(self, block_table: torch.Tensor, slots: torch.Tensor) -> StepMetadata:
        """Returns a copy of this step for layers that use another cache. The copy keeps what the
        engine's own builders have added to the step."""
        other = copy(self)
        other.block_table, other.slot_mapping = block_table, slots
        return other
