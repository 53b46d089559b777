"""Records each memory cell's last writer and the readers since that write, and finds unordered
accesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ptxlab.checks.engine_reads import EngineReads
from ptxlab.checks.happens_before import LANES, HappensBefore
from ptxlab.checks.shadow import Shadow, Touched
from ptxlab.interface import Engine, EngineAccess

NO_ACTOR = -1
_SEVERAL = -2
_INTEGER = np.dtype(np.int32)
_ALL_LANES = np.uint32(0xFFFFFFFF)
_LANE_BITS = np.uint32(1) << LANES.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Unordered accesses to the same cells. ``kind`` is RAW, WAR or WAW and names the later access
    first: RAW is a read after a write.

    ``rows`` are the indices of the later event's threads. ``others`` are the actors of the earlier
    accesses (threads, or engines as negative numbers), and ``sites`` are their instructions. If
    several actors are possible, the entry is NO_ACTOR. For ``kind`` PROXY the accesses are
    ordered, but there is no proxy fence between a thread's write and an engine's access.
    """

    kind: str
    cells: np.ndarray
    rows: np.ndarray
    others: np.ndarray
    sites: np.ndarray


@dataclass(frozen=True, slots=True)
class Party:
    """The threads that make an access, and the time and instruction of the access.

    For each thread, ``lanes`` is the mask of the lanes that receive what the thread reads.

    Atomics, strong loads and strong stores do not conflict with each other.
    ``by_word``: whether the accesses are strong and cover whole words.
    """

    threads: np.ndarray
    lanes: np.ndarray
    clock: int
    site: int
    atomic: bool = False
    by_word: bool = False


