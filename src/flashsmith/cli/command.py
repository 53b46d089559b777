"""The base class of all `flashsmith` commands, which checks arguments before options are parsed."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from flashsmith.errors import ArgumentError

# Matches a size in a problem, such as 'b16' or 's1:4096', and the beginning of a short form, such
# as '(FP16,'.
_SIZE = re.compile(r"[bshd]\d+(:\d+)?", re.ASCII)
_FORM_BEGINS = re.compile(r"\([A-Za-z]+\d*,")


class Command(TyperCommand):
    """A command that says what to quote if the shell has split a problem string or a config's short
    form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Does what Typer's method does, and makes two further checks.

        Raises ArgumentError for a string that the shell has split at spaces. Raises it also for an
        option that is given twice, because Typer would silently use only the last value.
        """
        if ctx.resilient_parsing:  # The shell is completing an unfinished command
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
        """Does what Typer's method does, with Command as the class of the command."""
        return super().command(name, cls=cls or Command, **options)


def split_text(args: Sequence[str]) -> list[str]:
    """The arguments that are the words of one problem string or short form, which the shell has
    split.

    These are at least two arguments in a row. Either the first two are sizes, or the first is the
    beginning of a short form. Returns [] if there are none.
    """
    runs = itertools.groupby(args, key=lambda arg: arg.startswith("-"))
    for words in (list(run) for is_option, run in runs if not is_option):
        for start, (first, second) in enumerate(itertools.pairwise(words)):
            sizes = _SIZE.fullmatch(first) and _SIZE.fullmatch(second)
            if sizes or _FORM_BEGINS.fullmatch(first):
                return words[start:]
    return []
