"""The group of ranks that share a call: how they agree on the call, and how they transfer tensors.

All ranks of the group must call the functions here in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import struct
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from flashsmith.errors import ArgumentError, GroupError
from flashsmith.parallel.rank_memory import MOST, HostSync, RankMemory, transfer_stream
from flashsmith.parallel.shared_words import SharedWords
from flashsmith.parallel.watch import Watch
from flashsmith.printable import quoted

# PyTorch has the first name from version 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_DEFAULT_TIMEOUT = default_pg_timeout.total_seconds()
# The size in bytes of the message in which a rank describes its call to the others. Shorter
# messages are padded; a longer one is an AssertionError.
_MESSAGE = 4096
# The largest number of agreements that are kept for each group.
_MOST_AGREEMENTS = 512
# The most characters of an error's text in a message; longer texts are truncated.
_MOST_TEXT = 512
# The format of the number of transfers that a rank has made, which follows the rank's message.
_COUNT = struct.Struct("<q")
# For each device type, the backends that can transfer tensors on such devices.
_CARRIERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}
_LARGEST = dist.AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX


class Message:
    """A rank's message to the others: the facts about its call, or the reason that it refuses the
    arguments."""

    def __init__(self, facts: dict[str, Any], error: Exception | None = None) -> None:
        self.facts, self.error = facts, error
        said = None if error is None else str(error)[:_MOST_TEXT]
        self.text = json.dumps({"facts": facts, "error": said}).encode()
        if len(self.text) > _MESSAGE:
            raise AssertionError(f"a message of {len(self.text)} bytes")


class Group:
    """A process group, as one of its ranks uses it."""

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
        """Raises ArgumentError if the group cannot transfer tensors of this device type."""
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
        """The name of the group's backend for a device type; None if there is none."""
        try:
            return str(self.handle._get_backend(torch.device(kind)).name()).lower()
        except RuntimeError:
            return None

    def _of_host(self) -> Any:
        """A group that can transfer host tensors: this group if it can, otherwise a gloo group of
        the same ranks.

        The gloo group has the same timeout. It is created by the first call.
        """
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

    def agree(self, message: Message) -> RankAgreement:
        """Starts to exchange messages about a call."""
        return RankAgreement(self, message)

    def same(self, word: int) -> Callable[[], bool]:
        """Starts to compare a 63-bit number with the numbers of all ranks.

        Returns a function that waits and returns whether all numbers are equal. The hosts exchange
        the numbers without waiting for a GPU.
        """
        with self.watch.waiting():
            if self.handle not in _shared_words:
                _shared_words[self.handle] = self._words_of_host()
            shared_words = _shared_words[self.handle]
            ask = (
                shared_words.same(word) if shared_words is not None else self._same_by_message(word)
            )

        def wait() -> bool:
            with self.watch.waiting():
                return ask()

        return wait

    def _words_of_host(self) -> SharedWords | None:
        return SharedWords.shared(self.rank, self.size, _seconds(self._of_host()), self.exchange)

    def _same_by_message(self, word: int) -> Callable[[], bool]:
        # All-reduces the maximum of the words, and the maximum of their complements, which gives
        # the minimum.
        largest = torch.tensor((word, ~word))
        work = self._of_host().allreduce([largest], _LARGEST)

        def wait() -> bool:
            work.wait()
            return bool(largest.tolist() == [word, ~word])

        return wait

    def exchange(self, mine: bytes) -> bytes:
        """Sends bytes to all ranks over the hosts.

        Returns the bytes from all ranks, in the order of ranks.

        All ranks must send the same number of bytes.
        """
        found = torch.empty((self.size, len(mine)), dtype=torch.uint8)
        given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        with self.watch.waiting():
            dist.all_gather(list(found.unbind()), given, group=self._of_host())
        return found.numpy().tobytes()

    def transfers(self) -> int:
        """The number of transfers that this rank has made; it is equal on ranks that have made the
        same calls."""
        shared = _peers.get(self.handle, {}).values()
        return _messages.get(self.handle, 0) + sum(it.number for it in shared if it is not None)

    def count_message(self) -> None:
        """Counts a transfer by the group's backend."""
        _messages[self.handle] = _messages.get(self.handle, 0) + 1

    def peers(self, devices: Hashable, device: Any, nbytes: int) -> RankMemory | None:
        """Returns slots of at least ``nbytes`` bytes, into which other ranks can copy data.

        ``devices`` are the devices of all ranks. Returns None if a rank cannot write to another
        rank's memory, or if the slots would be too large.
        """
        shared_words = _shared_words.get(self.handle)
        if shared_words is None or nbytes > MOST:
            return None
        of_group = _peers.setdefault(self.handle, {})
        found = of_group.get(devices)
        if devices not in of_group or (found is not None and found.capacity < nbytes):
            if found is not None:
                found.close()
            same = functools.partial(_same_by_shared_words, shared_words, self.watch)
            mark = functools.partial(self.watch.mark, device)
            others = HostSync(self.rank, self.size, same, mark)
            found = of_group[devices] = RankMemory.shared(others, device, nbytes, self.exchange)
        return found

    # --- tensors ----------------------------------------------------------------------------------

    def all_gather(self, mine: Any) -> Transfer:
        """Gathers a tensor from each rank, all of the same shape, into one tensor (ranks, ...)."""
        found = mine.new_empty((self.size, *mine.shape))
        whole, part = _bytes(found), _bytes(mine)

        def start() -> list[Any]:
            return [_all_gather(whole, part, self.handle, async_op=True)]

        return Transfer(self, start, [mine], found)

    def all_gather_into(self, found: Sequence[Any], mine: Sequence[Any]) -> Callable[[], None]:
        """Starts to gather several dense tensors in one message.

        Each tensor is gathered into a tensor of ``found``, whose first dimension is longer by a
        factor of the number of ranks. The transfer begins after the work that is already on the
        current stream. Returns a function that makes the current stream wait for the transfer; if
        the tensors are on the host, the host waits.
        """
        self.count_message()
        with self.watch.waiting():
            work = self.handle.allgather_into_tensor_coalesced(found, mine)

        def wait() -> None:
            with self.watch.waiting():
                work.wait()
            self.watch.mark(found[0].device)

        return wait

    def all_to_all(self, mine: Any) -> Transfer:
        """Sends part r of a (ranks, ...) tensor to rank r, and receives part r from it."""
        found, start = self._all_to_all(mine, (), ())
        return Transfer(self, start, [mine], found)

    def _all_to_all(
        self, mine: Any, sent: Sequence[int], come: Sequence[int]
    ) -> tuple[Any, Callable[[], list[Any]]]:
        """Returns the tensor that will be received, and a function that starts the transfer."""
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
        """Starts to send the parts of a (parts, ...) tensor to the ranks, in the order of ranks.

        ``sent`` has the number of parts to send to each rank, ``come`` the number to receive from
        each rank; the default is one each. As in all_gather_into(), the transfer begins after the
        work on the current stream, and the returned function waits for it.
        """
        found, start = self._all_to_all(mine, sent, come)
        self.count_message()
        with self.watch.waiting():
            (work,) = start()

        def wait() -> Any:
            with self.watch.waiting():
                work.wait()
            self.watch.mark(found.device)
            return found

        return wait

    def pass_on(self, mine: Any, into: Any, free: Any = None) -> Transfer:
        """Sends a tensor to the next rank, and receives the previous rank's tensor in ``into``.

        free: an event after which ``into`` may be written, or None.
        """
        after, before = (self.members[(self.rank + step) % self.size] for step in (1, -1))
        both = [
            dist.P2POp(dist.isend, _bytes(mine), after, self.handle),
            dist.P2POp(dist.irecv, _bytes(into), before, self.handle),
        ]

        def start() -> list[Any]:
            return dist.batch_isend_irecv(both)

        return Transfer(self, start, [mine], into, free)


