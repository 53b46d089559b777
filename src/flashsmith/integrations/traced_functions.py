"""Turns a call to attention with score and mask functions into a call to an op, for PyTorch's
tracers.

The functions are traced by flashsmith, outside of the compiler's graph. The tensors and numbers
that they capture become the op's inputs. Only calls under a tracer import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from flashsmith.chooser.functions import (
    CacheSizes,
    ScoreSizes,
    check_broadcast,
    lengths_for_blocks,
    sizes_over_cache,
)
from flashsmith.chooser.latent_decode import check_keywords
from flashsmith.integrations import program_ops  # noqa: F401, registers the ops
from flashsmith.integrations.cache_program_ops import OPS_OVER_CACHES, OPS_OVER_LATENT_CACHES
from flashsmith.integrations.inlined_functions import check_known, inlined_call
from flashsmith.integrations.pytorch_state import (
    assume_constant_result,
    check_for_an_op,
    under_autocast,
)
from flashsmith.integrations.torch_decode import called_by_op
from flashsmith.integrations.torch_latent_decode import latent_called_by_op
from flashsmith.integrations.torch_ops import OPS, no_out
from flashsmith.integrations.traced_attention import is_deterministic, of_op, short_form
from flashsmith.masks import MaskValue
from flashsmith.scores import ScoreValue
from flashsmith.semantics.signature import ATTENTION, CACHE
from flashsmith.tracing.block_masks import (
    check_lengths,
    has_no_lists,
    rows_are_of_the_call,
    states_of_lists,
)
from flashsmith.tracing.captures import follow
from flashsmith.tracing.graph_plans import (
    BLOCKS,
    BLOCKS_OF_ROWS,
    NUMBER,
    PARTS,
    TENSOR,
    plan_of,
    values_of,
)


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


# Calls a function outside of the graph. It is defined here because tracers cannot trace a call of
# torch.compiler.disable.
outside = torch.compiler.disable(
    _call,
    reason="flashsmith: the compiled code defines a function, or it captures what the compiler "
    "cannot guard, and this version of PyTorch does not trace functions for other operators; "
    "define it outside, or give a value of flashsmith.masks or flashsmith.scores with tensors",
)


def attention_by_program(
    q: Any, k: Any, v: Any, functions: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Any:
    """Computes attention() by a call to an op; ``functions`` are the keywords that define a
    program.

    Functions that the compiler cannot pass to Python, or whose captures it cannot guard, are traced
    by the compiler itself. Returns None if this version of the compiler cannot trace them.

    While tracing, raises ArgumentError and TraceError as attention() does, and ArgumentError for
    ``out`` with gradients. Other arguments are checked when the op runs.
    """
    asked = ATTENTION.bind(keywords)
    check_for_an_op(q=q, k=k, v=v)
    q, k, v = under_autocast(q, k, v)
    sinks, cu_q, cu_k = asked["sinks"], asked["cu_seqlens_q"], asked["cu_seqlens_k"]
    sizes = _sizes_of(q, k, cu_q)
    roots, block_sizes = _roots_of(functions, sizes)
    positions = functions.get("positions", "start")
    plan = _guarded_plan(roots, block_sizes, positions)
    program = None if plan is None else _program_of(plan, roots)
    if plan is None and not torch.compiler.is_dynamo_compiling():
        program = _program_now(roots, block_sizes, positions)
    read = () if program is None else program.pop("reads")
    options = of_op(asked, "causal softcap scale bits emulate return_row_max")
    options["positions"] = positions
    needs = [q.requires_grad, k.requires_grad, v.requires_grad]
    own = any(needs) or any(it is not None and it.requires_grad for it in (sinks, *read))
    if torch.is_grad_enabled() and (own or program is None):
        if asked["out"] is not None:
            if not own:
                return None
            raise no_out(q=q, k=k, v=v, sinks=sinks)
        options["with_backward"], options["needs"] = own, needs
        options["backward_config"] = short_form(asked["backward_config"])
        options["deterministic"] = is_deterministic(asked["deterministic"], asked["bits"])
    tensors = q, k, v, sinks, cu_q, cu_k
    if program is None:
        call = inlined_call(OPS.attention_of_program, roots, block_sizes, positions)
        return None if call is None else _returned(asked, *call(*tensors, **options))
    found = torch.ops.flashsmith.attention_of_program(*tensors, read, **program, **options)
    return _returned(asked, *found)


def over_cache_by_program(
    q: Any, k_cache: Any, v_cache: Any, functions: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Any:
    """Computes attention_with_cache() with ``functions`` by a call to an op; returns None when
    attention_by_program() would."""
    asked = CACHE.bind(keywords)
    caches: tuple[Any, ...] = k_cache, v_cache
    ops, called = OPS_OVER_CACHES, called_by_op
    if asked["v_width"] is not None:
        check_keywords(v_cache, asked)
        caches, ops, called = (k_cache,), OPS_OVER_LATENT_CACHES, latent_called_by_op
    names = "page_table", "cu_seqlens_q", "kv_offset"
    over = sizes_over_cache(q, k_cache, *[asked[name] for name in names])
    roots, block_sizes = _roots_over_cache(functions, over)
    plan = _guarded_plan(roots, block_sizes, "end")
    program = None if plan is None else _program_of(plan, roots)
    if plan is None and not torch.compiler.is_dynamo_compiling():
        program = _program_now(roots, block_sizes, "end")
    if program is None:
        calls = [inlined_call(op, roots, block_sizes, "end") for op in ops]
        if calls[0] is None:
            return None
        return called((calls[0], calls[1]), asked, (q, *caches), {})
    return called(ops, asked, (q, *caches, program.pop("reads")), program)


def _program_of(plan: Any, roots: Any) -> dict[str, Any]:
    """Returns a plan's string, tensors and numbers, as arguments of an op."""
    text, *paths = plan
    reads, ints, floats = [[follow(roots, path) for path in it] for it in paths]
    check_known(*floats)
    return {"program": text, "reads": reads, "ints": ints, "floats": floats}


