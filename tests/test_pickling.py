"""Public functions and classes, and what calls return, are pickled, copied and printed.

Spawned workers, torch.save, functools.partial and process pools do that with them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import multiprocessing
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest
import shared_kernels

import flashsmith
from flashsmith import errors, runtime
from flashsmith.families import DType, Semantics, get_kernel_configs
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.operations import Problem
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.safe_json import UnusableTextError

CFG = parse("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax")
UNEVEN = Semantics(uneven=True)
shared_kernels.want([CFG], UNEVEN)

# Beside flashsmith.__all__: what the docs show elsewhere.
FACADES: dict[str, tuple[str, ...]] = {
    "flashsmith.parallel": ("attention", "positions", "shard", "unshard"),
    "flashsmith.runtime": tuple(runtime.__all__),
    "flashsmith.integrations.fallbacks": ("FallbackWarning", "Reason", "fallback_count"),
    "flashsmith.integrations.flash_registry": ("register",),
    "flashsmith.integrations.page_tables": ("PagedLengths", "from_flashinfer"),
    "flashsmith.integrations.transformers": ("register", "flashsmith_attention_forward"),
    "flashsmith.integrations.transformers_masks": ("flashsmith_mask",),
}
NEED_TORCH = ("sdpa", "flashsmith.parallel", "flash_registry", "transformers")
NAMES = [
    pytest.param(
        module,
        name,
        marks=[pytest.mark.torch] if any(it in f"{module}.{name}" for it in NEED_TORCH) else [],
    )
    for module, names in {"flashsmith": tuple(flashsmith.__all__), **FACADES}.items()
    for name in names
]
ADDRESS = re.compile("0x[0-9a-f]{6,}")


def public(module: str, name: str) -> Any:
    if "transformers" in module:
        pytest.importorskip("transformers", reason="needs transformers: it is not installed")
    return getattr(importlib.import_module(module), name)


def copies(value: Any) -> Iterator[Any]:
    """By pickle's every protocol, and by copy."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(value, protocol))
    yield copy.copy(value)
    yield copy.deepcopy(value)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_names_are_pickled_by_reference(module: str, name: str) -> None:
    it = public(module, name)
    # Python 3.10 takes Callable[...] for a class.
    has_name = get_origin(it) is None and (inspect.isclass(it) or inspect.isroutine(it))
    for found in copies(it):
        if has_name:
            assert found is it
        else:
            assert found == it
    if has_name:
        # What help() and tracebacks say, and a worker imports.
        assert it.__qualname__ in (name, "forget_cached_launches")
        assert getattr(importlib.import_module(it.__module__), it.__qualname__) is it
        assert it.__doc__


