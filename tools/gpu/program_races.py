"""The commands that programs.py and program_gradients.py share: build, check and time."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from program_cases import CAP, DOCUMENTS, FUNCTIONS, Case, Functions, Shape, on_gpu

from flashsmith.benchmark.rounds import AlternatingRounds, Contender, PooledFigure, ratios_to
from flashsmith.benchmark.timing import Clock, Protocol
from flashsmith.builder import library_for
from flashsmith.families import DeviceSpec, DType, Semantics
from flashsmith.verify.attention_semantics import offsets

ROUND = Protocol(num_warmups=2, runs=10, warmup_ms=0.0, measure_ms=20.0, num_estimates=1)
GPU = "H200"
# The contender that others are compared with.
OURS = "function"
# Peers whose failure to compile or to run leaves them out: FlexAttention with Triton's kernels, and
# with those of flash-attn-4, which PyTorch generates from the same functions.
PEERS = {"FlexAttention": "TRITON", "FA4 flex": "FLASH"}
DOES_NOT_RUN = "does not run: "
_Kind = TypeVar("_Kind")


def parsed(description: str, *, others: bool) -> argparse.Namespace:
    """The command line. ``others``: whether other configs than the chosen ones can be timed."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile what the other commands need")
    building.add_argument("--jobs", type=int, default=2, help="libraries compiled at a time")
    checked = commands.add_parser("check", help="compare random problems with float64")
    checked.add_argument("--problems", type=int, default=300)
    checked.add_argument("--seed", type=int, default=0)
    timed = commands.add_parser("time", help="time cases alternately")
    timed.add_argument("rows", type=Path, help="the CSV file; the cases that it has are left out")
    timed.add_argument("--rounds", type=int, default=7)
    timed.add_argument(
        "--peer", action="store_true", help="with FlexAttention, max-autotune, and FA4's kernels"
    )
    timed.add_argument(
        "--only", default="", help="only cases whose names contain one of these, joined by commas"
    )
    if others:
        building.add_argument("--others", action="store_true", help="also for time --others")
        timed.add_argument("--others", action="store_true", help="with up to three other configs")
    return parser.parse_args()


def build(wanted: Iterable[tuple[Any, Semantics]], device: DeviceSpec, jobs: int) -> int:
    """Compiles kernels, and prints their registers and spills."""
    unique = list(dict.fromkeys(wanted))

    def built(one: tuple[Any, Semantics]) -> str:
        config, semantics = one
        entry = library_for([config], arch=device.arch, semantics=semantics).entry(config)
        figures = ", ".join(
            f"{it.registers} registers, {it.spill_bytes} bytes spilled"
            for it in (entry, *entry.beside)
        )
        return f"{config.short_form()} [{semantics}]: {figures}"

    with ThreadPoolExecutor(jobs) as pool:
        for number, line in enumerate(pool.map(built, unique)):
            print(f"{number + 1} of {len(unique)}: {line}", flush=True)
    return 0


def check(
    kinds: Sequence[_Kind],
    check_one: Callable[[_Kind, np.random.Generator], str],
    problems: int,
    seed: int,
) -> int:
    """Checks random problems, one kind after the other; ``check_one`` returns what is wrong."""
    wrong = 0
    for number in range(problems):
        draw = np.random.default_rng((seed, number))
        why = check_one(kinds[number % len(kinds)], draw)
        if why:
            wrong += 1
            print(f"WRONG {number}: {why}", flush=True)
    print(f"{problems} problems of {len(kinds)} kinds of kernels, {wrong} wrong", flush=True)
    return int(wrong > 0)


# --- speed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """Contenders for a case, and the floating-point operations of one launch."""

    name: str
    flop: int
    contenders: Sequence[Contender]


def wanted_cases(cases: Iterable[Case], only: str, path: Path) -> list[Case]:
    """The cases whose name contains one of the words, which are joined by commas, and whose rows
    the file lacks."""
    timed = set()
    if path.exists():
        with path.open(newline="") as file:
            timed = {row["case"] for row in csv.DictReader(file)}
    words = only.split(",")
    return [it for it in cases if it.name not in timed and any(word in it.name for word in words)]


def time_races(path: Path, races: Iterable[Race], rounds: int, clock: Clock | None = None) -> int:
    """Times races one after the other; adds a row to the file for each contender and round.

    A case's rows are written together, so that a run that was cut off can be continued. Returns the
    exit status: 1 if an output was wrong.
    """
    wrong = 0
    if not path.exists():
        path.write_text("case,contender,round,ms,tflops\n")
    for race in races:
        alternating = AlternatingRounds(race.contenders, clock)
        for name, why in alternating.wrong.items():
            does_run = not why.startswith(DOES_NOT_RUN)
            wrong += does_run
            print(f"{'WRONG ' if does_run else ''}{race.name}: {name}: {why}", flush=True)
        found = list(alternating.times_ms(ROUND, rounds))
        with path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                (race.name, name, number, f"{ms:.6f}", f"{race.flop / ms / 1e9:.1f}")
                for number, times in enumerate(found)
                for name, ms in times.items()
            )
        _print_summary(race, found)
    return int(wrong > 0)


def _print_summary(race: Race, rounds: Sequence[dict[str, float]]) -> None:
    by_name: dict[str, list[float]] = defaultdict(list)
    for times in rounds:
        for name, ms in times.items():
            by_name[name].append(ms)
    shares = ratios_to(OURS, rounds) if OURS in by_name else {}
    for name, its in by_name.items():
        share = f"  {OURS} is {shares[name]:.3f} times as fast" if name in shares else ""
        median = PooledFigure.of(its).median
        tflops = race.flop / median / 1e9
        print(f"{race.name:24} {name:14} {median:.4f} ms {tflops:6.1f}{share}")
    sys.stdout.flush()


