"""backward(do, q, k, v, o, lse): the gradients of attention(), with an automatic kernel choice."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashsmith.chooser.choice import choose_config
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig
from flashsmith.families.family import config_class_names
from flashsmith.operations.backward import BACKWARD, gradients_word
from flashsmith.printable import quoted
from flashsmith.runtime import BackwardAhead, Chooser, Gradients, cached_calls, run_backward
from flashsmith.runtime.backward_pass import backward_call
from flashsmith.runtime.bits import resolve_bits
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.tensors import Array, Dtype
from flashsmith.semantics.signature import NO_WINDOW, BackwardOptions, ForwardOptions
from flashsmith.semantics.sizes import GRADIENT_WORDS


def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool | None = None,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
    grad_dtype: Dtype | None = None,
    config: KernelConfig | None = None,
    emulate: bool = False,
) -> Gradients:
    """The gradients of ``attention(q, k, v, ...)``, which returned ``o`` and ``lse``.

    PyTorch's autograd differentiates attention() without this function; it is for loops over parts
    of the keys. o and lse may cover all keys while k and v hold only a part of the keys. The result
    is then the gradients of that part. Gradients are dense, with their input's shape and
    dtype. Rows that belong to no sequence or lie beyond max_seqlen have gradients of zero.

    Args:
        do: the gradient of o, with the shape and dtype of o and any strides; it is copied if a
            kernel cannot read them.
        q, k, v, causal, window, softcap, scale, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k: as given to attention().
        o, lse: the results of attention(..., return_lse=True).
        dlse: the gradient of lse, with the shape of lse, fp32; None means 0.
        deterministic: True requires a kernel that gives dq the same bits in every run. dk, dv and
            dsinks always have the same bits. None means True with FLASHSMITH_BITS=canonical.
            Otherwise it means PyTorch's are_deterministic_algorithms_enabled() for PyTorch's
            tensors, and False for others.
        needs: which of dq, dk, dv and dsinks to compute; the others take no memory.
        grad_dtype: 'float32' (or this dtype of PyTorch or NumPy) gives dq, dk and dv without
            rounding; None gives them the dtype of q, k and v.
        config: the kernel to use, a FlashBackwardKernelConfig; None chooses one.
        emulate: run host tensors in the emulator even when the estimated time is above 60 s.

    Returns:
        Gradients(dq, dk, dv, dsinks), in the framework and on the device of q. Gradients that are
        not in ``needs`` are None, and dsinks is None without sinks. dsinks has the shape (heads_q,)
        and the dtype of the sinks, or fp32 with grad_dtype.

    Raises:
        ArgumentError: an argument is invalid, or no kernel serves these tensors.
        The other errors of ``flashsmith.forward``.
    """
    check_backward_config("config", config)
    repeatable = resolve_deterministic(deterministic, q)
    forward = ForwardOptions(
        *(causal, window, softcap, scale, sinks, cu_seqlens_q, cu_seqlens_k),
        *(max_seqlen_q, max_seqlen_k),
    )
    options = BackwardOptions(forward, dlse, repeatable, needs, grad_dtype)
    chosen = config or CHOOSERS[repeatable]
    return run_backward(chosen, (do, q, k, v, o, lse), options, emulate)


def remember_backward(arguments: tuple[Any, ...], names: tuple[Any, ...]) -> None:
    """Remembers a call that backward() has just served, so that run_repeated can serve equivalent
    calls.

    ``arguments`` are the six tensors, followed by the values of keywords. ``names`` has a word for
    this function, whether gradients are enabled, and the names of these keywords.
    """
    groups = cached_calls.repeated
    keywords = dict(zip(names[2:], arguments[6:], strict=True))
    deterministic = keywords.pop("deterministic", None)
    if deterministic is None:  # A setting of PyTorch may decide
        return
    others = {name: keywords.pop(name, None) for name in ("dlse", "grad_dtype", "config")}
    needs, emulate = keywords.pop("needs", (True,) * 4), keywords.pop("emulate", False)
    forward = ForwardOptions(**keywords)
    options = BackwardOptions(
        forward, others["dlse"], bool(deterministic), needs, others["grad_dtype"]
    )
    chosen = others["config"] or CHOOSERS[bool(deterministic)]
    asked = backward_call(chosen, arguments[:6], options, emulate)
    _, call = cached_calls.find(asked)
    if asked is not None and call is not None:
        cached_calls.remember_repeated(groups, arguments, names, asked.tensors, call.run)


def backward_ahead(
    config: KernelConfig | None, deterministic: bool, dq: bool, dk: bool, dv: bool
) -> BackwardAhead:
    """Returns a description of the backward pass that will follow a forward pass. ``dq``, ``dk``
    and ``dv`` say which gradients the backward pass computes."""
    gradients = gradients_word(dq, dk, dv)
    if config is None:
        return _AHEAD[deterministic, gradients]
    return BackwardAhead(config, deterministic, gradients)


def check_backward_config(argument: str, config: KernelConfig | None) -> None:
    """Raises ArgumentError unless ``config`` is None or a config of the backward pass."""
    check_config_for(BACKWARD.name, argument, config)


def check_config_for(operation: str, argument: str, config: Any) -> None:
    """Raises ArgumentError unless ``config`` is None or a config of the operation."""
    if config is None:
        return
    is_config = isinstance(config, KernelConfig)
    # The call itself checks a config whose family is not registered.
    if is_config and (not hasattr(config, "family") or config.family.operation == operation):
        return
    raise ArgumentError(
        f"{argument}: got {config if is_config else type(config).__name__}; give a "
        f"{' or a '.join(config_class_names(operation))}, or None to have one chosen"
    )


def resolve_deterministic(deterministic: Any, q: Any, bits: Any = None) -> bool:
    """Returns whether gradients must have the same bits in every run.

    If ``deterministic`` is None, this is required if the forward pass has canonical ``bits``, or if
    q is a PyTorch tensor and PyTorch is set to be deterministic.

    Raises ArgumentError unless ``deterministic`` is True, False or None.
    """
    if deterministic is not None:
        check_deterministic_flag(deterministic)
        return bool(deterministic)
    if resolve_bits(bits):
        return True
    framework = framework_of(type(q))
    return framework is not None and framework.is_deterministic()


def check_deterministic_flag(deterministic: Any) -> None:
    """Raises ArgumentError unless ``deterministic`` is True, False or None."""
    if not (deterministic is None or deterministic is True or deterministic is False):
        raise ArgumentError(
            f"deterministic={quoted(deterministic)}: allowed are True, False and None, which asks "
            "PyTorch"
        )


# For each value of `deterministic`, the function that chooses a kernel.
CHOOSERS: dict[bool, Chooser] = {
    False: choose_config,
    True: partial(choose_config, deterministic=True),
}
_AHEAD = {
    (flag, word): BackwardAhead(chooser, flag, word)
    for flag, chooser in CHOOSERS.items()
    for word in ("", *GRADIENT_WORDS)
}
