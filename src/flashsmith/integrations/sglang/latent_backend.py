"""FlashsmithLatentBackend: computes the multi-head latent attention (MLA) of SGLang's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from sglang.srt.layers.radix_attention import RadixAttention

import flashsmith
from flashsmith.errors import ArgumentError
from flashsmith.families.latent import PAIRS
from flashsmith.integrations.layer_kernels import (
    LayerKernels,
    device_of,
    direct_problem,
    latent_problem,
)
from flashsmith.integrations.sglang.backend import FlashsmithBackend
from flashsmith.integrations.sglang.releases import is_deterministic, write_location
from flashsmith.operations.decode import INVARIANT
from flashsmith.semantics.signature import check_mask


@dataclass(frozen=True)
class LatentAttention:
    """The attention of one of a model's two layers. If ``is_direct``, queries attend to a step's
    own keys and values. Otherwise absorbed queries attend to the cache's latent rows, whose first
    d_v columns are the values."""

    heads: int
    d: int
    d_v: int
    scale: float
    is_direct: bool
    kernels: LayerKernels


class FlashsmithLatentBackend(FlashsmithBackend):
    """Computes decodes, and chunks after a prefix, by one ``flashsmith.attention_with_cache`` call
    over latent rows. For prompts without a prefix the engine projects keys and values, and
    ``flashsmith.attention`` computes the attention to these keys.

    Raises NotImplementedError for unsupported features, when the engine starts.
    """

    def __init__(self, model_runner: Any, *, earlier: int = 0) -> None:
        if is_deterministic(model_runner):
            # A row's keys are split into parts that depend on the last row of its tile, so a token
            # has other bits in a chunk than in a decode step.
            _refuse("deterministic inference with latent attention (MLA)")
        super().__init__(model_runner, earlier=earlier)

    def _attention_of(self, layer: RadixAttention) -> LatentAttention:
        runner, number = self.model_runner, layer.layer_id
        if layer.logit_cap or layer.sliding_window_size > -1 or layer.is_cross_attention:
            _refuse(f"a window, a soft cap or cross attention with MLA (layer {number})")
        d, d_v = layer.head_dim, layer.v_head_dim
        is_direct = d_v != runner.model_config.kv_lora_rank
        if not is_direct and (d, d_v) not in PAIRS:
            known = ", ".join(map(str, PAIRS))
            _refuse(f"a cache of latent rows of {d}:{d_v} (layer {number}; those of {known} are)")
        sizes: dict[str, Any] = {"heads": layer.tp_q_head_num, "d": d, "dtype": runner.dtype}
        if is_direct:
            mask = check_mask(True, (None, None))
            sizes |= {"kv_heads": layer.tp_k_head_num, "d_v": d_v, "mask": mask}
            problem = direct_problem(**sizes, softcap=0.0, bits=self.bits)
        else:
            keys = self.tables.most_pages * self.page
            sizes |= {"page": self.page, "keys": keys, "cache": self.cache_format}
            problem = latent_problem(**sizes, v_width=d_v)
        slots = self.tables.slots
        device = device_of(slots.device.type, slots.device.index or 0)
        kernels = LayerKernels(problem, INVARIANT, device)
        try:
            kernels.config_for(1, 1)
        except ArgumentError as error:
            _refuse(f"layer {number}, for which there is no kernel ({error}),")
        return LatentAttention(
            layer.tp_q_head_num, d, d_v, float(layer.scaling), is_direct, kernels
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention for a step's queries; q is (tokens, heads * d) and the result is
        (tokens, heads * d_v). If new rows are given, they are first written to the cache."""
        step, attention = self._ready(layer, options)
        if save_kv_cache and k is not None:
            location = write_location(forward_batch, None)
            # The pool rounds to 8-bit floats without a scale.
            self.model_runner.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        q = q.view(-1, attention.heads, attention.d)
        output = q.new_empty(*q.shape[:2], attention.d_v)
        config = attention.kernels.config_for(step.requests, step.longest)
        common = {"scale": attention.scale, "causal": True, "config": config}
        common |= {"out": output[: step.rows], "cu_seqlens_q": step.starts}
        if attention.is_direct:
            assert k is not None
            assert v is not None
            flashsmith.attention(
                *(q[: step.rows], k[: step.rows], v[: step.rows]),
                cu_seqlens_k=step.starts,
                max_seqlen_q=step.longest,
                max_seqlen_k=step.longest,
                **common,
            )
        else:
            rows = self.model_runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
            flashsmith.attention_with_cache(
                q[: step.rows],
                self._pages(rows),
                v_width=attention.d_v,
                cache_lens=step.lens,
                page_table=step.table,
                max_seqlen_q=step.longest,
                **common,
            )
        return output.view(-1, attention.heads * attention.d_v)


def _refuse(subject: str) -> NoReturn:
    """Raises the error for a feature that is not served."""
    raise NotImplementedError(
        f"flashsmith: {subject} is not served; choose another attention backend"
    )
