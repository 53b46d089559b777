"""The words of a wgmma short form as the fields of its config."""

from __future__ import annotations

import re
from dataclasses import fields

from flashsmith.families.config import is_flag
from flashsmith.families.wgmma.config import ENUMERATIONS, HopperForwardKernelConfig

SHAPE_FIELDS = ("d_head", "B_r", "B_c", "n_warpgroups")
# More digits are no number of anything.
_COUNT = r"(\d{1,18})"
_REGISTERS = re.compile(rf"regs_{_COUNT}_{_COUNT}", re.ASCII)
_WARPGROUPS = re.compile(rf"{_COUNT}wg", re.ASCII)


def warpgroups_of(part: str) -> str | None:
    """The number in '3wg', the last entry of the tuple; None for anything else."""
    match = _WARPGROUPS.fullmatch(part)
    return match.group(1) if match else None


def feature_values(word: str) -> dict[str, object] | None:
    """The fields that one feature sets; None where there is no such feature."""
    if word == "tma":
        return {}
    if registers := _REGISTERS.fullmatch(word):
        producer, consumer = map(int, registers.groups())
        return {"producer_registers": producer, "consumer_registers": consumer}
    for knob in fields(HopperForwardKernelConfig):
        name = knob.metadata["word"]
        if knob.name in ENUMERATIONS:
            for member in ENUMERATIONS[knob.name]:
                if word == f"{name}{member.name.lower()}":
                    return {knob.name: member}
        elif name is None:
            continue
        elif is_flag(knob):
            if word == name:
                return {knob.name: True}
        elif count := re.fullmatch(rf"{name}_{_COUNT}", word, re.ASCII):
            return {knob.name: int(count.group(1))}
    return None


def known_features() -> list[str]:
    """Every feature, for an error message."""
    words = ["tma"]
    for knob in fields(HopperForwardKernelConfig):
        name = knob.metadata["word"]
        if knob.name == "producer_registers":
            words.append("regs_N_N")
        elif knob.name in ENUMERATIONS:
            words += [f"{name}{member.name.lower()}" for member in ENUMERATIONS[knob.name]]
        elif name is not None:
            words.append(name if is_flag(knob) else f"{name}_N")
    return words
