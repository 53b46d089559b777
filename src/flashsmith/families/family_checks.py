"""The checks of a Family when it is registered: its name, sources, knobs, short forms and keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flashsmith import bundle
from flashsmith.errors import ArgumentError
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import KNOWN_DEVICES
from flashsmith.families.knob import feature_of, feature_words
from flashsmith.printable import quoted

# The pattern of a family's name: a C identifier in lower case, because the name is also that of a
# source folder and occurs in manifests.
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
# The pattern of the key of a set or a search space. It does not match paths, 'B_r,B_c' or short
# forms.
_KEY = re.compile(r"[\w.-]+", re.ASCII)
# Keys that stand for the sets or the search spaces of all families together.
_RESERVED_KEYS = {"all", "both", "known"}
_CSRC = Path(__file__).parents[1] / "csrc"


def check_name(family: Any, registered: Mapping[str, Any]) -> None:
    """Raises ArgumentError if the family's name is invalid, or taken by one of the registered
    families or by a folder of C++."""
    config_class: Any = getattr(family, "config_class", None)
    name = getattr(config_class, "FAMILY", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            f"family: its config_class {quoted(getattr(config_class, '__name__', config_class))} "
            f"has FAMILY={quoted(name)}; give a name of small letters, digits and underscores"
        )
    known = registered.get(name)
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


def check_definition(family: Any, registered: Mapping[str, Any]) -> None:
    """Raises ArgumentError if something that a family must define is missing, invalid, or taken by
    one of the other registered families."""
    _check_sources(family)
    config_class = family.config_class
    _check_knobs(config_class)
    others = [other for other in registered.values() if other.name != family.name]
    _check_short_forms(config_class, others, registered)
    _check_keys(family, others)


def _check_sources(family: Any) -> None:
    """Raises ArgumentError if the folder of the C++ sources or their names are missing."""
    name, folder = family.name, getattr(family, "csrc", None)
    there = bundle.is_copy() or (isinstance(folder, Path) and folder.is_dir())
    if not isinstance(folder, Path) or folder.name != name or not there:
        raise ArgumentError(
            f"csrc={quoted(folder)}: give the Path of the folder of its C++ sources, which exists "
            f"and is called {name!r}"
        )
    if not isinstance(getattr(family, "cpp", None), CppNames):
        raise ArgumentError(
            f"family: {name!r} has no cpp; set it to a Cpp, which names its kernels in C++"
        )


def _check_knobs(config_class: Any) -> None:
    """Raises ArgumentError if a config class has invalid knobs or an invalid OLDEST_ARCH."""
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
    # This is checked here rather than by an abstract base class, so that registering an incomplete
    # class fails, and not its first use.
    if silent := [
        member
        for member in ("n_threads", "smem_bytes")
        if getattr(getattr(config_class, member), "__isabstractmethod__", False)
    ]:
        raise ArgumentError(
            f"family: {name} does not define {' and '.join(silent)}; give the threads of a CTA and "
            "the bytes of its dynamic shared memory"
        )
    # In the tuple, d_v follows d_head after a colon: '192:128'.
    named = {
        *config_class.SHAPE,
        "d_v",
        *(knob for group in config_class.GROUPS for knob in group.knobs),
    }
    if unnamed := [
        knob
        for knob, declared in knobs.items()
        if knob not in named and declared.metadata["word"] is None
    ]:
        raise ArgumentError(
            f"family: no short form of {name} has {', '.join(unnamed)}, so that two configs would "
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


def _check_short_forms(
    config_class: Any, others: Sequence[Any], registered: Mapping[str, Any]
) -> None:
    """Raises ArgumentError if short forms of the family could be mistaken for short forms of
    another family."""
    name, word, suffix = config_class.__name__, config_class.LEADING_WORD, config_class.SHAPE_SUFFIX
    is_first = next(iter(registered), config_class.FAMILY) == config_class.FAMILY
    if not is_first and not word and not suffix:
        raise ArgumentError(
            f"family: {name} has neither LEADING_WORD nor SHAPE_SUFFIX, one of which marks its "
            "short forms; set one"
        )
    for other in others:
        theirs = other.config_class
        if name == theirs.__name__:
            raise ArgumentError(
                f"family: its config class is called {name}, like that of {other.name}; demangled "
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


def _check_keys(family: Any, others: Sequence[Any]) -> None:
    """Raises ArgumentError if the key of one of the family's sets or of its search space is invalid
    or taken."""
    keys = {*family.sets, *([family.space_key] if family.space_key else ())}
    if odd := sorted(key for key in keys if not _KEY.fullmatch(key)):
        raise ArgumentError(
            f"family: {family.name!r} offers {', '.join(map(quoted, odd))}; a key of a set or a "
            "search space has letters, digits, '-', '_' and '.' only"
        )
    taken = {key for other in others for key in (*other.sets, other.space_key)} | _RESERVED_KEYS
    if doubled := sorted(taken & set(family.sets)):
        raise ArgumentError(
            f"family: {family.name!r} offers the sets {', '.join(doubled)}, which are taken; "
            "rename them"
        )
    if family.space_key in taken - {""}:
        raise ArgumentError(
            f"family: space_key={quoted(family.space_key)} of {family.name!r} is taken; choose "
            "another"
        )
