"""Over a thousand calls with one mistake each: an error that names the argument, and no launch."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from invalid_calls import Arguments, InvalidCall, config_for, invalid_calls, valid_calls

from flashsmith.chooser import attention
from flashsmith.errors import FlashsmithError
from flashsmith.families import DType
from flashsmith.runtime import OperationResult, forward, forward_timed
from flashsmith.runtime.prepared_call import PreparedCall

forward_pass = importlib.import_module("flashsmith.runtime.forward_pass")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where a call would have run; nothing is built, and nothing runs."""
    reached: list[str] = []
    monkeypatch.setattr(forward_pass, "kernel_for", lambda *arguments: object())

    def run(prepared: PreparedCall, *_: Any) -> OperationResult:
        reached.append("emulator" if prepared.launch is None else "gpu")
        return OperationResult(prepared.outputs, None, None)

    monkeypatch.setattr(PreparedCall, "run", run)
    return reached


def call_forward(arguments: Arguments) -> Any:
    return forward(*positional(arguments), **keywords(arguments))


def call_forward_timed(arguments: Arguments) -> Any:
    return forward_timed(*positional(arguments), **keywords(arguments))


POSITIONAL = ("cfg", "q", "k", "v", "o")


def positional(arguments: Arguments) -> list[Any]:
    return [arguments[name] for name in POSITIONAL]


def keywords(arguments: Arguments) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in POSITIONAL}


def call_attention(arguments: Arguments) -> Any:
    cfg, q, k, v, o = positional(arguments)
    return attention(q, k, v, out=o, config=cfg, **keywords(arguments))


# By function, how it calls what others call differently.
Call = Callable[[Arguments], Any]
ENTRIES: dict[str, tuple[Call, dict[str, str]]] = {
    "forward": (call_forward, {}),
    "forward_timed": (call_forward_timed, {}),
    "attention": (call_attention, {"o": "out", "cfg": "config"}),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_calls_are_valid_but_for_the_mistake(entry: str, launches: list[str]) -> None:
    call, _ = ENTRIES[entry]
    for name, arguments in valid_calls():
        launches.clear()
        dtype = DType.FP16 if "FP16" in name else DType.BF16
        call({"cfg": config_for(dtype)} | arguments)
        assert launches == ["emulator"], name


def complaints(entry: str, bad: InvalidCall, launches: list[str]) -> Iterator[str]:
    """What is wrong with how a call is refused."""
    call, names = ENTRIES[entry]
    named = names.get(bad.argument, bad.argument)
    place = f"{entry}, {bad.argument}, {bad.what}"
    try:
        call(bad.arguments)
    except FlashsmithError as error:
        said = str(error)
        if not said.replace("\n", "").isprintable() or len(said) > 2000:
            yield f"{place}: says {said[:200]!r}"
        # A config's error is named by what it is, or by the tensors it does not fit.
        if bad.argument != "cfg" and not re.search(rf"\b{named}\b", str(error)):
            yield f"{place}: does not name {named}: {error}"
    except Exception as error:
        yield f"{place}: {type(error).__name__}, which is no error of ours: {error}"
    else:
        yield f"{place}: was accepted"
    if launches:
        yield f"{place}: reached the {launches.pop()}"


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_mistake_is_an_error_that_names_the_argument(entry: str, launches: list[str]) -> None:
    calls = list(invalid_calls())
    assert len(calls) >= 1000
    per_argument = Counter(bad.argument for bad in calls)
    assert len(per_argument) == 17
    assert min(per_argument.values()) >= 50
    wrong = [line for bad in calls for line in complaints(entry, bad, launches)]
    assert not wrong, f"{len(wrong)} of {len(calls)}:\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("entry", ENTRIES)
def test_unknown_keywords_are_refused(entry: str, launches: list[str]) -> None:
    call, _ = ENTRIES[entry]
    _, arguments = next(valid_calls())
    for name in ("dropout_p", "is_causal", "attn_mask", "window_size", "Causal", "stream"):
        with pytest.raises(TypeError, match=name):
            call({"cfg": config_for(DType.FP16)} | arguments | {name: None})
    assert launches == []


@pytest.mark.torch
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_only_pytorch_tensors_can_be(entry: str, launches: list[str]) -> None:
    """Another framework's tensor among them, gradients, layouts, devices."""
    import torch

    damages: dict[str, Callable[[Any], Any]] = {
        "NumPy's": lambda tensor: tensor.numpy(),
        "requiring grad": lambda tensor: tensor.clone().requires_grad_(),
        "sparse": lambda tensor: tensor.to_sparse(),
        "nowhere": lambda tensor: tensor.to("meta"),
        "a parameter": lambda tensor: torch.nn.Parameter(tensor.clone()),
        "float8": lambda tensor: tensor.to(torch.float8_e5m2),
        "its size": lambda tensor: tensor.shape,
    }
    calls = []
    for name, arguments in valid_calls():
        if "FP16" not in name:
            continue
        whole = {"cfg": config_for(DType.FP16)} | {
            key: torch.from_numpy(value) if hasattr(value, "dtype") else value
            for key, value in arguments.items()
        }
        vectors = [key for key in whole if key.startswith(("cu_seqlens", "sinks"))]
        for argument, (what, damage) in product(("q", "k", "v", "o", *vectors), damages.items()):
            if argument.startswith("cu_seqlens") and what in ("requiring grad", "a parameter"):
                continue  # PyTorch refuses gradients of integers itself
            bad = {**whole, argument: damage(whole[argument])}
            calls.append(InvalidCall(argument, f"{name}: {what}", bad))
    wrong = [line for bad in calls for line in complaints(entry, bad, launches)]
    assert len(calls) > 200
    assert not wrong, f"{len(wrong)} of {len(calls)}:\n" + "\n".join(wrong[:40])
