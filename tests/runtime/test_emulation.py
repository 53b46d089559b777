"""The one module that imports ptxlab: who loads it, and whose errors come out of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flashsmith.errors import ArgumentError, EmulatorError, FlashsmithError
from flashsmith.runtime.emulation import exact_mma, parse_entry, run_in_emulator
from flashsmith.runtime.launch_plan import Launch, LaunchPlan
from ptxlab.errors import PtxlabError

TOOLS = Path(__file__).parents[2] / "tools" / "gpu"

FIRST_CALLS = """
import sys

sys.path.insert(0, {tools!r})
import torch
from pretended_gpu import pretended_gpu

import flashsmith


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16, requires_grad=True)


with pretended_gpu() as gpu:
    q, k, v = half(1, 64, 2, 64), half(1, 64, 2, 64), half(1, 64, 2, 64)
    with torch.no_grad():
        flashsmith.attention(q, k, v, causal=True)
        o, lse = flashsmith.attention(q, k, v, partial=True)
        flashsmith.merge_attention([o, o], [lse, lse])
        cache = torch.zeros(1, 64, 2, 64, dtype=torch.float16)
        lens = torch.ones(1, dtype=torch.int32)
        flashsmith.attention_with_cache(q[:, :1], cache, cache, cache_lens=lens)
    flashsmith.attention(q, k, v).sum().backward()
    operations = {{launch.config.family.operation for launch in gpu.launches}}
print(*sorted(operations))
print(*sorted(name for name in sys.modules if name.split(".")[0] == "ptxlab"))
"""


@pytest.mark.torch
def test_calls_on_a_gpu_load_nothing_of_the_emulator() -> None:
    code = FIRST_CALLS.format(tools=str(TOOLS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["backward decode forward merge", ""]


KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 to)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<3>;
    .reg .f32 %f<5>;
    ld.param.u64 %rd1, [to];
    BODY
    ret;
}
"""


def run_body(body: str, **writable: np.ndarray) -> None:
    (array,) = writable.values()
    argument = array.ctypes.data.to_bytes(8, "little")
    launch = Launch(
        kernel="kernel",
        is_main=True,
        grid=(1, 1, 1),
        block=(32, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=0,
        argument_bytes=argument,
    )
    plan = LaunchPlan(launches=(launch,), workspaces=())
    run_in_emulator(KERNEL.replace("BODY", body), plan, readable={}, writable=writable)


# To 1 in each accumulator come sixteen products of 2**-25.
PRODUCTS = (
    "mov.b32 %r1, 0x0C000C00; mov.b32 %r2, 0x08000800; mov.f32 %f1, 0f3F800000;"
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    "{%f1,%f2,%f3,%f4}, {%r1,%r1,%r1,%r1}, {%r2,%r2}, {%f1,%f1,%f1,%f1};"
    "st.global.f32 [%rd1], %f1;"
)


def sum_of_products() -> float:
    to = np.zeros(4, np.float32)
    run_body(PRODUCTS, to=to)
    return float(to[0])


def test_exact_mma_lasts_as_long_as_its_block() -> None:
    assert sum_of_products() == 1 + 2.0**-21
    with exact_mma():
        assert sum_of_products() == 1
    assert sum_of_products() == 1 + 2.0**-21
    with pytest.raises(EmulatorError), exact_mma():
        run_body("frob.b32 %r1, %r2;", to=np.zeros(4, np.uint32))
    assert sum_of_products() == 1 + 2.0**-21


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("frob.b32 %r1, %r2;", "frob"),
        ("st.global.u32 [%rd1+4096], 1;", "outside every tensor"),
    ],
)
def test_what_the_emulator_refuses_is_an_error_of_flashsmith(body: str, said: str) -> None:
    with pytest.raises(EmulatorError, match=said) as caught:
        run_body(body, to=np.zeros(4, np.uint32))
    assert isinstance(caught.value, FlashsmithError)
    assert isinstance(caught.value.__cause__, PtxlabError)


def test_arguments_that_the_emulator_refuses_are_errors_of_flashsmith() -> None:
    array = np.zeros(4, np.uint32)
    array.flags.writeable = False
    with pytest.raises(ArgumentError, match="to: the array is read-only"):
        run_body("ret;", to=array)


def test_a_missing_kernel_is_an_error_of_flashsmith() -> None:
    with pytest.raises(EmulatorError, match="other"):
        parse_entry(KERNEL.replace("BODY", ""), "other")
