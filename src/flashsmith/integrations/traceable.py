"""The public attention(), attention_with_cache() and backward().

Eager calls go straight to the kernels. Traced calls become PyTorch custom ops, which a compiler can
put into a graph. attention() with gradients becomes an autograd function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from flashsmith import chooser
from flashsmith.errors import ArgumentError
from flashsmith.runtime import cached_calls
from flashsmith.runtime.backward_pass import Gradients
from flashsmith.runtime.cached_calls import run_repeated
from flashsmith.runtime.option_values import in_dtype, is_16_bits, plain_options

# The torch module, once the process has imported it. Calls read this variable instead of
# sys.modules, because Dynamo iterates over every dictionary that traced code reads, and another
# thread may change sys.modules by an import.
_torch: Any = sys.modules.get("torch")


def is_tracing() -> bool:
    """Whether torch.compile or torch.export is running the caller; never imports torch."""
    torch = _torch or _find_torch()
    tracing: bool = torch is not None and torch.compiler.is_compiling()
    return tracing


def _find_torch() -> Any:
    global _torch
    _torch = sys.modules.get("torch")
    return _torch


# The function pytorch_state.is_direct. It is imported when a call first needs it, because its
# module imports torch.
_is_direct: Any = None


def may_repeat() -> bool:
    """Whether run_repeated may serve this call, if its tensors are PyTorch's."""
    if _is_direct is not None:
        return bool(_is_direct())
    if is_tracing() or _torch is None:
        return False
    return bool(_find_is_direct()())


def _find_is_direct() -> Any:
    global _is_direct
    from flashsmith.integrations.pytorch_state import is_direct

    _is_direct = is_direct
    return is_direct


# Imported by the first call with gradients. An import statement in every call would take the time
# of a tensor allocation.
_with_gradients: Any = None


def _find_with_gradients() -> Any:
    global _with_gradients
    from flashsmith.integrations.differentiable_calls import differentiable_attention

    _with_gradients = differentiable_attention
    return _with_gradients


F = TypeVar("F", bound=Callable[..., Any])


def without_torchscript(function: F) -> F:
    """Marks the function so that torch.jit.script raises an error with advice instead of compiling
    the function's source."""
    refusal = (
        f"flashsmith.{function.__name__}() launches its kernels from Python, which TorchScript "
        "cannot run; use torch.compile or torch.export, or call PyTorch's function there"
    )
    # By this attribute PyTorch marks those of its functions that TorchScript does not support.
    setattr(function, "__script_unsupported", refusal)
    return function


def _documented_as(documented: Callable[..., Any]) -> Callable[[F], F]:
    """Does the same as functools.wraps, but leaves __module__ unchanged: functions are pickled by
    module and name, and the documented functions, in another module, have the same names."""
    assigned = [it for it in functools.WRAPPER_ASSIGNMENTS if it != "__module__"]

    def wrap(function: F) -> F:
        functools.update_wrapper(function, documented, assigned)
        return without_torchscript(function)

    return wrap


@_documented_as(chooser.attention)
def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    arguments: Any = None
    if may_repeat():
        arguments, names = (q, k, v, *keywords.values()), tuple(keywords)
        outputs = run_repeated(arguments, names)
        if outputs is not None:
            return outputs
    if "partial" in keywords or "seqused_k" in keywords or "k_begin" in keywords:
        return _attention_to_parts(q, k, v, **keywords)
    if not _FUNCTIONS.isdisjoint(keywords):
        return _attention_with_functions(q, k, v, keywords)
    if is_tracing():
        # Imported only while tracing, when torch is already imported.
        from flashsmith.integrations.traced_attention import attention_by_op

        return attention_by_op(q, k, v, **_traced_options(keywords))
    torch = _torch
    if torch is not None and isinstance(q, torch.Tensor):
        looked_at = torch._C._len_torch_dispatch_stack()
        # Calls under torch.func's transforms or with dual numbers go to autograd, even if autograd
        # only refuses them.
        transformed = (
            torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
        )
        if torch._C._is_any_autocast_enabled():
            q, k, v = _cast(q, k, v)
        plain = (_traced_options if looked_at else plain_options)(keywords)
        if transformed or (torch.is_grad_enabled() and _requires_grad(q, k, v, plain.get("sinks"))):
            found, remember = (_with_gradients or _find_with_gradients())(q, k, v, **plain)
        elif looked_at:
            from flashsmith.integrations.traced_attention import attention_by_op

            return attention_by_op(q, k, v, **plain)
        else:
            found, remember = chooser.attention(q, k, v, **plain), chooser.remember_attention
        if arguments is not None and plain is keywords:
            remember(arguments, names)
        return found
    keywords = plain_options(keywords)
    if "jax" in sys.modules and _is_traced_by_jax(q, k, v, keywords.get("sinks")):
        from flashsmith.integrations import jax_gradients

        return jax_gradients.differentiable_attention(q, k, v, **keywords)
    return chooser.attention(q, k, v, **keywords)


