"""The processes that share a call: their group, what they agree on, and what they send each other.

Every function here is called by all ranks of the group, in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from flashsmith.errors import ArgumentError
from flashsmith.parallel.board import Board
from flashsmith.parallel.peers import MOST, Others, Peers, transfer_stream
from flashsmith.parallel.watch import Watch
from flashsmith.printable import quoted

# Its name from PyTorch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_DEFAULT_TIMEOUT = default_pg_timeout.total_seconds()
# Of a rank's message to the others about its call, in bytes; texts are cut to fit.
_MESSAGE = 4096
# Of a group, what its ranks have agreed on before.
_MOST_AGREEMENTS = 512
_MOST_TEXT = 512
# The backends that carry tensors of a kind of device.
_CARRIERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}
_LARGEST = dist.AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX


class Message:
    """What a rank tells the others about its call, or why it has refused that."""

    def __init__(self, facts: dict[str, Any], error: Exception | None = None) -> None:
        self.facts, self.error = facts, error
        said = None if error is None else str(error)[:_MOST_TEXT]
        self.text = json.dumps({"facts": facts, "error": said}).encode()
        if len(self.text) > _MESSAGE:
            raise AssertionError(f"a message of {len(self.text)} bytes")


class Group:
    """A process group as one of its ranks sees it."""

    def __init__(self, given: Any) -> None:
        self.handle = _process_group(given)
        known = _members.get(self.handle)
        if known is None:
            size = dist.get_world_size(self.handle)
            members = [dist.get_global_rank(self.handle, it) for it in range(size)]
            rank = dist.get_rank(self.handle)
            known = _members[self.handle] = rank, members, _watch(self.handle, rank, size)
        self.rank, self.members, self.watch = known
        self.size = len(self.members)

    def check_device(self, name: str, tensor: Any) -> None:
        """Raises ArgumentError unless the group carries tensors of this one's device."""
        kind = tensor.device.type
        carriers = _CARRIERS.get(kind)
        if carriers is None:
            raise ArgumentError(
                f"{name}: on {tensor.device}; give tensors on a GPU, or on the host for the "
                "emulator"
            )
        if self.size > 1 and self._backend(kind) not in carriers:
            raise ArgumentError(
                f"group: its backend is {dist.get_backend(self.handle)}, and {name} is on "
                f"{tensor.device}; make the group with the backend {carriers[0]!r}, or move the "
                "tensors"
            )

    def _backend(self, kind: str) -> str | None:
        """The name of what carries tensors of a kind of device."""
        try:
            return str(self.handle._get_backend(torch.device(kind)).name()).lower()
        except RuntimeError:
            return None

    def _of_host(self) -> Any:
        """The group itself where it carries host tensors; else one of the same ranks that does,
        which waits for them as long, made at the first call."""
        known = _host_groups.get(self.handle)
        if known is not None:
            return known
        if self._backend("cpu") in _CARRIERS["cpu"]:
            return self.handle
        (device, *_) = self.handle._device_types
        made = _host_groups[self.handle] = dist.new_group(
            self.members,
            timeout=_timeout(self.handle._get_backend(device)),
            backend="gloo",
            use_local_synchronization=True,
        )
        return made

    def agree(self, message: Message) -> Agreement:
        """Begins to tell the others of a call, and to hear what they say."""
        return Agreement(self, message)

    def same(self, word: int) -> Callable[[], bool]:
        """Begins to ask over the host, so that no GPU is waited for, whether all ranks ask with the
        same number, of 63 bits; the result waits for the answer."""
        with self.watch.waiting():
            if self.handle not in _boards:
                _boards[self.handle] = self._board()
            board = _boards[self.handle]
            ask = board.same(word) if board is not None else self._same_by_message(word)

        def wait() -> bool:
            with self.watch.waiting():
                return ask()

        return wait

    def _board(self) -> Board | None:
        return Board.shared(self.rank, self.size, _seconds(self._of_host()), self.exchange)

    def _same_by_message(self, word: int) -> Callable[[], bool]:
        # The largest of all numbers, and of their complements: these fall where those rise.
        largest = torch.tensor((word, ~word))
        work = self._of_host().allreduce([largest], _LARGEST)

        def wait() -> bool:
            work.wait()
            return bool(largest.tolist() == [word, ~word])

        return wait

    def exchange(self, mine: bytes) -> bytes:
        """Sends bytes to every rank, as many of each, over the host; returns all, by rank."""
        found = torch.empty((self.size, len(mine)), dtype=torch.uint8)
        given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        with self.watch.waiting():
            dist.all_gather(list(found.unbind()), given, group=self._of_host())
        return found.numpy().tobytes()

    def peers(self, devices: Hashable, device: Any, nbytes: int) -> Peers | None:
        """Slots of at least so many bytes in memory that the ranks, on these devices, copy from
        each other; None where they cannot, or the slots would be too large."""
        board = _boards.get(self.handle)
        if board is None or nbytes > MOST:
            return None
        of_group = _peers.setdefault(self.handle, {})
        found = of_group.get(devices)
        if devices not in of_group or (found is not None and found.capacity < nbytes):
            if found is not None:
                found.close()
            same = functools.partial(_same_on_board, board, self.watch)
            mark = functools.partial(self.watch.mark, device)
            others = Others(self.rank, self.size, same, mark)
            found = of_group[devices] = Peers.shared(others, device, nbytes, self.exchange)
        return found

    # --- tensors ----------------------------------------------------------------------------------

    def all_gather(self, mine: Any) -> Transfer:
        """Of every rank the tensor, all of one shape: (ranks, ...)."""
        found = mine.new_empty((self.size, *mine.shape))
        whole, part = _bytes(found), _bytes(mine)

        def start() -> list[Any]:
            return [_all_gather(whole, part, self.handle, async_op=True)]

        return Transfer(self, start, [mine], found)

    def all_gather_into(self, found: Sequence[Any], mine: Sequence[Any]) -> Callable[[], None]:
        """Begins to gather several dense tensors as one message: of each, every rank's into one
        whose first dimension is as many times as long. They travel when what the current stream has
        been given so far is done; the result has it wait for them, or the host for the host's."""
        with self.watch.waiting():
            work = self.handle.allgather_into_tensor_coalesced(found, mine)

        def wait() -> None:
            with self.watch.waiting():
                work.wait()
            self.watch.mark(found[0].device)

        return wait

    def all_to_all(self, mine: Any) -> Transfer:
        """(ranks, ...): part r goes to rank r, and comes from it."""
        found, start = self._all_to_all(mine, (), ())
        return Transfer(self, start, [mine], found)

    def _all_to_all(
        self, mine: Any, sent: Sequence[int], come: Sequence[int]
    ) -> tuple[Any, Callable[[], list[Any]]]:
        """What comes, and what begins to send."""
        found = mine.new_empty((sum(come), *mine.shape[1:])) if come else torch.empty_like(mine)
        size = mine.element_size() * math.prod(mine.shape[1:])
        sizes = [[size * count for count in counts] or None for counts in (come, sent)]
        whole, part = _bytes(found), _bytes(mine)

        def start() -> list[Any]:
            return [dist.all_to_all_single(whole, part, *sizes, group=self.handle, async_op=True)]

        return found, start

    def exchange_parts(
        self, mine: Any, sent: Sequence[int] = (), come: Sequence[int] = ()
    ) -> Callable[[], Any]:
        """Begins to send (parts, ...), so many of them to each rank, one after another, while so
        many come from each; left out, one. It begins, and is waited for, as all_gather_into()."""
        found, start = self._all_to_all(mine, sent, come)
        with self.watch.waiting():
            (work,) = start()

        def wait() -> Any:
            with self.watch.waiting():
                work.wait()
            self.watch.mark(found.device)
            return found

        return wait

    def pass_on(self, mine: Any, into: Any, free: Any = None) -> Transfer:
        """The tensor goes to the next rank, and the one before's comes ``into`` a tensor.

        free: the event after which ``into`` may be written, or None.
        """
        after, before = (self.members[(self.rank + step) % self.size] for step in (1, -1))
        both = [
            dist.P2POp(dist.isend, _bytes(mine), after, self.handle),
            dist.P2POp(dist.irecv, _bytes(into), before, self.handle),
        ]

        def start() -> list[Any]:
            return dist.batch_isend_irecv(both)

        return Transfer(self, start, [mine], into, free)


