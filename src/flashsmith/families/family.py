"""Family: what differs between families of kernels, and the registry of them.

Everything else asks `cfg.family`; docs/add-a-family.md builds one step by step.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.families.canonical import version_of
from flashsmith.families.cpp import Cpp
from flashsmith.families.device import KNOWN_DEVICES, DeviceSpec
from flashsmith.families.knob import feature_of, feature_words
from flashsmith.families.order import Order
from flashsmith.families.rule import LegalSpace, Rule
from flashsmith.families.tile_work import CallWork, TileWork
from flashsmith.operations.problem import Problem
from flashsmith.operations.registry import find_more_with, operation
from flashsmith.printable import quoted
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType

ENTRY_POINT_GROUP = "flashsmith.families"
# A C identifier in small letters: it names a folder of sources and stands in manifests.
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
# A key of KERNELS that cannot be a path, 'B_r,B_c' or a short form.
_KEY = re.compile(r"[\w.-]+", re.ASCII)
# The sets and the spaces of all families together.
_RESERVED_KEYS = {"all", "both", "known"}
_CSRC = Path(__file__).parents[1] / "csrc"


class ConfigSet(NamedTuple):
    """A set that KERNELS can name: what it is, in words, and its configs."""

    meaning: str
    make: Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class SmemRegion:
    """A half-open range of a CTA's shared memory, bytes, and what it holds."""

    tile: str
    begin: int
    end: int
    rows: int  # 0 of what is no tile
    columns: int


def smem_regions(
    cfg: Any, tiles: Iterable[tuple[str, int, int]], rest: str = ""
) -> tuple[SmemRegion, ...]:
    """Tiles of d_head columns one after another, and what follows them.

    Args:
        cfg: with d_head, dtype and smem_bytes().
        tiles: a tile's name, how many buffers it has, and their rows.
        rest: what lies between the last tile and the end.
    """
    regions, begin = [], 0
    for tile, count, rows in tiles:
        for i in range(count):
            name = tile if count == 1 else f"{tile} {i + 1} of {count}"
            end = begin + rows * cfg.d_head * cfg.dtype.element_size
            regions.append(SmemRegion(name, begin, end, rows, cfg.d_head))
            begin = end
    if begin < cfg.smem_bytes():
        regions.append(SmemRegion(rest, begin, cfg.smem_bytes(), 0, 0))
    return tuple(regions)


@dataclass(frozen=True)
class Intensity:
    """FLOP per byte moved, in the long run of a sequence.

    `shared`: read from shared memory; `global_memory`: read by CTAs, mostly from L2.
    """

    shared: float
    global_memory: float


