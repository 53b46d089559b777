"""Finds the compilers for kernels: nvcc (from pip, CUDA_HOME or PATH) and g++."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flashsmith import env
from flashsmith.builder.scratch import require_plain
from flashsmith.errors import ArgumentError, ToolchainError, install_extra
from flashsmith.host import CPUS, require_supported_host, this_cpu
from flashsmith.printable import quoted
from flashsmith.system_errors import is_from_system

# Both compilers need C++20, because a config is a template argument of class type.
_OLDEST_NVCC = (12, 0)
_OLDEST_GXX = (11,)

_NVCC_ADVICE = (
    f"the extra 'compiler' brings one: {install_extra('compiler')}; "
    "or point CUDA_HOME at a CUDA toolkit"
)
# The names that CUDA toolkits have for processors, in targets/.
TARGETS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}
_GXX_ADVICE = "install g++ 11 or later, for example with: apt-get install g++"


@dataclass(frozen=True)
class Toolchain:
    """The compilers, their versions, and the folders with headers and libraries."""

    nvcc: Path
    nvcc_version: str
    gxx: Path
    gxx_version: str
    tvm_ffi_version: str
    include_dirs: tuple[Path, ...]  # CUDA's, then tvm-ffi's
    cuda_lib_dir: Path  # holds libcudart_static.a
    tvm_ffi_lib_dir: Path
    archs: frozenset[int]  # The architectures that nvcc supports, such as 80
    cpu: str = "x86_64"  # The processor for which libraries are built

    @property
    def crosses(self) -> bool:
        """Whether libraries are built for a processor other than the one of this machine."""
        return self.cpu != this_cpu()

    def identity(self) -> tuple[str, ...]:
        """The versions and the processor on which a compiled library depends."""
        versions = self.nvcc_version, self.gxx_version, tvm_ffi_abi(self.tvm_ffi_version)
        return versions if self.cpu == "x86_64" else (*versions, self.cpu)

    def check_arch(self, arch: int) -> None:
        """Raises ToolchainError if this nvcc does not support ``arch``."""
        if arch not in self.archs:
            known = ", ".join(f"sm_{a}" for a in sorted(self.archs))
            raise ToolchainError(
                f"arch: {self.nvcc} ({self.nvcc_version}) cannot compile for sm_{arch}; "
                f"it supports {known}. Choose one of these, or another compiler: {_NVCC_ADVICE}"
            )


def known_cpu(name: str | None = None) -> str:
    """Returns the processor for which libraries are built, x86_64 or aarch64. If ``name`` is None,
    this is the processor of this machine.

    Raises ArgumentError for any other name.
    """
    found = this_cpu() if name is None else name
    if found not in CPUS:
        raise ArgumentError(f"cpu={quoted(found)}: allowed are {' and '.join(CPUS)}")
    return found


def find_toolchain(cpu: str | None = None) -> Toolchain:
    """The compilers to use. nvcc comes from CUDA_HOME if it is set, otherwise from pip, otherwise
    from PATH. Libraries are built for the processor ``cpu``; None is this machine's.

    Raises PlatformError on a platform that is not supported. Raises ToolchainError with advice on
    installation if something is missing or too old.
    """
    require_supported_host()
    cpu = known_cpu(cpu)
    nvcc = _find_nvcc()
    root = nvcc.parent.parent
    gxx = _find_gxx(cpu)
    tvm_ffi = _find_tvm_ffi()
    for what, path in (("nvcc", nvcc), ("g++", gxx), ("tvm_ffi", tvm_ffi)):
        require_plain(what, path)
    return Toolchain(
        nvcc=nvcc,
        nvcc_version=_nvcc_version(nvcc),
        gxx=gxx,
        gxx_version=_gxx_version(gxx),
        tvm_ffi_version=tvm_ffi_version(),
        include_dirs=(_cuda_include_dir(root), tvm_ffi / "include"),
        cuda_lib_dir=_cuda_lib_dir(root, cpu),
        tvm_ffi_lib_dir=tvm_ffi / "lib",
        archs=_nvcc_archs(nvcc),
        cpu=cpu,
    )


def _find_nvcc() -> Path:
    home = env.CUDA_HOME.raw()
    if home is not None:
        # Compilers run in another folder, where a relative path would be wrong.
        nvcc = Path(home).expanduser().absolute() / "bin" / "nvcc"
        if not nvcc.is_file():
            raise ToolchainError(
                f"CUDA_HOME={home!r}: there is no bin/nvcc in it; "
                "unset it to use the compiler pip installed, or point it at a CUDA toolkit"
            )
        return nvcc
    found = _pip_nvcc() or shutil.which("nvcc")
    if found is None:
        raise ToolchainError(f"nvcc: not found, neither from pip nor on PATH; {_NVCC_ADVICE}")
    # PATH often contains a link; the headers and libraries are next to the real nvcc.
    return Path(found).resolve()


def _pip_nvcc() -> str | None:
    # This import is here because a build with CUDA_HOME does not need pip's compiler.
    from cuda.pathfinder import find_nvidia_binary_utility

    found = find_nvidia_binary_utility("nvcc")
    return str(found) if found else None


def _find_gxx(cpu: str) -> Path:
    name = "g++" if cpu == this_cpu() else f"{cpu}-linux-gnu-g++"
    found = shutil.which(name)
    if found is None and name != "g++":
        package = f"g++-{cpu.replace('_', '-')}-linux-gnu"
        raise ToolchainError(f"{name}: not found on PATH; install it: apt-get install {package}")
    if found is None:
        raise ToolchainError(f"g++: not found on PATH (nvcc needs it too); {_GXX_ADVICE}")
    return Path(found).absolute()


def _find_tvm_ffi() -> Path:
    # Importing tvm_ffi would also import PyTorch, if it is installed, which takes longer than a
    # build without changes.
    spec = importlib.util.find_spec("tvm_ffi")
    advice = "install it with: pip install apache-tvm-ffi"
    if spec is None or spec.origin is None:
        raise ToolchainError(f"tvm_ffi: not installed; {advice}")
    root = Path(spec.origin).parent
    for part in ("include/tvm/ffi/tvm_ffi.h", "include/dlpack/dlpack.h", "lib/libtvm_ffi.so"):
        if not (root / part).is_file():
            raise ToolchainError(f"tvm_ffi: there is no {part} in {root}; {advice}")
    return root


def tvm_ffi_version() -> str:
    """The version of the installed tvm-ffi, against whose headers libraries are compiled."""
    return importlib.metadata.version("apache-tvm-ffi")


def tvm_ffi_abi(version: str) -> str:
    """The ABI version of a release of tvm-ffi, such as '0.1' for '0.1.15.post2'.

    A library that was compiled against one release runs with all releases of the same ABI, because
    values, arrays and functions have the layouts in the C header of tvm-ffi.
    """
    return ".".join(version.split(".")[:2])


def _cuda_include_dir(root: Path) -> Path:
    for candidate in (root / "include", root / "targets" / TARGETS[this_cpu()] / "include"):
        if (candidate / "cuda_runtime.h").is_file():
            return candidate
    raise ToolchainError(f"cuda_runtime.h: not in {root}/include; {_NVCC_ADVICE}")


def _cuda_lib_dir(root: Path, cpu: str) -> Path:
    of_target = f"targets/{TARGETS[cpu]}/lib"
    if cpu == this_cpu():
        folders = [root / name for name in ("lib", "lib64", of_target)]
        advice = f"not in {root}/lib or lib64; {_NVCC_ADVICE}"
    else:
        given = env.CROSS_CUDA.raw()
        roots = [root, *([Path(given).expanduser().absolute()] if given else [])]
        folders = [roots[0] / of_target]
        for name in (of_target, "nvidia/cu13/lib", "lib"):
            folders += [one / name for one in roots[1:]]
        advice = (
            f"none for {cpu} in {roots[-1]}; install it with: pip install --no-deps "
            f"--only-binary=:all: --platform manylinux_2_17_{cpu} --target FOLDER "
            f"'nvidia-cuda-runtime==13.0.*', and set {env.CROSS_CUDA.name}=FOLDER"
        )
    for folder in folders:
        if (folder / "libcudart_static.a").is_file():
            return folder
    raise ToolchainError(f"libcudart_static.a: {advice}")


def _nvcc_version(nvcc: Path) -> str:
    text = _output([str(nvcc), "--version"], _NVCC_ADVICE)
    match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text)
    if match is None:
        raise ToolchainError(f"{nvcc}: its --version is not nvcc's: {text!r}; {_NVCC_ADVICE}")
    if (int(match[1]), int(match[2])) < _OLDEST_NVCC:
        raise ToolchainError(
            f"{nvcc}: release {match[1]}.{match[2]} is too old, C++20 needs 12.0; {_NVCC_ADVICE}"
        )
    build = re.search(r"^Build (\S+)$", text, re.MULTILINE)
    return f"{match[3]} ({build[1]})" if build else match[3]


def _nvcc_archs(nvcc: Path) -> frozenset[int]:
    text = _output([str(nvcc), "--list-gpu-code"], _NVCC_ADVICE)
    return frozenset(int(found) for found in re.findall(r"^sm_(\d+)$", text, re.MULTILINE))


def _gxx_version(gxx: Path) -> str:
    text = _output([str(gxx), "-dumpfullversion", "-dumpversion"], _GXX_ADVICE).strip()
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise ToolchainError(f"{gxx}: its version is not g++'s: {text!r}; {_GXX_ADVICE}")
    if tuple(int(part) for part in text.split(".")) < _OLDEST_GXX:
        raise ToolchainError(f"{gxx}: version {text} is too old for C++20; {_GXX_ADVICE}")
    return text


def _output(command: list[str], advice: str) -> str:
    """Runs a compiler with options that make it print information about itself, and returns what it
    printed.

    If even this fails, the compiler is unusable, and the error contains ``advice``.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=env.compiler_environment("/tmp"),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if not is_from_system(error):
            raise
        raise ToolchainError(f"{command[0]}: does not run ({error}); {advice}") from error
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip()
        raise ToolchainError(
            f"{command[0]}: {' '.join(command[1:])} ended with {done.returncode}: {words}; {advice}"
        )
    return done.stdout
