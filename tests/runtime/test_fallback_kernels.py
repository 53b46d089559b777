"""attention() without config= takes another built kernel where the chosen one may not be built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import shared_kernels

import flashsmith
from flashsmith.builder import BuildEvent, library_for, slow_kernels
from flashsmith.chooser import choose_config
from flashsmith.chooser.choice import expectation
from flashsmith.errors import KernelNotBuiltError, ToolchainError
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    KernelConfig,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import fallback_kernels, kernel_choice, libraries
from flashsmith.runtime.arguments import check_request
from flashsmith.runtime.fallback_kernels import FallbackKernels
from flashsmith.runtime.libraries import LoadedKernels
from flashsmith.runtime.request import Request
from flashsmith.semantics.signature import ForwardOptions
from flashsmith.verify import compare, compute_references

H200 = device_spec("H200")
WGMMA = parse_kernel_name_into_config(
    "(FP16, 128, 128, 128, 2wg): tma+stages_2+regs_24_240+overlap+pingpong_gemm"
)
MMA_SYNC = FlashForwardKernelConfig(DType.FP16, 128, 64, 64, 4, True, True, True)
WIDE = replace(MMA_SYNC, d_head=256, B_r=64, B_c=32)
PLAIN, UNEVEN, CAUSAL = Semantics(), Semantics(uneven=True), Semantics("causal")


def request_of(
    seq: int = 256, d: int = 128, causal: bool = False, q: Any = None, bits: str = "free"
) -> Request:
    q = np.zeros((1, seq, 2, d), np.float16) if q is None else q
    return check_request((q, q, q, None), ForwardOptions(causal=causal, bits=bits))


class Loaded:
    """LoadedKernels of which some are built, whatever a disk holds."""

    def __init__(self, *built: tuple[KernelConfig, Semantics]) -> None:
        self.built = list(built)
        self.asked = 0

    def get(self, cfg: Any, arch: int, semantics: Semantics, may_build: Callable[[], bool]) -> Any:
        self.asked += 1
        if (cfg, semantics) in self.built:
            return SimpleNamespace(config=cfg, semantics=semantics)
        raise KernelNotBuiltError(f"config {cfg} is not built for sm_{arch}, and so.\nMore:")


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What serves a request that wants a kernel, of those that are built."""
    found = FallbackKernels()
    monkeypatch.setenv("FLASHSMITH_JIT", "0")

    def take(
        loaded: Loaded, wanted: Any, request: Request, semantics: Semantics = PLAIN
    ) -> tuple[KernelConfig, Semantics]:
        monkeypatch.setattr(fallback_kernels, "built_kernels", lambda *, arch: tuple(loaded.built))
        kernel = found.kernel_or_other(
            loaded,  # type: ignore[arg-type]
            (wanted, 90, semantics),
            request,
            H200,
            lambda configs: choose_config(request.problem, H200, among=configs),
            lambda: True,
        )
        return kernel.config, kernel.semantics

    return take


def test_what_is_built_is_taken(take: Any, caplog: pytest.LogCaptureFixture) -> None:
    loaded = Loaded((WGMMA, PLAIN), (MMA_SYNC, PLAIN))
    assert take(loaded, MMA_SYNC, request_of()) == (MMA_SYNC, PLAIN)
    assert not caplog.records