def _program_now(roots: Any, block_sizes: Any, positions: Any) -> dict[str, Any]:
    """Returns the arguments of _program_of() for functions that no plan describes, while
    torch.export runs Python instead of tracing it."""
    text, reads, ints, floats = values_of(roots, block_sizes, positions)
    check_known(*floats)
    return {"program": text, "reads": list(reads), "ints": ints, "floats": floats}


def _returned(asked: Mapping[str, Any], o: Any, lse: Any, row_max: Any) -> Any:
    """Returns the results, as attention() returns them."""
    o = o if asked["out"] is None else asked["out"].copy_(o)
    if asked["return_lse"]:
        return (o, lse, row_max) if asked["return_row_max"] else (o, lse)
    return (o, row_max) if asked["return_row_max"] else o


def _guarded_plan(roots: Any, block_sizes: Any, positions: Any) -> Any:
    """Returns the plan's program as a string, and the plan's paths to tensors and numbers. All
    other paths of the plan are followed here, so that the compiler guards the objects to which they
    lead. Returns None if there is no plan."""
    if _is_for_compiler(roots):
        return None
    # The compiler passes an object to Python only as a separate argument, not within a tuple.
    score_mod, bias, mask_mod, mask = [_described(it) for it in roots]
    plan = _plan(score_mod, bias, mask_mod, mask, _attributes(roots), block_sizes, positions)
    if plan is None:
        return None
    text, reads, ints, floats, frozen, others = plan
    for path, value in frozen:
        assert follow(roots, path) == value
    for path in others:
        assert follow(roots, path) is not _NEVER
    return text, reads, ints, floats


_NEVER = object()


def _sizes_of(q: Any, k: Any, cu_q: Any) -> ScoreSizes:
    """Returns the sizes of the scores. For tensors that the op will refuse, no sizes are known."""
    if cu_q is None and q.dim() == k.dim() == 4:
        return ScoreSizes(q.shape[0], q.shape[2], (q.shape[1], k.shape[1]))
    if cu_q is None or q.dim() != 3 or cu_q.dim() != 1:
        return ScoreSizes(None, None, None)
    return ScoreSizes(cu_q.shape[0] - 1, q.shape[1], None)


def _roots_of(
    functions: Mapping[str, Any], sizes: ScoreSizes
) -> tuple[tuple[Any, Any, Any, Any], tuple[int, int] | None]:
    """Returns the roots of a plan's paths, and the block sizes of a BlockMask."""
    mask, block_sizes = functions.get("mask"), None
    if isinstance(mask, BlockMask):
        rows, keys = mask.BLOCK_SIZE
        if has_no_lists(rows, keys):
            mask = mask.mask_mod
        else:
            positions = functions.get("positions", "start")
            check_lengths(mask.seq_lengths, sizes.lengths, positions)
            mask, block_sizes = _lists_of(mask, BLOCKS), (rows, keys)
    return _with_mask(functions, mask, sizes), block_sizes


