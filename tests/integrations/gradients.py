"""Gradients of this folder's tests: the rule that judges them, and models whose own they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def assert_within_twice(
    ours: Sequence[Any], exact: Sequence[Any], rounded: Sequence[Any], names: Sequence[str] = ()
) -> None:
    """Each of our gradients is at most twice as far from the exact one as honest arithmetic of the
    same precision, in the norm of the error and in its largest element."""
    assert len(ours) == len(exact) == len(rounded) > 0
    for index, (mine, right, honest) in enumerate(zip(ours, exact, rounded, strict=True)):
        name = names[index] if names else str(index)
        assert mine is not None, f"{name} has no gradient"
        right = right.double()
        error, allowed = mine.double() - right, honest.double() - right
        slack = 1e-5 * max(1.0, float(right.abs().max()))
        assert error.abs().max() <= 2 * allowed.abs().max() + slack, name
        assert error.norm() <= 2 * allowed.norm() + slack * error.numel() ** 0.5, name


def parameter_gradients(model: Any, loss: Callable[[Any], Any]) -> Mapping[str, Any]:
    """The gradients of loss(model) with respect to the parameters that have one, by name."""
    model.zero_grad()
    loss(model).backward()
    gradients = ((name, weight.grad) for name, weight in model.named_parameters())
    return {name: gradient.clone() for name, gradient in gradients if gradient is not None}