class _SentFacts(NamedTuple):
    """The facts that all ranks have sent, and a number that identifies these facts on all ranks."""

    word: int
    said: list[dict[str, Any]]


class RankAgreement:
    """The messages about a call that the ranks of a group exchange.

    First they exchange one word, which says whether all ranks would send the same messages as
    before. If any rank would not, they exchange the messages themselves.
    """

    def __init__(self, group: Group, message: Message) -> None:
        self._group, self._message = group, message
        self._known = _agreements.get(group.handle, {}).get(message.text)
        self._transfers = group.transfers() if group.size > 1 else 0
        # A rank that has a new message sends the word 0.
        word = (self._known.word ^ self._transfers) or 1 if self._known else 0
        self._same = group.same(word) if group.size > 1 else None

    def said(self) -> list[dict[str, Any]]:
        """The facts from all ranks, in the order of ranks. Call it only once.

        If all ranks repeat their messages, the list is the same object as before. If a
        rank has refused its arguments, it raises its own error, and all other ranks raise one that
        quotes it.
        """
        group, message = self._group, self._message
        if self._same is None:
            if message.error is not None:
                raise message.error
            return [message.facts]
        if self._same() and self._known is not None:
            return self._known.said
        found = group.exchange(message.text.ljust(_MESSAGE) + _COUNT.pack(self._transfers))
        nbytes = _MESSAGE + _COUNT.size
        parts = [found[at : at + nbytes] for at in range(0, len(found), nbytes)]
        said = [json.loads(part[:_MESSAGE]) for part in parts]
        if message.error is not None:
            raise message.error
        for rank, it in enumerate(said):
            if it["error"] is not None:
                raise ArgumentError(f"rank {rank} of the group refused its call: {it['error']}")
        _check_transfers([_COUNT.unpack(part[_MESSAGE:])[0] for part in parts])
        agreements = _agreements.setdefault(group.handle, {})
        if len(agreements) >= _MOST_AGREEMENTS:
            agreements.clear()
        digest = hashlib.sha256(b"".join(part[:_MESSAGE] for part in parts)).digest()
        word = int.from_bytes(digest[:8], "big") >> 1
        facts = [it["facts"] for it in said]
        agreements[message.text] = _SentFacts(word, facts)
        return facts