_FUNCTIONS = frozenset(("score_mod", "mask_mod", "mask", "bias", "positions"))


def _attention_with_functions(q: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Any:
    """Computes attention() with a score or mask function."""
    given = {name: keywords[name] for name in _FUNCTIONS if keywords.get(name) is not None}
    others = {name: value for name, value in keywords.items() if name not in _FUNCTIONS}
    if given.keys() <= {"positions"}:
        return attention(q, k, v, **others)
    torch = _torch or _find_torch()
    if torch is not None and isinstance(q, torch.Tensor):
        if is_tracing():
            from flashsmith.integrations.traced_functions import attention_by_program, outside

            found = attention_by_program(q, k, v, given, _traced_options(others))
            if found is None:
                return outside(_attention_with_functions, q, k, v, keywords)
            return found
        q, k, v = _cast(q, k, v)
        if torch.is_grad_enabled():
            from flashsmith.integrations.program_gradients import attention_with_functions

            return attention_with_functions(q, k, v, given, plain_options(others), attention)
    elif "jax" in sys.modules and isinstance(q, sys.modules["jax"].Array):
        from flashsmith.integrations import jax_gradients

        return jax_gradients.attention_with_functions(q, k, v, given, plain_options(others))
    return chooser.attention(q, k, v, **given, **plain_options(others))


_NO_GRADIENTS_OF_PARTS = "parts have no gradients of their own"


def _attention_to_parts(
    q: Any,
    k: Any,
    v: Any,
    *,
    partial: Any = False,
    seqused_k: Any = None,
    k_begin: Any = None,
    **keywords: Any,
) -> Any:
    """Computes attention() with partial, seqused_k or k_begin; such calls cannot be traced and have
    no gradients.

    Under torch.compile such a call is a graph break. If all three arguments have their defaults,
    the call is an ordinary call to attention().
    """
    if partial is False and seqused_k is None and k_begin is None:
        return attention(q, k, v, **keywords)
    torch = _torch or _find_torch()
    if torch is not None and isinstance(q, torch.Tensor):
        if torch.is_grad_enabled():
            # backward() takes no functions.
            instead = ", and take them from flashsmith.backward() with the merged o and lse"
            instead = instead if _FUNCTIONS.isdisjoint(keywords) else ""
            for name, tensor in (("q", q), ("k", k), ("v", v)):
                if getattr(tensor, "requires_grad", False):
                    raise ArgumentError(
                        f"partial: {name} requires grad, and {_NO_GRADIENTS_OF_PARTS}; call under "
                        f"torch.no_grad(){instead}"
                    )
        if is_tracing():
            return torch.compiler.disable(_attention_to_parts)(
                q, k, v, partial=partial, seqused_k=seqused_k, k_begin=k_begin, **keywords
            )
        q, k, v = _cast(q, k, v)
    elif "jax" in sys.modules:
        for name, array in (("q", q), ("k", k), ("v", v)):
            if _is_traced_by_jax(array):
                raise ArgumentError(
                    f"partial: {name} is a tracer of JAX, and {_NO_GRADIENTS_OF_PARTS}; call "
                    "outside of JAX's transformations, and take them from flashsmith.backward()"
                )
    keywords |= {"partial": partial, "seqused_k": seqused_k, "k_begin": k_begin}
    if not _FUNCTIONS.isdisjoint(keywords):
        return _parts_with_functions(q, k, v, keywords)
    arguments, names = (q, k, v, *keywords.values()), tuple(keywords)
    outputs = run_repeated(arguments, names)
    if outputs is None:
        plain = plain_options(keywords)
        outputs = chooser.attention(q, k, v, **plain)
        if plain is keywords:
            chooser.remember_attention(arguments, names)
    return outputs


def _parts_with_functions(q: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Any:
    """Computes attention() to a part of the keys, with a score or mask function."""
    torch = _torch
    if torch is not None and isinstance(q, torch.Tensor) and torch.is_grad_enabled():
        from flashsmith.integrations.program_gradients import tensors_with_gradients

        for tensor in tensors_with_gradients(q, k, keywords):
            raise ArgumentError(
                f"partial: a tensor of shape {tuple(tensor.shape)} that a function reads requires "
                f"grad, and {_NO_GRADIENTS_OF_PARTS}; call under torch.no_grad(), or detach it"
            )
    return chooser.attention(q, k, v, **plain_options(keywords))


def _cast(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Casts q, k and v to autocast's dtype if autocast is enabled."""
    if not _torch._C._is_any_autocast_enabled():
        return q, k, v
    from flashsmith.integrations.pytorch_state import under_autocast

    return under_autocast(q, k, v)


@_documented_as(chooser.merge_attention)
def merge_attention(outs: Any, lses: Any, sinks: Any = None, **keywords: Any) -> Any:
    if sinks is not None and is_16_bits(sinks):
        sinks = in_dtype(sinks, "float32")
    if is_tracing():
        # This is a graph break, as in _attention_to_parts().
        return _torch.compiler.disable(chooser.merge_attention)(outs, lses, sinks, **keywords)
    return chooser.merge_attention(outs, lses, sinks, **keywords)


@_documented_as(chooser.write_slots)
def write_slots(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, **keywords: Any
) -> None:
    if is_tracing():
        from flashsmith.integrations.torch_decode import write_slots_by_op

        write_slots_by_op(k, v, k_cache, v_cache, slot_mapping, **keywords)
        return
    tensors = k, v, k_cache, v_cache, slot_mapping
    if run_repeated((*tensors, *keywords.values()), ("write_slots", *keywords)) is None:
        chooser.write_slots(*tensors, **keywords)


def _traced_options(keywords: dict[str, Any]) -> dict[str, Any]:
    """Does the same as plain_options(), for a traced call, in which tensors do not have values
    yet."""
    for name in ("scale", "softcap", "window"):
        if isinstance(keywords.get(name), _torch.Tensor):
            raise ArgumentError(
                f"{name}: is a tensor, whose numbers are not known while the call is traced; give "
                f"{'a pair of numbers' if name == 'window' else 'a number'}, read before the call"
            )
    sinks: Any = keywords.get("sinks")
    return {**keywords, "sinks": sinks.float()} if is_16_bits(sinks) else keywords


def _is_traced_by_jax(*tensors: Any) -> bool:
    tracer = sys.modules["jax"].core.Tracer
    return any(isinstance(tensor, tracer) for tensor in tensors)


def _requires_grad(q: Any, k: Any, v: Any, sinks: Any) -> bool:
    try:
        return bool(
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sinks is not None and sinks.requires_grad)
        )
    except AttributeError:
        return False  # an argument is not a tensor: the checks raise the error


# The function that run_repeated calls for a repeated call, and the tensors that it passes to this
# function.
Repeated = tuple[cached_calls.Run, tuple[Any, ...]]


def repeated_attention(*tensors: Any, **keywords: Any) -> Repeated | None:
    """Returns what run_repeated would run for a call to attention() with these arguments; None if
    run_repeated would not serve the call."""
    return _repeated((*tensors, *keywords.values()), tuple(keywords))


def repeated_backward(*tensors: Any, **keywords: Any) -> Repeated | None:
    """Returns what run_repeated would run for a call to backward() with these arguments; None if
    run_repeated would not serve the call."""
    return _repeated((*tensors, *keywords.values()), _backward_names(keywords))


def _repeated(arguments: tuple[Any, ...], names: Any) -> Repeated | None:
    found = cached_calls.find_repeated(cached_calls.repeated, arguments, names)
    return None if found is None else (found.run, found.tensors_of(arguments))


def _backward_names(keywords: dict[str, Any]) -> tuple[Any, ...]:
    return "backward by arguments", _torch.is_grad_enabled(), *keywords


@_documented_as(chooser.backward)
def backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **keywords: Any) -> Any:
    if is_tracing() or _is_looked_at(q):
        from flashsmith.integrations.traced_attention import backward_by_op

        found = backward_by_op(do, q, k, v, o, lse, **_traced_options(keywords))
    else:
        torch = _torch
        arguments: Any = None
        if torch is not None and isinstance(q, torch.Tensor):
            arguments = do, q, k, v, o, lse, *keywords.values()
            names = _backward_names(keywords)
            outputs = run_repeated(arguments, names)
            if outputs is not None:
                return Gradients(*outputs)
        plain = plain_options(keywords)
        found = chooser.backward(do, q, k, v, o, lse, **plain)
        if arguments is not None and plain is keywords and not is_16_bits(keywords.get("sinks")):
            chooser.remember_backward(arguments, names)
    sinks: Any = keywords.get("sinks")
    if found.dsinks is None or not is_16_bits(sinks) or keywords.get("grad_dtype") is not None:
        return found
    return found._replace(dsinks=in_dtype(found.dsinks, sinks.dtype))


@_documented_as(chooser.attention_with_cache)
def attention_with_cache(q: Any, k_cache: Any, v_cache: Any = None, **keywords: Any) -> Any:
    if keywords.get("v_width") is not None:
        return _over_latent_cache(q, k_cache, v_cache, keywords)
    if not _FUNCTIONS_OVER_CACHE.isdisjoint(keywords):
        return _over_cache_with_functions(q, k_cache, v_cache, keywords)
    torch = _torch
    if is_tracing() or (
        torch is not None
        and isinstance(q, torch.Tensor)
        and (
            torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
        )
    ):
        from flashsmith.integrations.torch_decode import decode_by_op

        return decode_by_op(q, k_cache, v_cache, **_traced_options(keywords))
    if torch is not None and torch._C._is_any_autocast_enabled() and isinstance(q, torch.Tensor):
        q, keywords = _cast_over(k_cache, q, keywords)
    arguments, names = (q, k_cache, v_cache, *keywords.values()), tuple(keywords)
    outputs = run_repeated(arguments, names)
    if outputs is None:
        plain = plain_options(keywords)
        outputs = chooser.attention_with_cache(q, k_cache, v_cache, **plain)
        if plain is keywords:
            chooser.remember_attention_with_cache(arguments, names)
    return outputs


_FUNCTIONS_OVER_CACHE = _FUNCTIONS - {"positions"}


def _over_cache_with_functions(q: Any, k_cache: Any, v_cache: Any, keywords: dict[str, Any]) -> Any:
    """Computes attention_with_cache() with a score or mask function."""
    given = {it: keywords[it] for it in _FUNCTIONS_OVER_CACHE if keywords.get(it) is not None}
    others = {it: value for it, value in keywords.items() if it not in _FUNCTIONS_OVER_CACHE}
    if not given:
        return attention_with_cache(q, k_cache, v_cache, **others)
    torch = _torch or _find_torch()
    if torch is not None and isinstance(q, torch.Tensor):
        if is_tracing():
            from flashsmith.integrations.traced_functions import outside, over_cache_by_program

            found = over_cache_by_program(q, k_cache, v_cache, given, _traced_options(others))
            if found is None:
                return outside(_over_cache_with_functions, q, k_cache, v_cache, keywords)
            return found
        if torch._C._is_any_autocast_enabled():
            q, others = _cast_over(k_cache, q, others)
    return chooser.attention_with_cache(q, k_cache, v_cache, **given, **plain_options(others))


def _cast_over(k_cache: Any, q: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns q and the keywords. If autocast casts to the cache's dtype, q, k and v are cast to
    this dtype."""
    from flashsmith.integrations.pytorch_state import under_autocast_over

    q, *new = under_autocast_over(k_cache, q, keywords.get("k"), keywords.get("v"))
    cast = dict(zip(("k", "v"), new, strict=True))
    return q, keywords | {name: it for name, it in cast.items() if name in keywords}


def _over_latent_cache(q: Any, k_cache: Any, v_cache: Any, keywords: dict[str, Any]) -> Any:
    """Computes attention_with_cache() over a latent cache."""
    if any(keywords.get(it) is not None for it in _FUNCTIONS_OVER_CACHE):
        return _over_cache_with_functions(q, k_cache, v_cache, keywords)
    if is_tracing() or _is_looked_at(q):
        from flashsmith.integrations.torch_latent_decode import latent_by_op

        return latent_by_op(q, k_cache, v_cache, **_traced_options(keywords))
    torch = _torch
    if torch is not None and torch._C._is_any_autocast_enabled() and isinstance(q, torch.Tensor):
        from flashsmith.integrations.pytorch_state import under_autocast_over

        q, k, _ = under_autocast_over(k_cache, q, keywords.get("k"), None)
        keywords = {**keywords, "k": k}
    return chooser.attention_with_cache(q, k_cache, v_cache, **plain_options(keywords))


def _is_looked_at(q: Any) -> bool:
    """Whether a dispatch mode, a transform of torch.func or forward-mode differentiation intercepts
    operations on the tensor."""
    torch = _torch
    return (
        torch is not None
        and bool(
            torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
        )
        and isinstance(q, torch.Tensor)  # last, because it is seldom reached
    )
