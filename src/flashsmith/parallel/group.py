"""The processes that share a call: their group, what they agree on, and what they send each other.

Every function here is called by all ranks of the group, in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashsmith.errors import ArgumentError, FlashsmithError, GroupError
from flashsmith.printable import quoted

# Its name from PyTorch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Of a rank's message to the others about its call, in bytes; texts are cut to fit.
_MESSAGE = 4096
_DIGEST = 16
# Of a group, what its ranks have agreed on before. All of them forget at the same call.
_MOST_AGREEMENTS = 512
_MOST_TEXT = 512
# The backends that carry tensors of a kind of device.
_CARRIERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}


class Message:
    """What a rank tells the others about its call, or why it has refused that."""

    def __init__(self, facts: dict[str, Any], error: Exception | None = None) -> None:
        self.facts, self.error = facts, error
        said = None if error is None else str(error)[:_MOST_TEXT]
        self.text = json.dumps({"facts": facts, "error": said}).encode()
        if len(self.text) > _MESSAGE:
            raise AssertionError(f"a message of {len(self.text)} bytes")
        self.digest = hashlib.sha256(self.text).digest()[:_DIGEST]


class Group:
    """A process group as one of its ranks sees it."""

    def __init__(self, given: Any) -> None:
        self.handle = _process_group(given)
        if self.handle not in _members:
            size = dist.get_world_size(self.handle)
            _members[self.handle] = [dist.get_global_rank(self.handle, it) for it in range(size)]
        self.members = _members[self.handle]
        self.rank, self.size = dist.get_rank(self.handle), len(self.members)

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
        if self._backend("cpu") in _CARRIERS["cpu"]:
            return self.handle
        if self.handle not in _host_groups:
            (device, *_) = self.handle._device_types
            _host_groups[self.handle] = dist.new_group(
                self.members,
                timeout=_timeout(self.handle._get_backend(device)),
                backend="gloo",
                use_local_synchronization=True,
            )
        return _host_groups[self.handle]

    def agree(self, message: Message) -> Agreement:
        """Begins to tell the others of a call, and to hear what they say."""
        return Agreement(self, message)

    def exchange(self, mine: bytes) -> Callable[[], bytes]:
        """Begins to send bytes to every rank, as many of each, over the host, so that no GPU is
        waited for; the result waits for all of them, by rank."""
        found = torch.empty((self.size, len(mine)), dtype=torch.uint8)
        given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        with self.waiting_for_others():
            work = dist.all_gather(
                list(found.unbind()), given, group=self._of_host(), async_op=True
            )

        def wait() -> bytes:
            with self.waiting_for_others():
                work.wait()
            return found.numpy().tobytes()

        return wait

    @contextlib.contextmanager
    def waiting_for_others(self) -> Iterator[None]:
        """Turns a failure of torch.distributed into a GroupError."""
        try:
            yield
        except FlashsmithError:
            raise
        except RuntimeError as failure:
            raise GroupError(
                f"group: rank {self.rank} of {self.size} lost the others: one has ended, or did "
                "not make the same call within the group's timeout; see that rank's own error. "
                f"torch.distributed says: {failure}"
            ) from failure

    # --- tensors ----------------------------------------------------------------------------------

    def all_gather(self, mine: Any) -> Transfer:
        """Of every rank the tensor, all of one shape: (ranks, ...)."""
        found = mine.new_empty((self.size, *mine.shape))
        whole, part = _bytes(found), _bytes(mine)

        def start() -> list[Any]:
            return [_all_gather(whole, part, self.handle, async_op=True)]

        return Transfer(self, start, [mine], found)

    def all_to_all(self, mine: Any) -> Transfer:
        """(ranks, ...): part r goes to rank r, and comes from it."""
        found = torch.empty_like(mine)
        whole, part = _bytes(found), _bytes(mine)

        def start() -> list[Any]:
            return [dist.all_to_all_single(whole, part, group=self.handle, async_op=True)]

        return Transfer(self, start, [mine], found)

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


class Agreement:
    """What the ranks of a group say to each other about a call: first a digest of each message, and
    the messages themselves where the ranks have not said just that before."""

    def __init__(self, group: Group, message: Message) -> None:
        self._group, self._message = group, message
        self._digests = group.exchange(message.digest) if group.size > 1 else None

    def said(self) -> list[dict[str, Any]]:
        """What every rank says, by rank; raises the same error on each if one has refused its
        arguments, its own on that one. The same list for the same messages. To be called once."""
        group, message = self._group, self._message
        if self._digests is None:
            if message.error is not None:
                raise message.error
            return [message.facts]
        agreements = _agreements.setdefault(group.handle, {})
        digests = self._digests()
        if digests in agreements:
            return agreements[digests]
        found = group.exchange(message.text.ljust(_MESSAGE))()
        parts = [found[at : at + _MESSAGE] for at in range(0, len(found), _MESSAGE)]
        said = [json.loads(part) for part in parts]
        if message.error is not None:
            raise message.error
        for rank, it in enumerate(said):
            if it["error"] is not None:
                raise ArgumentError(f"rank {rank} of the group refused its call: {it['error']}")
        if len(agreements) >= _MOST_AGREEMENTS:
            agreements.clear()
        agreements[digests] = [it["facts"] for it in said]
        return agreements[digests]


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
            with group.waiting_for_others():
                self._works = start()
            return
        stream = transfer_stream(found.device)
        stream.wait_event(free if free is not None else _event(found.device))
        with torch.cuda.stream(stream), group.waiting_for_others():
            for work in start():
                work.wait()  # the stream's, not the host's
            self._done = _event(found.device)
        for tensor in (*sent, found):
            tensor.record_stream(stream)

    def wait(self) -> Any:
        """What has come, for the current stream to use."""
        if self._done is not None:
            torch.cuda.current_stream(self._found.device).wait_event(self._done)
        with self._group.waiting_for_others():
            for work in self._works:
                work.wait()
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


_streams: dict[Any, Any] = {}


def transfer_stream(device: Any) -> Any:
    """The stream that a GPU's transfers wait on, so that they need not wait for its kernels."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


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


# Groups of the host for groups that carry no tensors of it.
_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# By group: its ranks' numbers in the world, and what they have said to each other, by digests.
_members: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
_agreements: WeakKeyDictionary[Any, dict[bytes, list[dict[str, Any]]]] = WeakKeyDictionary()


def _timeout(backend: Any) -> Any:
    """How long a backend waits for others; None, PyTorch's own, where it does not say."""
    return getattr(getattr(backend, "options", None), "_timeout", None)