class AccessHistory:
    """The last writer and the recent readers of each cell, as in the FastTrack algorithm.

    For the readers, each warp has one record: the clock of its last read and the mask of lanes.

    A write makes earlier reads irrelevant: an access ordered after the write is also ordered after
    those reads, unless these reads were reported as unordered. A read replaces the earlier record
    of its warp if it is ordered after the recorded read. Otherwise the lane masks are merged and
    get the later clock.

    ``shared_by_ctas``: whether all CTAs share the memory. A record then also names the CTA.
    ``cluster_size``: the number of CTAs that can access the same shared memory.
    """

    def __init__(
        self,
        banks: int,
        size: int,
        threads_per_cta: int,
        shared_by_ctas: bool = False,
        cluster_size: int = 1,
    ) -> None:
        self._threads = threads_per_cta
        self._cta_warps = -(-threads_per_cta // 32)
        self._warps = self._cta_warps * cluster_size
        self._cluster_size = cluster_size
        self._banks, self._size = banks, size
        self._by_cta = shared_by_ctas
        writes = {"thread": (_INTEGER, NO_ACTOR), "clock": (_INTEGER, 0), "site": (_INTEGER, 0)}
        self._writes = Shadow(banks, size, {**writes, "atomic": (np.dtype(bool), False)})
        # The words that the launch has accessed by writes (or reads) that are not strong or that
        # cover only part of a word.
        self._weakly_written, self._weakly_read = (
            np.zeros(-(-size // 4) if shared_by_ctas else 0, np.bool_) for _ in range(2)
        )
        # This is allocated at the first read, because outputs are the largest memories and are
        # rarely read.
        self._reads: Shadow | None = None
        self._engine_reads: EngineReads | None = None
        # Whether any engine has written. After that, the last writer of a cell may belong to
        # another CTA.
        self._engines_write = False

    def locate(
        self, banks: np.ndarray | int, addresses: np.ndarray, sizes: int | np.ndarray
    ) -> Touched:
        """Returns the cells that an access touches."""
        touched = self._writes.locate(banks, addresses, sizes)
        if self._writes.granule == 1:
            for reads in (self._reads, self._engine_reads):
                if reads is not None:
                    reads.refine()
        return touched

    def address(self, cell: int) -> int:
        """Returns the byte address of a cell within its memory."""
        return self._writes.address(cell)

    def footprint(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns four masks of words. They mark the words that the launch has written, read after
        the last write, ever written weakly, and ever read weakly.

        An access is weak here unless it is strong and covers whole words.
        """
        written = self._writes["thread"] != NO_ACTOR
        read = np.zeros_like(written)
        if self._reads is not None:
            read = (self._reads["clock"] > 0).any(axis=1)
        if self._writes.granule == 1:
            at = np.arange(0, written.size, 4)
            written, read = (np.logical_or.reduceat(x, at) for x in (written, read))
        return written, read, self._weakly_written, self._weakly_read

    def _words(self, cells: np.ndarray) -> np.ndarray:
        return cells // 4 if self._writes.granule == 1 else cells

    # ---- reads ----

    def read(self, touched: Touched, party: Party, order: HappensBefore) -> Iterator[Conflict]:
        """Checks reads against the last writes, then records them."""
        yield from self._after_write("RAW", touched, party, order)
        self._record_read(touched, party, order)

    def _reads_begun(self) -> Shadow:
        fields: dict[str, tuple[np.dtype, object]] = {
            "clock": (_INTEGER, 0),
            "lanes": (np.dtype(np.uint32), 0),
            "site": (_INTEGER, 0),
        }
        if self._by_cta:
            fields |= {"cta": (_INTEGER, NO_ACTOR), "atomic": (np.dtype(bool), False)}
        reads = Shadow(self._banks, self._size, fields, width=self._warps)
        if self._writes.granule == 1:
            reads.refine()
        return reads

    def _record_read(self, touched: Touched, party: Party, order: HappensBefore) -> None:
        if self._reads is None:
            self._reads = self._reads_begun()
        if self._by_cta and not party.by_word:
            self._weakly_read[self._words(touched.cells)] = True
        threads, lanes = party.threads[touched.rows], party.lanes[touched.rows]
        slots = touched.cells * self._warps + threads % self._threads // 32
        if self._cluster_size > 1:
            slots += order.rank(threads) * self._cta_warps
        clocks, masks = self._reads["clock"].ravel(), self._reads["lanes"].ravel()
        old_lanes, old_clocks = masks[slots], clocks[slots]
        stays = (old_clocks > order.floor(threads)) & ((old_lanes & ~lanes) != 0)
        if self._by_cta:
            stays &= self._claim(slots, threads, order)
        if order.partial and stays.any():
            kept = np.flatnonzero(stays)
            mates = order.warp_mates(threads[kept])
            known = order.ordered_after(threads[kept][:, None], mates, old_clocks[kept][:, None])
            stays[kept] = (_select(old_lanes[kept]) & ~known).any(axis=1)
        masks[slots[~stays]] = 0
        if np.all(lanes == _ALL_LANES):
            masks[slots] = _ALL_LANES
        else:
            np.bitwise_or.at(masks, slots, lanes)
        clocks[slots] = party.clock
        self._reads["site"].ravel()[slots] = party.site
        if self._by_cta:
            atomic = self._reads["atomic"].ravel()
            atomic[slots] = party.atomic & (atomic[slots] | ~stays)

    def _claim(self, slots: np.ndarray, threads: np.ndarray, order: HappensBefore) -> np.ndarray:
        """Records the CTAs of the readers.

        Returns a mask that is True where the previous reader belonged to the same CTA.
        """
        assert self._reads is not None
        owner = self._reads["cta"].ravel()
        ctas = threads // self._threads
        before = owner[slots]
        owner[slots] = ctas
        several = (before != ctas) & (before != NO_ACTOR)
        far = np.flatnonzero(several & (before != _SEVERAL))
        if order.reaches_others and far.size:
            # If this reader is ordered after a recorded reader of another CTA, the older record is
            # dropped.
            readers = before[far, None] * self._threads + self._tids(
                threads[far] % self._threads // 32
            )
            clocks = self._reads["clock"].ravel()[slots[far]]
            lanes = self._reads["lanes"].ravel()[slots[far]]
            known = order.ordered_after(threads[far][:, None], readers, clocks[:, None])
            several[far] = (_select(lanes) & ~known).any(axis=1)
        # The readers of one event may belong to several CTAs, but only one of these CTAs was
        # recorded.
        owner[slots[several | (owner[slots] != ctas)]] = _SEVERAL
        return before == ctas

    # ---- writes ----

    def write(self, touched: Touched, party: Party, order: HappensBefore) -> Iterator[Conflict]:
        """Checks writes against earlier writes and reads, then records them."""
        yield from self._after_write("WAW", touched, party, order)
        yield from self._after_reads(touched, party, order)
        yield from self._after_engine_reads(touched, party, order)
        yield from self.record_write(touched, party)

    def write_later(
        self, touched: Touched, party: Party, engine: Engine, order: HappensBefore
    ) -> Iterator[Conflict]:
        """Checks and records a write that threads issue to an engine; the engine becomes the
        writer.

        The threads must be ordered after earlier accesses to the cells. After earlier writes, a
        proxy fence is also needed.
        """
        yield from self._after_write("WAW", touched, party, order)
        yield from self._after_reads(touched, party, order)
        yield from self._unfenced(touched, party, order)
        self._engines_write = True
        actors = np.full_like(party.threads, order.actor(engine))
        yield from self.record_write(touched, replace(party, threads=actors))

    def _unfenced(self, touched: Touched, party: Party, order: HappensBefore) -> Iterator[Conflict]:
        cells, threads = touched.cells, party.threads[touched.rows]
        writers, clocks = self._writes["thread"][cells], self._writes["clock"][cells]
        # Unordered accesses were reported above, and atomics need not be ordered with respect to
        # one another.
        columns = order.column(threads, writers)
        own = (writers >= 0) & (columns >= 0)
        own &= ~(self._writes["atomic"][cells] & party.atomic)
        own[own] = order.ordered_after(threads[own], writers[own], clocks[own])
        if order.reaches_others:
            yield from self._far_unfenced(touched, party, order, columns)
        index = np.flatnonzero(own)
        if not index.size:
            return
        _, fenced = order.common(np.unique(threads))
        bad = index[clocks[index] > fenced[columns[index]]]
        if bad.size:
            sites = self._writes["site"][cells[bad]]
            yield Conflict("PROXY", cells[bad], touched.rows[bad], writers[bad], sites)

    def _far_unfenced(
        self, touched: Touched, party: Party, order: HappensBefore, columns: np.ndarray
    ) -> Iterator[Conflict]:
        """Finds earlier writes by threads of other clusters after which the access is ordered, but
        without a proxy fence in between."""
        cells, threads = touched.cells, party.threads[touched.rows]
        writers, clocks = self._writes["thread"][cells], self._writes["clock"][cells]
        far = (writers >= 0) & (columns < 0) & ~(self._writes["atomic"][cells] & party.atomic)
        far[far] = order.ordered_after(threads[far], writers[far], clocks[far])
        index = np.flatnonzero(far)
        bad = index[~order.fenced_after(threads[index], writers[index], clocks[index])]
        if bad.size:
            sites = self._writes["site"][cells[bad]]
            yield Conflict("PROXY", cells[bad], touched.rows[bad], writers[bad], sites)

    def retire_engines(self, order: HappensBefore) -> None:
        """Replaces, after a wave, each engine that is recorded as the writer of a cell by a thread
        of the engine's CTA.

        This is needed because the next wave uses the same numbers for its engines.
        """
        if not self._engines_write:
            return
        writers = self._writes["thread"]
        for actor in np.unique(writers[writers < _SEVERAL]).tolist():
            writers[writers == actor] = order.engine(actor).cta * self._threads

    def record_write(self, touched: Touched, party: Party) -> Iterator[Conflict]:
        """Records a write without checking earlier accesses.

        If two threads write one cell in the same event, this is a conflict.
        """
        cells, threads = touched.cells, party.threads[touched.rows]
        writer = self._writes["thread"]
        writer[cells] = threads
        self._writes["clock"][cells] = party.clock
        self._writes["site"][cells] = party.site
        self._writes["atomic"][cells] = party.atomic
        if self._by_cta and not party.by_word:
            self._weakly_written[self._words(cells)] = True
        self._forget_reads(cells)
        lost = np.flatnonzero(writer[cells] != threads)
        if lost.size and not party.atomic:
            sites = np.full(lost.size, party.site)
            yield Conflict("WAW", cells[lost], touched.rows[lost], writer[cells[lost]], sites)

    def _forget_reads(self, cells: np.ndarray) -> None:
        if self._engine_reads is not None:
            self._engine_reads.forget(cells)
        if self._reads:
            self._reads["clock"][cells] = 0
            self._reads["lanes"][cells] = 0
            if self._by_cta:
                self._reads["cta"][cells] = NO_ACTOR

    def _after_reads(
        self, touched: Touched, party: Party, order: HappensBefore
    ) -> Iterator[Conflict]:
        if self._reads is None:
            return
        threads = party.threads[touched.rows]
        clocks = self._reads["clock"][touched.cells]
        unsure = clocks > order.floor(threads)[:, None]
        if self._cluster_size > 1:
            unsure = clocks > 0
        if self._by_cta:
            ctas = (threads // self._threads)[:, None]
            unsure |= (clocks > 0) & (self._reads["cta"][touched.cells] != ctas)
            if party.atomic:
                unsure &= ~self._reads["atomic"][touched.cells]
        # The cells are sorted by warp, so that the cells of one thread's access are adjacent.
        warps, entries = np.nonzero(unsure.T)
        if not entries.size:
            return
        cells = touched.cells[entries]
        if self._by_cta:
            reader_ctas = self._reads["cta"][cells, warps].astype(np.int64)
        elif self._cluster_size > 1:
            reader_ctas = order.peer(threads[entries], warps // self._cta_warps)
        else:
            reader_ctas = threads[entries] // self._threads
        lanes, clocks = self._reads["lanes"][cells, warps], clocks[entries, warps]
        first, run = _runs(touched.rows[entries], warps, reader_ctas, clocks, lanes)
        several = reader_ctas[first] == _SEVERAL
        readers = reader_ctas[first, None] * self._threads + self._tids(warps[first])
        known = order.ordered_after(threads[entries[first], None], readers, clocks[first, None])
        unknown = _select(lanes[first]) & ~(known & ~several[:, None])
        bad = np.flatnonzero(unknown.any(axis=1)[run])
        if bad.size:
            bad = bad[np.lexsort((warps[bad], entries[bad]))]
            others = readers[run[bad], unknown.argmax(axis=1)[run[bad]]]
            others[several[run[bad]]] = NO_ACTOR
            sites = self._reads["site"][cells[bad], warps[bad]]
            yield Conflict("WAR", cells[bad], touched.rows[entries[bad]], others, sites)

    def _tids(self, warps: np.ndarray) -> np.ndarray:
        """Returns, for each warp, the indices of its 32 threads within the CTA, on a new last axis.

        ``warps`` are indices within the cluster.
        """
        lanes = 32 * (warps % self._cta_warps)[:, None] + LANES
        return np.minimum(lanes, self._threads - 1)

    # ---- both ----

    def _after_write(
        self, kind: str, touched: Touched, party: Party, order: HappensBefore
    ) -> Iterator[Conflict]:
        """Finds accesses that are not ordered after the last write to their cell.

        In a matrix load, each lane that receives data must be ordered after that write.
        """
        cells, threads = touched.cells, party.threads[touched.rows]
        writers = self._writes["thread"][cells]
        clocks = self._writes["clock"][cells]
        unsure = clocks > order.floor(threads)
        if self._by_cta or self._engines_write or self._cluster_size > 1:
            unsure |= order.cta(threads) != order.cta(writers)
        unsure &= writers != NO_ACTOR
        if party.atomic:
            unsure &= ~self._writes["atomic"][cells]
        index = np.flatnonzero(unsure)
        if not index.size:
            return
        first, run = _runs(touched.rows[index], writers[index], clocks[index])
        one = index[first]
        mates = order.warp_mates(threads[one])
        known = order.ordered_after(mates, writers[one][:, None], clocks[one][:, None])
        behind = (_select(party.lanes[touched.rows[one]]) & ~known).any(axis=1)
        index = index[behind[run]]
        if index.size:
            sites = self._writes["site"][cells[index]]
            yield Conflict(kind, cells[index], touched.rows[index], writers[index], sites)

    def _after_engine_reads(
        self, touched: Touched, party: Party, order: HappensBefore
    ) -> Iterator[Conflict]:
        """Finds writes by threads to cells that an engine may not have read yet."""
        if self._engine_reads is None:
            return
        index, columns, clocks, sites = self._engine_reads.of(touched.cells)
        if not index.size:
            return
        threads = party.threads[touched.rows[index]]
        engines = self._engines(touched.cells[index], columns, threads, order)
        bad = np.flatnonzero(~order.ordered_after(threads, engines, clocks))
        if bad.size:
            rows = touched.rows[index[bad]]
            yield Conflict("WAR", touched.cells[index[bad]], rows, engines[bad], sites[bad])

    def _engines(
        self, cells: np.ndarray, columns: np.ndarray, threads: np.ndarray, order: HappensBefore
    ) -> np.ndarray:
        """Returns the engines, as actors, that the columns of EngineReads represent.

        A cell's bank is the CTA that owns the memory.
        """
        assert self._engine_reads is not None
        banks = cells // self._writes.cells_per_bank + order.first_cta
        actors = np.zeros(cells.size, np.int64)
        keys = banks * 4096 + columns
        for key in np.unique(keys):
            bank, column = divmod(int(key), 4096)
            actors[keys == key] = order.actor(self._engine_reads.engine(column, bank))
        return actors

    # ---- engines ----

    def engine_access(
        self, cells: np.ndarray, event: EngineAccess, order: HappensBefore
    ) -> Iterator[Conflict]:
        """Checks an engine's read or write at its issue, then records it.

        All threads that issued the access must be ordered after the earlier accesses that conflict
        with it.
        """
        known, fenced = order.common(event.threads)
        writers, clocks = self._writes["thread"][cells], self._writes["clock"][cells]
        columns = order.column(event.threads, writers)
        written = writers != NO_ACTOR
        behind = written & ((columns < 0) | (clocks > known[columns]))
        kind = "RAW" if event.kind == "read" else "WAW"
        yield from self._bad(kind, cells, behind, writers, self._writes["site"][cells])
        own = np.minimum(columns, fenced.size - 1)
        unfenced = written & ~behind & (writers >= 0) & (clocks > fenced[own])
        yield from self._bad("PROXY", cells, unfenced, writers, self._writes["site"][cells])
        if event.kind == "read":
            if self._engine_reads is None:
                self._engine_reads = EngineReads(self._banks, self._size, self._writes.granule)
            self._engine_reads.record(cells, event.engine, event.cta, event.clock, event.site.index)
            return
        yield from self._engine_after_reads(cells, event, order, known)
        self._engines_write = True
        self._writes["thread"][cells] = order.actor(event.engine)
        self._writes["clock"][cells] = event.clock
        self._writes["site"][cells] = event.site.index
        self._writes["atomic"][cells] = False
        self._forget_reads(cells)

    def _engine_after_reads(
        self, cells: np.ndarray, event: EngineAccess, order: HappensBefore, known: np.ndarray
    ) -> Iterator[Conflict]:
        """Finds engine writes that are not ordered after earlier reads of the cells by threads or
        engines."""
        if self._reads is not None:
            clocks = self._reads["clock"][cells]
            entries, warps = np.nonzero(clocks)
            ctas = order.peer(np.repeat(event.threads[:1], warps.size), warps // self._cta_warps)
            if self._cluster_size == 1:
                ctas = np.full(warps.size, event.cta)
            readers = ctas[:, None] * self._threads + self._tids(warps)
            columns = order.column(event.threads, readers)
            seen = known[columns] >= clocks[entries, warps][:, None]
            unknown = _select(self._reads["lanes"][cells[entries], warps]) & ~seen
            bad = np.flatnonzero(unknown.any(axis=1))
            others = readers[bad, unknown[bad].argmax(axis=1)]
            sites = self._reads["site"][cells[entries[bad]], warps[bad]]
            if bad.size:
                yield Conflict("WAR", cells[entries[bad]], np.zeros_like(bad), others, sites)
        if self._engine_reads is not None:
            index, columns, clocks, sites = self._engine_reads.of(cells)
            if index.size:
                threads = np.repeat(event.threads[:1], index.size)
                engines = self._engines(cells[index], columns, threads, order)
                behind = clocks > known[order.column(event.threads, engines)]
                yield from self._bad("WAR", cells[index], behind, engines, sites)

    def _bad(
        self, kind: str, cells: np.ndarray, bad: np.ndarray, others: np.ndarray, sites: np.ndarray
    ) -> Iterator[Conflict]:
        index = np.flatnonzero(bad)
        if index.size:
            rows = np.zeros_like(index)
            yield Conflict(kind, cells[index], rows, others[index], sites[index])


def _runs(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds runs of equal neighbours. Returns the index at which each run begins, and for every
    element the number of the run that contains it.

    The cells of a 16-byte access usually have the same history, so checking a run's first cell is
    enough.
    """
    begins = np.ones(columns[0].size, bool)
    begins[1:] = False
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(begins), np.cumsum(begins) - 1


def _select(masks: np.ndarray) -> np.ndarray:
    """Converts lane masks (uint32) to booleans, on a new last axis of length 32."""
    return (masks[:, None] & _LANE_BITS) != 0