@pytest.mark.parametrize(("wanted", "other"), [(WGMMA, MMA_SYNC), (MMA_SYNC, WGMMA)])
def test_a_kernel_of_either_family_serves(
    wanted: Any, other: Any, take: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = Loaded((other, PLAIN))
    for _ in range(3):
        assert take(loaded, wanted, request_of()) == (other, PLAIN)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for word in (f"config {wanted} is not built for sm_90", f"{other} [plain]", "bits may differ"):
        assert word in caplog.text


def test_canonical_kernels_alone_serve_for_a_canonical_one(
    take: Any, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_of(bits="canonical")
    wanted = choose_config(request.problem, H200)
    other = MMA_SYNC.family.canonical(MMA_SYNC, H200)
    assert wanted.canonical == other.canonical == 1
    with pytest.raises(KernelNotBuiltError):
        take(Loaded((WGMMA, PLAIN), (MMA_SYNC, PLAIN)), wanted, request)
    loaded = Loaded((WGMMA, PLAIN), (MMA_SYNC, PLAIN), (other, PLAIN))
    assert take(loaded, wanted, request) == (other, PLAIN)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "is built and serves instead: it may be slower, and bits are the same"
    )
    # For any bits it may serve, too.
    assert take(Loaded((other, PLAIN)), MMA_SYNC, request_of()) == (other, PLAIN)


def test_each_pair_of_kernels_is_warned_of_once(
    take: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for seq in (256, 512):
        take(Loaded((MMA_SYNC, PLAIN)), WGMMA, request_of(seq))
    take(Loaded((MMA_SYNC, CAUSAL)), WGMMA, request_of(causal=True), CAUSAL)
    assert len(caplog.records) == 2


def test_uneven_serves_plain_and_the_very_semantics_come_first(take: Any) -> None:
    assert take(Loaded((MMA_SYNC, UNEVEN)), WGMMA, request_of()) == (MMA_SYNC, UNEVEN)
    both = Loaded((MMA_SYNC, UNEVEN), (MMA_SYNC, PLAIN))
    assert take(both, WGMMA, request_of(512)) == (MMA_SYNC, PLAIN)
    with pytest.raises(KernelNotBuiltError):
        take(Loaded((MMA_SYNC, PLAIN)), WGMMA, request_of(257), UNEVEN)


def test_a_free_kernel_is_no_substitute_for_a_repeatable_one(take: Any) -> None:
    free, repeatable, missing = (
        parse_kernel_name_into_config(f"(FP16, 128, {tile}, 64, 8): backward+columns_2{dq}")
        for tile, dq in ((64, "+dq_atomics"), (64, ""), (32, ""))
    )
    request = request_of()
    problem = replace(request.problem, operation="backward")
    asked, not_asked = (
        request._replace(problem=problem, options={"deterministic": deterministic})
        for deterministic in (True, False)
    )
    assert take(Loaded((free, PLAIN)), missing, not_asked) == (free, PLAIN)
    with pytest.raises(KernelNotBuiltError):
        take(Loaded((free, PLAIN)), missing, asked)
    assert take(Loaded((free, PLAIN), (repeatable, PLAIN)), missing, asked)[0] == repeatable


@pytest.mark.parametrize(
    ("built", "request_kind"),
    [
        ((MMA_SYNC, CAUSAL), {}),
        ((MMA_SYNC, Semantics(packed=True, uneven=True)), {}),
        ((MMA_SYNC, PLAIN), {"causal": True}),
        ((replace(MMA_SYNC, dtype=DType.BF16), PLAIN), {}),
        ((MMA_SYNC, UNEVEN), {"d": 136}),
        ((replace(MMA_SYNC, B_r=128, B_c=128, d_head=256), UNEVEN), {"d": 256}),
    ],
    ids=["mask", "packed", "causal", "dtype", "d", "registers"],
)
def test_what_does_not_serve_is_not_taken(built: Any, request_kind: Any, take: Any) -> None:
    with pytest.raises(KernelNotBuiltError, match="is not built for sm_90"):
        take(Loaded(built), WGMMA, request_of(**request_kind))


def test_tma_reads_no_broadcast_tensors(take: Any) -> None:
    q = np.zeros((1, 256, 2, 128), np.float16)
    k = np.broadcast_to(q[:, :, :1], q.shape)
    request = check_request((q, k, k, None), ForwardOptions())
    with pytest.raises(KernelNotBuiltError):
        take(Loaded((WGMMA, UNEVEN)), MMA_SYNC, request)
    assert take(Loaded((WGMMA, UNEVEN), (WIDE, UNEVEN)), MMA_SYNC, request) == (WIDE, UNEVEN)


def test_the_best_by_the_evidence_is_taken(take: Any) -> None:
    """A larger d_head costs columns that are not there."""
    slow = replace(MMA_SYNC, B_r=64, B_c=32, swizzled=False)
    request = request_of(4096)
    assert take(Loaded((WIDE, UNEVEN), (MMA_SYNC, PLAIN)), WGMMA, request) == (MMA_SYNC, PLAIN)
    request = request_of(2048)
    measured = choose_config(request.problem, H200)
    loaded = Loaded((slow, PLAIN), (MMA_SYNC, PLAIN), (measured, UNEVEN))
    assert take(loaded, WGMMA, request) == (measured, UNEVEN)


def test_damaged_libraries_are_passed_over(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded((WGMMA, PLAIN), (MMA_SYNC, PLAIN))
    get = loaded.get

    def damaged(cfg: Any, *options: Any) -> Any:
        if cfg == WGMMA:
            raise KernelNotBuiltError("damaged")
        return get(cfg, *options)

    monkeypatch.setattr(loaded, "get", damaged)
    assert take(loaded, WIDE, request_of()) == (MMA_SYNC, PLAIN)


def test_a_search_is_not_repeated_until_the_cache_changes(
    take: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = [1]
    monkeypatch.setattr(fallback_kernels, "cache_stamp", lambda: stamp[0])
    loaded = Loaded((MMA_SYNC, PLAIN))
    take(loaded, WGMMA, request_of())
    asked = loaded.asked
    assert take(loaded, WGMMA, request_of()) == (MMA_SYNC, PLAIN)
    assert loaded.asked == asked
    loaded.built.append((WGMMA, PLAIN))
    stamp[0] = 2
    assert take(loaded, WGMMA, request_of()) == (WGMMA, PLAIN)
    monkeypatch.setenv("FLASHSMITH_JIT", "1")  # what may be built is not replaced
    stamp[0] = 1
    assert take(loaded, WGMMA, request_of()) == (WGMMA, PLAIN)


# --- through attention() -------------------------------------------------------------------------

BUILT = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)


@pytest.fixture
def one_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache is one kernel, for uneven lengths, and none may be built."""
    library = library_for([BUILT], semantics=UNEVEN)

    def find(cfg: Any, *, arch: int, semantics: Semantics) -> Any:
        return library if (cfg, semantics) == (BUILT, UNEVEN) else None

    monkeypatch.setattr(libraries, "find_library", find)
    monkeypatch.setattr(libraries, "build", None)
    monkeypatch.setattr(fallback_kernels, "built_kernels", lambda *, arch: ((BUILT, UNEVEN),))
    monkeypatch.setattr(kernel_choice, "loaded_kernels", LoadedKernels())
    monkeypatch.setattr(kernel_choice, "fallback_kernels", FallbackKernels())
    monkeypatch.setenv("FLASHSMITH_JIT", "0")


@pytest.mark.usefixtures("one_built")
def test_attention_runs_on_built_kernels_and_a_named_config_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 64, 2, 64)).astype(np.float16) for _ in range(3))
    for seq in (64, 50):
        out = flashsmith.attention(q[:, :seq], k, v)
        references = compute_references(q[:, :seq], k, v, 64**-0.5)
        assert compare(BUILT, out, None, references).ok
    assert "bits may differ" in caplog.text
    chosen = replace(BUILT, B_r=128)
    for call in (
        lambda: flashsmith.attention(q, k, v, config=chosen),
        lambda: flashsmith.forward(chosen, q, k, v),
        lambda: flashsmith.attention(q, k, v, causal=True),
    ):
        with pytest.raises(KernelNotBuiltError):
            call()


@pytest.mark.torch
def test_while_a_graph_is_captured_too_and_it_is_not_remembered_for_later_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    from pretended_gpu import PretendedTensors, pretended_gpu

    q = torch.zeros(2, 256, 4, 128, dtype=torch.float16)
    chosen = choose_config(request_of(q=q).problem, H200)
    launched = []
    with pretended_gpu() as gpu, monkeypatch.context() as patch:

        def get(cfg: Any, arch: int, semantics: Semantics, may_build: Any) -> Any:
            if cfg != MMA_SYNC and not may_build():
                raise KernelNotBuiltError("not built.\n")
            return gpu.kernel(cfg, arch, semantics, may_build)

        patch.setattr(kernel_choice, "loaded_kernels", SimpleNamespace(get=get))
        patch.setattr(kernel_choice, "fallback_kernels", FallbackKernels())
        patch.setattr(fallback_kernels, "built_kernels", lambda *, arch: ((MMA_SYNC, PLAIN),))
        for capturing in (True, True, False):
            patch.setattr(PretendedTensors, "is_capturing", lambda *_, c=capturing: c)
            flashsmith.attention(q, q, q)
            launched.append(gpu.launches[-1].config)
    assert launched == [MMA_SYNC, MMA_SYNC, chosen]


# --- kernels that a build shows to be slow -------------------------------------------------------


def test_what_is_found_slow_gives_way_before_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chooser is asked once more, and every later call of the kind gets the same kernel."""
    monkeypatch.setattr(slow_kernels, "_noted", {})
    built: list[KernelConfig] = []

    def get(cfg: KernelConfig, arch: int, semantics: Semantics, may_build: Any) -> Any:
        built.append(cfg)
        if cfg == WGMMA:
            slow_kernels._noted[arch, semantics, cfg] = SimpleNamespace()
        return SimpleNamespace(config=cfg, semantics=semantics)

    def choose(problem: Any, device: Any, family: Any = None, among: Any = None) -> Any:
        return MMA_SYNC if slow_kernels.noted_slow(WGMMA, 90, PLAIN) else WGMMA

    monkeypatch.setattr(kernel_choice, "loaded_kernels", SimpleNamespace(get=get))
    monkeypatch.setattr(kernel_choice, "fallback_kernels", FallbackKernels())
    request = request_of()
    for _ in range(2):
        first = choose(request.problem, H200)
        kernel = kernel_choice.kernel_for(first, PLAIN, request, H200, choose)
        assert kernel.config == MMA_SYNC
    assert built == [WGMMA, MMA_SYNC, MMA_SYNC]
    slow_kernels._noted.clear()
    named = kernel_choice.kernel_for(WGMMA, PLAIN, request, H200, None)
    assert named.config == WGMMA  # config= means this very kernel


def test_a_build_that_spills_is_warned_of_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = shared_kernels.load([MMA_SYNC]).entry(MMA_SYNC).config
    library = shared_kernels.load([cfg])
    monkeypatch.setattr(libraries, "build", lambda configs, **_: library)
    monkeypatch.setattr(libraries, "find_library", lambda *_, **__: None)
    monkeypatch.setattr(libraries, "losses", lambda kernel: ["paged: 44 bytes are spilled"])
    monkeypatch.setattr(type(cfg.family), "must_not_spill", True)
    kernel = LoadedKernels().get(cfg, 80)
    assert kernel.config == cfg
    assert f"made {cfg} slower than it could be" in caplog.text
    assert "paged: 44 bytes are spilled" in caplog.text


@pytest.mark.parametrize(("as_fast", "level"), [(True, "INFO"), (False, "WARNING")])
def test_a_substitute_that_is_as_fast_is_no_warning(
    as_fast: bool, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flashsmith")
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    loaded = Loaded((MMA_SYNC, PLAIN))
    monkeypatch.setattr(fallback_kernels, "built_kernels", lambda *, arch: tuple(loaded.built))
    kernel = FallbackKernels().kernel_or_other(
        loaded,  # type: ignore[arg-type]
        (WGMMA, 90, PLAIN),
        request_of(),
        H200,
        lambda configs: configs[0],
        lambda: True,
        lambda other: as_fast,
    )
    assert kernel.config == MMA_SYNC
    (record,) = caplog.records
    assert record.levelname == level
    assert ("should be as fast" in record.message) is as_fast


@pytest.mark.parametrize("as_fast", [True, False])
def test_an_installed_kernel_that_is_as_fast_serves_and_nothing_is_built(
    as_fast: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether or not a compiler is there; without installed kernels the chosen one is built."""
    loaded = Loaded((MMA_SYNC, PLAIN))
    built = SimpleNamespace(config=WGMMA, semantics=PLAIN)

    def get(cfg: Any, arch: int, semantics: Semantics, may_build: Callable[[], bool]) -> Any:
        if (cfg, semantics) in loaded.built or not may_build():
            return Loaded.get(loaded, cfg, arch, semantics, may_build)
        return built

    monkeypatch.setattr(loaded, "get", get)
    monkeypatch.setattr(
        loaded, "is_found", lambda key: (key[0], key[2]) in loaded.built, raising=False
    )
    monkeypatch.setattr(fallback_kernels, "built_kernels", lambda *, arch: tuple(loaded.built))
    found = FallbackKernels()

    def take() -> KernelConfig:
        kernel = found.kernel_or_other(
            loaded,  # type: ignore[arg-type]
            (WGMMA, 90, PLAIN),
            request_of(),
            H200,
            lambda configs: configs[0],
            lambda: True,
            lambda other: as_fast,
        )
        return kernel.config

    assert take() == WGMMA  # no kernels are installed
    monkeypatch.setattr(fallback_kernels, "installed_package", lambda arch: object())
    assert take() == (MMA_SYNC if as_fast else WGMMA)
    monkeypatch.setattr(fallback_kernels, "_best_built", lambda *_: None)  # no second search
    assert take() == (MMA_SYNC if as_fast else WGMMA)
    assert not caplog.records


def test_with_installed_kernels_and_no_compiler_another_kernel_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without installed kernels the builder's error says how to install a compiler."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    libraries._missing_compiler.cache_clear()
    with pytest.raises(ToolchainError, match="CUDA_HOME"):
        LoadedKernels().get(MMA_SYNC, 80)
    monkeypatch.setattr(libraries, "installed_package", lambda arch: object())
    with pytest.raises(KernelNotBuiltError, match=r"no compiler is installed \(CUDA_HOME=.*nvcc"):
        LoadedKernels().get(MMA_SYNC, 80)
    libraries._missing_compiler.cache_clear()


def test_what_is_built_for_any_length_serves_without_a_warning() -> None:
    """Of two configs the first is taken that is within a tolerance of the faster."""
    problem = request_of(4096).problem
    times = expectation(problem, H200)
    first, *others = times.evidence.expected
    second = min(others, key=lambda one: one.ms)
    behind = second.ms / first.ms - 1
    assert behind > 0
    pair = second.config, first.config
    assert choose_config(problem, H200, among=pair) == first.config
    assert choose_config(problem, H200, among=pair, tolerance=behind + 1e-9) == second.config
    assert choose_config(problem, H200, among=pair, tolerance=behind / 2) == first.config


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (["wait", "wait", "reuse"], "waiting for another process that compiles"),
        (["compile", "compile", "done"], "compiling"),
    ],
)
def test_of_several_processes_one_builds_and_the_others_say_that_they_wait(
    stages: list[Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = shared_kernels.load([MMA_SYNC])

    def build(configs: Any, *, progress: Any, **_: Any) -> Any:
        for stage in stages:
            progress(BuildEvent(stage, "", 0, 1, None, 0.0))
        return library

    monkeypatch.setattr(libraries, "build", build)
    monkeypatch.setattr(libraries, "find_library", lambda *_, **__: None)
    LoadedKernels().get(MMA_SYNC, 80)
    (record,) = caplog.records
    assert f"{words} {MMA_SYNC} for sm_80" in record.message
