"""Counts executed instructions by class."""

from __future__ import annotations

from collections.abc import Mapping

# (class, prefixes of mnemonics). The first match counts.
_CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mma", ("mma.", "wgmma.mma")),
    ("ldmatrix", ("ldmatrix", "stmatrix")),
    ("TMA", ("cp.async.bulk.tensor", "prefetch.tensormap")),
    (
        "cp.async wait",
        ("cp.async.wait", "cp.async.commit", "cp.async.bulk.wait", "cp.async.bulk.commit"),
    ),
    ("cp.async", ("cp.async",)),
    ("barrier", ("bar.", "barrier.", "mbarrier.", "membar", "fence", "wgmma.")),
    ("shuffle", ("shfl", "vote", "match", "redux", "activemask")),
    ("special function", ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")),
)
_MEMORY = ("ld", "st", "atom", "red")
_SPACES = ("shared", "global", "local", "param", "const")
_FLOAT_TYPES = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
_CONTROL = ("bra", "ret", "exit", "call", "trap", "brx", "setmaxnreg")
_MOVES = ("mov", "selp", "prmt", "cvta", "slct")


def instruction_mix(instructions: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of executed warp instructions of each class, largest first.

    The argument is ``EmulationResult.instructions``.

    These are PTX instructions. ptxas may turn PTX instructions into more or fewer SASS
    instructions.
    """
    mix: dict[str, int] = {}
    for mnemonic, count in instructions.items():
        name = instruction_class(mnemonic)
        mix[name] = mix.get(name, 0) + count
    return dict(sorted(mix.items(), key=lambda item: (-item[1], item[0])))


def instruction_class(mnemonic: str) -> str:
    """Returns the class of a mnemonic: ``ld.shared`` for ``ld.shared.v4.u32``."""
    for name, beginnings in _CLASSES:
        if mnemonic.startswith(beginnings):
            return name
    opcode, *modifiers = mnemonic.split(".")
    if opcode in _MEMORY:
        space = next((part.split("::")[0] for part in modifiers if part.startswith(_SPACES)), "")
        return f"{opcode}.{space}" if space else opcode
    if opcode in _CONTROL:
        return "control"
    if opcode == "setp" or "pred" in modifiers:
        return "predicate"
    if opcode == "cvt":
        return "convert"
    if opcode in _MOVES:
        return "move"
    return "float" if modifiers and modifiers[-1] in _FLOAT_TYPES else "integer"
