"""ptxlab's public face: loading a module, launching a kernel, and what wrong arguments are told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import PtxlabError, load
from ptxlab.checks import BankConflicts

# y[i] = a * x[i] + y[i] for i < n, as nvcc writes it.
SAXPY = """.version 9.0
.target sm_80
.address_size 64
.global .align 4 .u32 launches;
.const .align 4 .f32 bias = 0f3F000000;
.visible .entry saxpy(
    .param .f32 saxpy_param_0,
    .param .u64 saxpy_param_1,
    .param .u64 .ptr .align 1 saxpy_param_2,
    .param .u32 saxpy_param_3
)
{
    .reg .pred %p<2>; .reg .f32 %f<8>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
    ld.param.f32 %f1, [saxpy_param_0];
    ld.param.u64 %rd1, [saxpy_param_1];
    ld.param.u64 %rd2, [saxpy_param_2];
    ld.param.u32 %r1, [saxpy_param_3];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.s32 %p1, %r5, %r1;
    @%p1 bra done;
    mul.wide.s32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    ld.global.f32 %f3, [%rd5];
    fma.rn.f32 %f4, %f1, %f2, %f3;
    ld.const.f32 %f5, [bias];
    add.f32 %f6, %f4, %f5;
    st.global.f32 [%rd5], %f6;
    mov.u64 %rd6, launches;
    atom.global.add.u32 %r6, [%rd6], 1;
done:
    ret;
}
.visible .entry _Z5otherv() { ret; }
.visible .entry scalars(
    .param .u8 a, .param .u16 b, .param .u64 c, .param .f64 d, .param .align 4 .b8 e[8],
    .param .b32 f, .param .u64 out
)
{
    .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f64 %fd<4>;
    ld.param.u64 %rd1, [out];
    ld.param.u8 %h1, [a]; st.global.u8 [%rd1], %h1;
    ld.param.u16 %h2, [b]; st.global.u16 [%rd1+2], %h2;
    ld.param.u64 %rd2, [c]; st.global.u64 [%rd1+8], %rd2;
    ld.param.f64 %fd1, [d]; st.global.f64 [%rd1+16], %fd1;
    ld.param.u32 %r1, [e+4]; st.global.u32 [%rd1+4], %r1;
    ld.param.b32 %r2, [f]; st.global.u32 [%rd1+24], %r2;
    ret;
}
"""
MODULE = load(SAXPY)
N = 100


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(N, dtype=np.float32), np.ones(N, np.float32)


def saxpy(arguments: Any, **how: Any) -> ptxlab.EmulationResult:
    return MODULE.launch("saxpy", arguments, **{"grid": 4, "block": 32, **how})


def test_arrays_are_read_and_written_in_place() -> None:
    x, y = arrays()
    result = saxpy([2, x, y, N])
    assert np.array_equal(y, 2 * np.arange(N) + 1.5)
    assert result.findings == []
    assert result.instructions["fma.rn.f32"] == 4


def test_a_write_to_a_read_only_array_is_found() -> None:
    x, y = arrays()
    y.flags.writeable = False
    (finding,) = saxpy([2.0, x, y, N]).findings
    assert "argument 2" in str(finding)
    assert finding.ptx_line == SAXPY[: SAXPY.index("st.global.f32")].count("\n") + 1
    assert (y == 1).all()


def test_an_access_beyond_the_end_is_found_and_an_error_without_checks() -> None:
    x, y = arrays()
    findings = saxpy([2.0, x[:-1].copy(), y, N]).findings
    assert len(findings) == 1
    assert "argument 1" in findings[0].message
    with pytest.raises(RuntimeError, match=r"PTX line \d+: ld\.global\.f32: .*of argument 1"):
        saxpy([2.0, x[:-1].copy(), y, N], checks=False)


def test_variables_of_the_module_are_given_and_come_back() -> None:
    x, y = arrays()
    launches, bias = np.zeros(1, np.uint32), np.array([10], np.float32)
    for _ in range(2):
        saxpy([0, x, y, N], variables={"launches": launches, "bias": bias})
    assert launches[0] == 2 * N
    assert (y == 21).all()
    saxpy([0, x, y, N])
    assert (y == 21.5).all()


def test_every_kind_of_scalar() -> None:
    out = np.zeros(32, np.uint8)
    pair = np.array((7, -2), dtype=[("x", np.int32), ("y", np.int32)])
    arguments = [True, np.int64(-1), -5, 1, pair[()], np.float32(0.5), out]
    MODULE.launch("scalars", arguments, grid=1, block=1)
    assert out[0] == 1
    assert out[2:4].view(np.int16) == -1
    assert out[4:8].view(np.int32) == -2
    assert out[8:16].view(np.int64) == -5
    assert out[16:24].view(np.float64) == 1
    assert out[24:28].view(np.float32) == 0.5
    MODULE.launch("scalars", [0, 0, None, 1, bytes(8), 3, out], grid=1, block=1)
    assert out[24:28].view(np.int32) == 3


def test_sizes_in_two_dimensions_and_a_seed() -> None:
    x, y = arrays()
    result = saxpy([2, x, y, N], grid=(4, 1), block=[16, 2], seed=3)
    assert (y[:64] != 1).all()
    # Two threads have each element.
    assert {finding.kind for finding in result.findings} == {"race-war", "race-waw"}


def test_more_observers() -> None:
    conflicts = BankConflicts()
    saxpy([2, *arrays(), N], checks=False, observers=[conflicts])
    assert conflicts.by_kind == {}


X, Y = arrays()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kernel": "sum"}, "kernel: there is no 'sum'; the module has: saxpy, _Z5otherv, scalars; "
            'extern "C" keeps'),
        ({"arguments": [2, X, Y]}, "arguments: got 3, but saxpy takes 4: .f32, .u64, .u64, .u32"),
        ({"arguments": X}, "arguments: got ndarray; give a list or a tuple"),
        ({"arguments": ["2", X, Y, N]}, "argument 0: got a value of type str; .f32 takes a number"),
        ({"arguments": [1e300, X, Y, N]}, "argument 0: 1e+300 is beyond the range of .f32"),
        ({"arguments": [X, X, Y, N]},
            "argument 0: got an array of shape (100,), but the kernel takes "
            "a number there (.f32)"),
        ({"arguments": [2, 0.5, Y, N]},
            "argument 1: got 0.5; .u64 takes an array, an integer or None"),
        ({"arguments": [2, X[::2], Y, N]}, "argument 1: the array of shape (50,) has strides (8,)"),
        ({"arguments": [2, [1.0], Y, N]},
            "argument 1: got a value of type list; .u64 takes an array"),
        ({"arguments": [2, X.astype(object), Y, N]}, "argument 1: got an array of Python objects"),
        ({"arguments": [2, X, Y, 1 << 32]},
            "argument 3: 4294967296 does not fit .u32; give a number "
            "from -2147483648 to 4294967295"),
        ({"arguments": [2, X, Y, 100.0]}, "argument 3: got 100.0; .u32 takes an integer"),
        ({"arguments": [2, X, Y, None]}, "argument 3: got None; .u32 takes an integer"),
        ({"arguments": [2, X, Y, X]}, "argument 3: got an array of shape (100,), but"),
        ({"grid": 0}, "grid: 0: x must be from 1 to 2147483647"),
        ({"grid": (1, 70_000)}, "grid: (1, 70000): y must be from 1 to 65535"),
        ({"grid": 1.5}, "grid: got 1.5; give an int, or a tuple of up to three"),
        ({"grid": (1, 1, 1, 1)}, "grid: got (1, 1, 1, 1); give"),
        ({"block": (32, 64)}, "block: (32, 64) has 2048 threads; at most 1024 are allowed"),
        ({"block": True}, "block: got True"),
        ({"grid": 3, "cluster": 2}, "grid=(3, 1, 1) is not a multiple of cluster=(2, 1, 1)"),
        ({"shared_bytes": -1}, "shared_bytes: -1; a CTA of sm_80 may have 0 to 166912 bytes"),
        ({"shared_bytes": 200_000}, "shared_bytes: 200000; a CTA of sm_80 may have"),
        ({"shared_bytes": 1.0}, "shared_bytes: got 1.0; give a number of bytes"),
        ({"variables": {"biass": X}},
            "variables: there is no 'biass'; the module has: launches, bias"),
        ({"variables": {"bias": X}}, "variables: bias: has 400 bytes; the module's has 4"),
        ({"variables": {"bias": 3.0}}, "variables: bias: give a C-contiguous NumPy array"),
        ({"kernel": "scalars", "arguments": [0, 0, 0, 0, bytes(4), 0, X]},
            "argument 4: a value of type bytes has 4 bytes; the kernel takes 8 by value (.b8[8])"),
        ({"kernel": "scalars", "arguments": [0, 0, 0, 0, 5, 0, X]},
            "argument 4: got 5; the kernel takes 8 bytes by value (.b8[8]): give bytes, or"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(changed: dict[str, Any], said: str) -> None:
    call = {"kernel": "saxpy", "arguments": [2, X, Y, N], "grid": 4, "block": 32, **changed}
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        MODULE.launch(**call)
    assert isinstance(caught.value, PtxlabError)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no_such_file.ptx", "source: cannot read the file 'no_such_file.ptx': No such file"),
        (b"\x7fELF...", "source: a cubin"),
        ("__global__ void k() {\n}\n", "source: not PTX: it has no .version; compile CUDA"),
        (3, "source: got int; give PTX as text or bytes, or a file's path"),
    ],
)
def test_what_is_no_ptx_is_said(source: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        load(source)


def test_a_module_from_a_file_from_bytes_and_in_words(tmp_path: Path) -> None:
    path = tmp_path / "saxpy.ptx"
    path.write_text(SAXPY)
    for source in (path, str(path), SAXPY.encode() + b"\0"):
        assert load(source).kernels == ("saxpy", "_Z5otherv", "scalars")
    assert repr(MODULE) == "<ptxlab.Module for sm_80: saxpy, _Z5otherv, scalars>"


def test_an_unknown_opcode_is_an_error_with_its_line() -> None:
    line = SAXPY[: SAXPY.index("fma.rn")].count("\n") + 1
    module = load(SAXPY.replace("fma.rn.f32", "fmadd.f32"))
    with pytest.raises(PtxlabError, match=rf"PTX line {line}: fmadd\.f32: opcode fmadd"):
        module.launch("saxpy", [2, X, Y, N], grid=1, block=32)


def test_the_public_names() -> None:
    assert len(ptxlab.__all__) == 5
    assert all(getattr(ptxlab, name).__doc__ for name in ptxlab.__all__)


ALONE = """
import sys

sys.modules["flashsmith"] = None  # importing it raises ImportError
import pkgutil
import numpy as np
import ptxlab

for module in pkgutil.walk_packages(ptxlab.__path__, "ptxlab."):
    __import__(module.name)
module = ptxlab.load({text!r})
x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
assert not module.launch("saxpy", [2, x, y, 100], grid=4, block=32).findings
assert (y == 2 * x + 1.5).all()
names = {{name.split(".")[0] for name in sys.modules}}
print(*sorted(names & {{"flashsmith", "torch", "tvm_ffi"}}))
"""


def test_it_needs_nothing_of_flashsmith() -> None:
    code = ALONE.format(text=SAXPY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "flashsmith"  # the entry that keeps it out
