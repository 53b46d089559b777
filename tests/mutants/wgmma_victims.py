"""Kernels of the wgmma family whose mutants are run, and runs of them on small problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any
from unittest.mock import patch

import shared_kernels
from hopper_mutant_runs import Noticed
from mutants import Mutant, mutants_by
from mutants_hopper import REGISTER_A_OPERATORS, hopper_operators

from flashsmith.errors import EmulatorError
from flashsmith.families import (
    KernelConfig,
    Semantics,
    WgmmaForwardKernelConfig,
    get_kernel_configs,
)
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.families.wgmma.config import PingPong
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from flashsmith.verify import prove
from ptxlab.ptx import Instruction
from ptxlab.ptx import parse as parse_ptx

ARCH = 90
# Half of them are hesitant.
SCHEDULES = range(12)


@cache
def _source(name: str) -> list[str]:
    return (files("flashsmith") / "csrc" / name).read_text().splitlines()


def source_lines(instruction: Instruction) -> str:
    """The line of our source that an instruction comes of, and the one that it was inlined in."""
    lines, location = [], instruction.location
    while location is not None:
        name, _, line = str(location).partition(":")
        if name.endswith(("cuh", "cu")) and (files("flashsmith") / "csrc" / name).is_file():
            lines.append(_source(name)[int(line) - 1].strip())
        location = location.inlined_at
    return "\n".join(lines)


@dataclass(frozen=True)
class KernelVictim:
    """A kernel, and keywords of prove() for a problem in which all of its code runs: one CTA has
    several tiles, each with several K/V blocks, so that every ring buffer wraps around. In the
    ``short`` problem tiles have hardly any blocks, so that the producer runs far ahead. In the
    ``ragged`` problems tiles have few blocks, and warpgroups often skip some of them."""

    config: KernelConfig
    semantics: Semantics
    problem: Mapping[str, Any]
    short: Mapping[str, Any]
    ragged: tuple[Mapping[str, Any], ...] = ()

    def __hash__(self) -> int:
        return hash((self.config, self.semantics))

    @cached_property
    def kernel(self) -> LoadedKernel:
        """The kernel as it is."""
        shared_kernels.load([self.config], self.semantics)
        return loaded_kernels.get(self.config, ARCH, self.semantics)

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        """All of them, in text order."""
        kernel, operators = self.kernel, hopper_operators()
        if self.config.register_Q:
            operators += REGISTER_A_OPERATORS
        return tuple(mutants_by(operators, kernel.ptx, kernel.entry.ptx_entry))

    @cached_property
    def instructions(self) -> list[Instruction]:
        """Those of the kernel, in text order."""
        kernel = self.kernel
        blocks = parse_ptx(kernel.ptx).entry(kernel.entry.ptx_entry).blocks
        return [instruction for block in blocks for instruction in block.instructions]

    def said(self, mutant: Mutant) -> str:
        """The lines of source that the mutated instruction comes of, innermost first."""
        known = {instruction.ptx_line: instruction for instruction in self.instructions}
        return source_lines(known[mutant.ptx_line])

    @cached_property
    def waits_by_arrival(self) -> dict[int, str]:
        """PTX line of a wait at an mbarrier, and the source of what comes next, if that arrives:
        of the arrival itself and of what leads to it."""
        found: dict[int, str] = {}
        wait, between = None, ""
        for instruction in self.instructions:
            between += source_lines(instruction) + "\n"
            if instruction.mnemonic.startswith("mbarrier.try_wait"):
                wait, between = instruction.ptx_line, ""
            elif instruction.mnemonic.startswith(("wgmma", "mbarrier", "cp.async", "bar.")):
                if wait and instruction.mnemonic.startswith("mbarrier.arrive"):
                    found[wait] = between
                wait = None
        return found

    def passing_waits(self, tile: str) -> list[int]:
        """PTX lines of the waits for tiles of 'K' or 'V' of warpgroups that skip blocks: what such
        a warpgroup does next is to release the tile."""
        waits = self.waits_by_arrival.items()
        return [line for line, then in waits if f"{tile}.consumer_release(warp, lane);" in then]

    @cached_property
    def next_V_wait(self) -> int:
        """PTX line of the producer's wait for a stage for V, after it has loaded the next K."""
        waits = self.waits_by_arrival.items()
        # After the wait for Q's slot the tile's info is stored first.
        acquired = [
            line
            for line, then in waits
            if "mbarrier_arrive_expect(full()," in then and "info_slot()" not in then
        ]
        assert len(acquired) == 4, "K of a tile's first block, K and V in the loop, V of the last"
        return acquired[2]

    def step(self, mutant: Mutant) -> tuple[str, int]:
        """Of a product: 'QK' or 'PV', and its number among the steps that make up one of them."""
        kinds = {
            i.ptx_line: "PV" if "PV::run" in source_lines(i) else "QK"
            for i in self.instructions
            if i.mnemonic.startswith("wgmma.mma_async")
        }
        kind = kinds[mutant.ptx_line]
        same_kind = [line for line, other in kinds.items() if other == kind]
        steps = self.config.d_head // 16 if kind == "QK" else self.config.B_c // 16
        return kind, same_kind.index(mutant.ptx_line) % steps

    def run(self, mutant: Mutant | None, schedules: Sequence[int] = SCHEDULES) -> Noticed:
        """Proofs of the kernel, or of a mutant of it, under all checks: with the fixed schedule,
        and while nothing is noticed of the short problem, and with random schedules."""
        runs: list[tuple[Mapping[str, Any], int | None]] = [
            (self.problem, None),
            (self.short, None),
        ]
        for problem in (self.problem, *self.ragged):
            runs += [(problem, seed) for seed in schedules]
        for problem, seed in runs:
            noticed = self._run(mutant, problem, seed)
            if noticed.caught:
                break
        return noticed

    def _run(self, mutant: Mutant | None, problem: Mapping[str, Any], seed: int | None) -> Noticed:
        changed = replace(self.kernel)
        text = mutant.apply(self.kernel.ptx) if mutant else self.kernel.ptx
        changed.__dict__["ptx"] = text
        key = self.config, ARCH, self.semantics
        with patch.dict(loaded_kernels.kernels, {key: changed}):
            try:
                verdict = prove(self.config, **problem, sm_count=1, checks=True, schedule_seed=seed)
            except EmulatorError as stopped:
                return Noticed(frozenset(), str(stopped), False)
        assert verdict.problem.semantics == self.semantics
        kinds = frozenset(finding.kind for finding in verdict.findings)
        return Noticed(kinds, "", bool(verdict.reasons))


