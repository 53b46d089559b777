"""Determines which GPU is meant by a name that a driver, nvidia-smi or a user writes."""

from __future__ import annotations

import re
from functools import lru_cache

# Words that are dropped from a GPU's name. Drivers add some of these words ('RTX 6000 Ada
# Generation', 'B300 SXM6 AC'). Other words describe features that do not affect a kernel's speed,
# such as the cooling and the size of the memory ('144G'; but '3g' stands for a MIG slice and is
# kept).
_VENDOR = {"nvidia", "geforce", "tesla", "gpu", "generation", "ac"}
_MEMORY = re.compile(r"\d+gb|\d{2,}g|hbm\d+e?|sxm\d*", re.IGNORECASE)
_EDITION = re.compile(r"[\s_-]+(?:server|workstation)[\s_-]+edition$", re.IGNORECASE)
# Words for a board's connection and cooling. Boards whose names differ only in these words have
# different clocks, but rarely different numbers of SMs.
_BOARD = {"pcie", "nvl", "max", "q", "liquid", "cooled"}
_SPACES = re.compile(r"[\s_-]+")

# Patterns of the names of GPUs that are older than sm_80, with the GPUs' architectures. Names are
# without spaces. 'RTX 2000 Ada' is a newer GPU, whose name must not match.
_TOO_OLD = (
    (r"t4g?|t[46]00|t1000|rtx20[678]0(?:ti|super)?|titanrtx|quadrortx\d+|gtx16\d\d\w*", 75),
    (r"v100s?|gv100|titanv|quadrogv100", 70),
    (r"p100|gp100|quadrogp100", 60),
    (r"p4|p6|p40|gtx10\d\d\w*|titanxp?|quadrop\d+", 61),
    (r"m4|m6|m10|m40|m60|gtx9\d\d\w*|gtx7\d\d\w*|k20x?|k40m?|k80", 52),
)
# Patterns of the names of other makers' devices, with the maker. Names are without spaces.
_OTHERS = (
    (r"(?:amd)?(?:instinct)?mi\d{2,3}[axp]?|(?:amd)?radeon\w*|rx\d{4}\w*|gfx\w+|amd\w*", "AMD"),
    (r"(?:intel)?(?:gaudi\d?|arc\w*|(?:datacentergpu)?max1\d{3}|pontevecchio)|intel\w*", "Intel"),
    (r"(?:apple)?m[1-5](?:pro|max|ultra)?|mps|apple\w*", "Apple"),
    (r"(?:google)?(?:cloud)?tpu\w*", "Google"),
    (r"(?:aws)?(?:trainium|inferentia|trn|inf)\d?", "Amazon"),
)


@lru_cache(maxsize=256)
def gpu_name(text: str) -> str:
    """The name of a GPU without its maker, memory size and socket: 'H100' for 'NVIDIA H100 80GB
    HBM3'.

    Words are kept if a GPU with this word has another number of SMs or another clock (PCIe, NVL,
    Laptop, a MIG slice).
    """
    words = [word for word in _SPACES.split(_EDITION.sub("", text.strip())) if word]
    kept = [w for w in words if w.lower() not in _VENDOR and not _MEMORY.fullmatch(w)]
    return " ".join(kept) or text.strip()


def same_gpu(one: str, other: str) -> bool:
    """Whether two names stand for the same GPU."""
    return gpu_name(one).lower() == gpu_name(other).lower()


def plain_name(text: str) -> str:
    """The name of a GPU in lower case without spaces, for comparisons: 'h100pcie'."""
    return gpu_name(text).lower().replace(" ", "")


def without_board(text: str) -> str:
    """plain_name() without the words for a board's connection and cooling: 'a100'."""
    kept = [word for word in gpu_name(text).lower().split() if word not in _BOARD]
    return "".join(kept)


def why_not_served(text: str) -> str:
    """The reason why no kernel runs on the device with this name: the device is too old, it is not
    from NVIDIA, or it is a MIG slice, whose limits are unknown here. '' if no such reason is
    known."""
    name = without_board(text)
    for pattern, arch in _TOO_OLD:
        if re.fullmatch(pattern, name):
            return f"is of sm_{arch}, older than sm_80, the oldest that the kernels support"
    for pattern, maker in _OTHERS:
        if re.fullmatch(pattern, name):
            return f"is {maker}'s, and the kernels are for NVIDIA GPUs"
    if "mig" in gpu_name(text).lower().split():
        return "is a part of a GPU (MIG); name the GPU itself"
    return ""
