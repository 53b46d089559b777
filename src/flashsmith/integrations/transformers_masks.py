"""Makes the masks of transformers' models, each in the smallest form that describes which keys are
hidden.

transformers builds a mask once per forward pass, and every layer reads it. A layer's attributes
(is_causal, sliding_window) may be wrong or missing. Only the mask function knows which mask was
requested, so it encodes the mask in the shape and values of its result, called a form. Every form
has four dimensions, because transformers passes four-dimensional masks on unchanged. A form
survives being copied and being moved to another device.

(batch, 1, 1, keys), bool: every query sees the keys whose element is True. PyTorch's attention
interprets this form in the same way. If all strides are 0, every key is True.

(batch, n, kind, 1 + window): a causal mask, or one with a window. ``kind`` is 2 for causal and 3
for bidirectional masks. ``kind`` is larger by 2 if a mask with that number of queries could be
mistaken for this form. A window of 0 means no window. The dtype defines n and the values:
- int8: n is the number of filled keys in a static cache; 0 means that all keys are filled. There is
  no padding.
- bool: the values mark which of n keys are real. In a static cache, the keys after these n are not
  filled.
- int64: sequences are packed into one batch row, and the values are the numbers of the sequences
  that the n keys belong to.
- int32: the first value is a batch row's number of filled keys in a static cache, which the host
  does not read. For canonical bits, the second value is the number of keys that a rolling cache
  has dropped. If n is above 2, the row is padded: the first value is the number of its real keys,
  and the values after the second mark which of n - 2 keys are real.

Models that inspect their masks get the (batch, 1, queries, keys) mask of PyTorch's attention.
Models that compute attention in their own code, or that transformers runs on eager attention only,
get the mask of eager attention. flashsmith still knows which keys these masks hide if the model
passes on the same object. Any other mask is a pattern, which kernels read as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    prepare_padding_mask,
    sdpa_mask,
)

from flashsmith.errors import ArgumentError
from flashsmith.integrations.pytorch_state import transform
from flashsmith.integrations.traceable import is_tracing
from flashsmith.integrations.transformers_bits import refuse_rolling, wants_canonical
from flashsmith.integrations.transformers_models import model_of
from flashsmith.printable import quoted

MaskFunction = Callable[..., Any]

_CAUSAL, _BIDIRECTIONAL = 2, 3
# The keywords of transformers' mask interface that are not parameters of flashsmith_mask().
_KEYWORDS = ("config", "dtype", "local_size", "use_vmap", "allow_torch_fix")


class HiddenKeys(NamedTuple):
    """The keys that a mask hides.

    causal, window: None if the mask does not determine them.
    window: number of keys that a query sees on the left, including its own position; 0 means no
        window. A bidirectional window has the same size on the right.
    padding: a (batch, keys) mask for packing_of().
    keys, filled: the number of filled keys in a static cache, as a number or as (batch,) int32 on
        the device.
    dropped: for canonical bits, (batch,) int32, how many keys of each sequence a rolling cache has
        dropped. ``filled`` is then set too, and counts real keys if there is padding.
    pattern: a mask that has no smaller form.
    """

    causal: bool | None = None
    window: int | None = None
    padding: Any = None
    keys: int | None = None
    filled: Any = None
    dropped: Any = None
    pattern: Any = None


def flashsmith_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Any = None,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    **keywords: Any,
) -> Any:
    """Builds a mask; transformers calls this function once per forward pass.

    It returns one of this module's compact forms, or a full mask for models that need one.

    Raises:
        ArgumentError: a keyword that transformers' mask interface does not have; or bits must be
            canonical, and it is not known how many keys a rolling cache has dropped.
    """
    _check_keywords(keywords)
    model = model_of(keywords.get("config"))
    # A model's own attention code adds masks to its scores, even if other layers call flashsmith.
    adds_masks = model is not None and not (model.calls_interface and model.supported)

    def full_mask() -> Any:
        return (eager_mask if adds_masks else sdpa_mask)(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            device=device,
            **keywords,
        )

    offsets = q_offset, kv_offset
    hidden = _hidden(
        mask_function, batch_size, q_length, kv_length, *offsets, attention_mask, device
    )
    if hidden is None:
        if not isinstance(kv_offset, int) or kv_offset > 0:
            refuse_rolling("kv_offset", "a cache whose mask is a pattern has dropped keys")
        return full_mask()
    if wants_canonical():
        hidden = _with_dropped(hidden, offsets, batch_size, kv_length, attention_mask, device)
    passed_on = model is not None and model.passes_masks_on
    may_skip = allow_is_causal_skip if hidden.causal else allow_is_bidirectional_skip
    if not adds_masks and _may_be_compact(hidden, q_length, may_skip=may_skip, passed_on=passed_on):
        return _form(hidden, batch_size, q_length, kv_length, device)
    mask = full_mask()
    if _may_ask():
        _known[mask] = _version(mask), hidden
    return mask


def _check_keywords(keywords: Mapping[str, Any]) -> None:
    for name, value in keywords.items():
        if name not in _KEYWORDS:
            raise ArgumentError(
                f"{name}={quoted(value)}: not a keyword of the mask interface of transformers 5.17 "
                f'to 5.24; use attn_implementation="sdpa"'
            )


def _may_be_compact(hidden: HiddenKeys, queries: int, *, may_skip: bool, passed_on: bool) -> bool:
    """Whether a model works with a compact form of its mask.

    ``may_skip``: whether transformers allows the mask to be left out.
    ``passed_on``: whether the model passes masks on to its layers without reading them.
    """
    if not hidden.causal:
        return may_skip and (passed_on or not hidden.window)
    # transformers always forbids skipping the mask for packed sequences and for decode steps with
    # static caches. In these cases ``may_skip`` is false although the model does not inspect its
    # mask.
    forced = queries == 1 or _numbers_sequences(hidden.padding)
    return passed_on and (may_skip or forced)


def _version(mask: Any) -> int | None:
    """PyTorch's counter of writes to a mask; None for inference tensors, which have no counter."""
    return None if mask.is_inference() else mask._version


