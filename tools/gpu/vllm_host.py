#!/usr/bin/env python3
"""What attention costs in an eager step of vLLM: host time and GPU time, for this backend and for
vLLM's FlashAttention, alternately in one process.

    python tools/gpu/vllm_host.py rows.csv [--rounds 20] [--layers 16]

A step writes the new keys and values of all layers and attends, 32:8 heads of d 128, bf16, pages of
16, through the backends' own metadata builders, layers and caches. Block tables have room for
16,384 keys. Outputs are compared before anything is timed. `host_us` is the time until a step is
enqueued on an idle GPU, `gpu_us` that of a CUDA graph of the same step. In cells of new sizes each
step has a token more than the one before, as in serving; the GPU's time is not measured there.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from flashsmith.integrations.vllm.backend import FlashsmithBackend

HEADS, KV_HEADS, D, PAGE, MOST_KEYS = 32, 8, 128, 16, 16384
# By name: queries and keys of the request, and whether each step has a new size.
CELLS = {
    "prefill 1 x 1000": (1000, 1000, False),
    "prefill 1 x 1000, new sizes": (1000, 1000, True),
    "decode 1 x 1000": (1, 1000, False),
    "decode 1 x 8000": (1, 8000, False),
}
TOLERANCE = 0.02


def config_of(folder: Path, device: str) -> VllmConfig:
    sizes = {"hidden_size": HEADS * D, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    lengths = {"num_hidden_layers": 1, "max_position_embeddings": MOST_KEYS}
    (folder / "config.json").write_text(json.dumps({**names, **sizes, **heads, **lengths}))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MOST_KEYS,
            enforce_eager=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            max_model_len=MOST_KEYS,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=PAGE),
        device_config=DeviceConfig(device=device),
    )


class Layers:
    """A backend's layers, with caches of their own that hold the same keys."""

    def __init__(self, backend: Any, config: VllmConfig, caches: list[Any], device: str) -> None:
        names = [f"{backend.get_name()}.layers.{at}.attn" for at in range(len(caches))]
        one = torch.ones((), device=device)
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        impl = backend.get_impl_cls()
        self.impls = [impl(HEADS, D, D**-0.5, KV_HEADS, None, None, "auto", None) for _ in caches]
        context = config.compilation_config.static_forward_context
        context.clear()
        context |= {
            name: SimpleNamespace(impl=one) for name, one in zip(names, self.impls, strict=True)
        }
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=D, dtype=torch.bfloat16
        )
        self.builder = backend.get_builder_cls()(spec, names, config, torch.device(device))
        self.caches = [cache.clone() for cache in caches]

    def step(self, common: CommonAttentionMetadata, tensors: list[Any], outputs: list[Any]) -> None:
        metadata = self.builder.build(0, common)
        for impl, cache, (q, k, v), output in zip(
            self.impls, self.caches, tensors, outputs, strict=True
        ):
            impl.do_kv_cache_update(self.layer, k, v, cache, common.slot_mapping)
            impl.forward(self.layer, q, k, v, cache, metadata, output)