class Family:
    """One family of kernels: a config class, the C++ that it instantiates, and all that differs
    between families.

    A subclass sets the attributes without a value here and overrides the methods that apply to its
    kernels; the defaults are for a family without that feature. `cfg` is always a config of the
    family.
    """

    # The class of its configs; its FAMILY is the family's name.
    config_class: Any
    # The family in a sentence: 'mma.sync'.
    title: str
    # What its kernels compute, by the operation's name.
    operation: str = "forward"
    # Which configs a kernel can be built for.
    rules: tuple[Rule, ...] = ()
    # The knobs that are chosen first when a config is completed: those that many rules read.
    settled_first: tuple[str, ...] = ()
    # For some knobs the values to try when an illegal config is corrected; other knobs try all.
    repairs: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # The folder of its C++ sources, which bears the family's name: includes begin with it, and its
    # .cc files are compiled into every library.
    csrc: Path
    # The C++ names in them.
    cpp: Cpp
    # The suffix of its compile target, such as 'a' for sm_90a, where it uses instructions of one
    # architecture only.
    target_suffix: str = ""
    # Whether TMA must be able to copy the tensors: then no stride may be 0 or negative.
    needs_tma: bool = False
    # Whether a CTA may compute several tiles, one after the other.
    persistent: bool = False
    # Whether spilling makes its kernels too slow to use: none that spills is measured or shipped.
    must_not_spill: bool = False
    # The key of its search space in `flashsmith tune`; '' if it has none of its own.
    space_key: str = ""
    # Its sets that KERNELS can name, by key.
    sets: ClassVar[Mapping[str, ConfigSet]] = {}

    @property
    def name(self) -> str:
        """Its name in manifests, tables and rows."""
        return str(self.config_class.FAMILY)

    @property
    def oldest_arch(self) -> int:
        """The first compute capability that its kernels run on, 90 for 9.0."""
        return int(self.config_class.OLDEST_ARCH)

    @cached_property
    def knob_values(self) -> dict[str, tuple[Any, ...]]:
        """Every value that a knob has in some legal config, in the order of the fields."""
        return {knob.name: knob.metadata["values"] for knob in fields(self.config_class)}

    @property
    def covered_values(self) -> Mapping[str, tuple[Any, ...]]:
        """Of them those that a covering array has: all whose legality is the same on every GPU that
        the config's other knobs are legal on."""
        values = self.knob_values
        return values | {"canonical": (0,)} if "canonical" in values else values

    @cached_property
    def legal_space(self) -> LegalSpace:
        """The space of its legal configs."""
        return LegalSpace(self.rules, self.knob_values, self.settled_first, self.repairs)

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        """The templates of the kernels that a config's plans launch, by a word for what they do;
        the main one first."""
        return {"main": self.cpp.kernel}

    def runs_on(self, device: DeviceSpec) -> bool:
        """Whether some config of it can be legal on a device."""
        if device.arch < self.oldest_arch:
            return False
        return all(rule.predicate(None, device) for rule in self.rules if not rule.knobs)

    def unserved(self, problem: Problem, device: DeviceSpec) -> str | None:
        """The reason why it has no kernels for a problem on a device; None where it has."""
        return None

    def gradients_of(self, cfg: Any) -> str:
        """The word of the problems that a config's kernels are for, where they compute no other
        gradients; '' where they compute whichever are needed."""
        return ""

    def for_gradients(self, cfg: Any, gradients: str) -> Any:
        """The config that computes the gradients of a problem's word in place of `cfg`, which was
        chosen for all: one without the others' work; mostly `cfg` itself."""
        return cfg

    def canonical(self, cfg: Any, device: DeviceSpec) -> Any:
        """The legal config that computes in the canonical order what `cfg` does in its own: `cfg`
        itself if it does; None where there is none."""
        return None

    def order(self, cfg: Any, arch: int) -> Order | None:
        """The order in which a kernel that is compiled for an architecture computes a row; None of
        families whose kernels compute no rows of attention."""
        return None

    def is_deterministic(self, cfg: Any) -> bool:
        """Whether all that a kernel writes has the same bits in every run."""
        return True

    def for_queries(self, cfg: Any, problem: Problem, device: DeviceSpec) -> Any:
        """The config that serves a problem in place of `cfg`, which was chosen for any number of
        queries: one that gives sequences of few queries the same bits."""
        return cfg

    def with_registers(self, cfg: Any, semantics: Semantics) -> Any:
        """The config that takes the place of one whose kernel has too few registers for these
        semantics, where nothing was measured for them; mostly `cfg` itself."""
        return cfg

    # --- which configs ---------------------------------------------------------------------------

    def kernels_to_build(self) -> Sequence[Any]:
        """The configs that a plain `flashsmith build` compiles."""
        return ()

    def block_size_set(self) -> Sequence[Any]:
        """The configs from which the key 'B_r,B_c' selects."""
        return ()

    def shipped(self) -> Sequence[tuple[Any, Semantics]]:
        """The kernels that it ships, independently of the table of winners."""
        return ()

    def candidates(
        self, dtype: DType, d_head: int, device: DeviceSpec, masked: bool
    ) -> Sequence[Any]:
        """The configs to consider where nothing was measured, in order of preference.

        masked: whether some rows see fewer keys than others.
        """
        return ()

    def search_space(self, dtype: DType, d_head: int, masked: bool) -> Sequence[Any]:
        """The configs that `flashsmith tune` tries first; () where there are no such kernels."""
        return ()

    def moved(self, cfg: Any) -> Iterable[Any]:
        """The configs one search step away from `cfg`, before any filter."""
        return ()

    def worth_searching(self, cfg: Any) -> bool:
        """Whether a legal config is worth measuring."""
        return True

    def neighbours(self, cfg: Any) -> list[Any]:
        """The configs one search step away that are worth measuring and legal on the roomiest
        device; of a canonical config those that are canonical, too."""
        found = dict.fromkeys(other for other in self.moved(cfg) if self.worth_searching(other))
        device, rules = self.roomiest_device, self.rules
        return [
            other
            for other in found
            if other != cfg
            and version_of(other) == version_of(cfg)
            and all(rule.predicate(other, device) for rule in rules)
        ]

    def for_heads(self, cfg: Any, problem: Problem) -> Any:
        """The config that takes the place of one whose tiles are of other groups of heads than the
        problem has; mostly `cfg` itself."""
        return cfg

    def pack_variants(self, cfg: Any, problem: Problem, device: DeviceSpec) -> Sequence[Any]:
        """Legal configs that compute the problem as `cfg` does, but with a group's query heads as
        rows of one tile, in parts of the keys or not; none where such tiles are not much fewer."""
        return ()

    def splits_keys(self, cfg: Any) -> bool:
        """Whether a kernel may compute tiles in parts of their keys, as split_variants' do."""
        return False

    def split_variants(self, cfg: Any, problem: Problem, device: DeviceSpec) -> Sequence[Any]:
        """Legal configs that compute the problem as `cfg` does, but in parts of its keys; none
        where its tiles fill the device."""
        return ()

    @cached_property
    def roomiest_device(self) -> DeviceSpec:
        """The known GPU with the most shared memory that it runs on."""
        served = [device for device in KNOWN_DEVICES if self.runs_on(device)]
        return max(served, key=lambda device: device.max_smem_per_block)

    def proof_configs(self, dtype: DType, d: int) -> Sequence[Any]:
        """A few configs for head dimension d that cover the features a proof should exercise."""
        return ()

    # --- costs -----------------------------------------------------------------------------------

    has_cost_model: bool = False

    # Seconds that the emulator takes on one core to translate a kernel.
    translation_seconds: float = 0.1

    def plan_costs(self, gpu: str) -> Sequence[float]:
        """Numbers of the cost model by which the family's C++ plans calls on a GPU, by its name, as
        its flashsmith_set_plan_costs() takes them; none where plans have no such model."""
        return ()

    def compile_cost(self, cfg: Any) -> float:
        """Relative compile time of one config; 1,000 are about 1.4 s."""
        return 500.0

    def tile_work(
        self, cfg: Any, device: DeviceSpec, registers: int | None, spill: int | None
    ) -> TileWork:
        """The work of one tile on an SM, for families that have a cost model.

        registers, spill: per thread, bytes, as compiled; None estimates them.
        """
        raise ArgumentError(f"cfg: no cost model for the family {self.name!r}")

    def loops(
        self,
        cfg: Any,
        problem: Problem,
        device: DeviceSpec,
        registers: int | None = None,
        spill: int | None = None,
    ) -> Sequence[TileWork]:
        """The same of all launches of a call that have such a loop, the main one first."""
        return (self.tile_work(cfg, device, registers, spill),)

    def helpers_ms(self, cfg: Any, problem: Problem, device: DeviceSpec) -> float:
        """Milliseconds of a call's launches that have no such loop."""
        return 0.0

    def call_work(self, cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork | None:
        """What a whole call takes, of families whose model does not go by tiles of queries; None:
        its time follows from tile_work."""
        return None

    # --- descriptions ----------------------------------------------------------------------------

    def dividing_tiles(self, cfg: Any) -> dict[str, int]:
        """The tiles that must divide a length of queries and keys, by their knobs."""
        return {}

    def smem_map(self, cfg: Any) -> Sequence[SmemRegion]:
        """Where things lie in a CTA's dynamic shared memory."""
        size = cfg.smem_bytes()
        return (SmemRegion("all", 0, size, 0, 0),) if size else ()

    def intensity(self, cfg: Any) -> Intensity | None:
        """FLOP per byte in the main loop; None where there is no such loop."""
        return None

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        """The uses of shared memory in its kernels ('ldmatrix', 'copy st', 'O st', 'O ld'), with
        the kinds of access that the emulator's observer counts for each."""
        return {}

    def registers_in_words(self, cfg: Any, registers: int) -> str:
        """The registers per thread, in words."""
        return f"{registers} of 255"

    def multiplies_with(self, cfg: Any) -> tuple[str, ...]:
        """The names of the roofline's ceilings for the kernels' MMA instruction."""
        return ()

    def loop_tiles(self, cfg: Any) -> tuple[int, int] | None:
        """Rows of a CTA's tile and keys of a step of its loop; None where there is no such loop."""
        return None

    # Whether all loop steps of a launch do the same work, so that counts scale with the steps.
    equal_steps: bool = False


# --- the registry --------------------------------------------------------------------------------

# By name, in the order of their registration.
FAMILIES: dict[str, Family] = {}
_log = logging.getLogger("flashsmith")
# The errors of installed packages that failed to register.
_failures: list[str] = []
_installed_are_loaded = False
# Reentrant: an entry point may itself ask for families.
_loading = threading.RLock()


def register_family(family: Family, csrc: Path | None = None) -> Family:
    """Registers a family: its configs then parse, build, run, and can be proven and tuned.

    Args:
        family: its config class has a FAMILY that is not taken.
        csrc: the folder of its C++ sources, with the family's name; None: the family's own `csrc`.

    Raises:
        ArgumentError: it is no Family; the name is no small C identifier or taken, a class, a
            folder or the operation is missing; no known GPU runs its kernels; its short forms leave
            a knob out or look like another family's; or the name of its config class, of a set or
            of its search space is taken.
    """
    if not isinstance(family, Family):
        raise ArgumentError(
            f"family={quoted(family)}: give an object of a class derived from Family, not the class"
        )
    config_class: Any = getattr(family, "config_class", None)
    name = getattr(config_class, "FAMILY", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            f"family: its config_class {quoted(getattr(config_class, '__name__', config_class))} "
            f"has FAMILY={quoted(name)}; give a name of small letters, digits and underscores"
        )
    known = FAMILIES.get(name)
    if known is not None and type(known) is not type(family):
        raise ArgumentError(
            f"family: {name!r} is registered already, as {type(known).__qualname__} of "
            f"{type(known).__module__}; give another FAMILY"
        )
    if (_CSRC / name).is_dir() and not (Path(__file__).parent / name).is_dir():
        raise ArgumentError(
            f"family: {name!r} is a folder of C++ that every family may include; give another "
            "FAMILY"
        )
    if csrc is not None:
        family.csrc = csrc
    folder = getattr(family, "csrc", None)
    if not isinstance(folder, Path) or folder.name != name or not folder.is_dir():
        raise ArgumentError(
            f"csrc={quoted(folder)}: give the Path of the folder of its C++ sources, which exists "
            f"and is called {name!r}"
        )
    if not isinstance(getattr(family, "cpp", None), Cpp):
        raise ArgumentError(
            f"family: {name!r} has no cpp; set it to a Cpp, which names its kernels in C++"
        )
    _check_knobs(config_class)
    others = [other for other in FAMILIES.values() if other.name != name]
    _check_short_forms(config_class, others)
    _check_keys(family, others)
    operation(family.operation)
    config_class.family = family
    config_class.KNOBS = tuple(declared.name for declared in fields(config_class))
    FAMILIES[name] = family
    return family


def _check_knobs(config_class: Any) -> None:
    """Raises ArgumentError for a config class with invalid knobs or OLDEST_ARCH."""
    name = config_class.__name__
    knobs = {declared.name: declared for declared in fields(config_class)}
    if missing := [wanted for wanted in ("dtype", "d_head") if wanted not in knobs]:
        raise ArgumentError(
            f"family: {name} has no {' and no '.join(missing)}; every config has both"
        )
    if plain := [knob for knob, declared in knobs.items() if "values" not in declared.metadata]:
        raise ArgumentError(
            f"family: {', '.join(plain)} of {name} is not declared with knob(); declare every "
            "field with it"
        )
    # Checked here and not by an abstract base class: at registration, before any config is made.
    if silent := [
        member
        for member in ("n_threads", "smem_bytes")
        if getattr(getattr(config_class, member), "__isabstractmethod__", False)
    ]:
        raise ArgumentError(
            f"family: {name} does not define {' and '.join(silent)}; say the threads of a CTA and "
            "the bytes of its dynamic shared memory"
        )
    said = {*config_class.SHAPE, *(knob for group in config_class.GROUPS for knob in group.knobs)}
    if unsaid := [
        knob
        for knob, declared in knobs.items()
        if knob not in said and declared.metadata["word"] is None
    ]:
        raise ArgumentError(
            f"family: no short form of {name} says {', '.join(unsaid)}, so that two configs would "
            "have one name; give the knob a word, or add it to SHAPE or to one of GROUPS"
        )
    words = Counter(word for declared in knobs.values() for word in feature_words(declared))
    if doubled := sorted(word for word, times in words.items() if times > 1):
        raise ArgumentError(
            f"family: several knobs of {name} have the word {', '.join(map(quoted, doubled))}; "
            "give each a word of its own"
        )
    oldest = getattr(config_class, "OLDEST_ARCH", None)
    newest = max(device.arch for device in KNOWN_DEVICES)
    if not isinstance(oldest, int) or oldest > newest:
        raise ArgumentError(
            f"family: {name} has OLDEST_ARCH={quoted(oldest)}; give the first compute capability "
            f"that its kernels run on, 80 for 8.0, at most {newest}, the newest known GPU's"
        )


def _check_short_forms(config_class: Any, others: Sequence[Family]) -> None:
    """Raises ArgumentError where its short forms could be read as another family's."""
    name, word, suffix = config_class.__name__, config_class.LEADING_WORD, config_class.SHAPE_SUFFIX
    is_first = next(iter(FAMILIES), config_class.FAMILY) == config_class.FAMILY
    if not is_first and not word and not suffix:
        raise ArgumentError(
            f"family: {name} has neither LEADING_WORD nor SHAPE_SUFFIX, one of which marks its "
            "short forms; set one"
        )
    for other in others:
        theirs = other.config_class
        if name == theirs.__name__:
            raise ArgumentError(
                f"family: its config class is called {name}, as that of {other.name}; demangled "
                "names could not distinguish them; rename it"
            )
        if suffix and suffix == theirs.SHAPE_SUFFIX:
            raise ArgumentError(
                f"family: SHAPE_SUFFIX={quoted(suffix)} of {name} is that of {other.name} too; "
                "choose another"
            )
        if word and feature_of(theirs, word) is not None:
            raise ArgumentError(
                f"family: LEADING_WORD={quoted(word)} of {name} is a feature of {other.name}; "
                "choose another word"
            )
        if theirs.LEADING_WORD and feature_of(config_class, theirs.LEADING_WORD) is not None:
            raise ArgumentError(
                f"family: {name} has the feature {quoted(theirs.LEADING_WORD)}, which marks the "
                f"short forms of {other.name}; choose another word for the knob"
            )


def _check_keys(family: Family, others: Sequence[Family]) -> None:
    """Raises ArgumentError for an invalid or taken key of its sets or search space."""
    keys = {*family.sets, *([family.space_key] if family.space_key else ())}
    if odd := sorted(key for key in keys if not _KEY.fullmatch(key)):
        raise ArgumentError(
            f"family: {family.name!r} offers {', '.join(map(quoted, odd))}; a key of a set or a "
            "search space has letters, digits, '-', '_' and '.' only"
        )
    taken = {key for other in others for key in (*other.sets, other.space_key)} | _RESERVED_KEYS
    if doubled := sorted(taken & set(family.sets)):
        raise ArgumentError(
            f"family: {family.name!r} offers the sets {', '.join(doubled)}, which are another's; "
            "rename them"
        )
    if family.space_key in taken - {""}:
        raise ArgumentError(
            f"family: space_key={quoted(family.space_key)} of {family.name!r} is taken; choose "
            "another"
        )


def load_installed_families() -> bool:
    """Registers the families of installed packages: entry points of the group flashsmith.families,
    each of them a callable that registers families. Returns whether there was anything to load.

    A failure is logged once as a warning; the other families work without it. `installed_failures`
    adds it to errors about unknown names.
    """
    global _installed_are_loaded
    with _loading:
        if _installed_are_loaded:
            return False
        # Set before loading: an entry point may itself ask for families, or for an operation's
        # name.
        _installed_are_loaded = True
        # importlib.metadata takes longer to import than all of families.
        from importlib.metadata import entry_points

        found = entry_points(group=ENTRY_POINT_GROUP)
        for entry in found:
            try:
                entry.load()()
            except Exception as error:
                failure = (
                    f"family {entry.name!r} ({entry.value}) failed to register: "
                    f"{type(error).__name__}: {error}; repair or uninstall its package"
                )
                _failures.append(failure)
                _log.warning("flashsmith: %s", failure)
        return bool(found)


def installed_failures() -> str:
    """The errors of installed families that failed to register, '' if there are none."""
    return "; ".join(_failures)


find_more_with(load_installed_families)


def families(operation: str | None = None) -> tuple[Family, ...]:
    """All families, including those of installed packages; only those of `operation` if given."""
    load_installed_families()
    return tuple(family for family in FAMILIES.values() if operation in (None, family.operation))


def family_named(name: str) -> Family:
    """The family of that name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in FAMILIES:
        load_installed_families()
    if name not in FAMILIES:
        failed = installed_failures()
        raise ArgumentError(
            f"family={quoted(name)}: known are {', '.join(FAMILIES)}{failed and f'; {failed}'}"
        )
    return FAMILIES[name]


def config_class_names(operation: str | None = None) -> list[str]:
    """The names of the config classes of families, of one operation or of all, for messages."""
    return [family.config_class.__name__ for family in families(operation)]
