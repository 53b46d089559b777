"""Parses short forms and demangled kernel names into configs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, NoReturn

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError, ConfigParseError
from flashsmith.families.config import KernelConfig
from flashsmith.families.family import FAMILIES, installed_failures, load_installed_families
from flashsmith.families.knob import enumeration, feature_of, is_flag
from flashsmith.printable import quoted
from flashsmith.safe_json import MOST_DIGITS_OF_COUNTS, whole_number
from flashsmith.semantics.dtype import DType

EXAMPLES = (
    "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax",
    "(FP16, 128, 128, 128, 2wg): tma+stages_2+q_buffers_1+regs_24_240",
)

# The maximum length of a string that the parser accepts; kernel names and table rows are far
# shorter.
MOST_CHARACTERS = 10_000

# The characters between the columns of a table; rich prints box-drawing characters there.
_TABLE_COLUMNS = re.compile(r"[|│┃]")
# No two adjacent parts of this pattern match the same character, so matching takes linear time.
_SHORT_FORM = re.compile(r"\(([^()]*)\)\s*:([\w+\s]*)")
# A value as demanglers print it, with its type or without: (flashsmith::DType)5, (bool)1, (int)128,
# 128.
_VALUE = re.compile(r"(?:\(\s*(?:\w+::)*\w+\s*\)\s*)?(\w+)")

ConfigClass = type[KernelConfig]


def parse_kernel_name_into_config(
    text: str, mma_sync_class: ConfigClass | None = None
) -> KernelConfig:
    """Returns the config, of any family, that `text` names.

    Args:
        text: a short form, alone or in a cell of a `| ... |` table row; or a demangled kernel name
            with a config's `ClassName{...}` in it, as printed by c++filt and Nsight Compute. Fields
            that are missing at the end of such a name are zero, because demanglers leave out
            trailing zeros.
        mma_sync_class: a subclass of a family's config class; it is used instead of the config
            class.

    Raises:
        ConfigParseError: the text is neither, or a feature is unknown, repeated or out of range.
    """
    try:
        return _parse(text, mma_sync_class)
    except ConfigParseError as error:
        if load_installed_families():
            return parse_kernel_name_into_config(text, mma_sync_class)
        if failed := installed_failures():
            raise ConfigParseError(f"{error} Installed kernels are missing: {failed}.") from error
        raise


def _parse(text: str, derived: ConfigClass | None) -> KernelConfig:
    if len(text) > MOST_CHARACTERS:
        _fail(text, f"it is longer than {MOST_CHARACTERS:,} characters")
    classes: list[ConfigClass] = [family.config_class for family in FAMILIES.values()]
    if derived is not None:
        classes = [derived if issubclass(derived, cls) else cls for cls in classes]
    by_name = {cls.__name__: cls for cls in classes}
    struct = re.compile(rf"\b({'|'.join(by_name)})\s*\{{([^{{}}]*)\}}")
    values = sorted(set(struct.findall(text)))
    if len(values) == 1:
        name, listed = values[0]
        return _from_values(text, listed, by_name[name])
    if values:
        _fail(text, "it names more than one config")
    cells = [cell.strip().strip("`") for cell in _TABLE_COLUMNS.split(text)]
    matches = [match for match in map(_SHORT_FORM.fullmatch, cells) if match]
    if len(matches) != 1:
        _fail(text, "it names more than one config" if matches else "it is not a kernel name")
    shape, features = matches[0].groups()
    parts = [part.strip() for part in shape.split(",")]
    words = [word.strip() for word in features.split("+")]
    # A short form that looks like one of no other family is parsed as one of the first family.
    like = (cls for cls in classes[1:] if _is_like(parts, words, cls))
    return _from_short_form(text, parts, words, next(like, classes[0]))


def _is_like(parts: list[str], words: list[str], config_class: ConfigClass) -> bool:
    """Whether a short form looks like a short form of a config class. The suffix of the tuple shows
    this or, in classes without a suffix, the leading word."""
    suffix = config_class.SHAPE_SUFFIX
    if suffix:
        return whole_number(parts[-1].removesuffix(suffix)) is not None and parts[-1].endswith(
            suffix
        )
    return bool(config_class.LEADING_WORD) and config_class.LEADING_WORD in words


def _from_short_form(
    text: str, parts: list[str], words: list[str], config_class: ConfigClass
) -> KernelConfig:
    names, suffix = config_class.SHAPE, config_class.SHAPE_SUFFIX
    if len(parts) != len(names):
        form = ", ".join(names[:-1] + ((f"N{suffix}",) if suffix else names[-1:]))
        _fail(text, f"the tuple has {len(parts)} entries; it must be ({form})")
    parts[-1] = parts[-1].removesuffix(suffix)
    knobs = {declared.name: declared for declared in fields(config_class)}
    given = dict(zip(names, parts, strict=True))
    if ":" in given.get("d_head", "") and "d_v" in knobs:
        given["d_head"], _, given["d_v"] = given["d_head"].partition(":")
    values: dict[str, object] = {
        name: _value(text, knobs[name], part) for name, part in given.items()
    }
    seen: set[str] = set()
    for word in words:
        found = _feature_values(text, word, config_class)
        if word in seen or found.keys() & values.keys():
            _fail(text, f"the feature {quoted(word)} is repeated or contradicts another")
        seen.add(word)
        values.update(found)
    for group in config_class.GROUPS:
        if group.knobs[0] not in values:
            _fail(
                text,
                f"the {group.what} are missing; add {group.form}, for example "
                f"{group.write(group.example)}",
            )
    return _construct(text, values, config_class)


def _feature_values(text: str, word: str, config_class: ConfigClass) -> dict[str, object]:
    """The config's fields, with their values, that one feature of a short form (`word`) sets."""
    found = feature_of(config_class, word)
    if found is not None:
        return {
            name: _number(text, quoted(word), value) if isinstance(value, str) else value
            for name, value in found.items()
        }
    known = known_features(config_class)
    hint = did_you_mean(word, known) or ";"
    _fail(text, f"unknown feature {quoted(word)}{hint} known are {', '.join(known)}")


