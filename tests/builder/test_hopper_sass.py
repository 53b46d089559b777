"""The machine code of the shipped wgmma kernels: warpgroup products, TMA, and nothing in memory
that belongs in registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter

import pytest
from cuda.pathfinder import find_nvidia_binary_utility

from flashsmith.builder import KernelLibrary, library_for
from flashsmith.builder.slow_kernels import losses
from flashsmith.families import Semantics, get_hopper_configs

# The first word of an instruction, its predicate before it.
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE
)


def machine_code(library: KernelLibrary) -> dict[str, Counter[str]] | None:
    """How often each instruction occurs in each kernel; None without the disassembler."""
    cuobjdump = find_nvidia_binary_utility("cuobjdump") or shutil.which("cuobjdump")
    if cuobjdump is None:
        return None
    command = [cuobjdump, "--dump-sass", str(library.so_path)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *functions = sass.split("Function : ")
    return {text.split()[0]: Counter(_INSTRUCTION.findall(text)) for text in functions}


SHIPPED = get_hopper_configs()
# Of each head dimension one, and all that an instruction below depends on.
FEW = [next(cfg for cfg in SHIPPED if cfg.d_head == d) for d in (64, 128, 192, 256)]
FEW += [next(cfg for cfg in SHIPPED if cfg.stale_max), next(c for c in SHIPPED if c.direct_O)]


@pytest.mark.parametrize(
    ("semantics", "configs"),
    [
        pytest.param(Semantics(), sorted(set(FEW)), id="few"),
        pytest.param(Semantics(), SHIPPED, id="plain", marks=pytest.mark.full),
        pytest.param(Semantics("causal"), SHIPPED, id="causal", marks=pytest.mark.full),
    ],
)
def test_shipped_kernels_multiply_by_warpgroups_and_keep_to_registers(semantics, configs) -> None:
    library = library_for(configs, arch=90, semantics=semantics)
    found = machine_code(library)
    for cfg in configs:
        entry = library.entry(cfg)
        assert losses(entry) == []
        assert entry.stack_bytes == 0
        # What a warpgroup's threads have when they start; setmaxnreg shares it out.
        assert entry.registers * cfg.n_threads <= 65536
        if found is None:  # the extra 'sass'; ptxas's report is looked at above all the same
            assert "wgmma.mma_async" in library.ptx(cfg)
            continue
        code = found[entry.ptx_entry]
        # A product of Q and K for every 16 columns, of P and V for every 16 keys.
        assert code["HGMMA"] >= cfg.d_head // 16 + cfg.B_c // 16
        assert code["USETMAXREG"] == 2
        assert code["UTMALDG"] >= 3
        assert (code["UTMASTG"] == 0) is cfg.direct_O
        # A warp by itself, for scores that were lost.
        for by_warp in ("HMMA", "LDSM"):
            assert (code[by_warp] > 0) is cfg.stale_max, f"{cfg}: {by_warp}"
        for unwanted in ("STL", "LDL"):
            assert code[unwanted] == 0, f"{cfg}: {unwanted}"
