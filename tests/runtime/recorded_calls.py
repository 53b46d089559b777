"""Calls with something wrong, and plans of calls that are right, as text: what a change of how
calls are checked and launched must leave as it is.

    python tests/runtime/recorded_calls.py    # records both

Nothing is built and nothing runs: host tensors, some of them passing for a GPU's.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "tools" / "gpu"))

from pretended_gpu import Launch, pretended_gpu

import flashsmith
import flashsmith.integrations.torch_decode
import flashsmith.integrations.torch_latent_decode
import flashsmith.integrations.torch_ops
from flashsmith.errors import FlashsmithError
from flashsmith.families import DType, KernelConfig, families
from flashsmith.runtime.libraries import LoadedKernels

FOLDER = Path(__file__).parent
REFUSALS, PLANS = FOLDER / "refused_calls.json", FOLDER / "launched_calls.json"
Arguments = dict[str, Any]

torch.manual_seed(0)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def config(operation: str) -> KernelConfig:
    """A kernel of d_head 64 that has stood in no table."""
    return families(operation)[0].proof_configs(DType.FP16, 64)[0]


# --- valid calls ---------------------------------------------------------------------------------


def dense(**more: Any) -> Arguments:
    """Batch 2, 4 heads, 5 queries and 9 keys of d 24."""
    return {
        "q": half(2, 5, 4, 24),
        "k": half(2, 9, 2, 24),
        "v": half(2, 9, 2, 24),
        "causal": False,
        "window": (3, 2),
        "softcap": 30.0,
        "scale": 0.2,
        "sinks": torch.zeros(4),
        **more,
    }


def packed(**more: Any) -> Arguments:
    """Three sequences, one of them without queries."""
    return dense(
        q=half(12, 4, 24),
        k=half(18, 2, 24),
        v=half(18, 2, 24),
        cu_seqlens_q=whole(0, 5, 5, 12),
        cu_seqlens_k=whole(0, 9, 11, 18),
        max_seqlen_q=7,
        max_seqlen_k=9,
        **more,
    )


def forward_only(make: Callable[..., Arguments], **more: Any) -> Arguments:
    arguments = make(**more)
    return arguments | {"out": torch.zeros_like(arguments["q"]), "return_lse": True}


def part() -> Arguments:
    arguments = dense(partial=True, seqused_k=whole(3, 9), k_begin=whole(2, 0))
    del arguments["sinks"]
    return arguments


def of_backward(make: Callable[..., Arguments]) -> Arguments:
    arguments = make()
    q = arguments["q"]
    rows = (q.shape[-2], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return {
        "do": torch.zeros_like(q),
        **arguments,
        "o": torch.zeros_like(q),
        "lse": torch.zeros(rows),
        "dlse": torch.zeros(rows),
        "deterministic": False,
        "needs": (True, True, False, True),
        "grad_dtype": None,
    }


def cached(**more: Any) -> Arguments:
    return {
        "q": half(2, 1, 4, 24),
        "k_cache": half(2, 16, 2, 24),
        "v_cache": half(2, 16, 2, 24),
        "cache_lens": whole(9, 3),
        "causal": True,
        "window": (3, 0),
        "softcap": 30.0,
        "scale": 0.2,
        "sinks": torch.zeros(4),
        "split": "free",
        "out": half(2, 1, 4, 24),
        "return_lse": True,
        **more,
    }


def paged() -> Arguments:
    return cached(
        k_cache=half(6, 8, 2, 24),
        v_cache=half(6, 8, 2, 24),
        page_table=whole(0, 1, 2, 3).view(2, 2),
        k=half(2, 1, 2, 24),
        v=half(2, 1, 2, 24),
        cos=torch.zeros(16, 6),
        sin=torch.zeros(16, 6),
        rotary_interleaved=False,
    )


def packed_cached() -> Arguments:
    return cached(q=half(3, 4, 24), out=half(3, 4, 24), cu_seqlens_q=whole(0, 1, 3), max_seqlen_q=2)


def parts() -> Arguments:
    return {
        "outs": [torch.zeros(2, 5, 4, 24) for _ in range(3)],
        "lses": [torch.zeros(2, 4, 5) for _ in range(3)],
        "sinks": torch.zeros(4),
        "dtype": "float16",
    }


def of_flash() -> Arguments:
    arguments = dense(softmax_scale=0.2, window_size=(3, 2), dropout_p=0.0)
    return {name: it for name, it in arguments.items() if name not in ("window", "scale", "sinks")}


def of_flash_varlen() -> Arguments:
    arguments = packed(softmax_scale=0.2, window_size=(3, 2))
    return {name: it for name, it in arguments.items() if name not in ("window", "scale", "sinks")}


def of_flash_cache() -> Arguments:
    return {
        "q": half(2, 1, 4, 24),
        "k_cache": half(2, 16, 2, 24),
        "v_cache": half(2, 16, 2, 24),
        "cache_seqlens": whole(9, 3),
        "k": half(2, 1, 2, 24),
        "v": half(2, 1, 2, 24),
        "softmax_scale": 0.2,
        "causal": True,
        "window_size": (3, 0),
        "num_splits": 1,
    }


def of_sdpa() -> Arguments:
    return {
        "query": half(2, 4, 5, 24),
        "key": half(2, 2, 9, 24),
        "value": half(2, 2, 9, 24),
        "dropout_p": 0.0,
        "is_causal": True,
        "scale": 0.2,
        "enable_gqa": True,
        "strict": True,
        "emulate": True,
    }


def _op(name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return getattr(torch.ops.flashsmith, name)(**arguments)

    return call


def op_arguments(make: Callable[..., Arguments], **more: Any) -> Arguments:
    arguments = make(**more)
    for name in ("window", "out", "split", "return_lse", "grad_dtype"):
        arguments.pop(name, None)
    return arguments | {"window_left": 3, "window_right": 2}


def _backward_op_arguments() -> Arguments:
    return op_arguments(lambda: of_backward(dense)) | {"needs": [True] * 4}


def _with_forward_config(arguments: Arguments) -> Arguments:
    return {"cfg": config("forward"), **arguments}


def no_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(function)


# By name: the function, and its valid calls.
ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Callable[[], Arguments]]]] = {
    "attention": (
        flashsmith.attention,
        {
            "dense": lambda: forward_only(dense),
            "packed": lambda: forward_only(packed),
            "part": part,
        },
    ),
    "forward": (
        flashsmith.forward,
        {"dense": lambda: _with_forward_config(dense(o=half(2, 5, 4, 24)))},
    ),
    "attention with gradients": (
        lambda **them: flashsmith.attention(
            **them | {"q": them["q"].clone().requires_grad_() if _grows(them["q"]) else them["q"]}
        ),
        {"dense": dense, "packed": packed},
    ),
    "backward": (
        flashsmith.backward,
        {"dense": lambda: of_backward(dense), "packed": lambda: of_backward(packed)},
    ),
    "attention_with_cache": (
        no_grad(flashsmith.attention_with_cache),
        {"dense": cached, "paged": paged, "packed": packed_cached},
    ),
    "merge_attention": (flashsmith.merge_attention, {"dense": parts}),
    "sdpa": (flashsmith.sdpa, {"dense": of_sdpa}),
    "flash_attn_func": (flashsmith.flash_attn_func, {"dense": of_flash}),
    "flash_attn_varlen_func": (flashsmith.flash_attn_varlen_func, {"packed": of_flash_varlen}),
    "flash_attn_with_kvcache": (flashsmith.flash_attn_with_kvcache, {"dense": of_flash_cache}),
    "op attention": (_op("attention"), {"dense": lambda: op_arguments(dense)}),
    "op attention_backward": (_op("attention_backward"), {"dense": _backward_op_arguments}),
    "op attention_with_cache": (
        _op("attention_with_cache"),
        {"dense": lambda: op_arguments(cached)},
    ),
}


def _grows(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_leaf


# --- mistakes ------------------------------------------------------------------------------------


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """At an address that is no multiple of 16 bytes."""
    flat = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return flat.view(tensor.shape)


_OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "missing": lambda it: None,
    "a number": lambda it: 3,
    "NumPy's": lambda it: np.zeros(tuple(it.shape), np.float16),
    "fp64": lambda it: it.double(),
    "another dtype": lambda it: it.to(torch.bfloat16 if it.dtype == torch.float16 else torch.int64),
    "a rank less": lambda it: it[0],
    "a rank more": lambda it: it[None],
    "longer": lambda it: torch.cat([it, it]),
    "wider": lambda it: torch.cat([it, it], -1),
    "odd": odd,
    "strided": lambda it: torch.zeros((*it.shape, 2), dtype=it.dtype)[..., 0],
    "grown": lambda it: it.clone().requires_grad_() if it.is_floating_point() else None,
    "meta": lambda it: it.to("meta"),
    "decreasing": lambda it: it.flip(0) - 1,
    "sparse": lambda it: it.to_sparse(),
}
_OF_OPTIONS: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "0": 0,
    "1": 1,
    "True": True,
    "1e300": 1e300,
    "nan": float("nan"),
    "text": "x",
    "huge": 2**40,
    "one": (1,),
    "numbers": (1, 2),
    "negative": (-1, 0),
    "fractions": (0.5, None),
    "four": (1, 0, 1, 0),
    "array": np.arange(3),
    "object": object,
}


class _LaunchedError(Exception):
    """A call went through all its checks."""


def _spoiled(arguments: Arguments) -> Iterator[tuple[str, str, Arguments]]:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            for what, spoil in _OF_TENSORS.items():
                try:
                    bad = spoil(value)
                except (RuntimeError, IndexError):
                    continue
                yield name, what, arguments | {name: bad}
        elif isinstance(value, list):
            yield name, "none", arguments | {name: []}
            yield name, "fewer", arguments | {name: value[1:]}
            yield name, "a tensor", arguments | {name: value[0]}
            for what, spoil in _OF_TENSORS.items():
                if isinstance(value[0], torch.Tensor):
                    yield name, what, arguments | {name: [*value[:-1], spoil(value[-1])]}
        else:
            for what, bad in _OF_OPTIONS.items():
                yield name, what, arguments | {name: bad}


def outcome(function: Callable[..., Any], arguments: Arguments) -> str:
    """What is said about a call: its error, or that it was launched."""
    try:
        function(**arguments)
    except _LaunchedError:
        return "launched"
    except FlashsmithError as error:
        text = re.sub(r"0x[0-9a-f]+", "0x", str(error)).partition("\n")[0]
        return text[:240]
    except Exception as error:  # Python's or PyTorch's own text, of one version
        return type(error).__name__
    return "returned"


def refusals() -> dict[str, dict[str, str]]:
    """By call, and by argument and mistake, what is said; of a device, what differs."""
    found: dict[str, dict[str, str]] = {}

    def launched(*arguments: Any, **options: Any) -> Any:
        raise _LaunchedError

    for entry, (function, makers) in ENTRIES.items():
        for where in ("host", "device"):
            for kind, make in makers.items():
                said = found[f"{entry}, {kind}, {where}"] = {}
                if where == "host":
                    with mock.patch.object(LoadedKernels, "get", launched):
                        _note(said, function, make)
                elif entry != "sdpa":
                    with pretended_gpu():
                        _note(said, function, make)
                    before = found[f"{entry}, {kind}, host"]
                    for mistake in [it for it in said if said[it] == before[it]]:
                        del said[mistake]
    return found


def _note(
    said: dict[str, str], function: Callable[..., Any], make: Callable[[], Arguments]
) -> None:
    said["nothing"] = outcome(function, make())
    for name, what, arguments in _spoiled(make()):
        said[f"{name}: {what}"] = outcome(function, arguments)
    for missing in make():
        said[f"{missing}: left out"] = outcome(
            function, {name: it for name, it in make().items() if name != missing}
        )
    said["another: given"] = outcome(function, make() | {"causl": True})


# --- plans ---------------------------------------------------------------------------------------


def _written(launch: Launch, given: dict[int, str]) -> str:
    """What a kernel is asked for: everything of a launch but where tensors are."""
    prepared = launch.prepared
    count = 4 + 1 + prepared[4]
    names = [given.get(at, "new" if at else "-") for at in launch.addresses]
    numbers = " ".join(f"{it:.6g}" if isinstance(it, float) else str(it) for it in prepared[:count])
    return f"{launch.config} [{launch.semantics}] {numbers} | {' '.join(names)}"


def launched_calls() -> dict[str, str]:
    """By call, what is launched for it."""
    found: dict[str, str] = {}
    for name, function, arguments in _calls():
        with pretended_gpu() as gpu:
            function(**arguments)
            given = {
                it.data_ptr(): name
                for name, it in arguments.items()
                if isinstance(it, torch.Tensor) and it.numel()
            }
            first = [_written(launch, given) for launch in gpu.launches]
            gpu.launches.clear()
            function(**arguments)
            assert first == [_written(launch, given) for launch in gpu.launches], name
        found[name] = "\n".join(first)
    return found


def _shapes() -> Iterator[tuple[str, Arguments]]:
    for batch, seq_q, seq_k, heads_q, heads_k, d in (
        (2, 64, 64, 4, 4, 64),
        (1, 37, 90, 4, 2, 56),
        (3, 1, 128, 8, 1, 64),
        (2, 5, 0, 2, 2, 32),
        (0, 5, 5, 2, 2, 64),
    ):
        yield (
            f"b{batch} s{seq_q}:{seq_k} h{heads_q}:{heads_k} d{d}",
            {
                "q": half(batch, seq_q, heads_q, d),
                "k": half(batch, seq_k, heads_k, d),
                "v": half(batch, seq_k, heads_k, d),
            },
        )
    outside = {name: half(2, 4, 64, 64).transpose(1, 2) for name in "qkv"}
    yield "heads outside", outside
    lengths = {"cu_seqlens_q": whole(0, 20, 20, 64), "cu_seqlens_k": whole(0, 30, 70, 96)}
    rows = {"q": half(64, 4, 64), "k": half(96, 2, 64), "v": half(96, 2, 64)}
    limits = {"max_seqlen_q": 44, "max_seqlen_k": 40}
    yield "packed", rows | lengths | limits
    yield "packed, no limits", rows | lengths


def _options() -> Iterator[tuple[str, Arguments]]:
    yield "plain", {}
    yield "causal", {"causal": True}
    yield "window", {"window": (17, 3)}
    yield "causal window", {"window": (17, None), "causal": True}
    yield "right window", {"window": (None, 5), "softcap": 20.0}
    yield "capped, scaled", {"softcap": 20.0, "scale": 0.3, "causal": True}


def _calls() -> Iterator[tuple[str, Callable[..., Any], Arguments]]:
    forward, backward = config("forward"), config("backward")
    for shape, tensors in _shapes():
        q = tensors["q"]
        *_, heads, _ = q.shape
        rows = (heads, q.shape[0]) if q.dim() == 3 else (q.shape[0], heads, q.shape[1])
        for options, asked in _options():
            name, call = f"{shape}, {options}", tensors | asked
            yield f"attention {name}", flashsmith.attention, call | {"config": forward}
            more = {"return_lse": True, "return_row_max": True, "sinks": torch.ones(heads)}
            more |= {"out": half(*q.shape), "config": forward}
            yield f"attention {name}, everything", flashsmith.attention, call | more
            after = {"do": half(*q.shape), "o": half(*q.shape), "lse": torch.zeros(rows)}
            yield f"backward {name}", flashsmith.backward, call | after | {"config": backward}
            more = {"dlse": torch.zeros(rows), "sinks": torch.ones(heads), "config": backward}
            more |= {"do": torch.zeros(1, dtype=torch.float16).expand(q.shape)}
            more |= {"grad_dtype": "float32", "needs": (False, True, True, True)}
            yield f"backward {name}, everything", flashsmith.backward, call | after | more
            if shape != "packed, no limits":
                part = {"partial": True, "config": forward}
                yield f"attention {name}, part", flashsmith.attention, call | part
        batch = 3 if q.dim() == 3 else q.shape[0]
        ranges = {"seqused_k": whole(*[3] * batch), "k_begin": whole(*[1] * batch)}
        ranges |= {"partial": True, "config": forward}
        yield f"attention {shape}, ranges", flashsmith.attention, tensors | ranges
    for split in ("invariant", "free"):
        for options, asked in _options():
            for kind, make in (("dense", cached), ("paged", paged), ("packed", packed_cached)):
                call = make() | {"split": split, "config": config("decode")}
                for name in ("causal", "window", "softcap", "scale"):
                    call.pop(name)
                yield (
                    f"cache {kind}, {options}, {split}",
                    flashsmith.attention_with_cache,
                    (call | asked),
                )
                for name in ("out", "return_lse", "sinks"):
                    call.pop(name)
                yield (
                    f"cache {kind}, {options}, {split}, less",
                    flashsmith.attention_with_cache,
                    (call | asked),
                )
    for count in (1, 3, 8, 11):
        for dtype in ("float16", "float32", None):
            call = {
                "outs": [torch.zeros(2, 5, 4, 64) for _ in range(count)],
                "lses": [torch.zeros(2, 4, 5) for _ in range(count)],
                "dtype": dtype,
            }
            yield f"merge {count}, {dtype}", flashsmith.merge_attention, call
            yield (
                f"merge {count}, {dtype}, sinks",
                flashsmith.merge_attention,
                call | {"sinks": torch.ones(4)},
            )


def schemas() -> dict[str, str]:
    """PyTorch's ops, and the public functions' signatures, as text."""
    names = "attention attention_with_statistics attention_backward"
    names += " attention_with_cache attention_with_cache_appended"
    names += " attention_with_latent_cache attention_with_latent_cache_appended"
    ops = torch.ops.flashsmith
    found = {name: str(getattr(ops, name).default._schema) for name in names.split()}
    for name in ("attention", "attention_with_cache", "backward", "forward", "merge_attention"):
        found[f"def {name}"] = str(inspect.signature(getattr(flashsmith, name)))
    return found


def record() -> None:
    REFUSALS.write_text(_text(compact(refusals())))
    PLANS.write_text(_text({"launched": launched_calls(), "schemas": schemas()}))


def _text(record: Any) -> str:
    return json.dumps(record, indent=0, sort_keys=True) + "\n"


def compact(found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """By call and by what is said, the mistakes."""
    by_text: dict[str, dict[str, str]] = {}
    for call, said in found.items():
        texts = by_text.setdefault(call, {})
        for mistake, text in said.items():
            texts[text] = f"{texts[text]}, {mistake}" if text in texts else mistake
    return by_text


if __name__ == "__main__":
    record()
