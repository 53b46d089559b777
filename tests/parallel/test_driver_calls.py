"""How often a causal call asks the driver for something: each takes the host some microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402
from test_gpu_memory import Driver, Event, Stream, pretended  # noqa: E402, F401

from flashsmith.parallel import causal_allgather, rank_memory  # noqa: E402
from flashsmith.parallel.group_call import GroupCall  # noqa: E402
from flashsmith.parallel.layout import CAUSAL, Layout  # noqa: E402
from flashsmith.parallel.rank_memory import GpuMemory, HostSync, RankMemory  # noqa: E402
from flashsmith.runtime import driver  # noqa: E402

ROWS, HEADS, D = 64, (4, 2), 64


class Rank:
    """One rank of a group; the words and copies of the others are left out."""

    def __init__(self, size: int, rank: int, batch: int, calls: Counter[str]) -> None:
        made = [GpuMemory(torch.device("cpu"), it, size, 1 << 22) for it in range(size)]
        names = [it.name.ljust(rank_memory._NAME, b"\0") for it in made]
        for it in made:
            it.open(names)
        self._kept = made
        host = HostSync(rank, size, lambda word: True, lambda stream: calls.update(["mark"]))
        peers = RankMemory(host, made[rank], 1 << 21)
        layout = Layout((size * ROWS,), size)
        group: Any = SimpleNamespace(rank=rank, size=size, peers=lambda *_: peers)
        shapes = ((batch, ROWS, heads, D) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0]))
        self.q, self.k, self.v, self.do = (torch.randn(shape).half() for shape in shapes)
        options = {"softcap": 0.0, "scale": None, "emulate": False}
        self.call = GroupCall(
            *(group, layout, layout, False, CAUSAL, options, None, None, False, True, False, False),
            *(tuple(self.q.shape), D, lambda: None),
            launches={},
        )

    def forward(self) -> Any:
        return causal_allgather.forward(self.call, self.q, self.k, self.v, None)

    def backward(self, found: Any) -> None:
        needs = True, True, True, False
        causal_allgather.backward(self.call, found.saved, self.do, None, needs)


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as found:
        yield found


@pytest.fixture
def calls(pretended: Driver, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:  # noqa: F811
    """What was asked of the driver."""
    found: Counter[str] = Counter()

    def counted(where: Any, name: str, kind: str) -> None:
        right = getattr(where, name)

        def call(*given: Any) -> Any:
            found[kind] += 1
            return right(*given)

        monkeypatch.setattr(where, name, call)

    counted(driver, "copy_rows", "copy")
    counted(driver, "words", "words")
    counted(Event, "record", "record")
    counted(Stream, "wait_event", "wait")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: found.update(["keep"]))
    return found


def counts(one: Rank, gpu: PretendedGpu, calls: Counter[str]) -> list[dict[str, int]]:
    """The calls of both passes, in a call that repeats an earlier one."""
    one.backward(one.forward())
    shown = []
    calls.clear()
    found = one.forward()
    shown.append(dict(calls))
    calls.clear()
    one.backward(found)
    shown.append(dict(calls))
    return shown


# Copies: K and V to the other rank, and to its own slot; dk and dv to the other rank. Words: that a
# slot is free, together with the wait until the other's is; that data are here; the wait for them.
# Events: the stream of transfers waits for the kernels before, and the kernels behind until all is
# sent. Marks: each wait for the other rank, so that a lost one is noticed. Kept: dk and dv.
FORWARD = {"record": 2, "wait": 2, "words": 3}
BACKWARD = {"record": 2, "wait": 2, "words": 4, "keep": 2}


@pytest.fixture
def gathers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass of long sequences, which gathers K and V like the forward pass."""
    monkeypatch.setattr(causal_allgather, "_MOST_KEPT", 0)


@pytest.mark.parametrize(("rank", "copies", "marks"), [(0, 4, 1), (1, 6, 2)])
def test_two_ranks(
    rank: int, copies: int, marks: int, gpu: PretendedGpu, calls: Counter[str]
) -> None:
    of_forward, of_backward = counts(Rank(2, rank, 1, calls), gpu, calls)
    assert of_forward == {**FORWARD, "copy": copies, "mark": marks}
    assert of_backward == {**BACKWARD, "copy": 2, "mark": 2}


@pytest.mark.usefixtures("gathers_again")
@pytest.mark.parametrize(("rank", "copies", "marks"), [(0, 4, 1), (1, 6, 2)])
def test_two_ranks_that_gather_again(
    rank: int, copies: int, marks: int, gpu: PretendedGpu, calls: Counter[str]
) -> None:
    _, of_backward = counts(Rank(2, rank, 1, calls), gpu, calls)
    assert of_backward == {
        name: FORWARD.get(name, 0) + count
        for name, count in {**BACKWARD, "copy": 2 + copies, "mark": 2 + marks}.items()
    }


@pytest.mark.usefixtures("gathers_again")
def test_words_for_more_ranks_are_one_call(gpu: PretendedGpu, calls: Counter[str]) -> None:
    """Of four ranks the first hears of three slots, and tells three that its own is free."""
    of_forward, of_backward = counts(Rank(4, 0, 1, calls), gpu, calls)
    # Together with the first wait; each other wait together with the word that data are there.
    assert of_forward == {"record": 2, "wait": 2, "words": 5, "copy": 8, "mark": 1}
    assert of_backward["words"] == 5 + 4 + 2


@pytest.mark.usefixtures("gathers_again")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_copy_takes_both_chunks_of_one_sequence(
    batch: int, gpu: PretendedGpu, calls: Counter[str]
) -> None:
    of_forward, of_backward = counts(Rank(2, 0, batch, calls), gpu, calls)
    assert of_forward["copy"] == 2 + 2 * batch
    assert of_backward["copy"] == 2 + 2 * batch + 2 * batch