# For each mask, PyTorch's version counter of the mask and the keys that the mask hides at that
# version. An entry must not refer to its mask; otherwise both would stay in memory forever.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def hidden_by(mask: Any, queries: int) -> HiddenKeys:
    """Returns the keys that an attention mask hides; ``queries`` is the number of queries.

    Raises:
        ArgumentError: the model has changed the mask that flashsmith_mask() built.
    """
    if mask is None:
        return HiddenKeys()
    if mask.dim() == 4:
        if mask.dtype is torch.int8:
            causal, window = _kind_of_form(mask)
            return HiddenKeys(causal, window, keys=mask.shape[1] or None)
        if mask.dtype is torch.int32 and mask.shape[1] < 3:
            return _counted(mask)
        if mask.dtype is torch.bool and _is_one_value(mask):
            return HiddenKeys(causal=False, window=0)
    if not _may_ask():
        return _hidden_by_values(mask, queries) or HiddenKeys(pattern=mask)
    # Every layer gets the same mask and therefore the same padding object, by which packing_of()
    # caches its results.
    version = _version(mask)
    if mask not in _known or _known[mask][0] != version:
        _known[mask] = version, _hidden_by_values(mask.detach(), queries)
    return _known[mask][1] or HiddenKeys(pattern=mask)


def _counted(mask: Any) -> HiddenKeys:
    """Returns the keys that an int32 mask hides."""
    n = mask.shape[1]
    filled, dropped = (mask[:, i, 0, 0].contiguous() if i < n else None for i in range(2))
    found = HiddenKeys(*_kind_of_form(mask), filled=filled, dropped=dropped)
    return found if n < 3 else found._replace(padding=mask[:, 2:, 0, 0] != 0, keys=n - 2)


def _is_one_value(mask: Any) -> bool:
    """Whether a mask is a single element that was expanded. If so, the element is True, because no
    mask hides all keys."""
    sizes = zip(mask.shape, mask.stride(), strict=True)
    return all(stride == 0 for size, stride in sizes if size != 1)


def selected_by(mask: Any, indices: Any, keys: int) -> Any:
    """Returns the mask of sparse attention: a (batch, 1, queries, keys) mask that also hides all
    keys that are not among the (batch, queries, n) indices.

    Raises:
        ArgumentError: the mask or the indices have another shape.
    """
    batch, queries = indices.shape[:2]
    if mask is None or indices.dim() != 3 or mask.shape != (batch, 1, queries, keys):
        shape = None if mask is None else tuple(mask.shape)
        raise ArgumentError(
            f"indices: shape {tuple(indices.shape)}, with an attention_mask of shape {shape}; "
            "allowed are (batch, queries, n) of a (batch, 1, queries, keys) mask"
        )
    shape = (batch, queries, keys)
    selected = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    selected = selected.scatter(-1, indices.long(), True)[:, None]
    if mask.dtype is torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


