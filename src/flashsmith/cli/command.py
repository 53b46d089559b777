"""The base class of every `flashsmith` command, which checks the arguments before options are
parsed."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from flashsmith.errors import ArgumentError

# Sizes of a problem ('b16', 's1:4096'), and the beginning of a short form: '(FP16,'.
_SIZE = re.compile(r"[bshd]\d+(:\d+)?", re.ASCII)
_FORM_BEGINS = re.compile(r"\([A-Za-z]+\d*,")


class Command(TyperCommand):
    """A command that says what to quote if the shell split a problem or a short form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer's method, with two more errors.

        Raises ArgumentError for a text that was split at its spaces. Raises it also for an option
        given twice, because Typer would silently take the last value.
        """
        if ctx.resilient_parsing:  # shell completion of an unfinished command
            return super().parse_args(ctx, args)
        split = split_text(args)
        if split:
            text = " ".join(split)
            raise ArgumentError(f"{text}: is one argument: put it in quotes, as {text!r}")
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option, times in Counter(given).items():
            if times > 1 and not (option.multiple or getattr(option, "is_flag", False)):
                names = ", ".join(option.opts)
                raise ArgumentError(f"{names}: given {times} times; give it once")
        return super().parse_args(ctx, args)


class App(typer.Typer):
    """A Typer whose commands are Commands."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any
    ) -> Callable[[Any], Any]:
        """As Typer's."""
        return super().command(name, cls=cls or Command, **options)


def split_text(args: Sequence[str]) -> list[str]:
    """The words of a problem or a short form that a shell split into several arguments.

    They are at least two consecutive words. Either the first two are sizes, or the first begins a
    short form. Returns [] without such words.
    """
    runs = itertools.groupby(args, key=lambda arg: arg.startswith("-"))
    for words in (list(run) for is_option, run in runs if not is_option):
        for start, (first, second) in enumerate(itertools.pairwise(words)):
            sizes = _SIZE.fullmatch(first) and _SIZE.fullmatch(second)
            if sizes or _FORM_BEGINS.fullmatch(first):
                return words[start:]
    return []
