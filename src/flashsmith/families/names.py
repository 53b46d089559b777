"""Text -> config: short forms and the kernel names that demanglers print."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import NoReturn

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError, ConfigParseError
from flashsmith.families.config import is_flag
from flashsmith.families.family import KernelConfig
from flashsmith.families.mma_sync.config import (
    LOAD_FIELDS,
    FlashForwardKernelConfig,
    feature_fields,
)
from flashsmith.families.wgmma.config import ENUMERATIONS, HopperForwardKernelConfig
from flashsmith.families.wgmma.names import (
    SHAPE_FIELDS,
    feature_values,
    known_features,
    warpgroups_of,
)
from flashsmith.operations.dtype import DType
from flashsmith.printable import quoted
from flashsmith.untrusted import MOST_DIGITS_OF_COUNTS, whole_number

EXAMPLES = (
    "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax",
    "(FP16, 128, 128, 128, 2wg): tma+stages_2+q_buffers_1+regs_24_240",
)

# Far more than any kernel name or row of a table has.
MOST_CHARACTERS = 10_000

# rich draws its columns with the box characters.
_TABLE_COLUMNS = re.compile(r"[|│┃]")
# No two parts of it can match the same character: a text is read once, however long it is.
_SHORT_FORM = re.compile(r"\(([^()]*)\)\s*:([\w+\s]*)")
_LOAD = re.compile(r"load_(\d+)_(\d+)_(\d+)_tiles")
_COUNT = re.compile(r"(\w+)_(\d+)")
# Demanglers write a value with or without its type: (flashsmith::DType)5, (bool)1, (int)128, 128.
_VALUE = re.compile(r"(?:\(\s*(?:\w+::)*\w+\s*\)\s*)?(\w+)")


def parse_kernel_name_into_config(
    text: str, mma_sync_class: type[FlashForwardKernelConfig] = FlashForwardKernelConfig
) -> KernelConfig:
    """The config that `text` names, of whichever family.

    Args:
        text: a short form, alone or as one cell of a `| ... |` table row; or a demangled kernel
            name with `FlashForwardKernelConfig{...}` or `HopperForwardKernelConfig{...}` in it, as
            c++filt and Nsight Compute print it. Trailing fields that are missing there are zero:
            demanglers drop trailing zeros.
        mma_sync_class: the class to make for the mma.sync family.

    Raises:
        ConfigParseError: neither, or a feature is unknown, doubled or out of range.
    """
    if len(text) > MOST_CHARACTERS:
        _fail(text, f"it is longer than {MOST_CHARACTERS:,} characters")
    classes = {cls.__name__: cls for cls in (mma_sync_class, HopperForwardKernelConfig)}
    struct = re.compile(rf"\b({'|'.join(classes)})\s*\{{([^{{}}]*)\}}")
    values = sorted(set(struct.findall(text)))
    if len(values) == 1:
        name, listed = values[0]
        return _from_values(text, listed, classes[name])
    if values:
        _fail(text, "it names more than one config")
    cells = [cell.strip().strip("`") for cell in _TABLE_COLUMNS.split(text)]
    matches = [match for match in map(_SHORT_FORM.fullmatch, cells) if match]
    if len(matches) != 1:
        _fail(text, "it names more than one config" if matches else "this is no kernel name")
    shape, features = matches[0].groups()
    if warpgroups_of(shape.split(",")[-1].strip()):
        return _from_hopper_short_form(text, shape, features)
    return _from_short_form(text, shape, features, mma_sync_class)


def _from_hopper_short_form(text: str, shape: str, features: str) -> HopperForwardKernelConfig:
    parts = [part.strip() for part in shape.split(",")]
    if len(parts) != 5:
        _fail(text, f"the tuple has {len(parts)} entries; it is (dtype, d_head, B_r, B_c, Nwg)")
    values: dict[str, object] = {"dtype": _dtype(text, parts[0])}
    parts[-1] = warpgroups_of(parts[-1]) or parts[-1]
    for name, part in zip(SHAPE_FIELDS, parts[1:], strict=True):
        values[name] = _number(text, name, part)
    words: set[str] = set()
    for word in map(str.strip, features.split("+")):
        found = feature_values(word)
        if found is None:
            hint = did_you_mean(word, known_features()) or ";"
            known = ", ".join(known_features())
            _fail(text, f"unknown feature {quoted(word)}{hint} known are {known}")
        if word in words or found.keys() & values.keys():
            _fail(text, f"the feature {quoted(word)} stands there twice, or contradicts another")
        words.add(word)
        values.update(found)
    if "producer_registers" not in values:
        _fail(text, "the registers are missing; add regs_N_N, for example regs_24_240")
    try:
        return HopperForwardKernelConfig(**values)  # type: ignore[arg-type]
    except ArgumentError as error:
        raise ConfigParseError(f"cannot parse {quoted(text)}: {error}") from error


def _from_short_form(
    text: str, shape: str, features: str, config_class: type[FlashForwardKernelConfig]
) -> KernelConfig:
    parts = [part.strip() for part in shape.split(",")]
    if len(parts) != 5:
        _fail(text, f"the tuple has {len(parts)} entries; it is (dtype, d_head, B_r, B_c, n_warps)")
    values: dict[str, object] = {"dtype": _dtype(text, parts[0])}
    for name, part in zip(("d_head", "B_r", "B_c", "n_warps"), parts[1:], strict=True):
        values[name] = _number(text, name, part)
    for word in features.split("+"):
        for name, value in _feature_values(text, word.strip(), config_class).items():
            if name in values:
                _fail(text, f"the feature {quoted(word.strip())} stands there twice")
            values[name] = value
    if LOAD_FIELDS[0] not in values:
        _fail(
            text, "the load counts are missing; add load_Q_K_V_tiles, for example load_0_2_2_tiles"
        )
    return _construct(text, values, config_class)


def _feature_values(
    text: str, word: str, config_class: type[FlashForwardKernelConfig]
) -> dict[str, object]:
    """The fields that one feature of a short form sets."""
    if load := _LOAD.fullmatch(word):
        counts = (_number(text, quoted(word), digits) for digits in load.groups())
        return dict(zip(LOAD_FIELDS, counts, strict=True))
    for knob in feature_fields(config_class):
        if is_flag(knob):
            if knob.metadata["word"] == word:
                return {knob.name: True}
        elif (count := _COUNT.fullmatch(word)) and knob.metadata["word"] == count.group(1):
            return {knob.name: _number(text, quoted(word), count.group(2))}
    known = [
        knob.metadata["word"] + ("" if is_flag(knob) else "_N")
        for knob in feature_fields(config_class)
        if knob.metadata["word"]
    ]
    known.append("load_Q_K_V_tiles")
    hint = did_you_mean(word, known) or ";"
    _fail(text, f"unknown feature {quoted(word)}{hint} known are {', '.join(known)}")


def _from_values(
    text: str,
    listed: str,
    config_class: type[FlashForwardKernelConfig] | type[HopperForwardKernelConfig],
) -> KernelConfig:
    knobs = fields(config_class)
    parts = listed.split(",")
    if len(parts) > len(knobs):
        _fail(text, f"{len(parts)} values for the {len(knobs)} fields of {config_class.__name__}")
    values: dict[str, object] = {}
    for knob, part in zip(knobs, parts, strict=False):
        match = _VALUE.fullmatch(part.strip())
        if match is None:
            _fail(text, f"{quoted(part.strip())} is no value for {knob.name}")
        value = match.group(1)
        if knob.name == "dtype":
            values[knob.name] = _dtype(text, value)
        elif is_flag(knob):
            values[knob.name] = _flag(text, knob.name, value)
        elif knob.name in ENUMERATIONS:
            values[knob.name] = _member(text, knob.name, value)
        else:
            values[knob.name] = _number(text, knob.name, value)
    return _construct(text, values, config_class)


def _construct(
    text: str,
    values: dict[str, object],
    config_class: type[FlashForwardKernelConfig] | type[HopperForwardKernelConfig],
) -> KernelConfig:
    # What is missing is zero; a shape of zero is then refused by the class.
    filled = {knob.name: values.get(knob.name, 0) for knob in fields(config_class)}
    try:
        return config_class(**filled)  # type: ignore[arg-type]
    except ArgumentError as error:
        raise ConfigParseError(f"cannot parse {quoted(text)}: {error}") from error


def _dtype(text: str, part: str) -> DType:
    try:
        return DType.parse(part)
    except ArgumentError as error:
        raise ConfigParseError(f"cannot parse {quoted(text)}: {error}") from error


def _number(text: str, name: str, part: str) -> int:
    number = whole_number(part)
    if number is None:
        _fail(
            text,
            f"{name} is {quoted(part)}, not a whole number of at most "
            f"{MOST_DIGITS_OF_COUNTS} digits",
        )
    return number


def _member(text: str, name: str, part: str) -> int:
    """The number of an enumeration's member, which demanglers write as a number or a name."""
    members = ENUMERATIONS[name].__members__
    return members[part.upper()] if part.upper() in members else _number(text, name, part)


def _flag(text: str, name: str, part: str) -> bool:
    if part not in ("true", "false", "1", "0"):
        _fail(text, f"{name} is {quoted(part)}; allowed are true, false, 1 and 0")
    return part in ("true", "1")


def _fail(text: str, problem: str) -> NoReturn:
    raise ConfigParseError(
        f"cannot parse {quoted(text)}: {problem}. Write a short form such as "
        f"{' or '.join(map(repr, EXAMPLES))}, or give a demangled kernel name."
    )