def _check_transfers(counts: Sequence[int]) -> None:
    """Raises GroupError unless all ranks have made the same number of transfers."""
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise GroupError(
                f"group: rank {rank} has made {count} transfers, and rank 0 {counts[0]}, so a rank "
                "has left out a call or a backward pass, or has run one alone; every rank must run "
                "the same. These ranks cannot go on: end all processes"
            )


class Transfer:
    """A transfer of tensors.

    On a GPU it has its own stream, so that kernels can run at the same time.

    This stream waits for the work that is already on the current stream. If the event ``free`` is
    given, it waits only for this event; that is for a tensor that was itself received by a
    transfer.
    """

    def __init__(
        self,
        group: Group,
        start: Callable[[], Sequence[Any]],
        sent: Sequence[Any],
        found: Any,
        free: Any = None,
    ) -> None:
        group.count_message()
        self._group, self._found = group, found
        self._works: Sequence[Any] = ()
        self._done: Any = None
        # Kept until the transfer is complete, since the memory of these tensors must not be freed
        # before.
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
                work.wait()  # Here the stream waits, not the host
            self._done = _event(found.device)
        for tensor in (*sent, found):
            tensor.record_stream(stream)

    def wait(self) -> Any:
        """Makes the current stream wait for the transfer. Returns the received tensor."""
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
    """Returns an event that follows all work on the current stream that may use the tensor.

    Returns None for a host tensor, because a kernel on the host has finished when its call returns.
    """
    return _event(tensor.device) if tensor.is_cuda else None


def _bytes(tensor: Any) -> Any:
    """A view of a dense tensor as uint8, a dtype that all backends can transfer."""
    # A dense tensor may have any stride in a dimension of size 1, but a view as bytes may not.
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


def _same_by_shared_words(shared_words: SharedWords, watch: Watch, word: int) -> bool:
    with watch.waiting():
        return shared_words.same(word)()


def _watch(handle: Any, rank: int, size: int) -> Watch:
    """The Watch of this rank.

    The Watch has only a weak reference to the group, so that it does not keep the group alive.
    """
    reference = weakref.ref(handle)

    def lost() -> str:
        group = reference()
        shared_words = None if group is None else _shared_words.get(group)
        return "" if shared_words is None else shared_words.lost()

    watch = Watch(rank, size, _seconds(handle), lost)
    return watch.start() if size > 1 else watch


# By group: the gloo group that replaces it for host tensors, if it cannot transfer them.
_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# For each group, the shared words; None if the ranks are on several hosts.
_shared_words: WeakKeyDictionary[Any, SharedWords | None] = WeakKeyDictionary()
# For each group and each tuple of the ranks' devices, the rank memory; None if some rank cannot
# write to the memory of another.
_peers: WeakKeyDictionary[Any, dict[Hashable, RankMemory | None]] = WeakKeyDictionary()
# For each group, the number of transfers by the group's backend.
_messages: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# For each group: the rank of this process, the global ranks of all members, and the watch. Also for
# each group, the agreements, keyed by this rank's message.
_members: WeakKeyDictionary[Any, tuple[int, list[int], Watch]] = WeakKeyDictionary()
_agreements: WeakKeyDictionary[Any, dict[bytes, _SentFacts]] = WeakKeyDictionary()


def _timeout(backend: Any) -> Any:
    """The timeout of a backend. None if the backend has no timeout; PyTorch's default then
    applies."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _seconds(group: Any) -> float:
    """The longest timeout of the backends of a group, in seconds."""
    limits = [_timeout(group._get_backend(device)) for device in group._device_types]
    return max((it.total_seconds() for it in limits if it), default=_DEFAULT_TIMEOUT)
