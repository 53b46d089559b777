"""Runs broken variants of an operation's kernels and says who noticed: of their PTX, of their
sources, and of their plans."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import shared_kernels
from backward_cases import Asked, Spoiled
from hopper_mutant_runs import Noticed
from mutants import Mutant, Operator, mutants_by

from flashsmith.builder.generate import generate_kernel_instantiations
from flashsmith.builder.library_spec import kernel_flags
from flashsmith.builder.ptx_module import split_ptx
from flashsmith.builder.sources import package_sources
from flashsmith.builder.toolchain import find_toolchain
from flashsmith.errors import EmulatorError
from flashsmith.families import KernelConfig, Problem, Semantics, device_spec
from flashsmith.runtime.launch_plan import InitialContents, Launch, LaunchPlan, Workspace
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from ptxlab.checks import all_checks
from ptxlab.interface import MemoryAccess, Observer
from ptxlab.ptx import parse

ChangedPlan = Callable[[LaunchPlan], LaunchPlan]


class StopAtFinding(Observer):
    """Ends a run at the next access after something was found: loops of a mutant that reads wrong
    bounds may last for an hour."""

    def __init__(self, checks: Sequence[Observer]) -> None:
        super().__init__()
        self.checks = checks

    def memory(self, event: MemoryAccess) -> None:
        if any(check.findings for check in self.checks):
            raise EmulatorError("stopped: there is a finding")


@dataclass(frozen=True)
class AskedForward(Asked):
    """A problem of the forward pass without its dtype, for kernels of uneven lengths."""

    def problem(self, cfg: KernelConfig) -> Problem:
        problem = Problem.parse(f"{self.sizes} {cfg.dtype.name.lower()}")
        return replace(problem, semantics=replace(problem.semantics, uneven=True))


@dataclass(frozen=True)
class OperationVictim:
    """A config, and problems in which all code of its kernels runs: mutants are run on one after
    the other, until one shows them."""

    config: KernelConfig
    semantics: Semantics
    asked: tuple[Asked, ...]
    #: For a planned device of so many SMs; None: the usual one.
    sm_count: int | None = None
    #: Of a later GPU than the oldest one that the config has kernels for.
    arch: int = 0

    def __post_init__(self) -> None:
        if not self.arch:
            object.__setattr__(self, "arch", self.config.OLDEST_ARCH)

    def __hash__(self) -> int:
        return hash((self.config, self.semantics))

    @cached_property
    def kernel(self) -> LoadedKernel:
        """The kernels as they are."""
        shared_kernels.load([self.config], self.semantics, self.arch)
        return loaded_kernels.get(self.config, self.arch, self.semantics)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Entries of the kernels by their roles; the main one's is 'main'."""
        entry = self.kernel.entry
        return {"main": entry.ptx_entry, **{one.role: one.ptx_entry for one in entry.beside}}

    def mutants(self, operators: tuple[Operator, ...], role: str) -> tuple[Mutant, ...]:
        """Those of one kernel, in text order."""
        entry = self.roles[role]
        return _mutants(operators, self.kernel.modules[entry], entry)

    def said(self, role: str, mutant: Mutant) -> str:
        """The lines of our sources that a mutated instruction comes of, innermost first, each
        between its neighbours: lines of code, without comments."""
        entry = self.roles[role]
        lines: list[str] = []
        location = _locations(self.kernel.modules[entry], entry)[mutant.ptx_line]
        while location is not None:
            name, _, line = str(location).partition(":")
            if name.endswith("cuh") and (package_sources() / name).is_file():
                code = lines_of_code(name)
                numbers = list(code)
                place = numbers.index(int(line))
                lines += (code[number] for number in numbers[max(0, place - 1) : place + 2])
            location = location.inlined_at
        return "\n".join(lines)

    def plan(self) -> LaunchPlan:
        """The plan of the first problem."""
        seen: list[LaunchPlan] = []

        def note(plan: LaunchPlan) -> LaunchPlan:
            seen.append(plan)
            return plan

        replace(self, asked=self.asked[:1]).run(plan=note)
        return seen[0]

    def run_mutant(self, role: str, mutant: Mutant) -> Noticed:
        entry = self.roles[role]
        return self.run({entry: mutant.apply(self.kernel.modules[entry])})

    def run(
        self, modules: Mapping[str, str] | None = None, plan: ChangedPlan | None = None
    ) -> Noticed:
        """Proofs with other PTX, or with a changed plan, under all checks."""
        changed = replace(self.kernel)
        changed.__dict__["modules"] = {**self.kernel.modules, **(modules or {})}
        if plan is not None:
            changed.__dict__["plan"] = lambda call: plan(self.kernel.plan(call))
        key = self.config, self.arch, self.semantics
        with patch.dict(loaded_kernels.kernels, {key: changed}):
            for asked in self.asked:
                noticed = self._run(asked)
                if noticed.caught:
                    break
        return noticed

    def _run(self, asked: Asked) -> Noticed:
        device = device_spec(self.arch)
        observers = all_checks(self.config.family.is_deterministic(self.config))
        try:
            reasons = asked.reasons(
                self.config,
                [*observers, StopAtFinding(observers)],
                spoiled=_case(self, self.asked.index(asked)),
                arch=replace(device, sm_count=self.sm_count or device.sm_count),
            )
            error = ""
        except EmulatorError as stopped:
            reasons, error = (), str(stopped)
        kinds = frozenset(f.kind for observer in observers for f in observer.findings)
        return Noticed(kinds, error, bool(reasons))