class _Known(NamedTuple):
    """What the ranks have said to each other, and a number for it that all of them have."""

    word: int
    said: list[dict[str, Any]]


class Agreement:
    """What the ranks of a group say to each other about a call: first whether all say what they
    said before, in a word; and the messages themselves where one does not."""

    def __init__(self, group: Group, message: Message) -> None:
        self._group, self._message = group, message
        self._known = _agreements.get(group.handle, {}).get(message.text)
        self._same = group.same(self._known.word if self._known else 0) if group.size > 1 else None

    def said(self) -> list[dict[str, Any]]:
        """What every rank says, by rank; raises the same error on each if one has refused its
        arguments, its own on that one. The same list for what is agreed on in a word. To be called
        once."""
        group, message = self._group, self._message
        if self._same is None:
            if message.error is not None:
                raise message.error
            return [message.facts]
        if self._same() and self._known is not None:
            return self._known.said
        found = group.exchange(message.text.ljust(_MESSAGE))
        parts = [found[at : at + _MESSAGE] for at in range(0, len(found), _MESSAGE)]
        said = [json.loads(part) for part in parts]
        if message.error is not None:
            raise message.error
        for rank, it in enumerate(said):
            if it["error"] is not None:
                raise ArgumentError(f"rank {rank} of the group refused its call: {it['error']}")
        agreements = _agreements.setdefault(group.handle, {})
        if len(agreements) >= _MOST_AGREEMENTS:
            agreements.clear()
        # Not 0, what a rank asks with that has nothing to repeat.
        word = int.from_bytes(hashlib.sha256(found).digest()[:8], "big") >> 1 | 1
        facts = [it["facts"] for it in said]
        agreements[message.text] = _Known(word, facts)
        return facts