def victim(
    config: KernelConfig,
    semantics: str,
    short: Mapping[str, Any],
    ragged: Sequence[Mapping[str, Any]] = (),
    **problem: Any,
) -> KernelVictim:
    """``short`` and ``ragged`` say what differs in these problems."""
    others = tuple(problem | other for other in ragged)
    return KernelVictim(config, Semantics.parse(semantics), problem, problem | short, others)


@cache
def shipped() -> dict[str, KernelVictim]:
    """Kernels of the set 'hopper': three warpgroups one step after the other, and two whose
    products overlap."""
    known = [
        config
        for config in get_kernel_configs("hopper")
        if isinstance(config, WgmmaForwardKernelConfig)
        and (config.d_head, config.pingpong) == (128, PingPong.GEMM)
        and config.q_buffers == 2
        and config.cluster_size == 1
    ]
    three = next(config for config in known if config.n_warpgroups == 3 and not config.overlap)
    two = next(config for config in known if config.n_warpgroups == 2 and config.overlap)
    return {
        "three": victim(three, "plain", {"seq_k": 128}, seq=310, heads=2, seq_k=384),
        "two": victim(
            two, "causal+uneven", {"seq_k": 20}, seq=190, heads=3, seq_k=318, causal=True
        ),
    }


@cache
def rare() -> dict[str, KernelVictim]:
    """Those with mutants that hardly any schedule shows. Packed, short tiles come before longer
    ones."""
    two = shipped()["two"]
    return {
        "two": two,
        "packed two": victim(
            two.config, "causal+packed+uneven", {"lens_k": (20, 20, 20, 20)},
            lens_q=(60, 128, 60, 128), lens_k=(20, 192, 20, 192), heads=1, causal=True,
        ),
    }  # fmt: skip


@cache
def small() -> dict[str, KernelVictim]:
    """The same schedules on the smallest tiles, and one with all that those do without."""
    three, two = (replace(v.config, d_head=64, B_c=32) for v in shipped().values())
    other = parse(
        "(FP16, 64, 128, 48, 2wg): tma+stages_1+q_buffers_1+regs_24_240+pingpong_exp"
        "+static_persistent+separate_O"
    )
    return {
        "small three": victim(
            three, "plain", {"seq_k": 32}, [{"seq": 290, "heads": 5, "seq_k": 64}],
            seq=310, heads=2, seq_k=96,
        ),
        "small two": victim(
            two, "causal+uneven", {"seq_k": 20},
            [{"seq": 90, "seq_k": 90, "heads": 5}, {"seq_k": 70}],
            seq=190, heads=3, seq_k=190, causal=True,
        ),
        "separate": victim(
            other, "window+packed+uneven", {"lens_k": (10, 0, 0, 0, 0)},
            [{"lens_q": (128,) * 6, "lens_k": (100,) * 6}],
            lens_q=(128, 30, 0, 20, 128), lens_k=(193, 200, 40, 145, 145),
            heads=1, d=56, window=(60, 10),
        ),
    }  # fmt: skip


@cache
def with_register_Q() -> dict[str, KernelVictim]:
    """Small kernels whose GEMMs read Q from registers: every second step of it, where Q's memory is
    free before its tile is finished, and all of it, where O is stored in Q's place. Nothing else
    needs them, and the default run leaves them out."""
    half = parse(
        "(BF16, 128, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+dynamic"
        "+rescale_8+direct_O+register_Q_4"
    )
    two = small()["small two"]
    return {
        "half of Q": victim(
            half, "plain", {"seq_k": 32},
            # In tiles of four blocks alone a V is asked for whose place Q's release does not free.
            [{"seq": 190, "heads": 5, "seq_k": 64}, {"seq": 128, "seq_k": 128}],
            seq=190, heads=3, seq_k=96,
        ),
        "all of Q": replace(two, config=replace(two.config, register_Q=4)),
    }  # fmt: skip


for _victim in (*small().values(), *shipped().values()):
    shared_kernels.want([_victim.config], _victim.semantics)
