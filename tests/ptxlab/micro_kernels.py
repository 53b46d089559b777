"""One-instruction PTX kernels: thread i runs the instruction on the i-th test vector.

``Case`` is an instruction with its scalar oracle; ``run_case`` executes it through an ``Executor``
(the emulator here, a GPU in the tests that have one) and returns what differs from the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scalar_floats import BF16, FP16, FP32, FP64, FloatFormat

# An executor runs (ptx, entry, threads, input buffers, output sizes) and returns output buffers.
Executor = Callable[[str, str, int, Sequence[bytes], Sequence[int]], list[bytes]]
Agreement = Callable[[int, int], bool]

FORMATS: dict[str, FloatFormat] = {"f16": FP16, "bf16": BF16, "f32": FP32, "f64": FP64}
_WIDTHS = {"b16": 16, "b32": 32, "b64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_WIDTHS |= {"f16x2": 32, "bf16x2": 32}
_VECTORS = 256
INPUT_NAMES, OUTPUT_NAMES = "abceijklmn", "dfgh"


def width_of(kind: str) -> int:
    return _WIDTHS[kind]


def _register_type(kind: str) -> str:
    return f".f{width_of(kind)}" if kind in ("f32", "f64") else f".b{width_of(kind)}"


def exactly(got: int, want: int) -> bool:
    return got == want


def same_float(fmt: FloatFormat) -> Agreement:
    """Equal bits, or both NaN: payloads are not part of the emulator's promise."""
    return lambda got, want: got == want or (fmt.is_nan(got) and fmt.is_nan(want))


def same_float_pair(fmt: FloatFormat) -> Agreement:
    same = same_float(fmt)
    return lambda got, want: same(got & 0xFFFF, want & 0xFFFF) and same(got >> 16, want >> 16)


@dataclass(frozen=True)
class Case:
    """One instruction under test.

    ``text`` may hold several instructions and uses {d}, {a}, {b}, {c}, {e} for registers and
    %p1 to %p3 for predicates. ``oracle`` takes and returns bit patterns.
    """

    name: str
    text: str
    inputs: tuple[str, ...]
    output: str
    oracle: Callable[..., int]
    agree: Agreement = exactly
    domain: Callable[..., bool] = field(default=lambda *values: True)

    def __str__(self) -> str:
        return self.name


def _edges(kind: str) -> list[int]:
    if kind in ("f16x2", "bf16x2"):
        half = _edges(kind[:-2])
        return [low | high << 16 for low, high in zip(half, reversed(half), strict=True)]
    width = width_of(kind)
    if kind in FORMATS:
        fmt = FORMATS[kind]
        one, smallest_normal = fmt.encode(1.0), 1 << fmt.mantissa_bits
        positive = [0, 1, 2, 3, smallest_normal - 1, smallest_normal, smallest_normal + 1]
        positive += [one - 1, one, one + 1, fmt.encode(0.5), fmt.encode(1.5), fmt.encode(2.5)]
        positive += [fmt.exponent_mask - 1, fmt.exponent_mask, fmt.nan, fmt.exponent_mask + 1]
        positive += [fmt.encode(3.0), fmt.encode(255.5), fmt.encode(127.0)]
        return positive + [bits | fmt.sign_mask for bits in positive]
    top = 1 << (width - 1)
    mask = 2 * top - 1
    walls = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256]
    walls += [top - 2, top - 1, top, top + 1, mask - 1, mask]
    return walls + [
        bits & mask for bits in (0xAAAAAAAAAAAAAAAA, 0x5555555555555555, 0x123456789ABCDEF)
    ]


def _random_value(kind: str, rng: random.Random) -> int:
    width = width_of(kind)
    if kind in FORMATS and rng.random() < 0.6:
        return FORMATS[kind].encode(rng.uniform(-1.0, 1.0) * 2.0 ** rng.randint(-12, 12))
    if kind.startswith("b") and rng.random() < 0.3:
        return rng.getrandbits(rng.randint(1, width))
    return rng.getrandbits(width)


def vectors(case: Case, count: int = _VECTORS) -> list[tuple[int, ...]]:
    """Edge values against each other and random patterns, seeded by the case's name."""
    rng = random.Random(case.name)
    edges = [_edges(kind) for kind in case.inputs]
    found: list[tuple[int, ...]] = []
    for value in edges[0]:
        found += [(value, *(rng.choice(others) for others in edges[1:])) for _ in range(6)]
    while len(found) < 3 * count:
        draw = tuple(
            rng.choice(edge) if rng.random() < 0.25 else _random_value(kind, rng)
            for kind, edge in zip(case.inputs, edges, strict=True)
        )
        found.append(draw)
    allowed = [values for values in found if case.domain(*values)]
    assert len(allowed) >= 32, f"{case.name}: its domain leaves too few vectors"
    return allowed[:count]


