"""FlashsmithDraftBackend: computes the attention of a draft model that extends requests by several
tokens."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from flashsmith.integrations.sglang.releases import create_backend


class FlashsmithDraftBackend:
    """The backends of a draft model's decode steps. Each step has a backend, because one captured
    graph has all steps, and each step has its own lengths: in step i, requests have i + 1 drafted
    tokens."""

    def __init__(self, draft_runner: Any, steps: int) -> None:
        """``steps``: the number of drafted tokens. The draft model's prefill gives the first of
        them, so there is one decode step fewer."""
        self.attn_backends = [
            create_backend(draft_runner, earlier=step + 1) for step in range(steps - 1)
        ]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        view = build_inner_fb_view(
            forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE
        )
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(view, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Does nothing: all metadata is computed outside the graph."""
