"""A scenario's outcome: flashsmith's attention against transformers' eager and sdpa."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from builders import SIZES, Architecture, NotBuildableError, tiny_model
from inputs import candidates
from replaced_kernels import exact_kernels
from scenarios import PACKED, ROUNDED, SCENARIOS, Given, NotApplicableError, packed_alone

from flashsmith.errors import ArgumentError
from flashsmith.integrations.fallbacks import FallbackWarning, forget_warnings

# Sums in another order, through a few layers with large weights.
_CLOSE = 2e-3
_CLOSE_ROUNDED = 0.1


class Outcome(NamedTuple):
    """``kind`` is one of the words below; ``why`` says more, or ''."""

    kind: str
    why: str = ""


SERVED, PARTLY, REFUSED, PYTORCH = "served", "partly", "refused", "PyTorch"
OWN = "own attention"  # none of its attention goes through transformers' interface
UPSTREAM = "upstream"  # transformers' own two differ
NOT_RUN, WRONG = "not run", "wrong"


def sweep(
    architecture: Architecture, scenarios: Iterable[str] = tuple(SCENARIOS)
) -> dict[str, Outcome]:
    """The outcome of each scenario that applies; of 'built' alone where no model can be made, and
    of 'plain' alone where a model's attention is not of transformers' interface."""
    try:
        given = working_model(architecture)
    except NotBuildableError as error:
        return {"built": Outcome(NOT_RUN, str(error))}
    found = {}
    for name in scenarios:
        if (outcome := run_scenario(given, name)) is not None:
            found[name] = outcome
        if name == "plain" and outcome is not None and outcome.kind == OWN:
            break
    return found


def working_model(architecture: Architecture) -> Given:
    """A tiny model that runs on eager attention, and inputs that it takes.

    Raises:
        NotBuildableError: none does; with the first reason.
    """
    reasons = []
    for size in SIZES:
        try:
            model = tiny_model(architecture, size)
        except NotBuildableError as error:
            reasons.append(str(error))
            continue
        for inputs in candidates(model):
            given = Given(model, inputs)
            try:
                with torch.no_grad():
                    _quietly(given.forward)
                return given
            except Exception as error:
                reasons.append(said(error))
    raise NotBuildableError(reasons[0] if reasons else "no input that is known")


def run_scenario(given: Given, name: str) -> Outcome | None:
    """None where it does not apply to the model."""
    run = SCENARIOS[name]
    try:
        eager = _run_on("eager", given, run)
        if name in PACKED:
            eager = _run_on("eager", given, packed_alone)
    except NotApplicableError:
        return None
    except Exception as error:
        return Outcome(NOT_RUN, said(error))
    forget_warnings()
    with exact_kernels() as calls, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _set(given.model, "flashsmith")
        except Exception as error:
            return Outcome(REFUSED, f"by transformers: {_short(str(error))}")
        try:
            ours = _run_on("flashsmith", given, run, quiet=False)
        except ArgumentError as error:
            return Outcome(REFUSED, _short(str(error)))
        except Exception as error:
            return Outcome(WRONG, said(error))
    left = [str(it.message) for it in caught if it.category is FallbackWarning]
    if (difference := _off(name, ours, eager)) > _close(name) and (calls or left):
        if name in PACKED:
            return _of_leaking_sequences(
                given, name, ours, difference, mixed=_is_mixed(calls, left)
            )
        return _compared_by_sdpa(given, name, ours, eager, difference)
    why = "; ".join(sorted({_short(it.partition("to PyTorch: ")[2]) for it in left}))
    if left:
        return Outcome(PARTLY if calls else PYTORCH, why)
    return Outcome(SERVED if calls else OWN)


def _is_mixed(calls: list[Any], left: list[str]) -> bool:
    """Whether some layers have a mask as a tensor, for a kernel or for PyTorch, and others none."""
    by_tensor = [call.keys() & {"mask", "score_mod"} for call in calls]
    return bool(calls) and (bool(left) or (any(by_tensor) and not all(by_tensor)))


def _of_leaking_sequences(
    given: Given, name: str, ours: Any, difference: float, *, mixed: bool
) -> Outcome | None:
    """Of packed sequences that see each other. None where they do on eager attention without mask
    and cache: they have other ways, such as convolutions, or the model has no use for positions.

    ``mixed``: some layers are served, and others have a mask that transformers made without regard
    to the positions.
    """
    packed, alone = (_run_on("eager", given, run) for run in (SCENARIOS["packed"], packed_alone))
    if _difference(packed, alone) > _CLOSE:
        return None
    if mixed or _difference(ours, _run_on("eager", given, SCENARIOS[name])) <= _CLOSE:
        return Outcome(UPSTREAM, "the sequences see each other on eager attention, too")
    return Outcome(WRONG, f"off by {difference:.2g} of the largest value")


def _close(name: str) -> float:
    return _CLOSE_ROUNDED if name in ROUNDED else _CLOSE


def _compared_by_sdpa(given: Given, name: str, ours: Any, eager: Any, difference: float) -> Outcome:
    """Of what differs from eager: where sdpa differs in the same way, it is transformers' fault."""
    off = f"off by {difference:.2g} of the largest value"
    try:
        sdpa = _run_on("sdpa", given, SCENARIOS[name])
    except Exception:  # not every model has one
        return Outcome(WRONG, off)
    theirs = _off(name, sdpa, eager)
    if _off(name, ours, sdpa) <= _close(name) or (name in ROUNDED and difference <= 3 * theirs):
        return Outcome(UPSTREAM, "sdpa differs from eager as much")
    return Outcome(WRONG, f"{off}, sdpa by {theirs:.2g}")


def _run_on(implementation: str, given: Given, run: Any, *, quiet: bool = True) -> Any:
    _set(given.model, implementation)
    torch.manual_seed(0)
    with torch.no_grad():
        return _quietly(run, given) if quiet else run(given)


def _set(model: Any, implementation: str) -> None:
    try:
        model.set_attn_implementation(implementation)
    except ImportError:
        # gpt-oss lists the implementations that it may be set to.
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = implementation


def _quietly(function: Any, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def _off(name: str, one: Any, other: Any) -> float:
    """Of rounded values the mean, since routers of experts choose others for single tokens."""
    if name in ROUNDED and one.shape == other.shape:
        return float((one - other).abs().mean() / other.abs().mean())
    return _difference(one, other)


def _difference(one: Any, other: Any) -> float:
    """The largest, of the largest value; of different shapes, or NaN in one alone: infinite."""
    if one.shape != other.shape:
        return math.inf
    one, other = (it.detach().double().cpu() for it in (one, other))
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    one, other = (it.nan_to_num(0.0, 0.0, 0.0) for it in (one, other))
    largest = float(other.abs().max()) if other.numel() else 0.0
    return float((one - other).abs().max()) / max(largest, 1e-30) if other.numel() else 0.0


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _short(reason: str) -> str:
    """A reason without what stands behind its first statement."""
    first = reason.replace(" (said once)", "").split(";")[0]
    return textwrap.shorten(first, 100, placeholder=" ...")


def texts(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """As they are recorded."""
    return {
        scenario: f"{outcome.kind}: {outcome.why}" if outcome.why else outcome.kind
        for scenario, outcome in outcomes.items()
    }
