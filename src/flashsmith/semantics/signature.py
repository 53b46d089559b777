"""Defines each argument of attention once: the argument's default, its check, and its type in an
op.

The public functions repeat their arguments for readers and type checkers, and a test compares both.
All other code that has or forwards such arguments derives them from here.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.mask import UNLIMITED
from flashsmith.semantics.sizes import CANONICAL, FREE, window_class

# Kernels take scale * log2(e) as fp32. For scales outside this range, this product would be
# infinite or lose bits.
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
# Without a softcap, a logit is the score times the scale, and a base-2 exponent is the difference
# of two fp32 logits. For logits from 2^28 on, rounding alone makes an exponent so wrong that a
# probability overflows. Above this scale, a score of 2 gives such a logit.
MAX_UNCAPPED_SCALE = 2.0**27
NO_WINDOW = (None, None)
_PAIR = "tuple[int | None, int | None]"
_TENSOR = "Array | None"
_SCALES = "float | Array | None"


class REQUIRED:
    """Marks an argument that has no default.

    It is a class because torch.compile can trace a comparison with a class.
    """


class Argument(NamedTuple):
    """One argument of the attention functions.

    ``kind`` is its type annotation in the public functions. ``op`` is its type in the schema of a
    PyTorch op; '' means that no op has the argument. A schema has two arguments for a window: the
    left limit and the right limit.
    """

    name: str
    kind: str
    default: Any = None
    op: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether the argument is, or may be, a tensor of the call instead of an option."""
        return "Array" in self.kind

    def in_schema(self, default: Any) -> str:
        """Returns the argument's declaration in an op's schema."""
        value = repr(default) if isinstance(default, str) else str(default)
        if self.kind == _PAIR:
            return f"{self.op} {self.name}_left=None, {self.op} {self.name}_right=None"
        return f"{self.op} {self.name}" + ("" if default is REQUIRED else f"={value}")


_ARGUMENTS = (
    Argument("causal", "bool", False, "bool"),
    Argument("window", _PAIR, NO_WINDOW, "SymInt?"),
    Argument("softcap", "float", 0.0, "float"),
    Argument("scale", "float | None", None, "float?"),
    Argument("sinks", _TENSOR, op="Tensor?"),
    Argument("score_mod", "Callable[..., Any] | None"),
    Argument("mask_mod", "Callable[..., Any] | None"),
    Argument("mask", "Any"),
    Argument("bias", _TENSOR),
    Argument("positions", "str", "start"),
    Argument("cu_seqlens_q", _TENSOR, op="Tensor?"),
    Argument("cu_seqlens_k", _TENSOR, op="Tensor?"),
    Argument("max_seqlen_q", "int | None", op="SymInt?"),
    Argument("max_seqlen_k", "int | None", op="SymInt?"),
    Argument("return_lse", "bool", False, "bool"),
    Argument("return_row_max", "bool", False, "bool"),
    # For partial attention.
    Argument("partial", "bool", False),
    Argument("seqused_k", _TENSOR),
    Argument("k_begin", _TENSOR),
    # For attention over a cache.
    Argument("cache_lens", "Array", REQUIRED, "Tensor"),
    Argument("v_width", "int | None", op="SymInt?"),
    Argument("page_table", _TENSOR, op="Tensor?"),
    Argument("kv_offset", _TENSOR, op="Tensor?"),
    Argument("k", _TENSOR, op="Tensor?"),
    Argument("v", _TENSOR, op="Tensor?"),
    Argument("cos", _TENSOR, op="Tensor?"),
    Argument("sin", _TENSOR, op="Tensor?"),
    Argument("rotary_interleaved", "bool", False, "bool"),
    Argument("k_scale", _SCALES, op="Tensor?"),
    Argument("v_scale", _SCALES, op="Tensor?"),
    Argument("split", "str", "invariant", "str"),
    # This decides what the bits of a row may depend on.
    Argument("bits", "str | None", None, "str?"),
    # For gradients.
    Argument("dlse", _TENSOR, op="Tensor?"),
    Argument("deterministic", "bool | None", None, "bool"),
    Argument("needs", "tuple[bool, bool, bool, bool]", (True,) * 4, "bool[4]"),
    Argument("grad_dtype", "Dtype | None"),
    # These affect only how the result is computed.
    Argument("out", _TENSOR),
    Argument("dtype", "Dtype | None"),
    Argument("config", "KernelConfig | None", None, "str?"),
    Argument("backward_config", "KernelConfig | None", None, "str?"),
    Argument("emulate", "bool", False, "bool"),
    # A BoundProgram, which the public attention functions make from score and mask functions.
    Argument("program", "BoundProgram | None"),
)
ARGUMENTS = {argument.name: argument for argument in _ARGUMENTS}