def _roots_over_cache(
    functions: Mapping[str, Any], over: CacheSizes
) -> tuple[tuple[Any, Any, Any, Any], tuple[int, int] | None]:
    """Returns the roots of a plan's paths, and the block sizes of a BlockMask, for a call over a
    cache."""
    mask, block_sizes = functions.get("mask"), None
    if isinstance(mask, BlockMask):
        rows, keys = mask.BLOCK_SIZE
        if has_no_lists(rows, keys):
            mask = mask.mask_mod
        else:
            of_call = rows_are_of_the_call(
                mask.seq_lengths, mask.kv_num_blocks.shape[-1], rows, *lengths_for_blocks(over)
            )
            mask = _lists_of(mask, BLOCKS_OF_ROWS if of_call else BLOCKS)
            block_sizes = rows, keys
    sizes = over.sizes or ScoreSizes(None, None, None)
    return _with_mask(functions, mask, sizes._replace(lengths=None)), block_sizes


def _lists_of(mask: BlockMask, kind: str) -> tuple[Any, ...]:
    """Returns the root for a BlockMask that has lists of blocks."""
    states = states_of_lists(
        *(mask.kv_num_blocks, mask.kv_indices),
        *(mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    return kind, states, _plain(mask.mask_mod)


def _with_mask(
    functions: Mapping[str, Any], mask: Any, sizes: ScoreSizes
) -> tuple[Any, Any, Any, Any]:
    """Returns the roots of a call's functions; ``mask`` is the root of the mask."""
    bias = functions.get("bias")
    for name, it in (("mask", mask), ("bias", bias)):
        if isinstance(it, torch.Tensor):
            check_broadcast(name, tuple(it.shape), sizes)
    mask = mask if type(mask) is tuple else _plain(mask)
    score_mod, mask_mod = _plain(functions.get("score_mod")), _plain(functions.get("mask_mod"))
    return score_mod, bias, mask_mod, mask


def _plain(value: Any) -> Any:
    """Replaces a value of flashsmith.masks or flashsmith.scores, or a partial, by its parts, so
    that one trace also serves other values of these parts. Anything else is returned unchanged."""
    if type(value) in (MaskValue, ScoreValue):
        return PARTS, value.function, tuple([_plain(it) for it in value.parts])
    if isinstance(value, partial) and not value.keywords:
        return PARTS, value.func, tuple([_plain(it) for it in value.args])
    return value


def _described(root: Any) -> Any:
    """Makes a root of constants only: each tensor is replaced by its dtype and by its sizes, where
    every size other than 1 becomes 2, and each number by its type."""
    if isinstance(root, torch.Tensor):
        return TENSOR, tuple([1 if size == 1 else 2 for size in root.shape]), root.dtype
    if type(root) is int or type(root) is float:
        return NUMBER, type(root)
    return tuple([_described(it) for it in root]) if type(root) is tuple else root


# PyTorch 2.11 cannot pass an object to Python; 2.12 is not known to.
_PASSES_OBJECTS = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)


def _is_for_compiler(root: Any) -> bool:
    """Whether only the compiler can trace a function: the code that is being compiled defines the
    function, so the compiler has no closure of it, and cannot pass it to Python. The compiler
    cannot pass a partial that has tensors or numbers as keywords either, an object or method within
    a tuple, an object without a dict, nor, in older versions, any object or method."""
    if type(root) is tuple:
        return any(
            _is_for_compiler(it) or _is_object(it) or isinstance(it, MethodType) for it in root
        )
    if isinstance(root, partial):
        return any(isinstance(it, torch.Tensor | int | float) for it in root.keywords.values())
    if isinstance(root, FunctionType):
        try:
            # PyTorch 2.11 has attributes of such a function, but does not know their values. Its
            # __kwdefaults__ are never None. Other functions with such defaults may be inlined, too.
            return root.__closure__ is not None and root.__kwdefaults__ is not None
        except AttributeError:
            return True
    if not _PASSES_OBJECTS:
        return callable(root) and not isinstance(root, type)
    return _is_object(root) and not hasattr(root, "__dict__")


def _is_object(root: Any) -> bool:
    """Whether a root is a callable object other than a function."""
    return callable(root) and not isinstance(root, FunctionType | MethodType | partial | type)


def _attributes(root: Any) -> tuple[int, ...]:
    """Returns, for each root that is a callable object, the number of its attributes."""
    if type(root) is tuple:
        found: tuple[int, ...] = ()
        for it in root:
            found = found + _attributes(it)
        return found
    return (len(root.__dict__),) if _is_object(root) else ()


@assume_constant_result
def _plan(
    score_mod: Any,
    bias: Any,
    mask_mod: Any,
    mask: Any,
    attributes: Any,
    block_sizes: Any,
    positions: Any,
) -> Any:
    """Returns the result of plan_of() as tuples; tracers let Python run this function and do not
    trace it."""
    roots = score_mod, bias, mask_mod, mask
    if _attributes(roots) != attributes:
        return None  # an object that the compiled code makes has no attributes here
    found = plan_of(roots, block_sizes, positions)
    return found if found is None else tuple(found)