SOURCE = "micro.cu"
_HEADER = f'.version 9.0\n.target sm_80\n.address_size 64\n.file 1 "{SOURCE}"\n'


def kernel_text(
    body: str, inputs: Sequence[str], outputs: Sequence[str], declarations: str = ""
) -> str:
    """An entry ``micro``: loads {a}.. per thread, runs ``body``, stores {d}.. per thread.

    ``{a}`` and so on stand for INPUT_NAMES and OUTPUT_NAMES; ``%r0`` holds the thread's index.
    """
    names_in, names_out = INPUT_NAMES[: len(inputs)], OUTPUT_NAMES[: len(outputs)]
    lines = [f".param .u64 p{i}" for i in range(len(inputs) + len(outputs))]
    text = _HEADER + f".visible .entry micro({', '.join(lines)})\n{{\n"
    text += ".reg .pred %p<4>;\n.reg .b16 %h<8>;\n.reg .b32 %r<12>;\n"
    text += ".reg .b64 %rd<12>;\n.reg .f32 %f<4>;\n"
    for name, kind in zip(names_in + names_out, [*inputs, *outputs], strict=True):
        text += f".reg {_register_type(kind)} %{name};\n"
    text += declarations + "mov.u32 %r0, %tid.x;\n"
    for i, (name, kind) in enumerate(zip(names_in, inputs, strict=True)):
        text += f"ld.param.u64 %rd0, [p{i}];\ncvta.to.global.u64 %rd1, %rd0;\n"
        text += f"mul.wide.u32 %rd2, %r0, {width_of(kind) // 8};\nadd.s64 %rd3, %rd1, %rd2;\n"
        text += f"ld.global{_memory_type(kind)} %{name}, [%rd3];\n"
    registers = {name: f"%{name}" for name in names_in + names_out}
    for name, register in registers.items():
        body = body.replace(f"{{{name}}}", register)
    text += body + "\n"
    for i, (name, kind) in enumerate(zip(names_out, outputs, strict=True)):
        text += f"ld.param.u64 %rd0, [p{len(inputs) + i}];\ncvta.to.global.u64 %rd1, %rd0;\n"
        text += f"mul.wide.u32 %rd2, %r0, {width_of(kind) // 8};\nadd.s64 %rd3, %rd1, %rd2;\n"
        text += f"st.global{_memory_type(kind)} [%rd3], %{name};\n"
    return text + "ret;\n}\n"


def _memory_type(kind: str) -> str:
    return f".f{width_of(kind)}" if kind in ("f32", "f64") else f".b{width_of(kind)}"


def pack(values: Sequence[int], width: int) -> bytes:
    return b"".join(value.to_bytes(width // 8, "little") for value in values)


def unpack(buffer: bytes, width: int) -> list[int]:
    step = width // 8
    return [int.from_bytes(buffer[i : i + step], "little") for i in range(0, len(buffer), step)]


def run_columns(
    execute: Executor,
    body: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    columns: Sequence[Sequence[int]],
    declarations: str = "",
) -> list[list[int]]:
    """Run ``body`` over columns of bit patterns, one per input; returns one per output."""
    threads = len(columns[0])
    text = kernel_text(body, inputs, outputs, declarations)
    buffers = [pack(c, width_of(kind)) for c, kind in zip(columns, inputs, strict=True)]
    sizes = [threads * width_of(kind) // 8 for kind in outputs]
    results = execute(text, "micro", threads, buffers, sizes)
    return [unpack(r, width_of(kind)) for r, kind in zip(results, outputs, strict=True)]


def disagreements(case: Case, execute: Executor) -> list[str]:
    """Runs a case; one line per vector whose result the oracle does not accept."""
    rows = vectors(case)
    columns = [list(column) for column in zip(*rows, strict=True)]
    (got,) = run_columns(execute, case.text, case.inputs, (case.output,), columns)
    lines = []
    for values, result in zip(rows, got, strict=True):
        want = case.oracle(*values)
        if not case.agree(result, want):
            shown = ", ".join(f"{value:#x}" for value in values)
            lines.append(f"{case.name}({shown}) gave {result:#x}, the ISA says {want:#x}")
    return lines


def as_array(buffer: bytes) -> np.ndarray:
    """A writable byte array with 16-byte alignment, as a kernel's tensors have."""
    storage = np.zeros(len(buffer) + 16, dtype=np.uint8)
    start = -storage.ctypes.data % 16
    array = storage[start : start + len(buffer)]
    array[:] = np.frombuffer(buffer, dtype=np.uint8)
    return array