class Signature:
    """The keywords of one function, in their order, with their defaults."""

    def __init__(self, function: str, names: str, **defaults: Any) -> None:
        """``defaults`` replace the arguments' own defaults in this signature."""
        self.function = function
        arguments = [ARGUMENTS[name] for name in names.split()]
        self.defaults = {it.name: defaults.get(it.name, it.default) for it in arguments}

    def bind(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all keywords of a call, with defaults filled in.

        Raises TypeError for a keyword that the function does not have, and for a missing required
        keyword.
        """
        for name in keywords:
            if name not in self.defaults:
                hint = did_you_mean(name, self.defaults)
                raise TypeError(
                    f"{self.function}() got an unexpected keyword argument {name!r}{hint}"
                )
        bound = {**self.defaults, **keywords}
        for name, value in bound.items():
            if value is REQUIRED:
                raise TypeError(
                    f"{self.function}() missing 1 required keyword-only argument: {name!r}"
                )
        return bound

    def in_schema(self, names: str) -> str:
        """Returns the declarations of the named arguments in an op's schema, in that order."""
        return ", ".join(ARGUMENTS[it].in_schema(self.defaults[it]) for it in names.split())


_SCORES = "causal window softcap scale sinks"
_PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_PARTS = "partial seqused_k k_begin"
ATTENTION = Signature(
    "attention",
    f"{_SCORES} score_mod mask_mod mask bias positions {_PACKED} out return_lse return_row_max "
    f"{_PARTS} bits config backward_config deterministic emulate",
)
FORWARD = Signature(
    "forward", f"{_SCORES} {_PACKED} return_lse return_row_max {_PARTS} bits emulate"
)
BACKWARD = Signature(
    "backward", f"dlse {_SCORES} {_PACKED} deterministic needs grad_dtype config emulate"
)
CACHE = Signature(
    "attention_with_cache",
    "cache_lens v_width page_table kv_offset k v cos sin rotary_interleaved cu_seqlens_q "
    f"max_seqlen_q {_SCORES} score_mod mask_mod mask bias k_scale v_scale split bits out "
    "return_lse config emulate",
    causal=True,
)
MERGE = Signature("merge_attention", "dtype config emulate")
WRITE_SLOTS = Signature("write_slots", "k_scale v_scale config emulate")
SIGNATURES = {it.function: it for it in (ATTENTION, FORWARD, BACKWARD, CACHE, MERGE, WRITE_SLOTS)}


class ForwardOptions(NamedTuple):
    """The keywords of ``forward`` that define what is computed, as the caller gave them."""

    causal: Any = False
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    return_lse: Any = False
    return_row_max: Any = False
    partial: Any = False
    seqused_k: Any = None
    k_begin: Any = None
    bits: Any = None
    program: Any = None

    def with_tensors(self, sinks: Any, cu_q: Any, cu_k: Any) -> ForwardOptions:
        """Returns a copy with these tensors, which keeps seqused_k and k_begin."""
        if sinks is self.sinks and cu_q is self.cu_seqlens_q and cu_k is self.cu_seqlens_k:
            return self
        # This is five times faster than _replace().
        made: ForwardOptions = tuple.__new__(
            ForwardOptions, (*self[:_SINKS], sinks, cu_q, cu_k, *self[_SINKS + 3 :])
        )
        return made


_SINKS = ForwardOptions._fields.index("sinks")


class BackwardOptions(NamedTuple):
    """The keywords of ``backward`` that define what is computed, as the caller gave them.

    ``forward`` holds the keywords that the forward pass also has.
    """

    forward: ForwardOptions = ForwardOptions()
    dlse: Any = None
    deterministic: Any = False
    needs: Any = ARGUMENTS["needs"].default
    grad_dtype: Any = None


def _some(names: Iterable[str]) -> Callable[[ForwardOptions], tuple[Any, ...]]:
    return itemgetter(*map(ForwardOptions._fields.index, names))


# The key of a cached call holds ForwardOptions in two parts: the tensors, which are named in
# TENSORS, and the other options.
TENSORS = tuple(name for name in ForwardOptions._fields if ARGUMENTS[name].is_tensor)
tensors_of = _some(TENSORS)
others_of = _some(name for name in ForwardOptions._fields if not ARGUMENTS[name].is_tensor)


# --- checks --------------------------------------------------------------------------------------


class MaskLimits(NamedTuple):
    """A value of Semantics.mask, and how many keys before and after its own key a row may see."""

    kind: str
    left: int
    right: int

    @property
    def window_keys(self) -> int:
        """The class of the window, which is the value for Problem.window_keys; 0 if there is no
        window."""
        return window_class(self.left, self.right) if self.kind == "window" else 0


NO_MASK = MaskLimits("none", UNLIMITED, UNLIMITED)
CAUSAL = MaskLimits("causal", UNLIMITED, 0)


def check_flag(name: str, value: Any) -> bool:
    """Raises ArgumentError unless ``value`` is a bool."""
    if value is True or value is False:
        return value
    if _is_numpys_bool(value):
        return bool(value)
    raise ArgumentError(f"{name}={quoted(value)}: allowed are True and False")


def _is_numpys_bool(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def check_bits(bits: Any, default: str | None) -> str:
    """Returns the value for Problem.bits: 'canonical', or '' for free.

    None means ``default``, the value of FLASHSMITH_BITS, and free if that is unset.

    Raises ArgumentError for anything else.
    """
    name, value = ("bits", bits) if bits is not None else ("FLASHSMITH_BITS", default)
    if value is None or value == FREE:
        return ""
    if value == CANONICAL:
        return CANONICAL
    raise ArgumentError(
        f"{name}={quoted(value)}: give {CANONICAL!r} (a row has the same bits in training, "
        f"prefill, chunks and decode) or {FREE!r}"
    )


def check_mask(causal: Any, window: Any) -> MaskLimits:
    """Returns the mask that the two arguments request together. If ``causal`` is set, a row sees no
    keys after its own, for any right limit of the window.

    Raises ArgumentError unless causal is a bool and window a pair of None or whole numbers from 0.
    """
    causal = check_flag("causal", causal)
    if window is NO_WINDOW:
        return CAUSAL if causal else NO_MASK
    left, right = (_window_limit(window, limit) for limit in check_pair(window))
    if causal:
        right = 0
    if left < UNLIMITED:
        return MaskLimits("window", left, right)
    if right == 0:
        return CAUSAL
    return NO_MASK if right == UNLIMITED else MaskLimits("window", UNLIMITED, right)


def check_pair(window: Any) -> tuple[Any, Any]:
    """Returns the two limits of a window, whose values are not checked. Raises ArgumentError unless
    there are exactly two."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentError(
            f"window={quoted(window)}: give a pair (left, right), each None (no limit) or a whole "
            "number"
        )
    return window[0], window[1]


def _window_limit(window: Any, limit: Any) -> int:
    if limit is None:
        return UNLIMITED
    value = whole_number(limit)
    if value is not None and value >= 0:
        return min(value, UNLIMITED)
    raise ArgumentError(
        f"window={quoted(window)}: {quoted(limit)} is not a limit; give a whole number from 0, or "
        "None for none"
    )


def whole_number(value: Any) -> int | None:
    """Returns the number as an int; None for anything else, such as a bool or an array of
    several."""
    if isinstance(value, bool) or _is_numpys_bool(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_scale(scale: Any, d: int) -> float:
    """Returns the scale as a float; None gives 1/sqrt(d). Raises ArgumentError unless finite and >
    0."""
    if scale is None:
        return 1.0 / math.sqrt(d)
    value = _real(scale)
    if value is not None and MIN_SCALE <= value <= MAX_SCALE:
        return value
    raise ArgumentError(
        f"scale={quoted(scale)}: give a finite number above 0 that fp32 can hold, or None for "
        "1/sqrt(d)"
    )


def check_softcap(softcap: Any, scale: float) -> float:
    """Returns the cap as a float, 0 for none.

    Raises ArgumentError unless the cap is finite and >= 0, and fp32 can hold scale / softcap.
    Without a cap, a scale above MAX_UNCAPPED_SCALE is also an error.
    """
    value = _real(softcap)
    if value == 0.0:
        if scale > MAX_UNCAPPED_SCALE:
            raise ArgumentError(
                f"scale={quoted(scale)}: at most 2**27 without a softcap, since fp32 cannot "
                "hold the differences of such logits; scale q or k down, or give a softcap"
            )
        return 0.0
    if value is None or not MIN_SCALE <= value <= MAX_SCALE:
        raise ArgumentError(
            f"softcap={quoted(softcap)}: give a finite number above 0 that fp32 can hold, or 0 for "
            "none"
        )
    if not MIN_SCALE <= scale / value <= MAX_SCALE / 4:
        raise ArgumentError(
            f"softcap={quoted(softcap)}: scale / softcap is {scale / value}, which fp32 cannot "
            "hold; "
            "give numbers nearer to each other"
        )
    return value


def check_k_scale(k_scale: float, scale: float, softcap: float) -> None:
    """Raises ArgumentError unless check_scale() and check_softcap() accept the product of the
    scores' scale and the keys' scale."""
    factor = scale * k_scale / (softcap or 1.0)
    if not MIN_SCALE <= factor <= (MAX_SCALE / 4 if softcap else MAX_UNCAPPED_SCALE):
        raise ArgumentError(
            f"k_scale={k_scale}: times scale{' / softcap' if softcap else ''} it is {factor}, "
            "which fp32 cannot hold; give numbers nearer to 1"
        )


def _real(value: Any) -> float | None:
    """Returns the number as a float, infinite if it is too large; None if it is not a real
    number."""
    if type(value) is float:
        return value
    if isinstance(value, numbers.Real) and not (isinstance(value, bool) or _is_numpys_bool(value)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None
