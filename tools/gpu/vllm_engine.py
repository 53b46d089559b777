#!/usr/bin/env python3
"""Runs vLLM with flashsmith's backend and with its own, and compares tokens, log-probabilities and
the time of a step.

    python tools/gpu/vllm_engine.py models FOLDER               # writes small random models
    python tools/gpu/vllm_engine.py run FOLDER/llama OUT.json --backend CUSTOM
    python tools/gpu/vllm_engine.py run FOLDER/llama OUT.json --backend CUSTOM --invariant
    python tools/gpu/vllm_engine.py compare OURS.json THEIRS.json THEIRS_IN_OTHER_CHUNKS.json

``run`` generates from fixed prompts (prefixes that are shared, chunked prefill, full CUDA graphs),
then times decode-heavy and prefill-heavy steps. ``--invariant`` sets VLLM_BATCH_INVARIANT=1 and
compares log-probabilities of the same tokens bit by bit: in other batches, in decode and prefill.
vLLM 0.26's fused norm sums a row in another order in steps of 256 tokens and more, so that decode
and prefill differ with any backend; ``--pinned-norm`` replaces it by vLLM's other norm.
``compare`` wants two backends no further apart than twice what one of them is from itself when
``--tokens`` gives it other chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VOCABULARY = 4096
SIZES = (1, 16, 64)
NEW_TOKENS = 48


def write_models(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

    common = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 4,
        "max_position_embeddings": 16384,
        "initializer_range": 0.03,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    configs = {
        "llama": LlamaConfig(
            hidden_size=4096,
            intermediate_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            **(common | {"num_hidden_layers": 16}),
        ),
        "gemma2": Gemma2Config(
            hidden_size=2048,
            intermediate_size=2048,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=256,
            **common,
        ),
        "gpt_oss": GptOssConfig(
            hidden_size=1024,
            intermediate_size=1024,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=128,
            **common,
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=1.0)
        model.save_pretrained(folder / name)


def engine(args: argparse.Namespace, **more: Any) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if args.invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    from vllm import LLM

    sizes = {
        "max_model_len": 16384,
        "max_num_seqs": 64,
        "max_num_batched_tokens": args.tokens,
        "gpu_memory_utilization": 0.5,
    }
    graphs = {
        "mode": 0,
        "cudagraph_mode": args.graphs,
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    }
    return LLM(
        model=str(args.model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=args.backend,
        enforce_eager=args.graphs == "NONE",
        compilation_config=graphs,
        **(sizes | more),
    )


def prompts(count: int, shared: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    first = tokens(shared)
    return [first + tokens(rng.randrange(1, longest)) for _ in range(count)]


def generate(llm: Any, given: list[list[int]], new_tokens: int, **more: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more
    )
    found: list[Any] = llm.generate(
        [{"prompt_token_ids": one} for one in given], sampling, use_tqdm=False
    )
    return found


def pin_norm() -> None:
    """Makes rows of a fused norm independent of the number of tokens (vllm#48271)."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    def add_and_norm(x: Any, residual: Any, weight: Any, eps: float) -> None:
        residual.add_(x)
        x.copy_(rms_norm_batch_invariant(residual, weight, eps))

    ops.fused_add_rms_norm = add_and_norm


def run(args: argparse.Namespace) -> int:
    if args.pinned_norm:
        pin_norm()
    start = time.perf_counter()
    llm = engine(args, enable_prefix_caching=True)
    result: dict[str, Any] = {"backend": args.backend, "start_s": time.perf_counter() - start}
    given = prompts(24, 300, 2500)
    result["generated"] = []
    for batch in (given[:12], given):  # The second call finds the prefixes of the first
        outputs = generate(llm, batch, NEW_TOKENS, logprobs=5)
        for one in outputs:
            completion = one.outputs[0]
            result["generated"].append(
                {
                    "tokens": list(completion.token_ids),
                    "logprobs": [
                        sorted(
                            ((token, it.logprob) for token, it in row.items()), key=lambda x: -x[1]
                        )
                        for row in completion.logprobs
                    ],
                }
            )
    if args.invariant:
        result["differences"] = differences(llm, given)
    if args.rounds:
        result["ms"] = times(llm, args.rounds)
    args.out.write_text(json.dumps(result))
    print(args.backend, {k: v for k, v in result.items() if k != "generated"})
    return 0


def differences(llm: Any, given: list[list[int]]) -> dict[str, dict[str, float]]:
    """Compares the bits of log-probabilities of the same tokens: decode steps in two batches,
    prefills in other batches, and decode with prefill."""
    decoded = generate(llm, given, 32, logprobs=0)
    whole = [one.prompt_token_ids + list(one.outputs[0].token_ids) for one in decoded]
    found = {name: Differences() for name in ("decode", "prefill", "decode and prefill")}
    alone = generate(llm, given[2:3], 32, logprobs=0) + generate(llm, given[4:9], 32, logprobs=0)
    for again, first in zip(alone, [decoded[2], *decoded[4:9]], strict=True):
        pairs = zip(_chosen(first), _chosen(again), strict=True)
        found["decode"].add(pairs)
    prefilled: dict[int, list[float]] = {}
    for batch in (whole, [whole[3]], whole[::-2]):
        for again in generate(llm, batch, 1, prompt_logprobs=0):
            place = whole.index(list(again.prompt_token_ids))
            first = decoded[place]
            at = len(first.prompt_token_ids)
            rows = again.prompt_logprobs[at:]
            tokens = first.outputs[0].token_ids
            values = [row[token].logprob for token, row in zip(tokens, rows, strict=True)]
            found["decode and prefill"].add(zip(_chosen(first), values, strict=True))
            found["prefill"].add(zip(prefilled.setdefault(place, values), values, strict=True))
    return {name: vars(one) for name, one in found.items()}


class Differences:
    """How many of the pairs differ, and the largest difference."""

    def __init__(self) -> None:
        self.rows, self.of, self.largest = 0, 0, 0.0

    def add(self, pairs: Iterable[tuple[float, float]]) -> None:
        for one, other in pairs:
            self.of += 1
            self.rows += one != other
            self.largest = max(self.largest, abs(one - other))


def _chosen(output: Any) -> list[float]:
    """The log-probabilities of the tokens that were generated."""
    completion = output.outputs[0]
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return [row[token].logprob for token, row in rows]


def times(llm: Any, rounds: int) -> dict[str, list[float]]:
    """By batch, the milliseconds of a decode step after 1,000 and 8,000 tokens, and of a
    prefill."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for batch in SIZES:
            for length in (1000, 8000):
                if batch * length > 600_000:
                    continue
                given = [one[:length] for one in prompts(batch, length, 2, seed=batch)]
                for one, prompt in enumerate(given):
                    prompt[0] = 3 + one  # No prefix is shared
                    prompt[1] = random.randrange(3, VOCABULARY)
                begin = time.perf_counter()
                generate(llm, given, 1)
                prefill = time.perf_counter() - begin
                begin = time.perf_counter()
                generate(llm, given, 1)  # All of its prefix is cached except one block
                short = time.perf_counter() - begin
                begin = time.perf_counter()
                generate(llm, given, 101)
                decode = time.perf_counter() - begin - short
                found.setdefault(f"prefill {batch} x {length}", []).append(prefill * 1e3)
                found.setdefault(f"decode {batch} x {length}", []).append(decode * 10)
    return found


def compare(ours: Path, theirs: Path, again: Path | None) -> int:
    """``again`` is their backend with other chunks, which shows how much right results may
    differ."""
    first, second = (json.loads(path.read_text()) for path in (ours, theirs))
    found = _apart(first, second)
    print("ours and theirs:", found)
    wrong = 0
    if again is not None:
        noise = _apart(json.loads(again.read_text()), second)
        print("theirs in other chunks:", noise)
        wrong = int(found["largest"] > 2 * noise["largest"] or found["share"] > 2 * noise["share"])
    for name, ms in first.get("ms", {}).items():
        base = second["ms"][name]
        ratio = statistics.median(base) / statistics.median(ms)
        print(
            f"{name:22} {statistics.median(ms):9.3f} ms, {second['backend']} "
            f"{statistics.median(base):9.3f} ms, ratio {ratio:.3f} (ours {min(ms):.3f} to "
            f"{max(ms):.3f}, theirs {min(base):.3f} to {max(base):.3f})"
        )
    return wrong


def _apart(first: Any, second: Any) -> dict[str, float]:
    """How much two runs differ: in log-probabilities of the same tokens, and in the share of
    sequences whose tokens become different. Tokens after the first different one have another
    context, and do not count."""
    apart, parted = [0.0], 0
    for one, other in zip(first["generated"], second["generated"], strict=True):
        for step, token in enumerate(other["tokens"]):
            ours = dict(map(tuple, one["logprobs"][step]))
            theirs = map(tuple, other["logprobs"][step])
            apart += [abs(ours[it] - value) for it, value in theirs if it in ours]
            if one["tokens"][step] != token:
                parted += 1
                break
    apart.sort()
    return {
        "compared": len(apart) - 1,
        "median": round(apart[len(apart) // 2], 4),
        "largest": round(apart[-1], 4),
        "share": round(parted / len(first["generated"]), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    models = commands.add_parser("models")
    models.add_argument("folder", type=Path)
    one = commands.add_parser("run")
    one.add_argument("model", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--backend", default="CUSTOM")
    one.add_argument("--invariant", action="store_true")
    one.add_argument("--pinned-norm", action="store_true")
    one.add_argument("--rounds", type=int, default=0)
    one.add_argument("--tokens", type=int, default=8192)
    one.add_argument("--graphs", default="FULL_DECODE_ONLY")
    both = commands.add_parser("compare")
    both.add_argument("ours", type=Path)
    both.add_argument("theirs", type=Path)
    both.add_argument("again", type=Path, nargs="?")
    args = parser.parse_args()
    if args.command == "models":
        write_models(args.folder)
        return 0
    return run(args) if args.command == "run" else compare(args.ours, args.theirs, args.again)


if __name__ == "__main__":
    sys.exit(main())