def known_features(config_class: ConfigClass) -> list[str]:
    """All features that a family's short forms can have, for an error message."""
    words = [config_class.LEADING_WORD] * bool(config_class.LEADING_WORD)
    groups = {group.knobs[0]: group.form for group in config_class.GROUPS}
    for declared in fields(config_class):
        name = declared.metadata["word"]
        if declared.name in groups:
            words.append(groups[declared.name])
        elif members := enumeration(declared):
            words += [f"{name}{member.name.lower()}" for member in members]
        elif name is not None:
            words.append(name if is_flag(declared) else f"{name}_N")
    return words


def _from_values(text: str, listed: str, config_class: ConfigClass) -> KernelConfig:
    knobs = fields(config_class)
    parts = listed.split(",")
    if len(parts) > len(knobs):
        _fail(text, f"{len(parts)} values for the {len(knobs)} fields of {config_class.__name__}")
    # Missing values are zero. The config class rejects a tile size of zero.
    values: dict[str, object] = {declared.name: 0 for declared in knobs}
    for declared, part in zip(knobs, parts, strict=False):
        match = _VALUE.fullmatch(part.strip())
        if match is None:
            _fail(text, f"{quoted(part.strip())} is not a value of {declared.name}")
        values[declared.name] = _value(text, declared, match.group(1))
    return _construct(text, values, config_class)


def _construct(text: str, values: dict[str, object], config_class: ConfigClass) -> KernelConfig:
    make: Callable[..., KernelConfig] = config_class
    try:
        return make(**values)
    except ArgumentError as error:
        raise ConfigParseError(f"cannot parse {quoted(text)}: {error}") from error


def _value(text: str, declared: Field[Any], part: str) -> object:
    """Parses the value of a knob from a part of a tuple or of a demangled name."""
    if declared.name == "dtype":
        try:
            return DType.parse(part)
        except ArgumentError as error:
            raise ConfigParseError(f"cannot parse {quoted(text)}: {error}") from error
    if is_flag(declared):
        if part not in ("true", "false", "1", "0"):
            _fail(text, f"{declared.name} is {quoted(part)}; allowed are true, false, 1 and 0")
        return part in ("true", "1")
    members = enumeration(declared)
    # In the string, a member of an enumeration may be a number or a name.
    if members and part.upper() in members.__members__:
        return members[part.upper()]
    return _number(text, declared.name, part)


def _number(text: str, name: str, part: str) -> int:
    number = whole_number(part)
    if number is None:
        _fail(
            text,
            f"{name} is {quoted(part)}, not a whole number of at most "
            f"{MOST_DIGITS_OF_COUNTS} digits",
        )
    return number


def _fail(text: str, problem: str) -> NoReturn:
    raise ConfigParseError(
        f"cannot parse {quoted(text)}: {problem}. Write a short form such as "
        f"{' or '.join(map(repr, EXAMPLES))}, or give a demangled kernel name."
    )