@cache
def _mutants(operators: tuple[Operator, ...], ptx: str, entry: str) -> tuple[Mutant, ...]:
    return tuple(mutants_by(operators, ptx, entry))


@cache
def _locations(ptx: str, entry: str) -> dict[int, Any]:
    """Places in the sources, by PTX line."""
    return {i.ptx_line: i.location for b in parse(ptx).entry(entry).blocks for i in b.instructions}


@cache
def lines_of_code(name: str) -> dict[int, str]:
    """The lines of a source by their numbers, without comments and without those that have no more:
    what a comment says changes more often than the code."""
    source = (package_sources() / name).read_text().splitlines()
    code = {number: line.partition("//")[0].strip() for number, line in enumerate(source, 1)}
    return {number: line for number, line in code.items() if line}


@cache
def _case(victim: OperationVictim, index: int) -> Spoiled:
    asked = victim.asked[index]
    assert asked.problem(victim.config).required_semantics(victim.config) == victim.semantics
    return asked.case(victim.config)


@dataclass(frozen=True)
class SourcePatch:
    """An arithmetic mistake: ``old`` stands once in a file below csrc, and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name

    def times(self) -> int:
        """How often ``old`` stands in its file: no mistake of today's sources unless once."""
        return (package_sources() / self.file).read_text().count(self.old)


def void_mistakes(mistakes: Iterable[SourcePatch]) -> list[str]:
    """Those that are none of today's sources. The tests that make mistakes are full ones: a plain
    run asks here, and sees at once what a change of the sources has made void."""
    return [str(mistake) for mistake in mistakes if mistake.times() != 1]


def patched_modules(victim: OperationVictim, mistake: SourcePatch) -> dict[str, str]:
    """The PTX of the victim's kernels, by entry, out of sources with a mistake."""
    tools = find_toolchain()
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(shutil.copytree(package_sources(), Path(folder) / "csrc"))
        file = csrc / mistake.file
        assert mistake.times() == 1, f"{mistake}: {mistake.file} has {mistake.old!r} not once"
        file.write_text(file.read_text().replace(mistake.old, mistake.new))
        ptx = Path(folder) / "kernels.ptx"
        generated = generate_kernel_instantiations(
            [victim.config], Path(folder) / "sources", semantics=victim.semantics
        )
        shard = generated.shards[0]
        flags = kernel_flags(victim.config.FAMILY, victim.arch)
        command = [str(tools.nvcc), f"-ccbin={tools.gxx}", *flags, f"-I{csrc}", "-ptx", str(shard)]
        done = subprocess.run(
            [*command, "-o", str(ptx)], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{mistake}: {done.stderr}"
        return split_ptx(ptx.read_text(), [csrc, shard.parent])


def wrong_plans(victim: OperationVictim, plan: LaunchPlan) -> Iterator[tuple[str, ChangedPlan]]:
    """Changes of a plan, by name: without a launch, with one before what it needs, of too few CTAs,
    with workspaces that are too short or hold anything. ``plan`` is one of the victim's."""
    roles = {entry: role for role, entry in victim.roles.items()}
    for launch in plan.launches:
        role = roles[launch.kernel]
        yield f"without {role}", _without(launch.kernel)
        yield f"half of {role}", _fewer_ctas(launch.kernel)
        if role not in ("prepare", "gaps"):
            yield f"{role} first", _first(launch.kernel)
    for workspace in plan.workspaces:
        if workspace.nbytes > 4:  # by a counter that is not there a kernel may never end
            yield f"half of {workspace.name}", _shorter(workspace.name)
        if workspace.contents == InitialContents.ZEROED:
            yield f"{workspace.name} not zeroed", _not_zeroed(workspace.name)


# By names: other problems of a victim may have fewer launches and workspaces.
def _without(kernel: str) -> ChangedPlan:
    return lambda plan: replace(
        plan, launches=tuple(one for one in plan.launches if one.kernel != kernel)
    )


def _fewer_ctas(kernel: str) -> ChangedPlan:
    def halved(launch: Launch) -> Launch:
        x, y, z = launch.grid
        return replace(launch, grid=(x // 2, y, z)) if launch.kernel == kernel else launch

    return lambda plan: replace(plan, launches=tuple(map(halved, plan.launches)))


def _first(kernel: str) -> ChangedPlan:
    # Sorting keeps the others' order.
    return lambda plan: replace(
        plan, launches=tuple(sorted(plan.launches, key=lambda launch: launch.kernel != kernel))
    )


def _shorter(name: str) -> ChangedPlan:
    return lambda plan: _with_workspace(plan, name, lambda one: {"nbytes": one.nbytes // 2})


def _not_zeroed(name: str) -> ChangedPlan:
    return lambda plan: _with_workspace(
        plan, name, lambda one: {"contents": InitialContents.UNDEFINED}
    )


def _with_workspace(
    plan: LaunchPlan, name: str, changes: Callable[[Workspace], dict[str, Any]]
) -> LaunchPlan:
    workspaces = (
        one._replace(**changes(one)) if one.name == name else one for one in plan.workspaces
    )
    return replace(plan, workspaces=tuple(workspaces))
