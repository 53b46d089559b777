"""A config is looked for among what is loaded, then in the cache, then built; once per process."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashsmith.builder import BuildEvent, KernelLibrary, library_for
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.manifest import FileRecord
from flashsmith.errors import (
    ArgumentError,
    CacheError,
    DamagedLibraryError,
    KernelNotBuiltError,
    LaunchError,
)
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import forward, forward_pass, kernel_choice, libraries, plan_forward
from flashsmith.runtime.libraries import NEUTRAL, LoadedKernels, load_library
from flashsmith.runtime.prepared_call import unplaced_call

CONFIGS = [
    parse_kernel_name_into_config(f"({dtype}, 64, 64, 32, 4): {features}")
    for dtype in ("FP16", "BF16")
    for features in ("load_0_0_0_tiles", "async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
]
PROBLEM = Problem(2, 128, 64, 3, 3, 64, DType.FP16)
A100 = device_spec("A100")


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return library_for(CONFIGS)


def test_every_config_of_a_library_is_loaded_under_its_own_index(library: KernelLibrary) -> None:
    kernels = load_library(library)
    assert set(kernels) == set(library.configs)
    for config, kernel in kernels.items():
        problem = replace(PROBLEM, dtype=config.dtype)
        plan = kernel.plan(unplaced_call(problem, A100, 0.125))
        assert plan.kernel == library.entry(config).ptx_entry
        assert f".entry {plan.kernel}(" in kernel.ptx


def test_two_libraries_in_one_process_keep_their_own_kernels(library: KernelLibrary) -> None:
    other = FlashForwardKernelConfig(DType.FP16, 64, 128, 32, 4, True)
    alone = load_library(library_for([other]))
    assert set(load_library(library)) == set(library.configs)
    assert other in alone
    plan = alone[other].plan(unplaced_call(PROBLEM, A100, 0.125))
    assert plan.block == (128, 1, 1)
    assert plan.grid == (6, 1, 1)


def test_a_library_that_does_not_match_its_manifest_is_refused(library: KernelLibrary) -> None:
    class Mislabelled:
        so_path = library.so_path
        is_installed = False
        configs = library.configs
        manifest = library.manifest

    fewer, another = Mislabelled(), Mislabelled()
    fewer.configs = library.configs[:-1]
    another.manifest = replace(library.manifest, semantics=Semantics("causal"))
    for mislabelled in (fewer, another):
        with pytest.raises(LaunchError, match="holds other kernels than its manifest lists"):
            load_library(mislabelled)  # type: ignore[arg-type]


def test_the_second_lookup_searches_nothing(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = LoadedKernels()
    # Otherwise, another test's library that has only the first config could be found.
    monkeypatch.setattr(libraries, "find_library", lambda *_, **__: library)
    first = kernels.get(CONFIGS[0], 80)
    monkeypatch.setattr(libraries, "find_library", None)
    assert kernels.get(CONFIGS[0], 80) is first
    assert kernels.get(CONFIGS[1], 80) is not first


def test_libraries_are_kept_apart_by_arch(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = LoadedKernels()
    kernels.get(CONFIGS[0], 80)
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    monkeypatch.setattr(libraries, "find_library", lambda *args, **kwargs: None)
    with pytest.raises(KernelNotBuiltError, match="not built for sm_86"):
        kernels.get(CONFIGS[0], 86)


def test_without_jit_a_miss_names_the_config_its_neighbours_and_the_command(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    monkeypatch.setattr(libraries, "built_configs", lambda **kwargs: tuple(CONFIGS))
    monkeypatch.setattr(libraries, "find_library", lambda *args, **kwargs: None)
    wanted = replace(CONFIGS[1], mma_double_buffer_loads=True)
    with pytest.raises(KernelNotBuiltError) as caught:
        LoadedKernels().get(wanted, 80)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"config {wanted} is not built for sm_80, and FLASHSMITH_JIT=0")
    assert lines[2].strip() == str(CONFIGS[1])
    assert lines[3].strip() == str(CONFIGS[3])
    assert lines[-1] == f'Build it with: flashsmith build --kernels "{wanted}" --arch 80'


def test_while_a_graph_is_captured_a_miss_is_an_error(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "find_library", lambda *args, **kwargs: None)
    monkeypatch.setattr(libraries, "build", None)
    causal = Semantics("causal", uneven=True)
    with pytest.raises(KernelNotBuiltError) as caught:
        LoadedKernels().get(CONFIGS[0], 80, causal, lambda: False)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"config {CONFIGS[0]} [causal+uneven] is not built for sm_80, and no compiler is started "
        "while a CUDA graph is captured."
    )
    assert lines[-1].endswith(f'--kernels "{CONFIGS[0]}" --arch 80 --semantics causal+uneven')


UNEVEN = Semantics(uneven=True)


@pytest.fixture
def only_uneven(monkeypatch: pytest.MonkeyPatch) -> list[Semantics]:
    """No kernel for whole tiles is in the cache; what was searched for."""
    uneven = library_for(CONFIGS[:1], semantics=UNEVEN)
    searched: list[Semantics] = []

    def find(cfg: Any, *, arch: int, semantics: Semantics) -> KernelLibrary | None:
        searched.append(semantics)
        return uneven if semantics == UNEVEN else None

    monkeypatch.setattr(libraries, "find_library", find)
    monkeypatch.setattr(libraries, "build", None)
    return searched


@pytest.mark.parametrize("why", ["FLASHSMITH_JIT=0", "CUDA graph"])
def test_where_nothing_may_be_built_the_kernel_for_uneven_lengths_serves(
    why: str,
    only_uneven: list[Semantics],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    jit = why != "FLASHSMITH_JIT=0"
    monkeypatch.setenv("FLASHSMITH_JIT", str(int(jit)))
    kernels = LoadedKernels()
    for _ in range(3):
        kernel = kernels.get(CONFIGS[0], 80, NEUTRAL, lambda: False)
        assert kernel is kernels.get(CONFIGS[0], 80, UNEVEN)
    assert only_uneven == [NEUTRAL, UNEVEN]  # each searched for once
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{CONFIGS[0]} is not built for sm_80" in caplog.text
    assert why in caplog.text
    kernel.plan(unplaced_call(PROBLEM, A100, 0.125))


def test_a_general_edge_kernel_serves_only_while_nothing_may_be_built(
    library: KernelLibrary, only_uneven: list[Semantics], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = LoadedKernels()
    assert kernels.get(CONFIGS[0], 80, NEUTRAL, lambda: False).semantics == UNEVEN
    monkeypatch.setattr(libraries, "build", lambda *args, **kwargs: library)
    assert kernels.get(CONFIGS[0], 80, NEUTRAL).semantics == NEUTRAL
    assert kernels.get(CONFIGS[0], 80, NEUTRAL, lambda: False).semantics == NEUTRAL


def test_no_general_edge_kernel_serves_other_semantics(
    only_uneven: list[Semantics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    kernels = LoadedKernels()
    for semantics in (Semantics("causal"), Semantics(softcap=True)):
        with pytest.raises(KernelNotBuiltError, match=f"\\[{semantics}\\] is not built"):
            kernels.get(CONFIGS[0], 80, semantics)
    with pytest.raises(KernelNotBuiltError):
        kernels.get(CONFIGS[1], 80, Semantics("window", uneven=True))


def test_a_general_edge_kernel_computes_the_same(
    library: KernelLibrary, only_uneven: list[Semantics], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    qkv = [rng.standard_normal((1, 64, 2, 64)).astype(np.float16) for _ in range(3)]
    outputs = {}
    for jit, kernels in (("1", LoadedKernels(load_keys(library))), ("0", LoadedKernels())):
        monkeypatch.setenv("FLASHSMITH_JIT", jit)
        for module in (forward_pass, kernel_choice):
            monkeypatch.setattr(module, "loaded_kernels", kernels)
        outputs[jit] = forward(CONFIGS[0], *qkv)
        assert (NEUTRAL in {semantics for *_, semantics in kernels.kernels}) == (jit == "1")
    assert np.array_equal(outputs["0"], outputs["1"])


def load_keys(library: KernelLibrary) -> dict[Any, Any]:
    return {(config, 80, NEUTRAL): kernel for config, kernel in load_library(library).items()}


def test_the_command_that_is_named_works(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    monkeypatch.setattr(libraries, "find_library", lambda *args, **kwargs: None)
    with pytest.raises(KernelNotBuiltError) as caught:
        LoadedKernels().get(CONFIGS[0], 80)
    command = str(caught.value).splitlines()[-1].partition("flashsmith ")[2]
    subprocess.run([sys.executable, "-m", "flashsmith", *shlex.split(command)], check=True)


def test_without_jit_an_empty_cache_is_reported_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    with pytest.raises(KernelNotBuiltError, match="Nearest built: none"):
        LoadedKernels().get(CONFIGS[0], 80)


def test_a_miss_is_built_and_logged(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []

    def build(configs: list[FlashForwardKernelConfig], **options: Any) -> KernelLibrary:
        asked.append((configs, options["arch"]))
        options["progress"](BuildEvent("compile", "", 0, 1, None, 1.0))
        return library

    monkeypatch.setattr(libraries, "find_library", lambda *args, **kwargs: None)
    monkeypatch.setattr(libraries, "build", build)
    assert LoadedKernels().get(CONFIGS[0], 80).config == CONFIGS[0]
    assert asked == [([CONFIGS[0]], 80)]
    assert f"compiling {CONFIGS[0]} for sm_80" in caplog.text


def test_threads_that_want_one_config_load_it_once(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[float] = []

    def slow_search(*args: Any, **kwargs: Any) -> KernelLibrary:
        searches.append(time.monotonic())
        time.sleep(0.2)
        return library

    monkeypatch.setattr(libraries, "find_library", slow_search)
    kernels, found = LoadedKernels(), []
    threads = [
        threading.Thread(target=lambda i=i: found.append(kernels.get(CONFIGS[i % 4], 80)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(searches) == 1
    assert len({id(kernel) for kernel in found}) == 4


def test_a_kernel_that_is_built_already_is_not_waited_for(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, done = threading.Event(), threading.Event()

    def build(*args: Any, **kwargs: Any) -> KernelLibrary:
        building.set()
        assert done.wait(60)
        return library

    def find(cfg: Any, **kwargs: Any) -> KernelLibrary | None:
        return library if cfg == CONFIGS[1] else None

    monkeypatch.setattr(libraries, "build", build)
    monkeypatch.setattr(libraries, "find_library", find)
    kernels = LoadedKernels()
    other = threading.Thread(target=kernels.get, args=(CONFIGS[0], 80))
    other.start()
    try:
        assert building.wait(60)
        assert kernels.get(CONFIGS[1], 80).config == CONFIGS[1]
    finally:
        done.set()
        other.join()


@pytest.fixture
def kernel(library: KernelLibrary) -> Iterator[Any]:
    return load_library(library)[CONFIGS[0]]


def test_a_refused_launch_is_a_launch_error_with_cudas_words(kernel: Any) -> None:
    """No machine has a GPU 4095; one without a driver refuses it for that reason."""
    call = unplaced_call(PROBLEM, A100, 0.125)
    for timed in (False, True):
        launch = kernel.prepare(call, 4095, timed=timed)
        with pytest.raises(LaunchError, match=r"on GPU 4095: .*cudaError\w+: "):
            launch(0, *call.addresses)


def test_a_launcher_takes_a_stream_and_addresses(kernel: Any) -> None:
    """Zeros at the end may be left out; any other count is an error before any launch."""
    call = unplaced_call(PROBLEM, A100, 0.125)
    arguments = (kernel.index, *call.library_arguments(), 4095, False)
    launch, block_bytes = kernel.functions.prepare(*arguments)
    assert block_bytes == 0
    for short in range(5):
        with pytest.raises(ValueError, match="fewer arguments than the call takes"):
            launch(*[0] * short)
    with pytest.raises(ValueError, match="more arguments than the call takes"):
        launch(*[0] * 13)
    for enough in range(5, 13):
        with pytest.raises(RuntimeError, match="cudaError"):
            launch(*[0] * enough)
    with pytest.raises(ValueError, match="packed: the call and this library's kernels must both"):
        launch(*[0] * 8, 1, 1)
    with pytest.raises(ValueError, match="more arguments than the call takes"):
        kernel.functions.prepare(*arguments, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": DType.BF16}, "problem: dtype BF16; the config's kernel is for FP16"),
        ({"d": 128, "d_v": 128}, "problem: d 128; the config's kernel is for up to 64"),
        ({"d": 60, "d_v": 60}, "d is 60; the config serves multiples of 8 up to 64"),
        ({"seq_k": 1 << 30}, "lengths must be between 0 and"),
        ({"batch": 1 << 40}, "batch and total lengths must be between 0 and"),
        ({"batch": 1 << 20, "heads_q": 1 << 12, "heads_k": 1 << 12}, "must stay within"),
    ],
)
def test_what_the_planner_refuses_is_an_argument_error(
    library: KernelLibrary, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan_forward(CONFIGS[0], replace(PROBLEM, **changed), A100)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (replace(PROBLEM, seq_q=96), "uneven: this library's kernels want whole tiles"),
        (replace(PROBLEM, seq_k=80), "uneven: this library's kernels want whole tiles"),
        (replace(PROBLEM, semantics=Semantics("causal")), "mask: this library's kernels have none"),
        (replace(PROBLEM, semantics=Semantics("window")), "mask: this library's kernels have none"),
        (replace(PROBLEM, semantics=Semantics(softcap=True)), "softcap: this library's kernels"),
        (replace(PROBLEM, semantics=Semantics(packed=True, uneven=True)), "packed: the call and"),
    ],
)
def test_a_kernel_compiled_for_other_semantics_refuses_the_call(
    kernel: Any, problem: Problem, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        kernel.plan(unplaced_call(problem, A100, 0.125))


def test_a_call_of_another_length_is_refused(kernel: Any) -> None:
    arguments = (kernel.index, *unplaced_call(PROBLEM, A100, 0.125).library_arguments())
    kernel.functions.plan(*arguments)
    for wrong in ((), arguments[:-1], (*arguments, 0)):
        with pytest.raises(ValueError, match=r"(fewer|more) arguments than the call takes"):
            kernel.functions.plan(*wrong)


def test_planning_for_too_small_a_device_is_refused(kernel: Any) -> None:
    tiny = replace(A100, max_smem_per_block=1024)
    with pytest.raises(ArgumentError, match="16384 bytes of shared memory, the device allows 1024"):
        kernel.plan(unplaced_call(PROBLEM, tiny, 0.125))


@pytest.mark.parametrize(
    ("problem", "device", "message"),
    [
        ("b2 s128", A100, "problem: got str; give a Problem"),
        (PROBLEM, "A100", "device: got str; give a DeviceSpec"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_is_compiled(
    problem: Any, device: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(LoadedKernels, "get")
    with pytest.raises(ArgumentError, match=message):
        plan_forward(CONFIGS[0], problem, device)


def test_planning_needs_no_gpu_and_no_framework() -> None:
    program = f"""
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import flashsmith
from flashsmith import DType, Problem, device_spec, parse_kernel_name_into_config, plan_forward
config = parse_kernel_name_into_config({str(CONFIGS[0])!r})
plan = plan_forward(config, Problem(2, 128, 64, 3, 3, 64, DType.FP16), device_spec("A100"))
assert plan.grid == (12, 1, 1) and plan.block == (128, 1, 1) and plan.smem_bytes == 16384
assert plan.cluster == (1, 1, 1) and not plan.tensor_maps and plan.workspace_bytes == 0
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


