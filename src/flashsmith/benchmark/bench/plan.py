"""BenchPlan: who is measured, on what, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashsmith.benchmark.contenders import OURS
from flashsmith.benchmark.peers import Peer
from flashsmith.benchmark.timing import INTERLEAVED, Protocol
from flashsmith.chooser import choose_config
from flashsmith.errors import ArgumentError, FlashsmithError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, d_head_for
from flashsmith.operations import DEFAULT
from flashsmith.operations.operation import load_attribute


@dataclass(frozen=True)
class Entrant:
    """A contender of ours before there are tensors. ``config`` None: why there is none in ``note``.

    ``attention``: whether attention() is called, which chooses ``config``, and not the kernel.
    """

    name: str
    config: KernelConfig | None
    attention: bool = False
    note: str = ""


@dataclass(frozen=True)
class BenchPlan:
    """A whole benchmark of ``configs``, ``peers`` and, if ``ours``, attention().

    ``rotation``: which contender of a problem is measured first; those before it come last.
    """

    problems: tuple[Problem, ...]
    configs: tuple[KernelConfig, ...] = ()
    ours: bool = False
    peers: tuple[Peer, ...] = ()
    protocol: Protocol = INTERLEAVED
    seed: int = 0
    rotation: int = 0

    def check(self) -> None:
        """Raises ArgumentError when there is nothing to measure, or nobody to measure on it."""
        if not self.problems:
            raise ArgumentError("problems: none; give at least one")
        if not (self.configs or self.ours or self.peers):
            raise ArgumentError("kernels: none, and no peers; give at least one contender")
        unserved = [cfg for cfg in self.configs if not any(serves(cfg, p) for p in self.problems)]
        if self.configs and len(unserved) == len(self.configs) and not self.ours:
            raise ArgumentError(
                f"kernels: none of the {len(unserved)} serves any of the problems (the first is "
                f"{self.configs[0]}, the first problem '{self.problems[0]}'); "
                "give --d_heads and --dtypes that are theirs"
            )

    def entrants(self, problem: Problem, device: DeviceSpec) -> Iterator[Entrant]:
        """Those of ours that serve a problem."""
        if self.ours and problem.operation == DEFAULT:
            try:
                chosen = choose_config(problem, device)
            except FlashsmithError as error:
                yield Entrant(OURS, None, note=str(error))
            else:
                yield Entrant(OURS, chosen, attention=True)
        yield from (Entrant(str(cfg), cfg) for cfg in self.configs if serves(cfg, problem))

    def peers_of(self, problem: Problem) -> tuple[Peer, ...]:
        """The peers that a problem is for: those asked for or, of another operation than attention,
        all that it names.

        Raises ArgumentError when these cannot be loaded.
        """
        if problem.operation == DEFAULT or not self.peers:
            return self.peers
        named = problem.computed.peers
        return tuple(load_attribute(named, f"peers of {problem.operation}")) if named else ()


def serves(cfg: KernelConfig, problem: Problem) -> bool:
    """Whether a kernel is made for a problem's operation, dtype and head dimension."""
    if cfg.family.operation != problem.operation or cfg.dtype != problem.dtype:
        return False
    return cfg.d_head == d_head_for(problem)