def _hidden_by_values(mask: Any, queries: int) -> HiddenKeys | None:
    """Returns the keys that a mask hides, read from its shape and values; None if it is a
    pattern."""
    if mask.dim() == 2:  # the user's mask, from a model that does not call the mask function
        real = mask if mask.dtype is torch.bool else mask != 0
        return HiddenKeys(padding=real, keys=mask.shape[1])
    if mask.dim() != 4 or mask.dtype not in (torch.bool, torch.int32, torch.int64):
        return None
    if mask.dtype is torch.int32:
        return _counted(mask)
    if mask.dtype is torch.bool and mask.shape[2] in (1, queries):
        # With one query, a mask of any kind may have this shape. Its values must be read to know
        # the kind, and a tracer cannot read them.
        of_keys = mask.shape[1] == mask.shape[2] == 1 and (queries > 1 or _may_ask())
        return HiddenKeys(False, 0, mask[:, 0, 0]) if of_keys else None
    causal, window = _kind_of_form(mask)
    return HiddenKeys(causal, window, mask[:, :, 0, 0], mask.shape[1])


def _form(hidden: HiddenKeys, batch_size: int, q_length: int, kv_length: int, device: Any) -> Any:
    if not hidden.causal and not hidden.window:
        if hidden.padding is not None:
            return hidden.padding[:, None, None, :]
        nothing = torch.ones((), dtype=torch.bool, device=device)
        return nothing.expand(batch_size, 1, 1, kv_length)
    kind = _CAUSAL if hidden.causal else _BIDIRECTIONAL
    values, n = hidden.padding if hidden.filled is None else _counts(hidden), -1
    if values is None:
        values, n = torch.ones((1, 1), dtype=torch.int8, device=device), hidden.keys or 0
    elif values.dtype is torch.bool and q_length == kind:
        kind += 2
    return values[:, :, None, None].expand(batch_size, n, kind, 1 + (hidden.window or 0))


def _counts(hidden: HiddenKeys) -> Any:
    """Returns the values of a mask in the int32 form: (batch, n) int32."""
    counts = [it[:, None] for it in (hidden.filled, hidden.dropped) if it is not None]
    if hidden.padding is not None:
        counts.append(hidden.padding.to(torch.int32))
    return torch.cat(counts, dim=1)


def _kind_of_form(mask: Any) -> tuple[bool, int]:
    """Whether a (batch, n, kind, 1 + window) mask is causal, and its window."""
    _, _, kind, window = mask.shape
    if kind not in (2, 3, 4, 5) or window == 0:
        raise ArgumentError(
            f"attention_mask: shape {tuple(mask.shape)}, {mask.dtype}; the model has changed the "
            "mask that flashsmith built for it, so what it hides is no longer known: use "
            'attn_implementation="sdpa"'
        )
    return kind % 2 == 0, window - 1


def _hidden(
    mask_function: MaskFunction,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    attention_mask: Any,
    device: Any,
) -> HiddenKeys | None:
    """Returns the keys hidden by the mask that transformers requests; None if only the full mask
    describes them."""
    sequences = _sequence_numbers(mask_function)
    if sequences is not None and attention_mask is None:
        numbers, (causal, window) = sequences
        return HiddenKeys(causal, window, numbers)
    kind = _kind(mask_function)
    if kind is None:
        return None
    causal, window = kind
    if causal and attention_mask is None and not isinstance(q_offset, int):
        filled = (q_offset + q_length - kv_offset).clamp(max=kv_length)
        filled = filled.to(device, torch.int32).expand(batch_size).contiguous()
        return HiddenKeys(causal, window, filled=filled)
    if is_tracing() and isinstance(q_offset, torch.Tensor):
        return None
    real = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if real is not None:
        real = real[:, kv_offset : kv_offset + kv_length].expand(batch_size, -1)
    keys = None
    if causal:
        # If only the filled keys count, the last query is aligned to the last key, as in
        # attention().
        last = int(q_offset) + q_length - kv_offset
        if last > kv_length:
            return None  # the last queries' own keys are missing
        if last < kv_length:
            keys, real = last, None if real is None else real[:, :last]
    # The values on the GPU must be read to know whether there is any padding, and a tracer cannot
    # read them.
    if real is None or (_may_ask() and bool(real.all())):
        return HiddenKeys(causal, window, keys=keys)
    return HiddenKeys(causal, window, real, keys)


