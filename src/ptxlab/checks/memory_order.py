"""Release and acquire: tracks the order between threads of any CTAs that is created by words of
global memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptxlab.checks.happens_before import Far, HappensBefore, merge_far
from ptxlab.interface import MemoryAccess, MemoryFence, Site

#: Scopes that make an access visible to other CTAs.
_WIDE = ("gpu", "sys")


def is_strong(event: MemoryAccess) -> bool:
    """Whether an access is strong. Strong accesses of different CTAs are not a race."""
    return bool(event.order) and event.scope in _WIDE


def is_strong_by_word(event: MemoryAccess) -> bool:
    """Whether an access is strong and each of its elements is one whole aligned 4-byte word."""
    if not is_strong(event) or event.engine is not None:
        return False
    element = event.site.mnemonic.rpartition(".")[2]
    return element in ("b32", "u32", "s32", "f32") and not np.any(event.addresses % 4)


def is_sum(event: MemoryAccess) -> bool:
    """Whether an access adds to floating-point numbers, so that the result depends on the order of
    additions."""
    if event.kind not in ("atomic", "async_atomic"):
        return False
    words = event.site.mnemonic.split(".")
    return "add" in words and any(word in ("f32", "f64", "f16x2", "bf16x2") for word in words)


@dataclass(slots=True)
class _Word:
    """The state of a word after the last write to it: the clocks that a thread acquires by reading
    the word, and, if this write was not a release, the write's instruction."""

    released: Far
    unreleased: Site | None = None


@dataclass
class _Thread:
    """The releases that a thread has read but not yet acquired, and the clocks that its last fence
    released."""

    pending: list[Far] = field(default_factory=list)
    fenced: Far | None = None


class MemoryOrder:
    """A thread becomes ordered after another thread by acquiring a word that the other has
    released.

    - A release is a ``.release`` write, or a fence followed by a ``.relaxed`` write of the same
      thread. It covers everything that the thread had done, or was ordered after, before the write
      or fence.
    - An acquire is an ``.acquire`` read, or a ``.relaxed`` read followed by a fence of the same
      thread.
    - An atomic adds to the releases that the word carries; a store discards them.
    - The scope must be ``.gpu`` or ``.sys``; with ``.cta`` or ``.cluster`` nothing is ordered here.

    Floating-point sums neither release nor acquire.
    """

    def __init__(self) -> None:
        self._words: dict[int, _Word] = {}
        self.wave(None)

    def wave(self, order: HappensBefore | None) -> None:
        """Begins a wave with new threads. Words keep the clocks that earlier waves released to
        them."""
        self._order = order
        self._threads: dict[int, _Thread] = {}
        # For each CTA: the thread and the instruction of the last read of a released word that was
        # not followed by an acquire; and the last write without a release whose value the CTA has
        # read.
        self._unacquired: dict[int, tuple[int, Site]] = {}
        self._unreleased: dict[int, Site] = {}

    def access(self, event: MemoryAccess) -> None:
        """Updates the order with an access to global memory."""
        writes = event.kind in ("write", "atomic", "async_write", "async_atomic")
        if not is_strong(event) or event.engine is not None:
            if writes and self._words:
                self._forget(event)
            return
        if is_sum(event):
            return
        if event.order == "relaxed" and not self._words and not self._threads and not writes:
            return
        for thread, address in zip(event.threads.tolist(), event.addresses.tolist(), strict=True):
            if event.kind in ("read", "atomic"):
                self._read(event, thread, address)
            if writes:
                self._write(event, thread, address)

    def _read(self, event: MemoryAccess, thread: int, address: int) -> None:
        word = self._words.get(address)
        if word is None:
            return
        assert self._order is not None
        cta = thread // self._order.threads_per_cta
        if word.unreleased is not None:
            self._unreleased[cta] = word.unreleased
        else:
            self._unreleased.pop(cta, None)
        if not word.released:
            return
        if event.order in ("acquire", "acq_rel"):
            self._order.acquire_far(thread, word.released)
        else:
            self._threads.setdefault(thread, _Thread()).pending.append(word.released)
            self._unacquired[cta] = (thread, event.site)

    def _write(self, event: MemoryAccess, thread: int, address: int) -> None:
        assert self._order is not None
        state = self._threads.get(thread)
        before = self._words.get(address)
        released: Far = {}
        if event.order in ("release", "acq_rel"):
            released = self._order.released(thread, event.clock)
        elif state is not None and state.fenced is not None:
            released = state.fenced
        unreleased = None if released else event.site
        if event.kind == "atomic" and before is not None:
            released = merge_far(before.released, released)
            unreleased = unreleased or before.unreleased
        self._words[address] = _Word(released, unreleased)

    def _forget(self, event: MemoryAccess) -> None:
        """Forgets the releases of words that were written weakly, since a read of such a word
        orders nothing."""
        begins, sizes = event.addresses, event.sizes
        low, high = int(begins.min()), int((begins + sizes).max())
        for address in [a for a in self._words if low <= a < high]:
            if bool(((begins <= address) & (address < begins + sizes)).any()):
                del self._words[address]

    def fence(self, event: MemoryFence) -> None:
        """Records a fence: its threads acquire the releases that they have read, and their later
        writes release."""
        if event.scope not in _WIDE:
            return
        assert self._order is not None
        for thread in event.threads.tolist():
            state = self._threads.setdefault(thread, _Thread())
            if state.pending:
                self._order.acquire_far(thread, merge_far(*state.pending))
                state.pending = []
            state.fenced = self._order.released(thread, event.clock)
            cta = thread // self._order.threads_per_cta
            if self._unacquired.get(cta, (-1,))[0] == thread:
                del self._unacquired[cta]

    def missing(self, cta: int) -> str:
        """Returns a hint at why one CTA is not ordered after another; '' if no reason is known."""
        if cta in self._unacquired:
            site = self._unacquired[cta][1]
            return f": {site} reads a released word, but neither .acquire nor a fence follows"
        if cta in self._unreleased:
            site = self._unreleased[cta]
            return f": {site} wrote the word it read, but neither .release nor a fence precedes"
        return ""
