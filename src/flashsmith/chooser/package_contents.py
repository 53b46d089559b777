"""Determines the contents of a kernel package: the kernels that attention() and the other
operations use on GPUs of one architecture.

These are the kernels that are chosen for the problems in the shipped tables and for a fixed grid of
problems. For each kind of call, dtype and d_head, the grid has some numbers of heads, batches and
lengths, on each GPU that was measured. For the grid, a few kernels are enough: for every problem,
one of them is expected to take at most TOLERANCE longer than the best kernel, as with `flashsmith
build --any-length`. Over a cache, all chosen kernels are in the package, since a sequence must have
the same bits in every batch.

The grid has all widths for which an operation has kernels on the architecture. The package contains
each kernel also compiled for uneven lengths; the kernel then serves all smaller d. A PackageScope
leaves out rare combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashsmith.chooser.batch_invariant import adapt_to_queries, without_batch
from flashsmith.chooser.choice import Expectation
from flashsmith.chooser.evidence import fastest_over_cache, gather
from flashsmith.chooser.package_scope import STANDARD, PackageScope
from flashsmith.chooser.prebuild import CallSizes, compiled_for, cover
from flashsmith.chooser.winners import WinnersTable
from flashsmith.chooser.winners.validation import device_of
from flashsmith.chooser.write_slots import write_config
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DeviceSpec,
    DType,
    KernelConfig,
    Problem,
    Semantics,
    device_spec,
    families,
)
from flashsmith.families.device import KNOWN_DEVICES
from flashsmith.families.gpu_names import same_gpu
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.legality import D_STEP
from flashsmith.operations import DEFAULT
from flashsmith.operations.backward import BACKWARD
from flashsmith.operations.decode import DECODE
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.operations.merge import MERGE
from flashsmith.operations.write_slots import WRITE_SLOTS
from flashsmith.semantics.cache_format import D_STEP_OF_8BIT

PackedKernel = tuple[KernelConfig, Semantics]
# The type of a function that is called as searched(finished, total); both numbers count kinds of
# calls.
Searched = Callable[[int, int], None]

# The values of (heads_q, heads_k) in the grid: one or four heads of q use each head of k and v.
# With a latent cache, all heads of q use the one head of the cache.
HEADS = ((16, 16), (32, 8))
LATENT_HEADS = ((16, 1), (64, 1), (128, 1))
_MASKS = ("", "causal", "window", "causal softcap", "window softcap")
_PACKED = tuple(f"{words} packed" for words in _MASKS)
_CANONICAL = (
    *("canonical", "causal canonical", "window canonical", "causal softcap canonical"),
    *("packed canonical", "causal packed canonical", "window packed canonical"),
)
FORWARD_KINDS = (
    *_MASKS,
    *_PACKED,
    *("partial", "causal partial", "causal packed partial"),
    *_CANONICAL,
)
BACKWARD_KINDS = tuple(
    f"backward {words}"
    for words in (*_MASKS, *_PACKED, "only_dq", "no_dq", "causal only_dq", "causal no_dq")
)
# The kinds of calls that serving engines make in their steps. Calls without a mask attend to keys
# that other ranks have cached, or they are the calls of an encoder.
_STEPS = (
    *(*_PACKED, "softcap packed"),
    *("packed canonical", "causal packed canonical", "window packed canonical"),
)
_8BIT_CACHES = ("cache_e4m3", "cache_e5m2")
DECODE_KINDS = (
    *(f"decode {words}" for words in (*_MASKS, "causal canonical", "window canonical", *_STEPS)),
    *(f"decode {words} {cache}" for cache in _8BIT_CACHES for words in ("causal", *_STEPS)),
)
WRITE_KINDS = ("write_slots", *(f"write_slots {cache}" for cache in _8BIT_CACHES))
MERGE_KINDS = ("merge", "merge packed")
LATENT_KINDS = (
    *("latent_decode", "latent_decode causal", "latent_decode causal packed"),
    "latent_decode causal packed cache_e4m3",
)
KINDS = (
    *(*FORWARD_KINDS, *BACKWARD_KINDS, *DECODE_KINDS, *LATENT_KINDS, *MERGE_KINDS),
    *WRITE_KINDS,
)
SMALLEST_D_HEAD = 64
# The lengths and batches of the grid. The length 1000 is not a multiple of any tile. A batch has at
# most _MOST_ROWS rows of q.
_LENGTHS = (512, 1000, 2048, 4096, 8192, 16384, 65536)
_BATCHES = (1, 4, 16)
_MOST_ROWS = 2**18
SIZES: tuple[CallSizes, ...] = (
    *((b, s, s) for b in _BATCHES for s in _LENGTHS if b * s <= _MOST_ROWS),
    *((b, q, k) for b in (1, 8) for q, k in ((64, 4096), (512, 8192))),
)
CACHE_SIZES: tuple[CallSizes, ...] = tuple(
    itertools.product((1, 64), (1, 4, 64, 1024), (1000, 8192, 65536))
)
# The sizes of calls over a latent cache. They have few queries, because models do not use the
# absorbed form of latent attention for prompts.
LATENT_SIZES: tuple[CallSizes, ...] = tuple(itertools.product((1, 64), (1, 4), (1000, 8192, 65536)))
_OVER_CACHES = (DECODE.name, LATENT_DECODE.name)
_COMPILED_TWICE = (DEFAULT, BACKWARD.name, DECODE.name)


def words_of(kind: str) -> set[str]:
    """The words of a kind of call, and the name of the operation of this kind."""
    return {*kind.split(), Problem.parse(f"s1 d64 fp16 {kind}").operation}


@dataclass(frozen=True)
class PackageContents:
    """The kernels in a package: for each semantics, the configs that are compiled for it.

    ``problems`` is the number of problems that were examined.
    """

    arch: int
    problems: int
    kernels: Mapping[Semantics, tuple[KernelConfig, ...]]

    def __len__(self) -> int:
        """The number of kernels."""
        return sum(map(len, self.kernels.values()))


def package_contents(
    arch: int,
    *,
    d_heads: Sequence[HeadDims] | None = None,
    dtypes: Iterable[DType] = tuple(DType),
    kinds: Sequence[str] = KINDS,
    scope: PackageScope = STANDARD,
    searched: Searched | None = None,
) -> PackageContents:
    """Returns the kernels that a package for ``arch`` contains.

    ``d_heads``, ``dtypes`` and ``kinds`` restrict the kernels. If ``d_heads`` is None, the widths
    are all widths_of() the operation of a kind. ``scope`` leaves out rare combinations of these.
    The user's table is not used. Raises ArgumentError if there is no such kernel.
    """
    table = WinnersTable.shipped()
    devices = _grid_devices(table, arch)
    measured = _measured_problems(table, arch)
    found: dict[PackedKernel, None] = {}
    count = 0
    groups = [
        (kind, dtype, d)
        for kind, dtype in itertools.product(kinds, dtypes)
        for d in _widths(arch, kind, d_heads)
        if scope.includes(kind, dtype, d)
    ]
    for number, (kind, dtype, d) in enumerate(groups):
        if searched is not None:
            searched(number, len(groups))
        wanted = Problem.parse(f"s1 d{_served_by(d, kind)} {dtype.name} {kind}")
        own = measured.get(_sizeless(wanted), [])
        grid = [(one, device) for device in devices for one in _grid(wanted)]
        count += len(own) + len(grid)
        chosen = _chosen(own, grid, table)
        if not scope.has_whole_tiles(kind, dtype, d):
            chosen = _for_any_length(chosen)
        found.update(dict.fromkeys(chosen))
    if not found:
        widths = "any d_head" if d_heads is None else f"d_head {', '.join(map(str, d_heads))}"
        rare = "" if scope.everything else ", apart from rare combinations"
        raise ArgumentError(f"sm_{arch}: no kernel of {widths} serves these kinds of calls{rare}")
    kernels: dict[Semantics, list[KernelConfig]] = {}
    for config, semantics in sorted(found, key=lambda it: (it[1], it[0].FAMILY, it[0].to_ints())):
        kernels.setdefault(semantics, []).append(config)
    return PackageContents(arch, count, {it: tuple(found) for it, found in kernels.items()})


def known_devices(arch: int) -> tuple[DeviceSpec, ...]:
    """Returns the known GPUs of an architecture or, if there are none, one GPU that stands for the
    architecture.

    Raises ArgumentError if the architecture is not supported.
    """
    found = tuple(device for device in KNOWN_DEVICES if device.arch == arch)
    return found or (device_spec(arch),)


def _grid_devices(table: WinnersTable, arch: int) -> tuple[DeviceSpec, ...]:
    """Returns those known GPUs of an architecture that were measured or, if there are none, all its
    known GPUs."""
    known = known_devices(arch)
    gpus = {entry.key.gpu for entry in table if entry.key.arch == arch}
    return tuple(one for one in known if any(same_gpu(one.name, gpu) for gpu in gpus)) or known


def widths_of(arch: int, operation: str) -> tuple[HeadDims, ...]:
    """Returns the widths from SMALLEST_D_HEAD on for which an operation has kernels on GPUs of an
    architecture: first single widths, then pairs."""
    served = {
        dims
        for family, device in itertools.product(families(operation), known_devices(arch))
        for dims in family.head_dims
        if family.runs_on(device) and family.candidates(DType.BF16, dims, device, masked=False)
    }
    single = sorted(it for it in served if isinstance(it, int) and it >= SMALLEST_D_HEAD)
    return (*single, *sorted(it for it in served if isinstance(it, HeadPair)))


def _widths(arch: int, kind: str, asked: Sequence[HeadDims] | None) -> Iterator[HeadDims]:
    """Yields the widths in ``asked`` for which a kind of call has kernels. If ``asked`` is None,
    yields all widths for which it has kernels."""
    operation = Problem.parse(f"s1 d64 fp16 {kind}").operation
    if asked is None:
        yield from widths_of(arch, operation)
        return
    of_rows = {pair for family in families(LATENT_DECODE.name) for pair in family.pairs}
    for d in asked:
        if operation == MERGE.name:  # Merged outputs have one width
            fits = isinstance(d, int)
        else:
            fits = (d in of_rows) == (operation == LATENT_DECODE.name)
        if fits:
            yield d


def _served_by(dims: HeadDims, kind: str) -> HeadDims:
    """Returns the widths of the largest calls of a kind that kernels of the given widths serve.
    These are the widths of the kernels, except for a pair of equal widths such as 256:256. No call
    has such a pair of widths, so the returned d_v is smaller."""
    if isinstance(dims, HeadPair) and dims.d_head == dims.d_v:
        step = D_STEP_OF_8BIT if any(cache in kind for cache in _8BIT_CACHES) else D_STEP
        return dims._replace(d_v=dims.d_v - step)
    return dims


def _grid(wanted: Problem) -> Iterator[Problem]:
    """Yields the problems of the grid that have the kind, dtype and d of ``wanted``."""
    heads: tuple[tuple[int, int], ...] = HEADS
    sizes = CACHE_SIZES if wanted.operation == DECODE.name else SIZES
    if wanted.operation == LATENT_DECODE.name:
        heads, sizes = LATENT_HEADS, LATENT_SIZES
    for (heads_q, heads_k), (batch, seq_q, seq_k) in itertools.product(heads, sizes):
        if wanted.operation == MERGE.name:
            heads_k, seq_k = heads_q, 1
        yield replace(
            wanted, batch=batch, seq_q=seq_q, seq_k=seq_k, heads_q=heads_q, heads_k=heads_k
        )


def _measured_problems(
    table: WinnersTable, arch: int
) -> dict[Problem, list[tuple[Problem, DeviceSpec]]]:
    """The problems in the table that were measured on GPUs of an architecture, with their GPUs, by
    what remains of a problem without its sizes."""
    found: dict[Problem, list[tuple[Problem, DeviceSpec]]] = {}
    for entry in table:
        device = device_of(entry.key)
        if entry.key.arch == arch and device is not None:
            found.setdefault(_sizeless(entry.problem), []).append((entry.problem, device))
    return found


def _sizeless(problem: Problem) -> Problem:
    """Returns the problem without its sizes and its window, and without the property that its tiles
    are not whole."""
    semantics = problem.semantics
    kind = replace(semantics, uneven=semantics.packed or semantics.partial)
    one = replace(problem, batch=1, seq_q=1, seq_k=1, heads_q=1, heads_k=1)
    return replace(one, semantics=kind, page=0, window_keys=0)


def _for_any_length(kernels: Iterable[PackedKernel]) -> Iterator[PackedKernel]:
    """Yields each kernel as compiled for any lengths, if its operation is one whose kernels are
    compiled twice and are many."""
    for config, semantics in kernels:
        if config.family.operation in _COMPILED_TWICE:
            semantics = replace(semantics, uneven=True)
        yield config, semantics


def _chosen(
    measured: Sequence[tuple[Problem, DeviceSpec]],
    grid: Sequence[tuple[Problem, DeviceSpec]],
    table: WinnersTable,
) -> Iterator[PackedKernel]:
    """Yields the kernels for problems of one kind: all kernels that are chosen for measured
    problems, and a few kernels that are enough for the grid."""
    few: dict[KernelConfig, None] = {}
    if grid[0][0].operation == WRITE_SLOTS.name:  # a single kernel serves all sizes
        config = write_config(grid[0][0])
        semantics = grid[0][0].required_semantics(config)
        yield config, semantics
        yield config, replace(semantics, uneven=True)  # This one serves calls with a smaller d
        return
    for problem, device in measured:
        for deterministic in _determinisms(problem):
            found = _expected(problem, device, table, deterministic)
            if found is None:
                continue
            few[found.chosen.config] = None
            config = adapt_to_queries(found.chosen.config, problem, device)
            config = fastest_over_cache(config, problem, device, table)
            yield config, problem.required_semantics(config)
    if grid[0][0].operation in _OVER_CACHES:
        for problem, device in grid:
            found = _expected(problem, device, table, deterministic=False)
            if found is None:
                continue
            config = adapt_to_queries(found.chosen.config, problem, device)
            config = fastest_over_cache(config, problem, device, table)
            semantics = problem.required_semantics(config)
            yield config, semantics
            if problem.operation == DECODE.name:  # This one also serves a smaller d
                yield config, replace(semantics, uneven=True)
        return
    for deterministic in _determinisms(grid[0][0]):
        expected = [_expected(problem, device, table, deterministic) for problem, device in grid]
        usable = [it for it in few if not deterministic or it.family.is_deterministic(it)]
        for config in cover([it for it in expected if it is not None], usable):
            for semantics in compiled_for(grid[0][0].semantics, grid[0][0]):
                yield config, semantics


def _determinisms(problem: Problem) -> tuple[bool, ...]:
    """Returns the values of ``deterministic`` for which the chosen kernels may differ."""
    return (False, True) if problem.operation == BACKWARD.name else (False,)


def _expected(
    problem: Problem, device: DeviceSpec, table: WinnersTable, deterministic: bool
) -> Expectation | None:
    """Does the same as chooser.choice.expectation, but with the given table. Returns None if the
    device has no kernel for the problem, or if ``deterministic`` is set and the device has no
    kernel that gives the same bits in every run."""
    represented = without_batch(problem)
    try:
        evidence = gather(represented, device, table, deterministic=deterministic)
    except ArgumentError:
        return None
    return Expectation(represented, device, evidence)