def _with_dropped(
    hidden: HiddenKeys,
    offsets: tuple[Any, Any],
    batch_size: int,
    kv_length: int,
    attention_mask: Any,
    device: Any,
) -> HiddenKeys:
    """Adds to ``hidden`` the number of keys that the cache has dropped from each sequence, if any.

    Raises:
        ArgumentError: these keys cannot be counted, or a query would see them.
    """
    q_offset, kv_offset = offsets
    if isinstance(kv_offset, int) and kv_offset <= 0:
        return hidden
    if not isinstance(q_offset, int) or not isinstance(kv_offset, int):
        refuse_rolling("kv_offset", "how many keys the cache has dropped is known to a device only")
    if not hidden.causal or not hidden.window or q_offset - hidden.window + 1 < kv_offset:
        refuse_rolling("kv_offset", "the cache has dropped keys that its mask does not hide")
    keys = kv_length if hidden.keys is None else hidden.keys
    filled = torch.full((batch_size,), keys, dtype=torch.int32, device=device)
    if attention_mask is None:
        return hidden._replace(filled=filled, dropped=torch.full_like(filled, kv_offset), keys=None)
    before = attention_mask[:, :kv_offset].expand(batch_size, -1)
    dropped = before.sum(1, dtype=torch.int32).to(device)
    if hidden.padding is None:
        return hidden._replace(filled=filled, dropped=dropped, keys=None)
    if not _may_ask():
        refuse_rolling("attention_mask", "has values that are not known while the model is traced")
    if bool(((dropped > 0) & ~hidden.padding[:, 0]).any()):
        refuse_rolling("attention_mask", "has padding behind keys that the cache has dropped")
    filled = hidden.padding.sum(1, dtype=torch.int32)
    return hidden._replace(filled=filled, dropped=dropped, keys=keys)


def _may_ask() -> bool:
    tracing = is_tracing()
    return not tracing and transform(tracing) is None


def _numbers_sequences(padding: Any) -> bool:
    return padding is not None and padding.dtype is not torch.bool


def _closure(function: MaskFunction) -> dict[str, Any]:
    """Returns the closure variables of a nested function, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _parts(function: MaskFunction) -> dict[str, MaskFunction]:
    """Returns the masks that and_masks() combined, keyed by the names of the functions that made
    them."""
    if is_tracing() or getattr(function, "__name__", "") != "and_mask":
        return {}
    joined = _closure(function).get("mask_functions", ())
    return {part.__qualname__.partition(".")[0]: part for part in joined}


def _kind(function: MaskFunction) -> tuple[bool, int] | None:
    """Whether a mask is causal (otherwise it is bidirectional), and its window, which is 0 if there
    is none.

    Returns None for a mask of any other kind.
    """
    if function is causal_mask_function:
        return True, 0
    if function is bidirectional_mask_function:
        return False, 0
    parts = _parts(function)
    if parts.keys() == {"sliding_window_overlay", "causal_mask_function"}:
        return True, _closure(parts["sliding_window_overlay"])["sliding_window"]
    if parts.keys() == {"sliding_window_bidirectional_overlay", "bidirectional_mask_function"}:
        # The function's closure holds the largest visible distance; 1 is added for the query's own
        # key.
        overlay = parts["sliding_window_bidirectional_overlay"]
        return False, _closure(overlay)["sliding_window"] + 1
    return None


def _sequence_numbers(function: MaskFunction) -> tuple[Any, tuple[bool, int]] | None:
    """Returns the (batch, keys) sequence numbers of packed sequences, and the kind of mask within
    each sequence.

    None if the mask is not for packed sequences.
    """
    parts = _parts(function)
    numbered = parts.pop("packed_sequence_mask_function", None)
    if numbered is None or len(parts) != 1:
        return None
    ((name, within),) = parts.items()
    # In newer versions, positions count from the start of each sequence, which does not change the
    # mask within a sequence.
    if name == "remap_positions_for_packed_sequence":
        within = _closure(within)["mask_function"]
    kind = _kind(within)
    return None if kind is None else (_closure(numbered)["packed_sequence_mask"], kind)