class Transfer:
    """Tensors on their way; on a GPU by a stream of their own, beside the kernels.

    That stream waits for what the current one has been given so far, but for a tensor that itself
    arrived by a transfer, which is there already: then ``free`` says what to wait for.
    """

    def __init__(
        self,
        group: Group,
        start: Callable[[], Sequence[Any]],
        sent: Sequence[Any],
        found: Any,
        free: Any = None,
    ) -> None:
        self._group, self._found = group, found
        self._works: Sequence[Any] = ()
        self._done: Any = None
        # Until they are there: what is sent must not be freed.
        self._sent = sent
        if found.numel() == 0:
            return
        if not found.is_cuda:
            with group.watch.waiting():
                self._works = start()
            return
        stream = transfer_stream(found.device)
        stream.wait_event(free if free is not None else _event(found.device))
        with torch.cuda.stream(stream), group.watch.waiting():
            for work in start():
                work.wait()  # the stream's, not the host's
            self._done = _event(found.device)
        for tensor in (*sent, found):
            tensor.record_stream(stream)

    def wait(self) -> Any:
        """What has come, for the current stream to use."""
        if self._done is not None:
            torch.cuda.current_stream(self._found.device).wait_event(self._done)
        with self._group.watch.waiting():
            for work in self._works:
                work.wait()
        self._group.watch.mark(self._found.device)
        self._works, self._sent = (), ()
        return self._found


def _event(device: Any) -> Any:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def used_until_now(tensor: Any) -> Any:
    """The event after which no kernel of the current stream uses the tensor; None on the host,
    where kernels have ended when their call returns."""
    return _event(tensor.device) if tensor.is_cuda else None


def _bytes(tensor: Any) -> Any:
    """A dense tensor's memory as a dtype that every backend carries."""
    # Of a dimension of one element any stride counts as dense, but not for a view as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _process_group(given: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "group: torch.distributed is not initialised in this process; call "
            "torch.distributed.init_process_group() first"
        )
    if given is None:
        return dist.group.WORLD
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = given.mesh_dim_names
            raise ArgumentError(
                f"group: a DeviceMesh of {given.ndim} dimensions"
                f"{'' if names is None else f' {names}'}; give one of them, mesh[NAME]"
            )
        return given.get_group()
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            f"group: rank {dist.get_rank()} of the world is not a member of it; call this on its "
            "members alone"
        )
    if isinstance(given, dist.ProcessGroup):
        return given
    raise ArgumentError(
        f"group={quoted(given)}: give a ProcessGroup, a DeviceMesh of one dimension, or None for "
        "all processes"
    )


def _same_on_board(board: Board, watch: Watch, word: int) -> bool:
    with watch.waiting():
        return board.same(word)()


def _watch(handle: Any, rank: int, size: int) -> Watch:
    """What looks after this rank, without the group, which would keep itself alive."""
    reference = weakref.ref(handle)

    def lost() -> str:
        group = reference()
        board = None if group is None else _boards.get(group)
        return "" if board is None else board.lost()

    watch = Watch(rank, size, _seconds(handle), lost)
    return watch.start() if size > 1 else watch


# Groups of the host for groups that carry no tensors of it.
_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# None for groups of several hosts.
_boards: WeakKeyDictionary[Any, Board | None] = WeakKeyDictionary()
# By the ranks' devices; None where one cannot read another's memory.
_peers: WeakKeyDictionary[Any, dict[Hashable, Peers | None]] = WeakKeyDictionary()
# By group: this process's rank, all ranks' numbers in the world, and the watch; and what they have
# agreed on, by this one's message.
_members: WeakKeyDictionary[Any, tuple[int, list[int], Watch]] = WeakKeyDictionary()
_agreements: WeakKeyDictionary[Any, dict[bytes, _Known]] = WeakKeyDictionary()


def _timeout(backend: Any) -> Any:
    """How long a backend waits for others; None, PyTorch's own, where it does not say."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _seconds(group: Any) -> float:
    """How long a group's backends wait for others, the most patient of them."""
    limits = [_timeout(group._get_backend(device)) for device in group._device_types]
    return max((it.total_seconds() for it in limits if it), default=_DEFAULT_TIMEOUT)