FUNCTIONS = [
    name for name in flashsmith.__all__ if name.islower() and not name.startswith(("_", "sdpa"))
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_partial_functions(name: str) -> None:
    partial = functools.partial(getattr(flashsmith, name), causal=True)
    for found in copies(partial):
        assert (found.func, found.keywords) == (partial.func, partial.keywords)


def _instances() -> Iterator[Any]:
    of_others = ("backward", "decode", "latent", "latent-mma")
    for kernels in ("prog", "hopper", "hopper-backward", "hopper-dq", *of_others):
        yield get_kernel_configs(kernels)[0]
    yield from DType
    yield Semantics("window", softcap=True)
    yield Problem.parse("causal b2 s64 h4:2 d64 fp16")
    yield flashsmith.device_spec("h100")
    for words in ("b1 s64 h1 d64 fp16", "backward causal b1 s64 h1 d64 bf16"):
        yield flashsmith.choose(words, flashsmith.device_spec("h100"))
    yield runtime.Launches(gpu=3, emulator=2)
    yield importlib.import_module("flashsmith.integrations.fallbacks").Reason("query", "why")


@pytest.mark.parametrize("value", [*_instances()], ids=lambda value: type(value).__name__)
def test_values_equal_their_copies_and_print_no_addresses(value: Any) -> None:
    for found in copies(value):
        assert type(found) is type(value)
        assert found == value
        assert (repr(found), str(found)) == (repr(value), str(value))
    assert not ADDRESS.search(repr(value))
    assert repr(value).startswith((f"{type(value).__name__}(", f"<{type(value).__name__}."))


@pytest.mark.parametrize("kind", ["Gradients", "ForwardResult", "OperationResult", "PagedLengths"])
def test_results_keep_their_names(kind: str) -> None:
    home = runtime if hasattr(runtime, kind) else importlib.import_module(
        "flashsmith.integrations.page_tables"
    )  # fmt: skip
    result = getattr(home, kind)(*map(np.float32, range(len(getattr(home, kind)._fields))))
    for found in copies(result):
        assert type(found) is type(result)
        assert found == result
    assert repr(result).startswith(f"{kind}({result._fields[0]}=")


def test_errors_arrive_as_they_were_raised() -> None:
    kinds = [it for it in vars(errors).values() if inspect.isclass(it)]
    assert len(kinds) > 15
    for kind in (*kinds, UnusableTextError):
        error = kind("q: got \x1b[31m, allowed are arrays")
        error.place = "line 3"
        for found in copies(error):
            assert type(found) is kind
            assert (found.args, str(found), found.place) == (error.args, str(error), "line 3")


def test_a_spawned_worker_calls_what_it_is_sent() -> None:
    """By functions that a worker can import: this file is no module to it. An executor, because a
    Pool whose worker cannot read a task waits for ever."""
    shared_kernels.load([CFG], UNEVEN)
    q = np.random.default_rng(0).standard_normal((1, 9, 1, 64), np.float32).astype(np.float16)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as workers:
        sent_back = workers.submit(copy.copy, flashsmith.attention)
        output = workers.submit(functools.partial(flashsmith.attention, config=CFG), q, q, q)
        assert sent_back.result() is flashsmith.attention
        np.testing.assert_array_equal(output.result(), flashsmith.attention(q, q, q, config=CFG))


def test_the_plan_of_a_launch() -> None:
    shared_kernels.load([CFG], UNEVEN)
    problem, device = Problem.parse("b1 s9 h1 d64 fp16"), flashsmith.device_spec("a100")
    plan = flashsmith.plan_forward(CFG, problem, device)
    assert all(found == plan for found in copies(plan))
    assert not ADDRESS.search(repr(plan))


@pytest.mark.torch
def test_a_module_that_holds_functions_is_saved_and_copied(tmp_path: Path) -> None:
    import torch

    class Held(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.functions = [getattr(flashsmith, name) for name in FUNCTIONS]
            self.attend = functools.partial(flashsmith.attention, causal=True, config=CFG)

    # Pickle looks classes up in their modules.
    globals()["Held"] = Held
    Held.__qualname__ = "Held"
    held = Held()
    torch.save(held, tmp_path / "held.pt")
    for found in (torch.load(tmp_path / "held.pt", weights_only=False), *copies(held)):
        assert found.functions == held.functions
        assert (found.attend.func, found.attend.keywords) == (
            held.attend.func,
            held.attend.keywords,
        )


def test_an_array_on_a_gpu_is_copied_with_its_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two objects would free one address."""
    contents = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = DeviceArray.__new__(DeviceArray)
    array.shape, array.dtype, array.ordinal, array.address = (2, 3), contents.dtype, 1, 0xABC
    monkeypatch.setattr(DeviceArray, "to_host", lambda self: contents)
    made: list[Any] = []

    def from_host(_: type, *given: Any) -> Any:
        made.append(given)
        return array

    monkeypatch.setattr(DeviceArray, "from_host", classmethod(from_host))
    assert all(found is array for found in copies(array))
    assert len(made) == pickle.HIGHEST_PROTOCOL + 3
    for host, ordinal in made:
        np.testing.assert_array_equal(host, contents)
        assert ordinal == 1
