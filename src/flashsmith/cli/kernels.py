"""`flashsmith run`, `explain`, `configs` and `env`: run, explain and list kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flashsmith import env
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_columns, make_console, print_table, print_text
from flashsmith.cli.command import App
from flashsmith.cli.options import (
    FAILED,
    Arch,
    Csv,
    Json,
    Jsonl,
    Kernels,
    import_from_here,
    print_json,
    print_lines,
    selected,
)
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    Problem,
    Semantics,
    get_kernel_configs,
    kernel_set_sizes,
    parse_kernel_name_into_config,
)
from flashsmith.pluralize import pluralize
from flashsmith.printable import quoted

if TYPE_CHECKING:
    from flashsmith.benchmark.tasks import Task
    from flashsmith.runtime.target import Target

Batch = Annotated[
    int | None,
    typer.Option(help="Batch. Default: 1, or 2 on a GPU; for packed kernels, 4 sequences."),
]
Seq = Annotated[
    int | None,
    typer.Option(
        help="Sequence length. Default: 256, or 1024 on a GPU; for uneven kernels, one less."
    ),
]
Heads = Annotated[int | None, typer.Option(help="Heads. Default: 2, or 4 on a GPU.")]
SemanticsWords = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS",
        help="What the kernels compute: plain, or causal or window, softcap, packed, "
        "partial and uneven, joined by '+'. Default: plain.",
    ),
]
ProblemText = Annotated[
    str | None,
    typer.Option(
        # The name of the option is given explicitly, because typer 0.27 confuses it with a
        # metavar that equals the parameter's name.
        "--problem",
        metavar="PROBLEM",
        help="One problem, such as 'b1 s300 h4:2 d128 fp16 causal', instead of --batch, --seq, "
        "--heads and --semantics.",
    ),
]
Window = Annotated[
    str | None,
    typer.Option(
        metavar="LEFT,RIGHT",
        help="A window's limits, such as 40,9; an empty one means no limit. Default: half of "
        "the keys but at most 1024 for LEFT, and 0 for RIGHT.",
    ),
]
Softcap = Annotated[float | None, typer.Option(help="The value of the softcap. Default: 30.")]
Sinks = Annotated[bool, typer.Option("--sinks", help="Add a sink logit for every head.")]
Score = Annotated[
    str | None,
    typer.Option(
        "--score",
        metavar="NAME",
        help="Prove a score function and its derivative: 'package.module:function', or a value "
        "of flashsmith.scores such as 'alibi+softcap'.",
    ),
]
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask",
        metavar="NAME",
        help="Prove a mask function: 'package.module:function', or a value of flashsmith.masks "
        "such as 'documents&causal'.",
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Check every memory access in the emulator.")]
Emulate = Annotated[
    bool, typer.Option("--emulate", help="Use the emulator even if there is a GPU.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random inputs and of packed lengths.")]

app = App()


@app.command("run")
def run(
    kernels: Kernels = None,
    arch: Arch = None,
    batch: Batch = None,
    seq: Seq = None,
    heads: Heads = None,
    semantics: SemanticsWords = None,
    problem: ProblemText = None,
    window: Window = None,
    softcap: Softcap = None,
    sinks: Sinks = False,
    score: Score = None,
    mask: Mask = None,
    check: Check = False,
    emulate: Emulate = False,
    seed: Seed = 0,
    csv: Csv = None,
    jsonl: Jsonl = None,
    as_json: Json = False,
) -> None:
    """Build, run and prove kernels, and show their costs; on a GPU, time them too.

    Without --kernels and KERNELS, this runs prog, which has seven steps of one optimisation each.
    With --problem, kernels for a different d or dtype are skipped. With --score or --mask, this
    proves the functions with the kernels that attention() uses, or with --kernels, in the emulator.
    """
    sizes = _Sizes(problem, batch, seq, heads, semantics)
    words = [f"{name}={it}" for name, it in (("score", score), ("mask", mask)) if it is not None]
    if words or _has_functions(problem):
        others: dict[str, object] = {"--window": window, "--softcap": softcap, "--csv": csv}
        others |= {"--jsonl": jsonl, "--sinks": sinks or None, "--check": check or None}
        _check_without_functions(others)
        _run_functions(" ".join([sizes.text(), *words]), kernels, arch, seed, as_json)
        return
    from flashsmith.benchmark.measurement_files import MeasurementFiles

    with ProgressReporter() as reporter, MeasurementFiles(csv, jsonl=jsonl) as files:
        reporter.say("looking up kernels and compiler")
        configs = selected(kernels, default="prog")
        from flashsmith.runtime.target import choose_target

        target = choose_target(arch, emulate, configs)
        from flashsmith.benchmark.run import Options, run_kernels
        from flashsmith.benchmark.run_table import print_report

        limits = None if window is None else _parse_window(window)
        report = run_kernels(
            configs,
            target,
            task=sizes.task(target),
            options=Options(limits, softcap, sinks, check, seed),
            reporter=reporter,
            write=files.write if csv or jsonl else None,
        )
    if as_json:
        print_json(report.to_json())
    elif not files.takes_stdout:
        print_report(make_console(), report)
    if not report.ok:
        raise typer.Exit(FAILED)


class _Sizes(NamedTuple):
    """The options of `run` that say what is computed; an option that is not given is None."""

    problem: str | None
    batch: int | None
    seq: int | None
    heads: int | None
    semantics: str | None

    def text(self) -> str:
        """The string of a problem with functions, without the words for the functions."""
        self._check_alone()
        usual = {"b": (self.batch, 2), "s": (self.seq, 150), "h": (self.heads, 4)}
        sizes = [f"{key}{it if size is None else size}" for key, (size, it) in usual.items()]
        return self.problem or " ".join(
            [*sizes, "d64 bf16", (self.semantics or "").replace("+", " ")]
        )

    def task(self, target: Target) -> Task:
        """The task that all kernels of a set compute; sizes that are not given depend on the
        target."""
        from flashsmith.benchmark.tasks import OneProblem, default_size

        self._check_alone()
        if self.problem is not None:
            return OneProblem(Problem.parse(self.problem))
        semantics = Semantics.parse("plain" if self.semantics is None else self.semantics)
        size = default_size(target, semantics)
        return replace(
            size,
            batch=size.batch if self.batch is None else self.batch,
            seq=size.seq if self.seq is None else self.seq,
            whole_tiles=size.whole_tiles and self.seq is None,
            heads=size.heads if self.heads is None else self.heads,
        )

    def _check_alone(self) -> None:
        """Raises ArgumentError if --problem is given together with an option that it replaces."""
        others = self._asdict()
        del others["problem"]
        given = [f"--{name}" for name, value in others.items() if value is not None]
        if self.problem is not None and given:
            raise ArgumentError(
                f"--problem: already sets what is computed; leave out {' and '.join(given)}"
            )


def _has_functions(problem: str | None) -> bool:
    from flashsmith.chooser.function_problems import has_functions

    return problem is not None and has_functions(problem)


def _check_without_functions(options: dict[str, object]) -> None:
    """Raises ArgumentError for an option that has no meaning when functions are checked."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ArgumentError(
            f"{' and '.join(given)}: given with a score or mask function, whose proof checks all "
            "accesses and writes no rows; leave it out"
        )


