"""The emitter, which writes generated code and names its registers, constants and variables."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import Site
from ptxlab.machine import numeric
from ptxlab.machine.divergence import UNDEFINED
from ptxlab.machine.geometry import WARP
from ptxlab.machine.memory import LOCAL_WINDOW, SHARED_WINDOW
from ptxlab.machine.waits import REFUSED
from ptxlab.machine.warpgroup_mma import InFlight
from ptxlab.machine.wave import taken
from ptxlab.ptx.syntax import (
    TYPE_SIZES,
    Address,
    Entry,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from ptxlab.translate.flow import Flow, analyse
from ptxlab.translate.register_hazards import find_hazards

#: The NumPy type that generated code uses for each PTX type. 16-bit floats are held as bits.
DTYPES = {
    "pred": "b1",
    "b8": "u1", "u8": "u1", "s8": "i1",
    "b16": "u2", "u16": "u2", "s16": "i2", "f16": "u2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
}  # fmt: skip

_NUMPY = {
    "b1": np.bool_,
    "u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "u8": np.uint64,
    "i1": np.int8, "i2": np.int16, "i4": np.int32, "i8": np.int64,
    "f4": np.float32, "f8": np.float64,
}  # fmt: skip
_SIZES = {name: np.dtype(kind).itemsize for name, kind in _NUMPY.items()}
_STORED = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}

Handler = Callable[["Emitter", Instruction], None]


class Emitter:
    """Collects the lines of generated code and the names in it.

    The handlers of opcodes write code through it.
    """

    def __init__(
        self,
        entry: Entry,
        variables: Iterable[Variable],
        *,
        observed: bool,
    ) -> None:
        self.entry, self.observed = entry, observed
        self.flow: Flow = analyse(entry)
        #: None if the entry has no wgmma.
        self.hazards = find_hazards(self.flow)
        self.lines: list[str] = []
        self.indent = 0
        self.line_sites: dict[int, Site] = {}
        self.namespace: dict[str, Any] = {
            name: value for name, value in vars(numeric).items() if not name.startswith("_")
        }
        self.namespace |= {"np": np, "taken": taken, "UNDEFINED": UNDEFINED, "b1": np.bool_}
        self.namespace |= {"REFUSED": REFUSED, "TRUE": np.True_, "FALSE": np.False_}
        self.namespace["InFlight"] = InFlight
        self.names: dict[str, str] = {}
        self.storage: dict[str, str] = {}
        self.constants: dict[tuple[str, str], str] = {}
        self.temporaries = 0
        self.sites = tuple(Site.of(instruction) for instruction in entry.instructions)
        self.instruction: Instruction | None = None
        #: For each address register of the current node, the variable that holds the rows whose
        #: bounds were checked.
        self.shared_rows: dict[str, str] = {}
        #: The variable to which the current barrier assigns its Wait.
        self.barrier_result = ""
        #: Whether the current node is part of a polling loop.
        self.polls = False
        self.unwritten: frozenset[str] = frozenset()
        self._place_variables(variables)
        self.floats = _float_registers(self.flow)

    # Registers and constants

    def name(self, register: str) -> str:
        """Returns the Python name of a register."""
        name = self.names.get(register)
        if name is None:
            name = self.names[register] = f"r{len(self.names)}"
            held = self._stored(self.entry.register_type(register))
            as_float = held in ("u4", "u8") and register in self.floats
            self.storage[register] = f"f{held[1]}" if as_float else held
        return name

    def storage_of(self, register: str) -> str:
        """Returns the NumPy name of the type that holds a register's value."""
        self.name(register)
        return self.storage[register]

    def temporary(self) -> str:
        """Returns a new name for a local variable."""
        self.temporaries += 1
        return f"t{self.temporaries}"

    def constant(self, value: Any, dtype: str) -> str:
        """Returns the name of a constant (a NumPy scalar) in the generated code."""
        key = (dtype, value.hex() if isinstance(value, float) else str(value))
        name = self.constants.get(key)
        if name is None:
            name = self.constants[key] = f"c{len(self.constants)}"
            self.namespace[name] = _scalar(value, dtype)
        return name

    # Reading operands

    def use(self, operand: Operand, kind: str) -> str:
        """Returns the Python expression for an operand, read as PTX type ``kind``.

        16-bit floats are read as their bits.
        """
        wanted = DTYPES[kind]
        if isinstance(operand, Register):
            return self._reinterpret(
                self._checked(operand.name), self.storage_of(operand.name), wanted
            )
        if isinstance(operand, Immediate):
            return self.constant(_immediate_value(operand, wanted), wanted)
        if isinstance(operand, Negated):
            return f"(~{self.use(operand.operand, 'pred')})"
        if isinstance(operand, Special):
            held = "b1" if operand.name == "%is_explicit_cluster" else _special_type(operand.name)
            return self._reinterpret(f"G.special({operand.name!r})", held, wanted)
        if isinstance(operand, Symbol):
            return self._symbol(operand.name, wanted)
        raise self.error(f"operand {operand} cannot be read as .{kind}")

    def use_if_written(self, operand: Operand, kind: str) -> str:
        """Returns the same as use(), but an unwritten register reads as all ones, which is NaN for
        floats."""
        if self.is_written(operand) or not isinstance(operand, Register):
            return self.use(operand, kind)
        held = self.storage_of(operand.name)
        poison = f"W.or_poison({self.name(operand.name)}, {held!r})"
        return self._reinterpret(poison, held, DTYPES[kind])

    def is_written(self, operand: Operand) -> bool:
        """Whether the operand is certain to have a value here. Only registers may lack one."""
        return not isinstance(operand, Register) or operand.name not in self.unwritten

    def use_float(self, operand: Operand, kind: str) -> str:
        """Returns the Python expression for an operand of type f16, bf16, f32 or f64, read as a
        NumPy float (f32 or f64)."""
        expression = self.use(operand, kind)
        if kind == "f16":
            return f"half_to_float({expression})"
        if kind == "bf16":
            return f"bfloat_to_float({expression})"
        return expression

    def _checked(self, register: str) -> str:
        name = self.name(register)
        if register in self.unwritten:
            return f"W.written({name}, {register!r})"
        return name

    def _symbol(self, name: str, wanted: str) -> str:
        if name in self.offsets:
            return self.constant(self.offsets[name], wanted)
        if name == "WARP_SZ":
            return self.constant(WARP, wanted)
        for parameter in self.entry.parameters:
            if parameter.name == name:
                offset = self.constant(parameter.offset, "u8")
                return self._reinterpret(f"(W.parameter_address + {offset})", "u8", wanted)
        self.module_symbols.add(name)
        return self._reinterpret(f"W.symbols[{name!r}]", "u8", wanted)

    def address(self, operand: Operand) -> tuple[str, str]:
        """Returns the Python expression for an address, offset included, and its NumPy type (u4 or
        i8)."""
        if not isinstance(operand, Address) or operand.coordinates:
            raise self.error("expected an address in brackets")
        base = operand.base
        if isinstance(base, Register) and self.storage_of(base.name) == "u4":
            expression = self.use(base, "u32")
            if operand.offset:
                offset = self.constant(operand.offset & 0xFFFFFFFF, "u4")
                expression = f"({expression} + {offset})"
            return expression, "u4"
        if isinstance(base, Symbol) and base.name in self.offsets:
            return self.constant(self.offsets[base.name] + operand.offset, "i8"), "i8"
        if isinstance(base, Immediate):
            return self.constant(int(base.value) + operand.offset, "i8"), "i8"
        expression = self.use(base, "s64")
        if operand.offset:
            expression = f"({expression} + {self.constant(operand.offset, 'i8')})"
        return expression, "i8"

    # Writing results

    def define(self, operand: Operand, expression: str, held: str) -> None:
        """Assigns an expression to a result register; ``held`` is the NumPy type of the
        expression."""
        if isinstance(operand, Sink):
            # The expression must be evaluated even without a result, because it may contain checks.
            self.emit(expression)
            return
        if isinstance(operand, Pair):
            raise self.error("two results where one is expected")
        if not isinstance(operand, Register):
            raise self.error(f"cannot write to {operand}")
        target, stored = self.name(operand.name), self.storage_of(operand.name)
        value = self._reinterpret(expression, held, stored, extend=True)
        mask = self.mask()
        if mask is not None:
            if operand.name in self.unwritten:
                value = f"W.first_select({mask}, {value}, {target})"
            else:
                value = f"select({mask}, {value}, {target})"
        self.emit(f"{target} = {value}")

    def define_float(self, operand: Operand, expression: str, kind: str) -> None:
        """Assigns a float32 or float64 expression to a result register of PTX type f16, bf16, f32
        or f64."""
        if kind == "f16":
            expression = f"float_to_half({expression})"
        elif kind == "bf16":
            expression = f"float_to_bfloat({expression})"
        self.define(operand, expression, DTYPES[kind])

    def mask(self) -> str | None:
        """Returns the Python expression for the guard of the current instruction; None if it has no
        guard."""
        guard = self.instruction.guard if self.instruction else None
        if guard is None:
            return None
        expression = self._checked(guard.register.name)
        return f"(~{expression})" if guard.negated else expression

    # Types

    def _stored(self, declared: str) -> str:
        if declared == "pred":
            return "b1"
        if declared in ("f32", "f64"):
            return DTYPES[declared]
        if TYPE_SIZES.get(declared) in _STORED:
            return _STORED[TYPE_SIZES[declared]]
        raise self.error(f"registers of type .{declared} are not supported")

    def _reinterpret(self, expression: str, held: str, wanted: str, *, extend: bool = False) -> str:
        """Reinterprets bits as another NumPy type.

        Narrow integers are extended, wide ones truncated.
        """
        if held == wanted:
            return expression
        if "b1" in (held, wanted):
            raise self.error("a predicate where a number is expected, or the reverse")
        if not expression.isidentifier():
            expression = f"({expression})"
        if _SIZES[held] == _SIZES[wanted]:
            return f"{expression}.view({wanted})"
        if held[0] == "f":
            expression = f"{expression}.view(u{held[1]})"
        if _SIZES[held] > _SIZES[wanted] or extend:
            middle = wanted if wanted[0] != "f" else f"u{wanted[1]}"
            expression = f"{expression}.astype({middle})"
            return expression if middle == wanted else f"{expression}.view({wanted})"
        raise self.error(f"a register of {_SIZES[held]} bytes where {_SIZES[wanted]} are needed")

    # Output

    def emit(self, line: str) -> None:
        """Adds a line of generated code for the current instruction."""
        self.lines.append("    " * self.indent + line)
        if self.instruction is not None:
            self.line_sites[len(self.lines)] = self.sites[self.instruction.index]

    def site(self) -> str:
        """Returns the name of the current instruction's site in the generated code."""
        if self.instruction is None:
            raise EmulatorError("no instruction is being translated")
        name = f"S{self.instruction.index}"
        self.namespace[name] = self.sites[self.instruction.index]
        return name

    def error(self, message: str) -> EmulatorError:
        """Returns an error about the current instruction."""
        where = self.sites[self.instruction.index] if self.instruction else self.entry.name
        return EmulatorError(f"{where}: {message}")

    # Variables outside registers

    def _place_variables(self, module_variables: Iterable[Variable]) -> None:
        """Assigns offsets to shared and local variables, except to variables of the module that the
        entry does not use."""
        mentioned = {name for i in self.entry.instructions for name in _symbols(i.operands)}
        used = [v for v in module_variables if v.name in mentioned]
        self.offsets: dict[str, int] = {}
        self.module_symbols: set[str] = set()
        ends = {"shared": 0, "local": 0}
        dynamic = [v for v in used if v.space == "shared" and v.size == 0]
        for variable in (*used, *self.entry.variables):
            if variable.space in ends and variable.size:
                begin = -(-ends[variable.space] // variable.align) * variable.align
                self.offsets[variable.name] = begin
                ends[variable.space] = begin + variable.size
        align = max((v.align for v in dynamic), default=16)
        self.static_shared_bytes = ends["shared"]
        self.dynamic_shared_offset = -(-ends["shared"] // align) * align
        for variable in dynamic:
            self.offsets[variable.name] = self.dynamic_shared_offset
        self.local_bytes = ends["local"]
        self.windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


#: Opcodes that only move bits, so that their types do not show whether a value is a float.
_NEUTRAL = frozenset(["mov", "ld", "ldu", "selp", "shfl"])


def _float_registers(flow: Flow) -> frozenset[str]:
    """Returns the registers that only float instructions of the register's width write.

    Newer compilers declare all registers as bits. If generated code holds these registers as
    floats, it need not reinterpret them.
    """
    floats: set[str] = set()
    others: set[str] = set()
    for step in (step for node in flow.nodes for step in node.steps):
        modifiers = step.instruction.modifiers
        kinds = [m for m in modifiers if m in TYPE_SIZES]
        kind = kinds[0] if kinds else ""
        if kind in ("f32", "f64") and step.instruction.opcode not in ("setp", "testp"):
            floats.update(step.writes)
        elif step.instruction.opcode not in _NEUTRAL:
            others.update(step.writes)
    return frozenset(floats - others)


def _special_type(name: str) -> str:
    return "u8" if name in ("%clock64", "%globaltimer", "%gridid") else "u4"


def _immediate_value(operand: Immediate, wanted: str) -> Any:
    text = operand.text.lstrip("-+")
    if wanted == "b1":
        return bool(operand.value)
    if wanted[0] == "f" or not isinstance(operand.value, float):
        return operand.value if wanted[0] != "f" else float(operand.value)
    # A float literal used as bits: a 0f literal has 32 bits, every other one 64.
    if text[:2].lower() == "0f":
        bits = int(text[2:], 16) ^ (0x80000000 if operand.text[0] == "-" else 0)
    else:
        bits = struct.unpack("<Q", struct.pack("<d", operand.value))[0]
    return bits


def _scalar(value: Any, dtype: str) -> Any:
    kind = _NUMPY[dtype]
    if dtype[0] in "ui":
        size = _SIZES[dtype]
        unsigned = np.array(int(value) & ((1 << 8 * size) - 1), f"u{size}")
        return unsigned.view(kind)[()]
    return kind(value)


def _symbols(operands: Iterable[Operand]) -> Iterable[str]:
    for operand in operands:
        if isinstance(operand, Symbol):
            yield operand.name
        elif isinstance(operand, Address):
            yield from _symbols((operand.base, *operand.coordinates))
        elif isinstance(operand, Vector):
            yield from _symbols(operand.elements)
