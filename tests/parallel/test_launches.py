"""Kernels of the causal allgather that are launched with addresses: the same as for the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import parallel_lost  # noqa: E402
from pretended_gpu import Launch, PretendedGpu, pretended_gpu  # noqa: E402

from flashsmith.integrations import traceable  # noqa: E402
from flashsmith.parallel import causal_allgather  # noqa: E402
from flashsmith.parallel.group_call import GroupCall  # noqa: E402
from flashsmith.parallel.layout import CAUSAL, Layout  # noqa: E402
from flashsmith.runtime import forget_cached_launches  # noqa: E402
from flashsmith.runtime.cached_calls import CachedCall  # noqa: E402

RANKS, ROWS, HEADS, D = 2, 512, (4, 2), 64


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as found:
        yield found


@pytest.fixture
def by_addresses(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were launched with addresses."""
    calls: list[Any] = []
    run = CachedCall.run_from

    def noted(self: CachedCall, at: tuple[int, ...]) -> Any:
        calls.append(at)
        return run(self, at)

    monkeypatch.setattr(CachedCall, "run_from", noted)
    return calls


def drawn(batch: int, d: int, d_v: int) -> dict[str, Any]:
    shapes = {"q": (HEADS[0], d), "k": (HEADS[1], d), "v": (HEADS[1], d_v), "do": (HEADS[0], d_v)}
    return {name: torch.randn(batch, ROWS, *of).half() for name, of in shapes.items()}


class Rank:
    """One rank; the keys and gradients of the others are planted."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, batch: int, rank: int, d: int = D, d_v: int = D
    ) -> None:
        self.tensors, self.rank, chunk = drawn(batch, d, d_v), rank, ROWS // 2
        self.sinks = torch.randn(HEADS[0])
        both = [torch.randn(batch, 5 * chunk, HEADS[1], width).half() for width in (d, d_v)]
        keys = causal_allgather._Keys(
            *causal_allgather._prefixes(both, RANKS, rank, chunk), lambda: None, lambda: None
        )
        self.keys = both
        pair = [torch.zeros(batch, chunk, HEADS[1], width) for width in (d, d_v)]
        monkeypatch.setattr(causal_allgather, "_gather", lambda *_: keys)
        monkeypatch.setattr(causal_allgather, "_peers", lambda *_: None)
        monkeypatch.setattr(
            causal_allgather,
            "exchange",
            lambda call, peers, gradients, sent, owners, count: (
                lambda: {it: [pair] * count for it in owners}
            ),
        )

    def call(self, launches: dict[Any, Any] | None, **changed: Any) -> GroupCall:
        layout = Layout((RANKS * ROWS,), RANKS)
        group: Any = SimpleNamespace(rank=self.rank, size=RANKS)
        options = {"softcap": 0.0, "scale": None, "emulate": False}
        call = GroupCall(
            *(group, layout, layout, False, CAUSAL, options, None, None, False, True, True, False),
            *(tuple(self.tensors["q"].shape), self.tensors["v"].shape[-1], lambda: None),
            launches=launches,
        )
        return call._replace(**changed)

    def both(
        self, call: GroupCall, *, sinks: bool = False, dlse: bool = False, do: Any = None
    ) -> tuple[Any, list[tuple[int, int]]]:
        """The results of both passes; the addresses of tensors with their sizes."""
        given = self.tensors
        do = given["do"] if do is None else do
        its_sinks = self.sinks if sinks else None
        found = causal_allgather.forward(call, given["q"], given["k"], given["v"], its_sinks)
        its_dlse = torch.zeros_like(found.lse) if dlse else None
        needs = (True, True, True, sinks)
        gradients = causal_allgather.backward(call, found.saved, do, its_dlse, needs)
        known = [given["q"], do, *self.keys, self.sinks, found.o, *found.saved[5:]]
        places = [(it.data_ptr(), it.nbytes) for it in known]
        return (found, gradients), places


def named(launches: list[Launch], places: list[tuple[int, int]]) -> list[Any]:
    """The launches with the tensor and the offset in it in place of each address that is known; -1
    is another tensor."""

    def place(address: int) -> Any:
        for at, (first, nbytes) in enumerate(places):
            if first <= address < first + nbytes:
                return at, address - first
        return -1 if address else 0

    return [
        (it.config, it.semantics, it.prepared, it.stream, [place(to) for to in it.addresses])
        for it in launches
    ]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("how", [{}, {"sinks": True, "dlse": True}])
@pytest.mark.parametrize("widths", [(D, D), (192, 128)])
def test_launches_with_addresses_are_those_for_tensors(
    batch: int, rank: int, how: dict[str, bool], widths: tuple[int, int], gpu: PretendedGpu,
    by_addresses: list[Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    one, launches = Rank(monkeypatch, batch, rank, *widths), dict[Any, Any]()
    shown = []
    for given in (None, launches, launches):
        gpu.launches.clear()
        before = len(by_addresses)
        (found, gradients), places = one.both(one.call(given), **how)
        shown.append((named(gpu.launches, places), len(by_addresses) - before))
        layouts = [(it.shape, it.stride(), it.dtype) for it in (found.o, found.lse, *gradients[:3])]
        shown[-1] += (layouts,)
    assert [by for _, by, _ in shown] == [0, 0, 4]
    assert shown[0][::2] == shown[1][::2] == shown[2][::2]
    assert len(shown[0][0]) == 4


def test_another_layout_or_need_is_launched_anew(
    gpu: PretendedGpu, by_addresses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, launches = Rank(monkeypatch, 1, 1), dict[Any, Any]()
    call = one.call(launches)
    for _ in range(2):
        one.both(call)
    by_addresses.clear()
    heads_first = one.tensors["do"].transpose(1, 2).contiguous().transpose(1, 2)
    one.both(call, do=heads_first)
    assert len(by_addresses) == 2  # only the forward pass
    one.both(call, dlse=True)
    assert len(by_addresses) == 4
    one.both(one.call(None))
    assert len(by_addresses) == 4
    forget_cached_launches()  # another table of winners, for example
    one.both(call)
    assert len(by_addresses) == 4
    one.both(call)
    assert len(by_addresses) == 8


def test_addresses_that_need_the_checks_are_not_launched(
    gpu: PretendedGpu, by_addresses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, launches = Rank(monkeypatch, 1, 1), dict[Any, Any]()
    call = one.call(launches)
    one.both(call)
    launch = launches[1]
    gpu.launches.clear()
    at = [it.data_ptr() for it in (one.tensors["q"], *one.keys, one.tensors["do"])]
    in_order = [at[0], at[1], at[2], at[3]]
    assert launch.run(tuple(in_order)) is not None
    assert launch.run((at[0] + 2, *in_order[1:])) is None  # not aligned
    assert launch.run((*in_order[:3], at[0])) is None  # o on q
    assert len(gpu.launches) == 1


def test_parallel_lost_loses_a_rank_whose_kernels_would_be_launched_with_addresses(
    gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool plants its loss in a function that such launches do not call."""
    for name in ("may_repeat", "backward"):
        monkeypatch.setattr(traceable, name, getattr(traceable, name))  # restored after the test
    one, launches, calls = Rank(monkeypatch, 1, 1), dict[Any, Any](), [0]
    parallel_lost.plant("raised", tmp_path, calls)
    for calls[0] in range(1, parallel_lost.LAST):
        one.both(one.call(launches))
    calls[0] = parallel_lost.LAST
    with pytest.raises(parallel_lost.Planted):
        one.both(one.call(launches))
    assert (tmp_path / "lost").exists()
