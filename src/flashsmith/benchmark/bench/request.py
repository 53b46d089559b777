"""What `flashsmith bench` is asked for in words, as contenders and problems."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith import env
from flashsmith.benchmark.bench.problems import SEQ_LENS, Shapes
from flashsmith.benchmark.contenders import OURS
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, get_kernel_configs
from flashsmith.operations import DEFAULT
from flashsmith.printable import quoted
from flashsmith.untrusted import whole_number

_D_HEADS = (128,)
_DTYPES = (DType.FP16, DType.BF16)
# Lengths and head sizes that a typing error makes would run for hours.
_LARGEST = 1 << 20


def select_contenders(kernels: str | None) -> tuple[tuple[KernelConfig, ...], bool]:
    """The configs of a key, else of env KERNELS, and whether attention() takes part.

    'ours' stands for it, alone or beside a key; it is what takes part when nothing is said.

    Raises SelectionError for an unknown key.
    """
    text = env.KERNELS.raw() if kernels is None else kernels
    if text is None:
        return (), True
    words = [word.strip() for word in text.split(";")]
    others = [word for word in words if word and word != OURS]
    if not others and OURS in words:
        return (), True
    configs = get_kernel_configs(";".join(others))
    return tuple(dict.fromkeys(configs)), OURS in words


def parse_problems(texts: Sequence[str]) -> tuple[Problem, ...]:
    """The problems of all texts; one text may hold several, separated by ';'.

    Raises ArgumentError for a text that is none.
    """
    words = [word for text in texts for word in text.split(";") if word.strip()]
    return tuple(dict.fromkeys(map(Problem.parse, words)))


def make_shapes(
    configs: Sequence[KernelConfig],
    *,
    d_heads: str | None = None,
    seq_lens: str | None = None,
    dtypes: str | None = None,
    causal: bool = False,
    both: bool = False,
    gqa: str | None = None,
    packed: bool = False,
) -> Shapes:
    """The shapes that comma-separated lists ask for; without them the kernels' own.

    Raises ArgumentError for what is no such list.
    """
    operations = {config.family.operation for config in configs}
    return Shapes(
        d_heads=(
            _numbers("d_heads", d_heads)
            if d_heads is not None
            else tuple(sorted({config.d_head for config in configs})) or _D_HEADS
        ),
        seq_lens=SEQ_LENS if seq_lens is None else _numbers("seq_lens", seq_lens),
        dtypes=(
            tuple(dict.fromkeys(DType.parse(word) for word in _words("dtypes", dtypes)))
            if dtypes is not None
            else tuple(sorted({config.dtype for config in configs})) or _DTYPES
        ),
        masks=(False, True) if both else (causal,),
        gqa=gqa,
        packed=packed,
        operation=operations.pop() if len(operations) == 1 else DEFAULT,
    )


def _words(name: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ArgumentError(f"{name}={quoted(text)}: give at least one, separated by commas")
    return words


def _numbers(name: str, text: str) -> tuple[int, ...]:
    words = _words(name, text)
    numbers = [whole_number(word) for word in words]
    if not all(number and number <= _LARGEST for number in numbers):
        raise ArgumentError(
            f"{name}={quoted(text)}: give whole numbers from 1 to {_LARGEST}, separated by commas"
        )
    return tuple(dict.fromkeys(filter(None, numbers)))