def lazily(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """A launch that is made when it first runs."""
    made: list[Callable[[], Any]] = []

    def launch() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return launch


class TimedCase:
    """A case's tensors on the GPU and its functions.

    names: the tensors, of 'q', 'k', 'v' and 'do', each (batch, seq, heads, d).
    """

    def __init__(self, case: Case, names: tuple[str, ...]) -> None:
        import torch

        self.case, draw = case, np.random.default_rng(7)
        torch.manual_seed(7)
        dtype = torch.bfloat16 if case.kind.dtype is DType.BF16 else torch.float16
        heads = {"q": case.heads, "k": case.heads_k, "v": case.heads_k, "do": case.heads}
        self.tensors = {
            name: torch.randn(
                case.batch, case.seq, heads[name], case.kind.d, dtype=dtype, device="cuda"
            )
            for name in names
        }
        self.is_causal = case.kind.mask == "causal"
        self.lengths: list[int] = []
        if case.kind.function == "documents":
            cuts = np.sort(draw.choice(np.arange(1, case.seq), DOCUMENTS - 1, replace=False))
            self.lengths = np.diff([0, *cuts, case.seq]).tolist()
            doc = on_gpu(np.repeat(np.arange(DOCUMENTS, dtype=np.int32), self.lengths)[None])
            self.functions = Functions(mask=lambda b, h, q, k: doc[b, q] == doc[b, k])
        else:
            shape = Shape(case.batch, case.heads, case.seq, case.seq)
            self.functions = FUNCTIONS[case.kind.function](shape, draw, on_gpu)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.case.heads // self.case.heads_k

    @property
    def plain_options(self) -> dict[str, Any]:
        """The options of the same attention without a function."""
        if self.case.plain != "packed":
            cap = CAP if self.case.plain == "softcap" else 0.0
            return {"causal": self.is_causal, "softcap": cap}
        cu, longest = on_gpu(offsets(tuple(self.lengths))), max(self.lengths)
        return {
            "causal": self.is_causal,
            **{"cu_seqlens_q": cu, "cu_seqlens_k": cu},
            **{"max_seqlen_q": longest, "max_seqlen_k": longest},
        }

    def flex_attention(self, backend: str) -> Callable[..., Any]:
        """FlexAttention of (batch, heads, seq, d) q, k and v with the functions, compiled.

        ``backend``: TRITON or FLASH, as FlexAttention's kernel options name them.
        """
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask, seq, device = self.functions.mask, self.case.seq, self.tensors["q"].device

        def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
            seen = q >= k
            return seen if mask is None else seen & mask(b, h, q, k)

        mask_mod, block_mask = sees if self.is_causal else mask, None
        if mask_mod is not None:
            made = torch.compile(create_block_mask)
            block_mask = made(mask_mod, None, None, seq, seq, device=device)
        return partial(
            torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=False),
            score_mod=self.functions.score,
            block_mask=block_mask,
            enable_gqa=self.group > 1,
            kernel_options={"BACKEND": backend},
        )

    def peers(
        self, flex: Callable[[str], Callable[[], Any]]
    ) -> dict[str, tuple[Callable[[], Any], bool]]:
        """The launches of PEERS for race(). ``flex(backend)`` makes one."""
        import torch

        torch._dynamo.reset()  # what is compiled for other cases would count as recompilations
        return {name: (lazily(partial(flex, backend)), True) for name, backend in PEERS.items()}

    def changed(self, scores: Any, b: int, h: int, rows: Any, *, with_function: bool) -> Any:
        """The scaled scores of some rows and all keys, (rows, keys), after function and mask.

        The functions are the caller's own, run eagerly.
        """
        import torch

        device = scores.device
        keys = torch.arange(self.case.seq, device=device)
        at = torch.tensor(b, device=device), torch.tensor(h, device=device)
        at = (*at, rows[:, None], keys[None])
        if with_function and self.functions.score is not None:
            scores = self.functions.score(scores, *at)
        elif self.case.plain == "softcap":
            scores = CAP * torch.tanh(scores / CAP)
        seen = torch.ones_like(scores, dtype=torch.bool)
        if self.is_causal:
            seen = seen & (keys[None] <= rows[:, None])
        if self.functions.mask is not None:
            seen = seen & self.functions.mask(*at)
        return scores.masked_fill(~seen, -torch.inf)

    @property
    def pairs(self) -> int:
        """Visible pairs of one head of the whole batch."""
        lengths = self.lengths or [self.case.seq] * self.case.batch
        return sum(n * (n + 1) // 2 if self.is_causal else n * n for n in lengths)

    def race(
        self,
        flop_of_pair: int,
        launches: dict[str, tuple[Callable[[], Any], bool]],
        why_wrong: Callable[..., str],
    ) -> Race:
        """The race of these launches; the bool says whether one computes the function."""

        def contender(name: str, launch: Callable[[], Any], with_function: bool) -> Contender:
            def why() -> str:
                try:
                    output = launch()
                except Exception as error:
                    if name not in PEERS:
                        raise
                    return f"{DOES_NOT_RUN}{type(error).__name__}: {str(error)[:300]}"
                return why_wrong(output, with_function=with_function)

            return Contender(name, launch, why)

        contenders = [contender(name, *it) for name, it in launches.items()]
        flop = flop_of_pair * self.case.kind.d * self.case.heads * self.pairs
        return Race(self.case.name, flop, contenders)
