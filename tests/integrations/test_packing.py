"""Padding taken out of a batch, and put back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

LEFT = [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]


def mask(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_rows_lengths_and_the_longest() -> None:
    from flashsmith.integrations.packing import packing_of

    packing = packing_of(mask(LEFT))
    assert packing.cu_seqlens.tolist() == [0, 2, 6, 6]
    assert packing.cu_seqlens.dtype is torch.int32
    assert packing.longest == 4
    assert packing.unbroken
    padded = torch.arange(12.0).reshape(3, 4, 1)
    packed = packing.pack(padded)
    assert packed.flatten().tolist() == [2, 3, 4, 5, 6, 7]
    back = packing.unpack(packed, 3, 4)
    assert back.flatten().tolist() == [0, 0, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("row", "unbroken"),
    [([1, 1, 0, 0], True), ([0, 1, 1, 0], True), ([1, 0, 1, 0], False), ([0, 1, 0, 1], False)],
)
def test_holes(row: list[int], unbroken: bool) -> None:
    from flashsmith.integrations.packing import packing_of

    assert packing_of(mask([[1, 1, 1, 1], row])).unbroken is unbroken


def test_the_last_columns_are_the_queries() -> None:
    from flashsmith.integrations.packing import packing_of

    whole = mask(LEFT)
    assert packing_of(whole, last=1).cu_seqlens.tolist() == [0, 1, 2, 2]
    assert packing_of(whole, last=3).cu_seqlens.tolist() == [0, 2, 5, 5]
    assert packing_of(whole, last=4) is packing_of(whole)


def test_numbered_sequences() -> None:
    from flashsmith.integrations.packing import packing_of

    numbers = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1]])
    packing = packing_of(numbers)
    assert packing.cu_seqlens.tolist() == [0, 2, 5, 6, 11, 12]
    assert packing.longest == 5
    rows = torch.arange(12).reshape(2, 6)
    assert packing.pack(rows).tolist() == list(range(12))


def test_a_batch_of_nothing() -> None:
    from flashsmith.integrations.packing import packing_of

    packing = packing_of(torch.zeros(0, 5, dtype=torch.bool))
    assert packing.cu_seqlens.tolist() == [0]
    assert packing.longest == 0


def test_gradients_go_back_to_the_rows_they_came_from() -> None:
    from flashsmith.integrations.packing import packing_of

    packing = packing_of(mask(LEFT))
    rows = torch.randn(*mask(LEFT).shape, 2, dtype=torch.float64, requires_grad=True)
    real = mask(LEFT)[..., None]
    (packing.pack(rows) ** 3).sum().backward()
    assert torch.equal(rows.grad, torch.where(real, 3 * rows**2, 0))
    # There and back, and its own derivative.
    assert torch.autograd.gradcheck(lambda x: packing.unpack(packing.pack(x), *x.shape[:2]), rows)
    assert torch.autograd.gradgradcheck(lambda x: packing.pack(x) ** 3, rows)


def test_a_mask_is_packed_once_and_not_kept_alive() -> None:
    from flashsmith.integrations import packing

    one = mask(LEFT)
    assert packing.packing_of(one) is packing.packing_of(one)
    before = len(packing._known)
    del one
    assert len(packing._known) == before - 1


def test_a_batch_without_padding() -> None:
    from flashsmith.integrations.packing import packing_of, packing_of_all

    assert packing_of_all(3, 7, "cpu").cu_seqlens.tolist() == [0, 7, 14, 21]
    assert packing_of(torch.ones(3, 7, dtype=torch.bool)).whole_lines
    assert not packing_of(mask(LEFT)).whole_lines
    assert packing_of(torch.tensor([[0, 0], [0, 0]])).whole_lines
    assert not packing_of(torch.tensor([[0, 0], [0, 1]])).whole_lines
