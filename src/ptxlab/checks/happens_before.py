"""Tracks the happens-before order of an emulated launch, by vector clocks per thread.

This is the part of PTX's causality order that synchronisation creates. A thread is *ordered after*
an actor up to clock c if everything that the actor did until c happens before the thread's next
instruction. The sources of order are:

- program order: a thread is ordered after itself.
- a CTA barrier: a thread that waits at the barrier is ordered after all threads that arrived, and
  after everything that these threads are ordered after. A thread that only arrives (bar.arrive)
  gains no order.
- bar.warp.sync: like a CTA barrier, for the threads that the instruction names.
- an mbarrier: a thread that observed the end of a phase is ordered after the threads that arrived
  in this phase, and after the bulk copies that completed on the mbarrier in this phase.
  barrier.cluster orders its threads in the same way.
- wgmma.wait_group and cp.async.bulk.wait_group: the thread is ordered after the operations that it
  waited for.
- a word of global memory that one thread releases and another acquires (MemoryOrder). Threads of
  different clusters are ordered only by such words, or by a later barrier of a cluster whose
  threads acquired them.

``.sync.aligned`` instructions (shfl, ldmatrix, mma, vote) create no order. They make the lanes of a
warp meet, but the ISA does not order the lanes' memory accesses. A store before a shuffle need not
be visible to another lane after the shuffle; CUDA requires __syncwarp() for that. Lockstep
execution of a warp does not create order either, since sm_70 and later do not guarantee lockstep.

An actor is a thread or an engine (tensor cores or bulk copies). A thread's write is *fenced* for
another thread if a proxy fence is executed after the write and before the other thread's next
instruction. An engine may access the data only if the write is fenced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ptxlab.interface import Clusters, Engine

LANES = np.arange(32, dtype=np.int64)
#: Engines are actors with negative numbers, which lie below the values that mean 'none' and
#: 'several' in an access history.
_FIRST_ENGINE = -16
_ENGINES = 4096
_MORE_ENGINES = 32
_ALWAYS = np.iinfo(np.int32).max


#: How a thread is ordered after other clusters. Maps a cluster's number to (ordered clocks, fenced
#: clocks), each with one clock per column. It never changes after it is made.
Far = dict[int, tuple[np.ndarray, np.ndarray]]
#: The key for the previous launch, used in place of a cluster's number. A thread is ordered after
#: all of that launch or after nothing in it.
_LAUNCH_BEFORE = -1


def merge_far(*given: Far) -> Far:
    """Returns the union of the arguments.

    If an argument equals the union, that argument itself is returned.
    """
    merged: Far = {}
    for far in given:
        for number, row in far.items():
            merged[number] = _later(merged[number], row) if number in merged else row
    for far in given:
        if far.keys() == merged.keys() and all(far[n] is merged[n] for n in far):
            return far
    return merged


def _later(
    one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    if one is other:
        return one
    joined = padded_maximum(one[0], other[0]), np.maximum(one[1], other[1])
    for row in (one, other):
        if all(np.array_equal(x, y) for x, y in zip(row, joined, strict=True)):
            return row
    return joined


def padded_maximum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the larger clock of each column.

    The shorter array is padded, because engines may add columns to one array.
    """
    width = max(one.size, other.size)
    return np.maximum(np.pad(one, (0, width - one.size)), np.pad(other, (0, width - other.size)))


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks that threads publish: ordered and fenced clocks of the actors in their cluster,
    and the numbers of the sets that describe other clusters (see HappensBefore)."""

    known: np.ndarray
    fenced: np.ndarray
    far: frozenset[int] = frozenset()

    def joined(self, other: Clocks | None) -> Clocks:
        """Returns the union of these clocks and ``other``."""
        if other is None:
            return self
        known = padded_maximum(self.known, other.known)
        return Clocks(known, np.maximum(self.fenced, other.fenced), self.far | other.far)


class HappensBefore:
    """The vector clocks of one wave of CTAs.

    Times are the emulator's event clock, which only grows.

    Barriers of whole CTAs need only one number per CTA, the floor: all threads of the CTA are
    ordered after each other up to this clock. There is also one matrix of clocks per cluster, which
    is allocated when something other than a CTA barrier creates order.
    """

    def __init__(
        self,
        first_cta: int,
        cta_count: int,
        threads_per_cta: int,
        clusters: Clusters | None = None,
    ) -> None:
        self._first_cta = first_cta
        self._threads = threads_per_cta
        self._floor = np.zeros(cta_count, np.int64)
        self._known: np.ndarray | None = None
        self._fenced: np.ndarray | None = None
        # For each (barrier, CTA), the threads that arrived without waiting, and the clocks that
        # they published.
        self._handed: dict[tuple[int, int], tuple[list[np.ndarray], Clocks]] = {}
        ctas = np.arange(first_cta, first_cta + cta_count)
        clusters = clusters or Clusters((first_cta + cta_count, 1, 1), (1, 1, 1))
        self._grouping = clusters
        self.cluster_size = clusters.size
        self._rank = np.asarray(clusters.rank(ctas))
        numbers, self._cluster = np.unique(clusters.number(ctas), return_inverse=True)
        self._clusters, self._numbers = numbers.size, numbers
        # The CTA at each (cluster, rank), by which positions in the matrices are mapped back to
        # threads.
        self._members = np.zeros((self._clusters, self.cluster_size), np.int64)
        self._members[self._cluster, self._rank] = ctas
        self._slots: dict[tuple[int, Engine], int] = {}
        self._slot_counts = np.zeros(self._clusters, np.int64)
        # For each thread, the index of its set in `_sets`; 0: the empty set.
        self._far = np.zeros(cta_count * threads_per_cta, np.int64)
        self._sets: list[Far] = [{}]
        self._merged: dict[frozenset[int], int] = {}

    @property
    def threads_per_cta(self) -> int:
        """Threads of one CTA."""
        return self._threads

    @property
    def first_cta(self) -> int:
        """Flat number of the wave's first CTA."""
        return self._first_cta

    @property
    def partial(self) -> bool:
        """Whether anything other than barriers of whole CTAs has created order."""
        return self._known is not None

    @property
    def reaches_others(self) -> bool:
        """Whether any thread has been ordered after threads of other clusters."""
        return len(self._sets) > 1

    # Names

    def cta(self, threads: np.ndarray) -> np.ndarray:
        """Returns the index within the wave of each thread's CTA; negative for a CTA of an earlier
        wave."""
        return threads // self._threads - self._first_cta

    def floor(self, threads: np.ndarray) -> np.ndarray:
        """Returns, for each thread, the clock up to which the thread is ordered after every thread
        of its CTA."""
        return self._floor[self.cta(threads)]

    def warp_mates(self, threads: np.ndarray) -> np.ndarray:
        """Returns, for each thread, the flat indices of the 32 threads of its warp, on a new axis.

        If the CTA's last warp is partial, the CTA's last thread fills the missing entries.
        """
        tids = threads % self._threads
        lanes = (tids // 32 * 32)[..., None] + LANES
        return (threads - tids)[..., None] + np.minimum(lanes, self._threads - 1)

    def rank(self, threads: np.ndarray) -> np.ndarray:
        """Returns the rank of each thread's CTA in its cluster."""
        return self._rank[self.cta(threads)]

    def peer(self, threads: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Returns, for each thread, the flat number of the CTA that has this rank in the thread's
        cluster."""
        return self._members[self._cluster[self.cta(threads)], rank]

    def actor(self, engine: Engine) -> int:
        """Returns the actor (a negative number) of an engine."""
        cluster = int(self._cluster[engine.cta - self._first_cta])
        slot = self._slots.get((cluster, engine))
        if slot is None:
            slot = self._slots[cluster, engine] = int(self._slot_counts[cluster])
            self._slot_counts[cluster] += 1
        return _FIRST_ENGINE - (cluster * _ENGINES + slot)

    def engine(self, actor: int) -> Engine:
        """Returns the engine of an actor (a negative number)."""
        key = divmod(_FIRST_ENGINE - actor, _ENGINES)
        return next(e for (cluster, e), slot in self._slots.items() if (cluster, slot) == key)

    def _place(self, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the position of each thread of this wave in the matrices: (cluster, row)."""
        ctas = self.cta(threads)
        return self._cluster[ctas], self._rank[ctas] * self._threads + threads % self._threads

    def _columns(self, actors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the position of each actor in the matrices: (cluster, column).

        The cluster is -1 for actors of earlier waves.
        """
        ctas = self.cta(actors)
        inside = (ctas >= 0) & (ctas < self._floor.size)
        ctas = np.where(inside, ctas, 0)
        cluster = np.where(inside, self._cluster[ctas], -1)
        column = self._rank[ctas] * self._threads + actors % self._threads
        engines = actors <= _FIRST_ENGINE
        if engines.any():
            where, slots = np.divmod(_FIRST_ENGINE - actors, _ENGINES)
            cluster = np.where(engines, where, cluster)
            column = np.where(engines, self._width + slots, column)
        return cluster, column

    @property
    def _width(self) -> int:
        return self.cluster_size * self._threads

    # Questions

    def ordered_after(
        self, threads: np.ndarray, actors: np.ndarray, clocks: np.ndarray
    ) -> np.ndarray:
        """Returns, for each pair of a thread and an actor, whether the thread is ordered after the
        actor up to the given clock; arrays are broadcast."""
        ctas = self.cta(threads)
        same_cta = ctas == self.cta(actors)
        result: np.ndarray = (threads == actors) | (same_cta & (self._floor[ctas] >= clocks))
        if self._known is not None:
            known = self._matrix()
            # With all checks on, most of the run time is spent here, so the index is flat and
            # computed before broadcasting.
            cluster, row = self._place(threads)
            of, column = self._columns(actors)
            _, rows, columns = known.shape
            places = (cluster * rows + row) * columns + column
            result = result | ((cluster == of) & (known.ravel().take(places) >= clocks))
        if self.reaches_others:
            result = self._far_after(result, threads, actors, clocks, 0)
        return result

    def fenced_after(
        self, threads: np.ndarray, actors: np.ndarray, clocks: np.ndarray
    ) -> np.ndarray:
        """Returns, for each thread and its actor in another cluster, whether the actor's work up to
        the given clock is fenced for the thread."""
        return self._far_after(np.zeros(threads.shape, bool), threads, actors, clocks, 1)

    def _far_after(
        self,
        result: np.ndarray,
        threads: np.ndarray,
        actors: np.ndarray,
        clocks: np.ndarray,
        which: int,
    ) -> np.ndarray:
        """Returns a copy of ``result`` that is also True wherever a thread is ordered after its
        actor in another cluster, or the actor's work is fenced. ``which`` selects ordered (0) or
        fenced (1) clocks."""
        threads, actors, clocks = (
            np.broadcast_to(x, result.shape) for x in (threads, actors, clocks)
        )
        sets = self._far[threads - self._first_cta * self._threads]
        # Sets contain no entry for NO_ACTOR or for several readers.
        open_ = np.flatnonzero(~result & (sets > 0) & ((actors >= 0) | (actors <= _FIRST_ENGINE)))
        if not open_.size:
            return result
        result = result.copy()
        flat, sets, actors, clocks = (x.ravel()[open_] for x in (result, sets, actors, clocks))
        numbers, columns = self._far_columns(actors)
        for key in np.unique(np.stack([sets, numbers]), axis=1).T:
            row = self._sets[int(key[0])].get(int(key[1]))
            if row is None:
                continue
            its = (sets == key[0]) & (numbers == key[1])
            known = np.append(row[which], 0)
            flat[its] = known[np.minimum(columns[its], row[which].size)] >= clocks[its]
        result.ravel()[open_] = flat
        return result

    def _far_columns(self, actors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each actor, which may belong to another wave, its (cluster number,
        column)."""
        ctas = np.maximum(actors, 0) // self._threads
        numbers = np.asarray(self._grouping.number(ctas))
        columns = self._grouping.rank(ctas) * self._threads + actors % self._threads
        engines = actors <= _FIRST_ENGINE
        if engines.any():
            where, slots = np.divmod(_FIRST_ENGINE - actors, _ENGINES)
            numbers = np.where(engines, self._numbers[np.where(engines, where, 0)], numbers)
            columns = np.where(engines, self._width + slots, columns)
        return numbers, columns

    def common(self, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns two arrays of clocks, with one entry per column.

        For threads of one CTA: all of them are ordered after a column's actor up to the first
        clock, and the actor's work is fenced for all of them up to the second clock.
        """
        ctas, tids = self.cta(threads), threads % self._threads
        cluster, rows = self._place(threads)
        known = self._matrix()[cluster[0]][rows]
        own = int(self._rank[ctas[0]]) * self._threads
        known[np.arange(rows.size), own + tids] = _ALWAYS
        least = known.min(axis=0)
        part = least[own : own + self._threads]
        np.maximum(part, self._floor[ctas[0]], out=part)
        if self._fenced is None:
            return least, np.zeros(self._width, np.int32)
        return least, self._fenced[cluster[0]][rows].min(axis=0)

    def column(self, threads: np.ndarray, actors: np.ndarray) -> np.ndarray:
        """Returns, for each actor, its column in the result of ``common(threads)``; -1 for an actor
        in another cluster."""
        cluster, column = self._columns(actors)
        return np.where(cluster == self._cluster[self.cta(threads[:1])[0]], column, -1)

    # Events

    def arrive(self, threads: np.ndarray, barrier: int, clock: int) -> None:
        """Records that threads arrive at the barrier of their CTA without waiting (bar.arrive)."""
        for cta, members in self._by_cta(threads):
            arrived, given = self._handed.get((barrier, cta), ([], None))
            given = self._published(cta, members, clock).joined(given)
            self._handed[barrier, cta] = [*arrived, members], given

    def release(self, threads: np.ndarray, barrier: int, clock: int) -> None:
        """Records that a CTA barrier opens for ``threads``. All have arrived; they may belong to
        several CTAs."""
        for cta, members in self._by_cta(threads):
            handed = self._handed.pop((barrier, cta), None)
            if handed is None and members.size == self._threads:
                self._floor[cta] = clock
                if self._known is not None:
                    self._join(cta, members, clock)
                else:
                    self._learn(cta, members, self._sets_of(cta, members))
            elif handed is None:
                self._join(cta, members, clock)
            else:
                arrived, given = handed
                waiting = np.setdiff1d(members, np.concatenate(arrived))
                self._join(cta, waiting, clock, given)

    def synchronise_warps(self, threads: np.ndarray, clock: int) -> None:
        """For each warp, orders its given threads after each other."""
        for cta, members in self._by_cta(threads):
            for warp in np.unique(members // 32):
                self._join(cta, members[members // 32 == warp], clock)

    def published(self, threads: np.ndarray, clock: int) -> Clocks:
        """Returns the clocks that threads of one CTA publish when they arrive at a barrier or
        mbarrier."""
        return self._published(int(self.cta(threads)[0]), threads % self._threads, clock)

    def acquire(self, threads: np.ndarray, given: Clocks) -> None:
        """Orders threads of one CTA after everything in ``given``, which other threads
        published."""
        cta = int(self.cta(threads)[0])
        rows = self._rows(cta)
        own = self._own(cta, threads % self._threads)
        known = given.known
        rows[own, : known.size] = np.maximum(rows[own, : known.size], known)
        if self._fenced is not None:
            matrix = self._fenced[self._cluster[cta]]
            matrix[own] = np.maximum(matrix[own], given.fenced)
        self._learn(cta, threads % self._threads, given.far)

    def released(self, thread: int, clock: int) -> Far:
        """Returns the clocks that a thread's release publishes to other CTAs."""
        one = np.array([thread])
        cta = int(self.cta(one)[0])
        clocks = self._published(cta, one % self._threads, clock)
        known = clocks.known
        first = int(self._rank[cta]) * self._threads
        part = known[first : first + self._threads]
        np.maximum(part, self._floor[cta], out=part)
        own = {int(self._numbers[self._cluster[cta]]): (known, clocks.fenced)}
        return own if not clocks.far else {**self._sets[self._set(clocks.far)], **own}

    def acquire_far(self, thread: int, far: Far) -> None:
        """Orders a thread after everything in ``far``, which threads of other CTAs released."""
        one = np.array([thread])
        cta = int(self.cta(one)[0])
        number = int(self._numbers[self._cluster[cta]])
        if number in far:
            self.acquire(one, Clocks(*far[number]))
        others = {n: row for n, row in far.items() if n != number}
        if others:
            known = int(self._far[self._places(cta, one % self._threads)][0])
            merged = merge_far(self._sets[known], others)
            if merged is not self._sets[known]:
                self._sets.append(merged)
                self._far[self._places(cta, one % self._threads)] = len(self._sets) - 1

    def acquire_launch(self, threads: np.ndarray) -> None:
        """Orders threads after the previous launch."""
        self._sets.append({_LAUNCH_BEFORE: (np.ones(1, np.int32), np.ones(1, np.int32))})
        for cta, members in self._by_cta(threads):
            self._learn(cta, members, frozenset([len(self._sets) - 1]))

    def after_launch(self, threads: np.ndarray) -> np.ndarray:
        """Returns, for each thread, whether it is ordered after the previous launch."""
        known = np.array([_LAUNCH_BEFORE in far for far in self._sets])
        after: np.ndarray = known[self._far[threads - self._first_cta * self._threads]]
        return after

    # Sets of clocks: the order of threads after other clusters

    def _places(self, cta: int, members: np.ndarray) -> np.ndarray:
        places: np.ndarray = cta * self._threads + members
        return places

    def _sets_of(self, cta: int, members: np.ndarray) -> frozenset[int]:
        if len(self._sets) == 1:
            return frozenset()
        return frozenset(np.unique(self._far[self._places(cta, members)]).tolist()) - {0}

    def _set(self, numbers: frozenset[int]) -> int:
        """Returns the number of the union of the given sets."""
        if len(numbers) == 1:
            return next(iter(numbers))
        if numbers not in self._merged:
            known = sorted(numbers)
            merged = merge_far(*(self._sets[number] for number in known))
            same = [number for number in known if self._sets[number] is merged]
            if not same:
                self._sets.append(merged)
            self._merged[numbers] = same[0] if same else len(self._sets) - 1
        return self._merged[numbers]

    def _learn(self, cta: int, members: np.ndarray, numbers: frozenset[int]) -> None:
        """Also orders a CTA's threads after the clocks of other clusters in the sets with these
        ``numbers``."""
        if not numbers:
            return
        places = self._places(cta, members)
        before = self._far[places]
        for known in np.unique(before).tolist():
            self._far[places[before == known]] = self._set((numbers | {known}) - {0})

    def acquire_engine(self, threads: np.ndarray, engine: Engine, clock: int) -> None:
        """Orders threads of one CTA after an engine's work up to a clock."""
        actor = np.array([self.actor(engine)])
        rows = self._rows(int(self.cta(threads)[0]))
        (column,) = self._columns(actor)[1]
        own = self._place(threads)[1]
        rows[own, column] = np.maximum(rows[own, column], clock)

    def note_engine(self, known: np.ndarray, engine: Engine, clock: int) -> np.ndarray:
        """Returns a copy of the clocks ``known`` that also contains an engine's work up to a
        clock."""
        actor = np.array([self.actor(engine)])
        width = self._matrix().shape[2]
        if known.size < width:
            known = np.pad(known, (0, width - known.size))
        (column,) = self._columns(actor)[1]
        known[column] = max(int(known[column]), clock)
        return known

    def fence(self, threads: np.ndarray, clock: int) -> None:
        """Records a proxy fence: all work that the threads are ordered after is now fenced for
        them."""
        known = self._matrix()
        if self._fenced is None:
            self._fenced = np.zeros((self._clusters, self._width, self._width), np.int32)
        for cta, members in self._by_cta(threads):
            cluster, own = self._cluster[cta], self._own(cta, members)
            seen = known[cluster][own, : self._width]
            first = int(self._rank[cta]) * self._threads
            part = seen[:, first : first + self._threads]
            np.maximum(part, self._floor[cta], out=part)
            seen[np.arange(own.size), own] = clock
            self._fenced[cluster][own] = np.maximum(self._fenced[cluster][own], seen)

    # Matrices

    def by_cta(self, threads: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the given threads, CTA by CTA."""
        ctas = threads // self._threads
        for cta in np.unique(ctas):
            yield threads[ctas == cta]

    def _by_cta(self, threads: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (index of the CTA, thread numbers within the CTA) for each CTA of the given
        threads."""
        ctas, tids = self.cta(threads), threads % self._threads
        for cta in np.unique(ctas):
            yield int(cta), tids[ctas == cta]

    def _matrix(self) -> np.ndarray:
        """Returns the clocks that are not covered by the floors, indexed by [cluster, thread,
        actor]."""
        engines = int(self._slot_counts.max())
        columns = self._width + -(-engines // _MORE_ENGINES) * _MORE_ENGINES
        if self._known is None:
            self._known = np.zeros((self._clusters, self._width, columns), np.int32)
        elif self._known.shape[2] < columns:
            more = columns - self._known.shape[2]
            self._known = np.pad(self._known, ((0, 0), (0, 0), (0, more)))
        return self._known

    def _rows(self, cta: int) -> np.ndarray:
        rows: np.ndarray = self._matrix()[self._cluster[cta]]
        return rows

    def _own(self, cta: int, members: np.ndarray) -> np.ndarray:
        own: np.ndarray = int(self._rank[cta]) * self._threads + members
        return own

    def _published(self, cta: int, members: np.ndarray, clock: int) -> Clocks:
        own = self._own(cta, members)
        given = self._rows(cta)[own].max(axis=0)
        if self.cluster_size > 1:
            # The floor of this CTA does not hold for threads of another CTA.
            first = int(self._rank[cta]) * self._threads
            part = given[first : first + self._threads]
            np.maximum(part, self._floor[cta], out=part)
        given[own] = clock
        far = self._sets_of(cta, members)
        if self._fenced is None:
            return Clocks(given, np.zeros(self._width, np.int32), far)
        return Clocks(given, self._fenced[self._cluster[cta]][own].max(axis=0), far)

    def _join(
        self,
        cta: int,
        members: np.ndarray,
        clock: int,
        handed: Clocks | None = None,
    ) -> None:
        if not members.size:
            return
        own = self._own(cta, members)
        clocks = self._published(cta, members, clock).joined(handed)
        together = clocks.known
        together[own] = clock
        self._rows(cta)[own] = together
        if self._fenced is not None:
            self._fenced[self._cluster[cta]][own] = clocks.fenced
        self._learn(cta, members, clocks.far)
