"""Typed access to all environment variables that flashsmith reads.

``flashsmith env`` prints this table. Nothing else in the package touches ``os.environ``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from flashsmith import bundle
from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.safe_json import MOST_DIGITS_OF_COUNTS, whole_number


@dataclass(frozen=True)
class Variable:
    """One environment variable: name, effect, and descriptions of its default and values."""

    name: str
    meaning: str
    default: str
    values: str

    def raw(self) -> str | None:
        """The value as set, or None when unset or empty."""
        return os.environ.get(self.name) or None


# The kinds of values that variables have. check_values() checks values of the first three kinds.
SWITCH = "0 or 1"
COUNT = "a whole number above 0"
_ORDERS = ("canonical", "free")
ORDERS = " or ".join(_ORDERS)
FOLDER = "a folder"
FILE = "a file"

KERNELS = Variable(
    "KERNELS",
    "the configs that a command uses: a set (prog, prog-all, tune, space, cover, all, hopper, "
    "backward, hopper-backward, hopper-dq, decode, latent, latent-mma or your own), a block size "
    "'B_r,B_c', or configs in short form, separated by ';'",
    "unset",
    "configs",
)
JIT = Variable(
    "FLASHSMITH_JIT",
    "1: build a config on first use; 0: attention() uses only configs that are already built, and "
    "naming one that is not built is an error",
    "1",
    SWITCH,
)
CACHE_DIR = Variable(
    "FLASHSMITH_CACHE_DIR",
    "where compiled kernel libraries are kept",
    "the user's cache folder, flashsmith/",
    FOLDER,
)
CACHE_LIMIT = Variable(
    "FLASHSMITH_CACHE_LIMIT",
    "size limit of the cache in MiB; the least recently used libraries are deleted first",
    "4096",
    COUNT,
)
TRUST_CACHE = Variable(
    "FLASHSMITH_TRUST_CACHE",
    "1: load kernels from any cache; 0: only if you or root own it and no other user may write it",
    "0",
    SWITCH,
)
TABLE = Variable(
    "FLASHSMITH_TABLE",
    "your own table of winners, a JSON file; `flashsmith winners path` prints its path",
    "winners.json in the user's data folder, flashsmith/",
    FILE,
)
EMULATE = Variable(
    "FLASHSMITH_EMULATE",
    "1: sdpa() and transformers run CPU tensors in the emulator, many times slower than PyTorch; "
    "0: PyTorch computes them",
    "0",
    SWITCH,
)
UNTUNED = Variable(
    "FLASHSMITH_UNTUNED",
    "1: sdpa() and transformers also use the kernels on sm_100 and later, which have no measured "
    "table; 0: PyTorch computes calls there",
    "0",
    SWITCH,
)
BITS = Variable(
    "FLASHSMITH_BITS",
    "canonical: calls without bits= give each row the same bits in training, prefill, chunks and "
    "decode; free: each kernel sums in its own order. Read at the first call of each kind",
    "free",
    ORDERS,
)
JOBS = Variable("FLASHSMITH_JOBS", "parallel compilations", "the number of cores", COUNT)
CUDA_HOME = Variable(
    "CUDA_HOME",
    "a CUDA toolkit to use instead of the one pip installed",
    "unset",
    FOLDER,
)
CROSS_CUDA = Variable(
    "FLASHSMITH_CROSS_CUDA",
    "for `flashsmith wheel --cpu` of another processor: where that processor's CUDA runtime is, as "
    "pip --target or a toolkit lays it out",
    "the toolkit's targets/",
    FOLDER,
)
SOURCE_DATE_EPOCH = Variable(
    "SOURCE_DATE_EPOCH",
    "the time that `flashsmith wheel` gives the files in a wheel, in seconds since 1970",
    "1980-01-01",
    COUNT,
)

VARIABLES = (
    KERNELS,
    JIT,
    CACHE_DIR,
    CACHE_LIMIT,
    TRUST_CACHE,
    TABLE,
    EMULATE,
    UNTUNED,
    BITS,
    JOBS,
    CUDA_HOME,
    CROSS_CUDA,
    SOURCE_DATE_EPOCH,
)


def _boolean(variable: Variable, default: bool) -> bool:
    raw = variable.raw()
    if raw is None:
        return default
    if raw in ("0", "1"):
        return raw == "1"
    raise ArgumentError(f"{variable.name}={quoted(raw)}: allowed are 0 and 1")


def _positive_int(variable: Variable, default: int) -> int:
    raw = variable.raw()
    if raw is None:
        return default
    number = whole_number(raw)
    if not number:
        raise ArgumentError(
            f"{variable.name}={quoted(raw)}: give a whole number above 0, of the digits 0 to 9 and "
            f"at most {MOST_DIGITS_OF_COUNTS} of them"
        )
    return number


def jit_enabled() -> bool:
    """Whether a config that is not built may be built on first use."""
    return _boolean(JIT, True) and not bundle.is_copy()


def trusts_cache() -> bool:
    """Whether kernels are loaded from the cache without checking its owner and mode."""
    return _boolean(TRUST_CACHE, False)


def emulation_enabled() -> bool:
    """Whether sdpa() and transformers run host tensors in the emulator by default."""
    return _boolean(EMULATE, False)


def untuned_enabled() -> bool:
    """Whether sdpa() and transformers use kernels on architectures without measurements."""
    return _boolean(UNTUNED, False)


def bits() -> str | None:
    """The default of the argument ``bits``: FLASHSMITH_BITS as set, or None when it is unset."""
    return BITS.raw()


def cache_limit_mib() -> int:
    """Size limit of the kernel cache, MiB."""
    return _positive_int(CACHE_LIMIT, 4096)


def jobs() -> int:
    """How many compilations run in parallel: FLASHSMITH_JOBS if set, otherwise the number of usable
    cores."""
    return _positive_int(JOBS, len(os.sched_getaffinity(0)))


def source_date_epoch() -> int:
    """The time of the files in a wheel, in seconds since 1970; 0 when it is not set."""
    return _positive_int(SOURCE_DATE_EPOCH, 0)


def check_values() -> None:
    """Raises ArgumentError, naming the variable, when a variable has an invalid value.

    Paths and the text of KERNELS are checked when they are used, since they may name files.
    """
    for variable in VARIABLES:
        if variable.values == SWITCH:
            _boolean(variable, False)
        elif variable.values == COUNT:
            _positive_int(variable, 1)
        elif variable.values == ORDERS and (raw := variable.raw()) not in (None, *_ORDERS):
            allowed = " and ".join(_ORDERS)
            raise ArgumentError(f"{variable.name}={quoted(raw)}: allowed are {allowed}")


def keep_models_offline() -> None:
    """Keeps Hugging Face's libraries, if they are not loaded yet, from downloading anything."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def ray_address() -> str:
    """The cluster that Ray connects to by default; '' when RAY_ADDRESS is unset."""
    return os.environ.get("RAY_ADDRESS", "")


def keep_ray_quiet() -> None:
    """Keeps Ray, if this process starts it, from sending usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def environment_of_gpu(ordinal: int) -> dict[str, str]:
    """The environment of a process that sees only GPU ``ordinal`` of the visible GPUs."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",")[ordinal] if listed else str(ordinal)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": visible}


def profiled_environment() -> dict[str, str]:
    """The environment of a profiler and the process it profiles: building is disabled, and numbers
    are written in the C locale."""
    return {**os.environ, JIT.name: "0", "LC_ALL": "C"}


# Users set these for their own builds. Here they would change a library but not its cache key.
_COMPILER_OVERRIDES = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    # g++ searches these folders before those of -isystem, so they could select the headers of
    # another toolkit.
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
)


def compiler_environment(scratch: str) -> dict[str, str]:
    """The environment for compilers: temporary files are in ``scratch``, messages in English."""
    kept = {name: value for name, value in os.environ.items() if name not in _COMPILER_OVERRIDES}
    return {**kept, "TMPDIR": scratch, "LC_ALL": "C"}