class Step:
    """The tensors of one step."""

    def __init__(self, queries: int, keys: int, layers: int, device: str) -> None:
        def ints(values: list[int], dtype: Any = torch.int32) -> Any:
            return torch.tensor(values, dtype=dtype, device=device)

        table = torch.zeros(1, MOST_KEYS // PAGE, dtype=torch.int32)
        order = torch.randperm(-(-MOST_KEYS // PAGE), dtype=torch.int32)
        used = -(-keys // PAGE)
        table[0, :used] = order[:used]
        slots = [
            int(table[0, key // PAGE]) * PAGE + key % PAGE for key in range(keys - queries, keys)
        ]
        starts = torch.tensor([0, queries], dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ints([keys]),
            num_reqs=1,
            num_actual_tokens=queries,
            max_query_len=queries,
            max_seq_len=keys,
            block_table_tensor=table.to(device),
            slot_mapping=ints(slots, torch.int64),
        )
        self.tensors, widths = [], [HEADS * D, KV_HEADS * D, KV_HEADS * D]
        for _ in range(layers):
            qkv = torch.randn(queries, sum(widths), device=device, dtype=torch.bfloat16)
            self.tensors.append([it.view(queries, -1, D) for it in qkv.split(widths, dim=-1)])
        shape = queries, HEADS, D
        self.outputs = [
            torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(layers)
        ]


def host_us(layers: Layers, step: Step) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    layers.step(step.common, step.tensors, step.outputs)
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took * 1e6


def gpu_timer(layers: Layers, step: Step) -> Callable[[], float]:
    """A function that replays the step's graph and returns its microseconds."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        layers.step(step.common, step.tensors, step.outputs)

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000

    return replay


def largest_difference(both: dict[str, Layers], step: Step) -> float:
    outputs = []
    for layers in both.values():
        layers.step(step.common, step.tensors, step.outputs)
        outputs.append([output.float() for output in step.outputs])
    pairs = zip(*outputs, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def measure(cell: str, both: dict[str, Layers], rounds: int, device: str) -> list[dict[str, Any]]:
    queries, keys, has_new_sizes = CELLS[cell]
    count = len(next(iter(both.values())).caches)
    step = Step(queries, keys, count, device)
    difference = largest_difference(both, step)
    if not difference < TOLERANCE:
        print(f"{cell}: WRONG, outputs differ by {difference}")
        return []
    timers = {} if has_new_sizes else {name: gpu_timer(it, step) for name, it in both.items()}
    rows = []
    for number in range(-2, rounds):  # the first two warm up
        if has_new_sizes:
            step = Step(queries + 3 + number, keys + 3 + number, count, device)
        for name, layers in both.items():
            row = {"cell": cell, "backend": name, "round": number}
            row["host_us"] = f"{host_us(layers, step):.1f}"
            row["gpu_us"] = f"{timers[name]():.1f}" if timers else ""
            if number >= 0:
                rows.append(row)
    return rows


def summary(cell: str, rows: list[dict[str, Any]]) -> str:
    text = []
    for column in ("host_us", "gpu_us"):
        medians = {
            name: statistics.median(float(it[column]) for it in rows if it["backend"] == name)
            for name in {it["backend"]: None for it in rows}
            if rows[0][column]
        }
        if medians:
            ours, theirs = medians.values()
            found = ", ".join(f"{name} {us:.0f}" for name, us in medians.items())
            text.append(f"{column} {found}, ratio {theirs / ours:.3f}")
    return f"{cell:28} {'; '.join(text)}"


def run(args: argparse.Namespace, device: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), device)
    torch.manual_seed(0)
    blocks = MOST_KEYS // PAGE
    rows: list[dict[str, Any]] = []
    with set_current_vllm_config(config), torch.inference_mode():
        caches = [
            torch.randn(
                blocks, PAGE, KV_HEADS, 2 * D, device=device, dtype=torch.bfloat16
            ).transpose(1, 2)
            for _ in range(args.layers)
        ]
        both = {
            name: Layers(backend, config, caches, device)
            for name, backend in (
                ("flashsmith", FlashsmithBackend),
                ("flash_attn", FlashAttentionBackend),
            )
        }
        for cell in CELLS:
            found = measure(cell, both, args.rounds, device)
            rows += found
            if found:
                print(summary(cell, found), flush=True)
    with open(args.rows, "w", newline="") as file:
        names = ["gpu", "cell", "backend", "round", "host_us", "gpu_us"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({"gpu": torch.cuda.get_device_name(), **row} for row in rows)
    return 0 if len(rows) == 2 * args.rounds * len(CELLS) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=16)
    return run(parser.parse_args(), "cuda")


if __name__ == "__main__":
    sys.exit(main())
