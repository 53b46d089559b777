"""Plans of several launches over workspaces: what is launched where, and what the emulator runs."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pretended_library import H200, PretendedLibrary

from flashsmith.errors import EmulatorError
from flashsmith.runtime.emulation import run_in_emulator
from flashsmith.runtime.launch_counter import count_launches
from flashsmith.runtime.launch_plan import (
    InitialContents,
    LaunchPlan,
    WorkspaceAddress,
    plan_from_library,
)
from flashsmith.runtime.libraries import LoadedKernel
from ptxlab.checks import all_checks
from ptxlab.interface import EmulationResult, Observer

sys.path.insert(0, str(Path(__file__).parents[1] / "ptxlab"))

from ptx_programs import program

STREAM, GRAPH = 7, 70
CTAS = 3
ELEMENTS = 32 * CTAS
# Of the block: sums first, which are zeroed; padding and scratch behind it.
SUMS_BYTES, PADDING_BYTES, BLOCK_BYTES = 512, 256, 512 + 256 + 512
FIRST_SUM = 300
X, O = 1 << 40, 2 << 40  # noqa: E741
OUT_OF_MEMORY = 2

PARTS = """
add.s64 %rd5, %rd1, %rd0; ld.global.u32 %r1, [%rd5];
shl.b32 %r2, %r1, 1; add.s64 %rd6, %rd2, %rd0; st.global.u32 [%rd6], %r2;
and.b32 %r3, %r0, 3; mul.wide.u32 %rd7, %r3, 4; add.s64 %rd8, %rd3, %rd7;
red.global.add.u32 [%rd8], %r1;
mov.u32 %r4, 1; red.global.add.u32 [%rd4], %r4;
ret;
"""
MERGE = """
add.s64 %rd5, %rd1, %rd0; ld.global.u32 %r1, [%rd5];
and.b32 %r3, %r0, 3; mul.wide.u32 %rd7, %r3, 4; add.s64 %rd8, %rd2, %rd7;
ld.global.u32 %r2, [%rd8];
add.u32 %r1, %r1, %r2; add.s64 %rd6, %rd3, %rd0; st.global.u32 [%rd6], %r1;
setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
mov.u32 %r5, 0; st.global.u32 [%rd4], %r5;
DONE:
ret;
"""
MODULES = {
    name: program(body, pointers=4).replace(".entry main", f".entry {name}")
    for name, body in (("parts", PARTS), ("merge", MERGE))
}


def arguments(
    library: PretendedLibrary, ctas: int = CTAS, x: int = X, o: int = O, wrong: int = 0
) -> list[int]:
    """Of the two-step plan, as the library takes them."""
    device = (H200.arch, H200.sm_count, H200.max_smem_per_block, H200.max_smem_per_sm)
    return [library.two_steps, *device, 2, ctas, wrong, x, 0, 0, o, *(0,) * 7]


def planned(library: PretendedLibrary, x: int = X, o: int = O) -> LaunchPlan:
    described = library.functions.plan(*arguments(library, x=x, o=o))
    return plan_from_library(["parts", "merge"], described)


@pytest.fixture
def launch(library: PretendedLibrary) -> Callable[..., Any]:
    """Launches on a stream: the tensors, and a block where one is given."""
    function, block_bytes = library.functions.prepare(*arguments(library), 0, False)
    assert block_bytes == BLOCK_BYTES

    def launch(stream: int = STREAM, block: Iterable[int] = ()) -> None:
        function(stream, X, 0, 0, O, *(0,) * 7, *block)

    return launch


def pointers(library: PretendedLibrary, index: int) -> tuple[int, ...]:
    """What the kernel of a launch was given."""
    return struct.unpack("<4Q", bytes(library.launches()[index].arguments)[:32])


# --- the plan as Python has it --------------------------------------------------------------------


def test_a_plan_says_its_launches_and_workspaces(library: PretendedLibrary) -> None:
    plan = planned(library)
    assert [one.kernel for one in plan.launches] == ["parts", "merge"]
    assert [(w.name, w.nbytes, w.contents) for w in plan.workspaces] == [
        ("padding", 40, InitialContents.UNDEFINED),
        ("scratch", 4 * ELEMENTS, InitialContents.UNDEFINED),
        ("counter", 4, InitialContents.KEPT_ZERO),
        ("sums", 316, InitialContents.ZEROED),
    ]
    first, second = plan.launches
    assert struct.unpack("<4Q", first.argument_bytes) == (X, 0, 0, 0)
    assert struct.unpack("<4Q", second.argument_bytes) == (0, 0, O, 0)
    assert second.workspace_addresses == ((0, 1, 0), (8, 3, 300), (24, 2, 0))


def test_what_a_launch_has_the_plan_has_of_its_main_kernel(library: PretendedLibrary) -> None:
    plan = planned(library)
    first, second = plan.launches
    swapped = replace(plan, launches=(second, first))
    for one in (plan, swapped):
        assert (one.kernel, one.grid, one.block, one.cluster) == (
            *("parts", (CTAS, 1, 1), (32, 1, 1), (1, 1, 1)),
        )
        assert (one.smem_bytes, one.argument_bytes) == (1024, first.argument_bytes)
        assert (one.workspace_offset, one.tensor_maps) == (8, ())
    assert plan.workspace_bytes == 40 + 4 * ELEMENTS + 4 + 316
    assert plan.workspace_zeroed


# --- the launcher ---------------------------------------------------------------------------------


def test_launches_follow_one_another_over_one_block(
    library: PretendedLibrary, launch: Callable[..., Any]
) -> None:
    launch()
    first, second = library.launches()
    assert [one.stream for one in (first, second)] == [STREAM] * 2
    assert [one.smem_bytes for one in (first, second)] == [1024, 2048]
    assert first.kernel != second.kernel
    x, scratch, sums, counter = pointers(library, 0)
    assert (x, scratch, sums, O, counter) == (
        X,
        *pointers(library, 1)[:2],
        *pointers(library, 1)[2:],
    )
    begin = sums - FIRST_SUM
    assert begin % 256 == 0
    assert scratch == begin + SUMS_BYTES + PADDING_BYTES
    assert not begin <= counter < begin + BLOCK_BYTES
    assert library.count("cudaMallocAsync") == library.count("cudaFreeAsync") == 1
    assert library.count("cudaFuncSetAttribute") == 2
    launch()
    assert library.count("cudaFuncSetAttribute") == 2, "once for good"
    assert library.count("cudaFreeAsync") == 2


def test_a_block_of_the_callers_is_taken_and_zeroed_in_part(
    library: PretendedLibrary, launch: Callable[..., Any]
) -> None:
    memory = np.full(BLOCK_BYTES + 256, 0xAA, np.uint8)
    block = memory.ctypes.data + -memory.ctypes.data % 256
    for _ in range(2):
        launch(block=[block])
        zeroed = ctypes.string_at(block, BLOCK_BYTES)
        assert zeroed[:SUMS_BYTES] == bytes(SUMS_BYTES)
        assert set(zeroed[SUMS_BYTES:]) == {0xAA}
        ctypes.memset(block, 0xAA, BLOCK_BYTES)
    assert pointers(library, 0)[2] == block + FIRST_SUM
    assert library.count("cudaMallocAsync") == 0
    # The first is of the chunk of counters.
    assert library.count("cudaMemsetAsync") == 1 + 2


def test_in_a_capture_everything_is_the_graphs(
    library: PretendedLibrary, launch: Callable[..., Any]
) -> None:
    launch()
    library.cuda.pretended_capture(STREAM, GRAPH)
    launch()
    library.cuda.pretended_end_capture(STREAM)
    assert len(library.launches()) == 4
    assert library.count("cudaMallocAsync") == library.count("cudaFreeAsync") == 2
    assert pointers(library, 2)[3] != pointers(library, 0)[3], "its counter is its own"


@pytest.mark.parametrize(
    ("name", "launched", "freed"),
    [
        ("cudaMallocAsync", 0, 0),
        ("cudaMemsetAsync", 0, 1),
        ("cudaFuncSetAttribute", 0, 1),
        ("cudaLaunchKernel", 0, 1),
    ],
)
def test_a_call_that_fails_leaves_nothing_behind(
    library: PretendedLibrary, name: str, launched: int, freed: int
) -> None:
    function, _ = library.functions.prepare(*arguments(library), 0, False)
    counting, _ = library.functions.prepare(*arguments(library), 0, False)
    counting(STREAM, X, 0, 0, O)
    before = library.count("cudaFreeAsync"), len(library.launches())
    kept = library.cuda.pretended_memory_bytes()
    library.fail(name, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        function(STREAM, X, 0, 0, O)
    assert library.count("cudaFreeAsync") == before[0] + freed
    assert len(library.launches()) == before[1] + launched
    assert library.cuda.pretended_memory_bytes() == kept
    function(STREAM, X, 0, 0, O)
    assert len(library.launches()) == before[1] + launched + 2


def test_a_timed_call_has_both_launches(library: PretendedLibrary) -> None:
    function, _ = library.functions.prepare(*arguments(library), 0, True)
    assert function(STREAM, X, 0, 0, O) == 1.0
    assert len(library.launches()) == 2


def test_a_kernel_launched_twice_may_have_the_larger_shared_memory(
    library: PretendedLibrary,
) -> None:
    function, _ = library.functions.prepare(*arguments(library, wrong=10), 0, False)
    function(STREAM, X, 0, 0, O)
    assert [one.smem_bytes for one in library.launches()] == [1024, 2048, 512]
    kernels = {one.smem_bytes: one.kernel for one in library.launches()}
    assert kernels[1024] == kernels[512]
    library.cuda.pretended_smem_limit.argtypes = [ctypes.c_uint64]
    # Once a plan of another test has asked for more, the limit is that.
    assert library.cuda.pretended_smem_limit(kernels[1024]) in (1024, 60_000)
    assert library.cuda.pretended_smem_limit(kernels[2048]) == 2048


def test_a_plan_lowers_no_limit_of_one_before(library: PretendedLibrary) -> None:
    """Of plans of one kernel, such as those of a large batch and of a small one, any may be
    launched at any time."""
    large, small = (
        library.functions.prepare(*arguments(library, wrong=wrong), 0, False)[0]
        for wrong in (14, 0)
    )
    library.cuda.pretended_smem_limit.argtypes = [ctypes.c_uint64]
    for function, bytes_of_first in ((large, 60_000), (small, 1024), (large, 60_000)):
        function(STREAM, X, 0, 0, O)
        first, second = library.launches()[-2:]
        assert (first.smem_bytes, second.smem_bytes) == (bytes_of_first, 2048)
        assert library.cuda.pretended_smem_limit(first.kernel) == 60_000
        assert library.cuda.pretended_smem_limit(second.kernel) == 2048


def test_nothing_to_compute_needs_nothing(library: PretendedLibrary) -> None:
    function, block_bytes = library.functions.prepare(*arguments(library, ctas=0), 0, False)
    function(STREAM, X, 0, 0, O)
    assert (block_bytes, library.launches()) == (0, [])
    for name in ("cudaMallocAsync", "cudaMemsetAsync", "cudaMalloc"):
        assert library.count(name) == 0


def test_a_number_too_many_or_too_few_is_told(library: PretendedLibrary) -> None:
    index, *device_and_rest = arguments(library)
    device, tensors = device_and_rest[:4], device_and_rest[7:]
    for numbers, message in (
        ((CTAS,), "fewer numbers than the operation takes"),
        ((CTAS, 0, 1.5), "more numbers than the operation takes"),
        ((2.5, 0), "number 1 of the call must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            library.functions.plan(index, *device, len(numbers), *numbers, *tensors)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (1, "it launches a kernel that the config does not have"),
        (2, "it writes beyond its arguments"),
        (3, "it names a buffer that does not exist"),
        (4, "it names a buffer that does not exist"),
        (5, "it names a tensor that does not exist"),
        (6, "more than 16 workspaces"),
        (7, "a kernel takes at most 4,096 bytes of arguments"),
        (8, "it writes beyond its arguments"),
        (9, "1048592 bytes of workspaces that are kept zero; at most 1048576"),
        (15, f"{2**64 - 4} bytes of workspaces that are kept zero; at most 1048576"),
    ],
)
def test_a_plan_that_leaves_what_there_is_is_refused(
    library: PretendedLibrary, wrong: int, message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"the family's plan: {message}"):
        library.functions.plan(*arguments(library, wrong=wrong))


# --- the emulator ---------------------------------------------------------------------------------


def emulate(
    library: PretendedLibrary,
    change: Callable[[LaunchPlan], LaunchPlan] = lambda plan: plan,
    observers: Iterable[Observer] = (),
    modules: dict[str, str] = MODULES,
) -> tuple[bool, EmulationResult]:
    """Whether o is what it should be after a run of a plan, changed."""
    x = np.arange(1, ELEMENTS + 1, dtype=np.uint32)
    o = np.zeros(ELEMENTS, np.uint32)
    plan = change(planned(library, x.ctypes.data, o.ctypes.data))
    result = run_in_emulator(
        modules, plan, readable={"x": x}, writable={"o": o}, observers=tuple(observers)
    )
    sums = x.reshape(-1, 4).sum(axis=0, dtype=np.uint32)
    return bool(np.array_equal(o, 2 * x + np.tile(sums, ELEMENTS // 4))), result


def test_launches_see_what_those_before_have_written(library: PretendedLibrary) -> None:
    checks = all_checks()
    right, result = emulate(library, observers=checks)
    assert right
    assert result.findings == []
    assert result.instructions["red.global.add.u32"] == 2 * CTAS, "those of the first launch"
    assert result.instructions["ld.global.u32"] == (1 + 2) * CTAS, "those of both"


def with_contents(plan: LaunchPlan, name: str, contents: InitialContents) -> LaunchPlan:
    spaces = [w._replace(contents=contents) if w.name == name else w for w in plan.workspaces]
    return replace(plan, workspaces=tuple(spaces))


def with_address(plan: LaunchPlan, step: int, place: int, *address: int) -> LaunchPlan:
    launches = list(plan.launches)
    addresses = list(launches[step].workspace_addresses)
    addresses[place] = WorkspaceAddress(*address)
    launches[step] = replace(launches[step], workspace_addresses=tuple(addresses))
    return replace(plan, launches=tuple(launches))


MUTANTS = {
    "sums are not zeroed": lambda plan: with_contents(plan, "sums", InitialContents.UNDEFINED),
    "the launches are swapped": lambda plan: replace(plan, launches=plan.launches[::-1]),
    "the second launch is left out": lambda plan: replace(plan, launches=plan.launches[:1]),
    "scratch begins later in the second": lambda plan: with_address(plan, 1, 0, 0, 1, 4),
    "sums begin earlier in the second": lambda plan: with_address(plan, 1, 1, 8, 3, 296),
    "scratch is where padding is": lambda plan: with_address(plan, 0, 0, 8, 0, 0),
    "an address stands elsewhere": lambda plan: with_address(plan, 1, 0, 8, 1, 0),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_plan_that_is_wrong_is_caught(library: PretendedLibrary, name: str) -> None:
    try:
        right, _ = emulate(library, MUTANTS[name])
    except EmulatorError:
        return
    assert not right


def test_a_counter_that_is_not_left_zero_is_told(library: PretendedLibrary) -> None:
    kernel = MODULES["merge"].replace("mov.u32 %r5, 0;", "mov.u32 %r5, 9;")
    with pytest.raises(EmulatorError, match=r"its workspace counter must be zero at the end.*09"):
        emulate(library, modules=MODULES | {"merge": kernel})


def test_every_kernel_of_a_plan_is_counted_but_for_empty_launches(
    library: PretendedLibrary,
) -> None:
    with count_launches() as counted:
        emulate(library)
    assert counted.emulator == 2
    with count_launches() as counted:
        emulate(library, without_the_second)
    assert counted.emulator == 1


def without_the_second(plan: LaunchPlan) -> LaunchPlan:
    first, second = plan.launches
    counter_left = [w._replace(contents=InitialContents.ZEROED) for w in plan.workspaces]
    return replace(
        plan, launches=(first, replace(second, grid=(0, 1, 1))), workspaces=tuple(counter_left)
    )


def test_a_gpus_launches_count_each_kernel(library: PretendedLibrary) -> None:
    entry = SimpleNamespace(beside=("merge",), ptx_entries=("parts", "merge"))
    held: Any = SimpleNamespace(
        manifest=SimpleNamespace(nvcc_version="13.0.88"), entry=lambda config: entry
    )
    kernel = LoadedKernel(None, held, library.two_steps, library.functions)  # type: ignore[arg-type]
    _, *rest = arguments(library)
    call: Any = SimpleNamespace(library_arguments=lambda: rest, addresses=rest[-11:], problem=None)
    launch = kernel.prepare(call, 0)
    with count_launches() as counted:
        launch(STREAM, X, 0, 0, O)
    assert (counted.gpu, len(library.launches())) == (2, 2)


def test_findings_are_of_the_launch_they_were_made_in(library: PretendedLibrary) -> None:
    """Both kernels write beyond their memory, in the same line of their own text."""
    beyond = "st.global.u32 [%rd6+1048576]"
    modules = {name: text.replace("st.global.u32 [%rd6]", beyond) for name, text in MODULES.items()}
    checks = all_checks()
    right, _ = emulate(library, observers=checks, modules=modules)
    found = [one for check in checks for one in check.findings if one.kind == "out-of-bounds"]
    assert not right
    assert [one.count for one in found] == [ELEMENTS] * 2