def _run_functions(
    text: str, kernels: str | None, arch: str | None, seed: int, as_json: bool
) -> None:
    """Checks the functions of a problem and prints the results."""
    from flashsmith.benchmark.functions_table import print_function_report
    from flashsmith.benchmark.run_functions import read_functions, run_functions
    from flashsmith.runtime.target import choose_target

    import_from_here()
    with ProgressReporter() as reporter:
        reporter.say("tracing the functions")
        found = read_functions(text, seed)
        is_selected = kernels is not None or env.KERNELS.raw() is not None
        configs = selected(kernels, default="prog") if is_selected else None
        target = choose_target(arch, True, configs or ())
        report = run_functions(found, configs, target, seed=seed, reporter=reporter)
    if as_json:
        print_json(report.to_json())
    else:
        print_function_report(make_console(), report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _parse_window(text: str) -> tuple[int | None, int | None]:
    """Parses the string as (left, right).

    Raises ArgumentError unless the string has two limits, each a whole number or empty.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(re.fullmatch(r"\d{0,9}", word, re.ASCII) for word in words):
        raise ArgumentError(
            f"window={quoted(text)}: give LEFT,RIGHT, whole numbers below 10^9, as 40,9; '40,' "
            "and ',9' have no limit on the other side"
        )
    left, right = (int(word) if word else None for word in words)
    return left, right


@app.command("explain")
def explain_config(
    config: Annotated[
        str,
        typer.Argument(
            help="A short form, a kernel's demangled name, or a problem with functions, such as "
            "'b1 s512 h4 d64 bf16 score=alibi mask=package.module:function'."
        ),
    ],
    arch: Arch = None,
    as_json: Json = False,
) -> None:
    """Show all that is known about one config: rules, resources, occupancy, instructions,
    conflicts. For a problem with functions, show how its kernels compute them.

    Exit status 1 if the config is illegal or its kernel is wrong.
    """
    from flashsmith.chooser.function_problems import has_functions
    from flashsmith.runtime.target import choose_target

    if has_functions(config):
        _explain_functions(config, arch, as_json)
        return
    cfg = parse_kernel_name_into_config(config)
    target = choose_target(arch, configs=[cfg])
    with ProgressReporter() as reporter:
        reporter.say(f"looking at {cfg}")
        from flashsmith.benchmark.explain import explain
        from flashsmith.benchmark.explanation_text import print_explanation

        explanation = explain(cfg, target, reporter)
    if as_json:
        print_json(explanation.to_json())
    else:
        print_explanation(make_console(), explanation)
    if not explanation.ok:
        raise typer.Exit(FAILED)


def _explain_functions(text: str, arch: str | None, as_json: bool) -> None:
    """Prints the compiled form of a problem's functions, and the kernels that compute them."""
    from flashsmith.chooser import choose
    from flashsmith.chooser.explain_functions import explain
    from flashsmith.chooser.function_problems import parse_with_functions
    from flashsmith.operations.decode import DECODE
    from flashsmith.operations.latent_decode import LATENT_DECODE
    from flashsmith.runtime.target import choose_target

    import_from_here()
    found = parse_with_functions(text)
    problem, asked = found.problem, found.asked
    lengths = None if problem.semantics.packed else (problem.seq_q, problem.seq_k)
    functions = {**found.functions._asdict(), "causal": asked[0], "window": asked[1]}
    is_latent = problem.operation == LATENT_DECODE.name
    if is_latent or problem.operation == DECODE.name:  # indices are positions in the whole sequence
        functions["positions"], lengths = "end", None
    explained = replace(explain(**functions, lengths=lengths), has_lists=not is_latent)
    choice = choose(problem, choose_target(arch).device)
    if as_json:
        print_json({**explained.to_json(), "kernel": choice.to_json()})
        return
    print_lines(str(explained))
    console = make_console()
    console.print()
    print_text(console, str(choice), indent=14)


@app.command("configs")
def list_configs(kernels: Kernels = None, arch: Arch = None, as_json: Json = False) -> None:
    """List the configs of a set with what is known before they are built.

    Without --kernels and KERNELS, this lists the sets.
    """
    from flashsmith.benchmark.listings import config_facts, print_configs, print_sets
    from flashsmith.builder import cache_entries
    from flashsmith.runtime.target import choose_target

    if kernels is None and env.KERNELS.raw() is None:
        sizes = kernel_set_sizes()
        if as_json:
            print_json(sizes)
        else:
            print_sets(make_console(), sizes)
        return
    configs = get_kernel_configs(kernels)
    target = choose_target(arch, configs=configs)
    facts = config_facts(configs, target, cache_entries())
    if as_json:
        print_json(facts)
        return
    console = make_console()
    print_configs(console, facts)
    console.print(
        f"{pluralize(len(facts), 'config')}; the columns legal, CTAs per SM and built are for "
        f"{target.arch}"
    )


@app.command("env")
def show_environment(as_json: Json = False) -> None:
    """List the environment variables that flashsmith reads, with their values and defaults."""
    facts: list[dict[str, Any]] = [
        {
            "name": variable.name,
            "value": variable.raw(),
            "default": variable.default,
            "values": variable.values,
            "meaning": variable.meaning,
        }
        for variable in env.VARIABLES
    ]
    if as_json:
        print_json(facts)
    else:
        print_table(
            make_console(),
            make_columns("variable | now | default~ | meaning~"),
            [(f["name"], f["value"] or "", f["default"], f["meaning"]) for f in facts],
        )
    env.check_values()
