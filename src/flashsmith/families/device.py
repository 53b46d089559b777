"""DeviceSpec: the properties of a GPU that planning needs, and a list of known GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.families.gpu_names import plain_name, why_not_served, without_board
from flashsmith.printable import quoted

_MIB = 2**20


@dataclass(frozen=True)
class DeviceSpec:
    """The limits of one GPU. Memory is in bytes; for arch, 80 stands for compute capability 8.0.

    max_smem_per_block is the most dynamic shared memory that a kernel can opt in to.
    """

    name: str
    arch: int
    sm_count: int
    max_smem_per_block: int
    max_smem_per_sm: int
    max_threads_per_sm: int
    max_ctas_per_sm: int
    l2_bytes: int
    registers_per_sm: int = 65536


def _ampere(name: str, sm_count: int, l2_mib: int) -> DeviceSpec:
    return DeviceSpec(name, 80, sm_count, 166912, 167936, 2048, 32, l2_mib * _MIB)


def _graphics(name: str, arch: int, sm_count: int, max_ctas: int, l2_mib: int) -> DeviceSpec:
    return DeviceSpec(name, arch, sm_count, 101376, 102400, 1536, max_ctas, l2_mib * _MIB)


def _server(name: str, arch: int, sm_count: int, l2_mib: int) -> DeviceSpec:
    return DeviceSpec(name, arch, sm_count, 232448, 233472, 2048, 32, l2_mib * _MIB)


# The shared memory, threads, CTAs and registers of an SM are from the table of technical
# specifications in the CUDA Programming Guide. The numbers of SMs and the sizes of the L2 are from
# NVIDIA's architecture whitepapers (GA100, GA102, AD102, GH100, GB202 and RTX PRO Blackwell). For
# B200 and B300, they are from NVIDIA's tuning guide and Blackwell page. For A10G, for H200 and for
# GPUs with the same chips as these, the driver reported them. If a caller gives only an
# architecture, the first GPU in this list that has this architecture is used.
KNOWN_DEVICES: tuple[DeviceSpec, ...] = (
    _ampere("A100", sm_count=108, l2_mib=40),
    _graphics("A10", 86, sm_count=72, max_ctas=16, l2_mib=6),
    _graphics("A10G", 86, sm_count=80, max_ctas=16, l2_mib=6),
    _graphics("RTX 3090", 86, sm_count=82, max_ctas=16, l2_mib=6),
    _graphics("L4", 89, sm_count=58, max_ctas=24, l2_mib=48),
    _graphics("L40S", 89, sm_count=142, max_ctas=24, l2_mib=96),
    _graphics("RTX 6000 Ada", 89, sm_count=142, max_ctas=24, l2_mib=96),
    _graphics("RTX 4090", 89, sm_count=128, max_ctas=24, l2_mib=72),
    _server("H100", 90, sm_count=132, l2_mib=50),
    _server("H200", 90, sm_count=132, l2_mib=60),
    _server("GH200", 90, sm_count=132, l2_mib=60),
    _server("H20", 90, sm_count=78, l2_mib=60),
    _server("B200", 100, sm_count=148, l2_mib=126),
    _server("B300", 103, sm_count=148, l2_mib=126),
    _graphics("RTX 5090", 120, sm_count=170, max_ctas=24, l2_mib=96),
    _graphics("RTX PRO 6000 Blackwell", 120, sm_count=188, max_ctas=24, l2_mib=128),
)

# Boards that have fewer SMs than other boards of the same GPU, from NVIDIA's data sheets.
_SM_COUNT_OF_BOARD = {"h100pcie": ("H100 PCIe", 114)}

# The device that legality checks and planning assume if the machine has no GPU and the caller names
# no device.
DEFAULT_DEVICE = KNOWN_DEVICES[0]


def default_device(oldest_arch: int) -> DeviceSpec:
    """The device that legality checks and planning assume for kernels that need at least
    `oldest_arch`, if the machine has no GPU and the caller names no device."""
    return next(device for device in KNOWN_DEVICES if device.arch >= oldest_arch)


def device_spec(name_or_arch: str | int) -> DeviceSpec:
    """Finds a known GPU by its architecture (80, '80', 'sm_80') or name: 'A100', 'rtx 4090', or as
    nvidia-smi prints it, 'NVIDIA A100-SXM4-80GB'.

    Case, spaces, '-', '_' and words for maker, memory and board do not matter. An architecture
    gives the first known GPU that has it. If none has it (87, 121), the limits of the newest older
    GPU of the same generation are used, whose kernels also run there.

    Raises:
        ArgumentError: no known GPU has this name or architecture. The message lists the known GPUs,
            and says if the named GPU is too old or not from NVIDIA.
    """
    arch = architecture_number(name_or_arch)
    if arch is None:
        return _named(name_or_arch)
    for device in KNOWN_DEVICES:
        if device.arch == arch:
            return device
    related = [d for d in KNOWN_DEVICES if d.arch // 10 == arch // 10 and d.arch < arch]
    if related:
        nearest = max(related, key=lambda device: device.arch)
        return replace(nearest, name=f"sm_{arch} (as {nearest.name})", arch=arch)
    raise ArgumentError(
        f"arch={quoted(name_or_arch)}: {_why_unknown(arch)}; {_known()}. Give one of these, or a "
        "later one of their generations (sm_87, sm_121)."
    )


def architecture_number(text: object) -> int | None:
    """The number of an architecture (80 for 80, '80', 'sm_80', 'sm_80a'); None for anything
    else."""
    plain = re.sub(r"[\s_-]+", "", str(text)).lower()
    match = re.fullmatch(r"(?:sm)?(\d{2,3})", plain, re.ASCII) or re.fullmatch(
        r"sm(\d{2,3})[af]", plain, re.ASCII
    )
    return int(match.group(1)) if match else None


def _named(name: str | int) -> DeviceSpec:
    text = str(name)
    for wanted in (plain_name(text), without_board(text)):
        for device in KNOWN_DEVICES:
            plain = plain_name(device.name)
            if wanted in (plain, plain.removeprefix("rtx")):
                board = _SM_COUNT_OF_BOARD.get(plain_name(text))
                return replace(device, name=board[0], sm_count=board[1]) if board else device
    why = why_not_served(text)
    if why:
        raise ArgumentError(
            f"device={quoted(name)}: it {why}; {_known()}. Give one of these, or an architecture."
        )
    hint = did_you_mean(text, (device.name for device in KNOWN_DEVICES)) or ";"
    raise ArgumentError(
        f"device={quoted(name)}: no known GPU is called that{hint} {_known()}. Give the "
        "architecture of another GPU (sm_89, say), or make a flashsmith.configs.DeviceSpec with "
        "its figures."
    )


def _why_unknown(arch: int) -> str:
    oldest = min(device.arch for device in KNOWN_DEVICES)
    if arch < oldest:
        return f"older than sm_{oldest}, the oldest that the kernels support"
    return (
        "no known GPU has it or is an older one of its generation, so its limits are not known "
        "and nothing is built for it"
    )


def _known() -> str:
    return "known are " + ", ".join(f"{d.name} (sm_{d.arch})" for d in KNOWN_DEVICES)