NAMES_ALONE = """
extern "C" const char names[] = "\\0__tvm_ffi_plan\\0__tvm_ffi_prepare\\0__tvm_ffi_configs\\0"
    "__tvm_ffi_semantics\\0";
"""


def shared_object(folder: Path, source: str) -> bytes:
    (folder / "source.cc").write_text(source)
    command = ["g++", "-shared", "-fPIC", "source.cc", "-o", "made.so"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "made.so").read_bytes()


@pytest.fixture
def plant(
    library: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bytes], Cache]:
    """Puts the library into a cache of the test's own, with another library.so and its checksum."""

    def put(content: bytes) -> Cache:
        cache = Cache(tmp_path / "cache")
        monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(cache.folder))
        copy = tmp_path / "copy"
        shutil.copytree(library.path, copy, ignore=shutil.ignore_patterns("manifest.json", "lock"))
        (copy / "library.so").write_bytes(content)
        files = {**library.manifest.files, "library.so": FileRecord.of_bytes(content)}
        manifest = replace(library.manifest, files=files)
        with cache.building(manifest.key, lambda _: None):
            cache.publish(copy, manifest)
        return cache

    return put


@pytest.mark.parametrize("kind", ["empty", "text", "cut off", "no functions", "names alone"])
def test_a_library_that_cannot_be_loaded_is_built_again(
    library: KernelLibrary,
    plant: Callable[[bytes], Cache],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = {
        "empty": lambda: b"",
        "text": lambda: b"what is this?",
        "cut off": lambda: library.so_path.read_bytes()[:2000],
        "no functions": lambda: shared_object(tmp_path, "int f() { return 1; }"),
        "names alone": lambda: shared_object(tmp_path, NAMES_ALONE),
    }[kind]()
    cache = plant(content)
    assert len(cache.entries(thorough=True)) == 1  # its manifest and checksums are in order
    monkeypatch.setattr(libraries, "build", lambda *args, **options: library)
    assert LoadedKernels().get(CONFIGS[0], 80).library is library
    assert "library.so: damaged: " in caplog.text
    assert cache.entries() == []


def test_a_library_that_cannot_be_loaded_nor_built_is_not_built(
    library: KernelLibrary, plant: Callable[[bytes], Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(b"what is this?")
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    with pytest.raises(KernelNotBuiltError, match="not built for sm_80"):
        LoadedKernels().get(CONFIGS[0], 80)


def test_a_library_that_cannot_be_loaded_gives_the_reason(
    library: KernelLibrary, plant: Callable[[bytes], Cache]
) -> None:
    opened = plant(b"what is this?").open(library.manifest.key)
    assert opened is not None
    with pytest.raises(DamagedLibraryError, match=r"so: damaged: it has no function 'plan'.*clear"):
        load_library(opened)


def test_a_library_that_others_may_write_is_not_loaded(
    library: KernelLibrary, plant: Callable[[bytes], Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it became so after it was opened."""
    opened = plant(library.so_path.read_bytes()).open(library.manifest.key)
    assert opened is not None
    opened.so_path.chmod(0o666)
    with pytest.raises(CacheError, match=r"library\.so: owner .*, mode 0666: .*TRUST_CACHE=1"):
        load_library(opened)
    with pytest.raises(CacheError, match="mode 0666"):
        LoadedKernels().get(CONFIGS[0], 80)
    monkeypatch.setenv("FLASHSMITH_TRUST_CACHE", "1")
    assert set(load_library(opened)) == set(library.configs)
