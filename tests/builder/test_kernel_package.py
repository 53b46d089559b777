"""Wheels of compiled kernels: their bytes, their names, and how an installation uses them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import packaged_kernels
import pytest
import shared_kernels

import flashsmith
from flashsmith.builder import (
    built_configs,
    built_kernels,
    discard,
    find_library,
    find_toolchain,
    installed_package,
    library_for,
)
from flashsmith.builder.cubin import kernel_code
from flashsmith.builder.kernel_package import INDEX_NAME, PackageIndex, forget_packages
from flashsmith.builder.library_spec import kernel_flags
from flashsmith.builder.manifest import MANIFEST_NAME, FileRecord
from flashsmith.builder.package_build import build_package, library_groups
from flashsmith.builder.package_wheel import write_wheels
from flashsmith.builder.sources import package_sources
from flashsmith.builder.system_libraries import newest_needs
from flashsmith.chooser import choose
from flashsmith.errors import ArgumentError, KernelNotBuiltError
from flashsmith.families import Semantics, get_kernel_configs
from flashsmith.host import this_cpu
from flashsmith.runtime.libraries import LoadedKernels

ARCH = packaged_kernels.ARCH
BARE_CALL = Path(__file__).with_name("bare_call.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in miniature, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    cache = shared_kernels.with_host_code(folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHSMITH_CACHE_DIR", str(cache))
        # Both libraries are built at the same time.
        made = packaged_kernels.build_wheel(folder / "dist", jobs=8)
    shared_kernels.keep_host_code(cache)
    return made


@pytest.fixture
def installed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's folder, installed where Python finds it; the cache is empty."""
    site = tmp_path / "site"
    package = packaged_kernels.unpack(wheel, site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    forget_packages()
    yield package
    forget_packages()


@pytest.fixture
def kernel() -> tuple:
    """One kernel of the package, and its semantics."""
    semantics, configs = next(iter(packaged_kernels.contents().items()))
    return configs[0], semantics


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- the wheel -----------------------------------------------------------------------------------


@pytest.mark.full
def test_two_builds_in_two_folders_have_the_same_bytes(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has other folders for the sources, the cache and temporary files, and fewer
    compilers at a time."""
    sources = shutil.copytree(package_sources(), tmp_path / "a copy" / "csrc")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    again = packaged_kernels.build_wheel(tmp_path / "dist", jobs=1, csrc=sources.absolute())
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.full
def test_kernels_of_every_operation_have_the_same_bytes_in_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: dict[Semantics, list] = {}
    latent = "h8:1 d576:512 latent_decode"
    words_of_d64 = ("", "backward", "backward only_dq", "decode", "merge")
    for words in (*(f"h8 d64 {it}" for it in words_of_d64), latent):
        choice = choose(f"b2 s1024 bf16 {words}", 90)
        semantics = choice.problem.required_semantics(choice.config)
        kernels.setdefault(semantics, []).append(choice.config)
    contents = []
    for name in ("one", "another"):
        sources = shutil.copytree(package_sources(), tmp_path / name / "csrc")
        monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / name / "cache"))
        libraries = build_package(kernels, arch=90, csrc=sources)
        assert len({library.manifest.family for library in libraries}) >= 6
        (path,) = write_wheels(libraries, 90, this_cpu(), tmp_path / name)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_command_continues_where_it_stopped(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several libraries are being built when the signal arrives. The wheel has the bytes that it
    has without an interruption."""
    words = ["wheel", "--for=80", "--only=bf16 d64 merge", "--jobs=8", "-o"]

    def start(name: str, cache: Path) -> subprocess.Popen[bytes]:
        monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(cache))
        command = [sys.executable, "-m", "flashsmith", *words, str(tmp_path / name)]
        return subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            # A shell lets what it starts in the background ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    cache = tmp_path / "cache"
    process = start("cut", cache)
    while not (finished := list(cache.glob("*/libraries/*/manifest.json"))):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    before = {path: path.stat().st_mtime_ns for path in finished}
    assert start("cut", cache).wait(timeout=600) == 0
    found = list(cache.glob("*/libraries/*/manifest.json"))
    assert len(found) > len(before)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert start("whole", tmp_path / "other").wait(timeout=600) == 0
    (cut,), (whole,) = ((tmp_path / it).iterdir() for it in ("cut", "whole"))
    assert cut.read_bytes() == whole.read_bytes()


def test_the_date_is_that_of_the_sources(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dates = {one.date_time for one in zipfile.ZipFile(wheel).infolist()}
    assert dates == {(1980, 1, 1, 0, 0, 0)}
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(wheel.parents[1] / "cache"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    again = packaged_kernels.build_wheel(tmp_path)
    dates = {one.date_time for one in zipfile.ZipFile(again).infolist()}
    assert dates == {(2023, 11, 14, 22, 13, 20)}


def test_a_wheel_names_no_folder_of_the_build(wheel: Path) -> None:
    folders = [str(Path.home()), sys.prefix, tempfile.gettempdir() + "/", str(package_sources())]
    folders += [str(find_toolchain().nvcc.parents[1]), *map(str, find_toolchain().include_dirs)]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            assert not [it for it in folders if it.encode() in content], name


def test_the_system_libraries_may_be_old(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        objects = [archive.read(it) for it in archive.namelist() if it.endswith("library.so")]
    assert len(objects) == 2
    needs = dict(it.split() for it in newest_needs(objects).split(", "))
    assert tuple(map(int, needs["GLIBC"].split("."))) <= (2, 17)
    assert tuple(map(int, needs["GLIBCXX"].split("."))) <= (3, 4, 21)


def test_pip_installs_it_and_it_wants_this_very_version(wheel: Path, tmp_path: Path) -> None:
    version = flashsmith.__version__
    assert re.fullmatch(
        rf"flashsmith_kernels_sm80-{version}-py3-none-manylinux_2_28_(x86_64|aarch64)\.whl",
        wheel.name,
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path), str(wheel)], check=True, timeout=300)
    (info,) = tmp_path.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert "Name: flashsmith-kernels-sm80\n" in metadata
    assert f"Requires-Dist: flashsmith=={version}\n" in metadata
    assert (info / "licenses" / "LICENSE").read_bytes()
    assert not list((tmp_path / "flashsmith_kernels").rglob("*.py"))


def test_machine_code_is_that_of_a_library_built_here(wheel: Path, kernel: tuple) -> None:
    """Packaged kernels have no line table; that changes no instruction."""
    config, semantics = kernel
    with zipfile.ZipFile(wheel) as archive:
        index = PackageIndex.from_json(
            archive.read(f"flashsmith_kernels/sm80/{INDEX_NAME}").decode()
        )
        (key,) = [it.key for it in index.libraries if it.semantics == semantics]
        manifest = archive.read(f"flashsmith_kernels/sm80/{key}/{MANIFEST_NAME}").decode()
    (packed,) = json.loads(manifest.partition("\n")[2])["kernels"]
    here = library_for([config], arch=ARCH, semantics=semantics).entry(config)
    assert (packed["code_bytes"], packed["registers"]) == (here.code_bytes, here.registers)


@pytest.mark.full
@pytest.mark.parametrize("family", ["mma_sync", "wgmma", "wgmma_backward"])
def test_a_line_table_changes_no_instruction(family: str, tmp_path: Path) -> None:
    """The cubins of one config, compiled with the flags of both kinds of libraries."""
    keys = {"mma_sync": "prog", "wgmma": "hopper", "wgmma_backward": "hopper-backward"}
    config = get_kernel_configs(keys[family])[-1]
    arch = config.OLDEST_ARCH
    library = library_for([config], arch=arch)
    source = library.path / "sources"
    (shard,) = [it for it in source.glob("shard_*.cu") if str(config) in it.read_text()]
    codes = []
    for packaged in (False, True):
        flags = kernel_flags(family, arch, packaged=packaged)
        cubin = tmp_path / f"{packaged}.cubin"
        include = [f"-I{package_sources()}", f"-I{source}", "-cubin", "-o", str(cubin)]
        nvcc = [str(find_toolchain().nvcc), *flags, *include, str(shard)]
        subprocess.run(nvcc, check=True, capture_output=True, timeout=600)
        codes.append(kernel_code(cubin.read_bytes()))
    assert codes[0] == codes[1] != {}


def test_no_library_makes_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="libraries: none"):
        write_wheels([], ARCH, "x86_64", tmp_path)


def test_a_package_that_is_too_large_is_split_by_operation(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is set so low that attention()'s two libraries need a wheel each, too."""
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(wheel.parents[1] / "cache"))
    kernels = packaged_kernels.contents()
    merge = choose("b1 s64 h1 d64 fp16 merge", ARCH)
    merged = merge.problem.required_semantics(merge.config)
    kernels.setdefault(merged, []).append(merge.config)
    libraries = build_package(kernels, arch=ARCH)
    assert len(libraries) == 3
    whole = write_wheels(libraries, ARCH, this_cpu(), tmp_path / "whole")
    assert len(whole) == 1
    most = 200_000 + max(_compressed_sizes(whole[0]).values()) + 1000
    parts = write_wheels(libraries, ARCH, this_cpu(), tmp_path / "parts", most_bytes=most)
    names = ["sm80", "sm80_forward2", "sm80_merge"]
    assert [path.name.split("-")[0] for path in parts] == [
        f"flashsmith_kernels_{it}" for it in names
    ]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == sorted(
        path.name for path in parts
    )
    assert all(path.stat().st_size <= most for path in parts)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links"]
    pip += [str(tmp_path / "parts"), "--target", str(tmp_path / "site")]
    # flashsmith itself need not be installed once more: the requirement is looked at below.
    (requirements,) = _requirements(parts[:1])
    for name in ("flashsmith", "flashsmith-kernels-sm80-forward2", "flashsmith-kernels-sm80-merge"):
        assert f"{name}=={flashsmith.__version__}" in requirements
    assert _requirements(parts[1:]) == [[f"flashsmith=={flashsmith.__version__}"]] * 2
    subprocess.run([*pip, "--no-deps", *map(str, parts)], check=True, timeout=300)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    forget_packages()
    try:
        assert len(built_kernels(arch=ARCH)) == 3
        for semantics, configs in kernels.items():
            for config in configs:
                found = find_library(config, arch=ARCH, semantics=semantics)
                assert found is not None
                assert found.is_installed
        discard(found)  # one part forgets it
        assert len(built_kernels(arch=ARCH)) == 2
    finally:
        forget_packages()
    with pytest.raises(ArgumentError, match=r"takes 0\.\d MB, and a wheel may have .*--only"):
        write_wheels(libraries, ARCH, this_cpu(), tmp_path / "none", most_bytes=210_000)


def _compressed_sizes(wheel: Path) -> dict[str, int]:
    """The compressed bytes of each library."""
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.infolist():
            if file.filename.endswith("library.so"):
                key = file.filename.split("/")[2]
                sizes[key] = sizes.get(key, 0) + file.compress_size
    return sizes


def _requirements(wheels: list[Path]) -> list[list[str]]:
    found = []
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            (name,) = [it for it in archive.namelist() if it.endswith("/METADATA")]
            lines = archive.read(name).decode().splitlines()
        found.append([it.removeprefix("Requires-Dist: ") for it in lines if "Requires-Dist" in it])
    return found


def test_libraries_are_of_one_family_and_not_too_large() -> None:
    kernels = {Semantics(): get_kernel_configs("prog-all"), Semantics("causal"): []}
    kernels[Semantics()] += get_kernel_configs("backward")
    groups = library_groups(kernels)
    assert all(len({cfg.FAMILY for cfg in configs}) == 1 for _, configs in groups)
    assert max(len(configs) for _, configs in groups) <= 64
    every = [(semantics, cfg) for semantics, configs in groups for cfg in configs]
    assert len(set(every)) == len(every) == len(set(kernels[Semantics()]))


def test_a_package_without_ptx_is_smaller_and_the_emulator_compiles_it(
    wheel: Path, kernel: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, semantics = kernel
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(wheel.parents[1] / "cache"))
    small = packaged_kernels.build_wheel(tmp_path / "dist", ptx=False)
    assert not [name for name in zipfile.ZipFile(small).namelist() if "ptx" in name]
    assert small.stat().st_size < wheel.stat().st_size
    packaged_kernels.unpack(small, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(shared_kernels._CACHE))
    forget_packages()
    try:
        loaded = LoadedKernels().get(config, ARCH, semantics)
        assert loaded.library.is_installed
        monkeypatch.setenv("FLASHSMITH_JIT", "0")
        with pytest.raises(KernelNotBuiltError, match="this package has no PTX"):
            loaded.modules  # noqa: B018
        monkeypatch.setenv("FLASHSMITH_JIT", "1")
        assert f".entry {loaded.entry.ptx_entry}" in loaded.modules[loaded.entry.ptx_entry]
    finally:
        forget_packages()


# --- installed -----------------------------------------------------------------------------------


def test_an_installed_kernel_is_found_before_the_cache_is_looked_at(
    installed: Path, kernel: tuple, tmp_path: Path
) -> None:
    config, semantics = kernel
    library = find_library(config, arch=ARCH, semantics=semantics)
    assert library is not None
    assert library.is_installed
    assert library.path.parent == installed
    assert config in built_configs(arch=ARCH, semantics=semantics)
    assert (config, semantics) in built_kernels(arch=ARCH)
    assert library_for([config], arch=ARCH, semantics=semantics).path == library.path
    assert f".entry {library.entry(config).ptx_entry}" in library.ptx(config)
    assert not (tmp_path / "cache").exists()
    assert find_library(config, arch=86, semantics=semantics) is None


def test_nothing_is_compiled_or_written_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """No compiler on PATH, no home, no cache, packages that cannot be written to and, where the
    tests may, another user and no network."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        site = Path(folder, "site")
        packaged_kernels.unpack(wheel, site)
        shutil.copy(BARE_CALL, Path(folder, "bare_call.py"))
        before = files_below(Path(folder))
        for path in [site, *site.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        python = [sys.executable, "-P", str(Path(folder, "bare_call.py"))]
        environment = {
            "PATH": str(tmp_path / "nothing"),
            "CUDA_HOME": str(tmp_path / "nothing"),
            "HOME": "/nonexistent",
            "PYTHONPATH": str(site),
        }
        done = subprocess.run(
            [*_isolated(), *python],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("ok ")
        assert str(site) in done.stdout
        assert "flashsmith:" not in done.stderr  # no warning
        assert files_below(Path(folder)) == before


def _isolated() -> list[str]:
    """The commands that take away root's rights and the network, of those that work here."""
    wrappers = []
    for words in (
        ["unshare", "--net"],
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
    ):
        program = shutil.which(words[0])
        command = [*wrappers, program or "", *words[1:]]
        test = [*command, sys.executable, "-P", "-c", "import flashsmith"]
        if program and subprocess.run(test, capture_output=True, cwd="/").returncode == 0:
            wrappers = command
    return wrappers


def test_a_warning_is_all_that_another_version_gives(
    installed: Path, kernel: tuple, caplog: pytest.LogCaptureFixture
) -> None:
    path = installed / INDEX_NAME
    index = PackageIndex.from_json(path.read_text())
    for changed, words in (
        (replace(index, version="9.9.9"), "they are for flashsmith 9.9.9, and here it is"),
        (replace(index, cpu="s390x"), "they are for the processor s390x, and here it is"),
        (replace(index, tvm_ffi="0.0"), "they are for tvm-ffi 0.0, and here it is"),
    ):
        caplog.clear()
        path.write_text(changed.to_json())
        forget_packages()
        assert find_library(kernel[0], arch=ARCH, semantics=kernel[1]) is None
        assert find_library(kernel[0], arch=ARCH, semantics=kernel[1]) is None
        (record,) = caplog.records
        assert words in record.getMessage()
    caplog.clear()
    path.write_text(index.to_json().replace("sm", "ms", 1) + " ")
    forget_packages()
    assert installed_package(ARCH) is None
    assert "its checksum does not match" in caplog.records[0].getMessage()


def test_kernels_of_other_sources_are_not_used(
    installed: Path, kernel: tuple, caplog: pytest.LogCaptureFixture
) -> None:
    path = installed / INDEX_NAME
    index = PackageIndex.from_json(path.read_text())
    path.write_text(replace(index, sources=dict.fromkeys(index.sources, "0" * 32)).to_json())
    forget_packages()
    assert find_library(kernel[0], arch=ARCH, semantics=kernel[1]) is None
    assert built_kernels(arch=ARCH) == ()
    (record,) = caplog.records
    assert "made from other sources" in record.getMessage()


@pytest.mark.parametrize("name", ["library.so", MANIFEST_NAME, "ptx"])
def test_damaged_files_are_warned_of_and_stay_where_they_are(
    installed: Path, kernel: tuple, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, semantics = kernel
    library = find_library(config, arch=ARCH, semantics=semantics)
    assert library is not None
    path = library.path / name
    path = path if path.is_file() else next(path.iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = files_below(installed)
    forget_packages()
    for _ in range(2):
        assert find_library(config, arch=ARCH, semantics=semantics) is None
    (record,) = caplog.records
    assert "checksum does not match" in record.getMessage()
    assert files_below(installed) == before


def test_a_library_that_does_not_load_is_built_instead(
    installed: Path, kernel: tuple, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its checksums are right, and the dynamic linker refuses it."""
    config, semantics = kernel
    library = find_library(config, arch=ARCH, semantics=semantics)
    assert library is not None
    library.so_path.write_bytes(b"no library" * 100)
    _record_again(installed, library.path)
    forget_packages()
    shared_kernels.with_host_code(tmp_path / "cache")
    before = files_below(installed)
    loaded = LoadedKernels().get(config, ARCH, semantics)
    assert not loaded.library.is_installed
    assert any("install the package of kernels again" in it.getMessage() for it in caplog.records)
    assert files_below(installed) == before
    discard(library)  # only forgotten
    assert files_below(installed) == before


def _record_again(package: Path, library: Path) -> None:
    """Writes the checksums of a library's files as they are now."""
    from flashsmith.builder.manifest import Manifest

    manifest = Manifest.read(library)
    files = {name: FileRecord.of(library, name) for name in manifest.files}
    text = replace(manifest, files=files).to_json()
    (library / MANIFEST_NAME).write_text(text)
    index = PackageIndex.from_json((package / INDEX_NAME).read_text())
    digest = FileRecord.of_bytes(text.encode()).sha256
    libraries = tuple(
        replace(it, manifest=digest) if it.key == library.name else it for it in index.libraries
    )
    (package / INDEX_NAME).write_text(replace(index, libraries=libraries).to_json())
