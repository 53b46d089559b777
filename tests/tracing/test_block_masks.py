"""BlockMasks as functions: the lists' rule, garbage behind counts, broadcast, changes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from flashsmith.errors import ArgumentError
from flashsmith.tracing import block_masks, trace
from flashsmith.tracing.block_masks import is_block_mask, mask_of_blocks

BLOCK, ROWS, COLUMNS = 16, 5, 6
LENGTHS = ROWS * BLOCK - 3, COLUMNS * BLOCK - 5


def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k) % 3 == 0


def lists_of(states: np.ndarray, garbage: bool) -> list[torch.Tensor]:
    """kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices of a table of states."""
    draw = np.random.default_rng(5)
    lists = []
    for state in (1, 2):
        counts = (states == state).sum(-1)
        behind = 2**31 - 1 if garbage else 1
        indices = draw.integers(-behind, behind, states.shape) if garbage else 0 * states
        for place in np.ndindex(*states.shape[:-1]):
            found = draw.permutation(np.flatnonzero(states[place] == state))
            indices[place][: len(found)] = found
        lists += [torch.tensor(counts, dtype=torch.int32), torch.tensor(indices).int()]
    return lists


def block_mask(states: np.ndarray, garbage: bool = True) -> BlockMask:
    return BlockMask(
        LENGTHS, *lists_of(states, garbage), None, None, None, None, (BLOCK, BLOCK), odd
    )


def values_of(function: Callable[..., Any], batch: int, heads: int) -> np.ndarray:
    bound = trace(None, function)
    program = bound.program
    assert program.mask is not None
    values: dict[str, Any] = {
        "b": np.arange(batch)[:, None, None, None],
        "h": np.arange(heads)[:, None, None],
        "q": np.arange(LENGTHS[0])[:, None],
        "k": np.arange(LENGTHS[1]),
    }
    values |= {it.name: n for it, n in zip(program.numbers, bound.numbers, strict=True)}
    tensors = {it.name: t for it, t in zip(program.reads, bound.tensors, strict=True)}
    found = program.mask.evaluate(values, tensors)
    return np.broadcast_to(found, (batch, heads, *LENGTHS))


def expected(states: np.ndarray, batch: int, heads: int) -> np.ndarray:
    wide = np.repeat(np.repeat(states, BLOCK, -2), BLOCK, -1)[..., : LENGTHS[0], : LENGTHS[1]]
    q, k = np.arange(LENGTHS[0])[:, None], np.arange(LENGTHS[1])
    seen = (wide == 2) | ((wide == 1) & ((q + k) % 3 == 0))
    return np.broadcast_to(seen, (batch, heads, *LENGTHS))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("kind", ["random", "empty rows", "one block", "nothing", "all full"])
def test_lists_with_garbage_behind_the_counts(shape: tuple[int, int], kind: str) -> None:
    states = np.random.default_rng(3).integers(0, 3, (*shape, ROWS, COLUMNS))
    if kind == "empty rows":
        states[..., ::2, :] = 0
    elif kind == "one block":
        states = 0 * states
        states[..., 3, 4] = 1
    elif kind in ("nothing", "all full"):
        states = 0 * states + 2 * (kind == "all full")
    found = values_of(mask_of_blocks(block_mask(states), LENGTHS), 2, 3)
    np.testing.assert_array_equal(found, expected(states, 2, 3))


def test_a_list_without_full_blocks() -> None:
    made = create_block_mask(
        odd, None, None, *LENGTHS, device="cpu", BLOCK_SIZE=BLOCK, separate_full_blocks=False
    )
    assert made.full_kv_indices is None
    q, k = np.arange(LENGTHS[0])[:, None], np.arange(LENGTHS[1])
    np.testing.assert_array_equal(
        values_of(mask_of_blocks(made, LENGTHS), 1, 1)[0, 0], (q + k) % 3 == 0
    )


def test_a_change_in_place_is_seen() -> None:
    states = np.ones((1, 1, ROWS, COLUMNS), int)
    made = block_mask(states, garbage=False)
    np.testing.assert_array_equal(
        values_of(mask_of_blocks(made, LENGTHS), 1, 1), expected(states, 1, 1)
    )
    first = trace(None, mask_of_blocks(made, LENGTHS))
    assert trace(None, mask_of_blocks(made, LENGTHS)).tensors[0] is first.tensors[0]
    made.kv_num_blocks[0, 0, 2] = 0
    states[0, 0, 2] = 0
    np.testing.assert_array_equal(
        values_of(mask_of_blocks(made, LENGTHS), 1, 1), expected(states, 1, 1)
    )
    assert trace(None, mask_of_blocks(made, LENGTHS)).program is first.program


def test_other_lengths_are_refused() -> None:
    made = block_mask(np.ones((1, 1, ROWS, COLUMNS), int))
    with pytest.raises(ArgumentError, match="block_mask: made for 77 queries and 91 keys"):
        mask_of_blocks(made, (77, 92))


def test_the_mask_of_no_lists_hides_nothing() -> None:
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    made = _create_empty_block_mask(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8))
    assert mask_of_blocks(made, (8, 8)) is noop_mask
    assert is_block_mask(made)
    assert not is_block_mask(odd)


class _Lists(NamedTuple):
    """A BlockMask of a window: its function, and whether its lists say as much."""

    mask_mod: Callable[..., Any]
    states: np.ndarray

    def is_function_alone(self) -> bool:
        lists = lists_of(self.states, garbage=True)
        none = None, None, None, None
        made = BlockMask(LENGTHS, *lists, *none, (BLOCK, BLOCK), self.mask_mod)
        return mask_of_blocks(made, LENGTHS) is self.mask_mod


def states_of(mask_mod: Callable[..., Any]) -> np.ndarray:
    """The states of a function's blocks, element by element."""
    q, k = np.arange(LENGTHS[0])[:, None], np.arange(LENGTHS[1])
    seen = np.broadcast_to(mask_mod(0, 0, q, k), LENGTHS)
    states = np.zeros((1, 1, ROWS, COLUMNS), int)
    for i, j in np.ndindex(ROWS, COLUMNS):
        block = seen[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        states[0, 0, i, j] = 2 if block.all() else 1 if block.any() else 0
    return states


@pytest.mark.parametrize("ahead", [14, 15, 16, 17, 40])
@pytest.mark.parametrize("before", [3, 15, 16, 30, None])
def test_lists_of_a_window_are_its_function(ahead: int, before: int | None) -> None:
    """Exactly if no visible block is omitted, and no hidden key is in a full block."""

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q + ahead if before is None else (k <= q + ahead) & (k >= q - before)

    states = states_of(window)
    assert _Lists(window, states).is_function_alone()
    # More partial blocks show no more.
    assert _Lists(window, np.where(states == 0, 1, states)).is_function_alone()
    assert _Lists(window, np.where(states == 2, 1, states)).is_function_alone()
    for place in np.ndindex(*states.shape):
        for state in {0, 2} - {states[place]}:
            other = states.copy()
            other[place] = state
            assert not _Lists(window, other).is_function_alone(), (place, state)


def test_a_windows_number_that_grows_does_not_outgrow_the_lists() -> None:
    limit = [9]

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q + 14) & (q - k <= limit[0])

    lists = lists_of(states_of(window), garbage=False)
    made = BlockMask(LENGTHS, *lists, None, None, None, None, (BLOCK, BLOCK), window)
    assert mask_of_blocks(made, LENGTHS) is window
    limit[0] = 50
    assert mask_of_blocks(made, LENGTHS) is not window
    states = torch.tensor(states_of(lambda b, h, q, k: (k <= q + 14) & (q - k <= 9)))[0, 0]
    wide = states.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wide = wide[: LENGTHS[0], : LENGTHS[1]].numpy()
    q, k = np.arange(LENGTHS[0])[:, None], np.arange(LENGTHS[1])
    seen = (wide == 2) | ((wide == 1) & (k <= q + 14) & (q - k <= 50))
    np.testing.assert_array_equal(values_of(mask_of_blocks(made, LENGTHS), 1, 1)[0, 0], seen)


def test_fake_tensors_are_not_kept() -> None:
    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q + 14

    made = create_block_mask(window, None, None, *LENGTHS, device="cpu", BLOCK_SIZE=BLOCK)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert mask_of_blocks(made, LENGTHS) is not window
    assert mask_of_blocks(made, LENGTHS) is window


def test_states_of_a_capture_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no values before the graph is launched."""

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q + 14

    made = create_block_mask(window, None, None, *LENGTHS, device="cpu", BLOCK_SIZE=BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(block_masks, "_has_values", lambda states: False)
        assert mask_of_blocks(made, LENGTHS) is not window
    assert mask_of_blocks(made, LENGTHS) is window


def test_rows_are_no_positions_from_the_end() -> None:
    made = block_mask(np.ones((1, 1, ROWS, COLUMNS), int))
    with pytest.raises(ArgumentError, match="positions='end': a BlockMask's lists count queries"):
        mask_of_blocks(made, LENGTHS, "end")
