"""Semantics: the properties of a kernel's computation that are fixed at compile time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.mask import CAUSAL, NONE, Mask, known_masks, mask_named
from flashsmith.semantics.program import Program, known_programs, program_named
from flashsmith.semantics.score import Score, capped_by

FLAGS = ("softcap", "packed", "uneven", "partial")
_PLAIN = "plain"


@dataclass(frozen=True, order=True)
class Semantics:
    """The part of a problem that is compiled into its kernels; a library has one Semantics.

    mask: which keys a query sees, a Mask or its name: 'none' (all), 'causal' (up to its own
    position) or 'window' (some before and after it). Positions are aligned to the bottom right.
    softcap: whether scores are capped.
    packed: whether sequences of unequal length are concatenated.
    uneven: whether lengths need not be multiples of the tiles, and d may be smaller than d_head.
    Packed and partial kernels are uneven.
    partial: whether only some of a sequence's keys count, so that outputs are merged later.
    Partial outputs are fp32, and have no sinks.
    program: the score and mask functions of a caller, a Program or its name or text; '' for none.
    Kernels with a program are uneven.

    Raises:
        ArgumentError: the mask or the program is unknown, a flag is not a bool, or packed, partial
        or program is set without uneven.
    """

    mask: str = NONE
    softcap: bool = False
    packed: bool = False
    uneven: bool = False
    partial: bool = False
    program: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", mask_named(self.mask))
        object.__setattr__(self, "program", program_named(self.program))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(
                    f"{name}={quoted(getattr(self, name))}: allowed are True and False"
                )
        if self.packed and not self.uneven:
            raise ArgumentError("packed=True: needs uneven=True, since any length may be packed")
        if self.partial and not self.uneven:
            raise ArgumentError("partial=True: needs uneven=True, since any keys may count")
        if self.program and not self.uneven:
            raise ArgumentError(
                f"program={quoted(self.program)}: needs uneven=True, since it computes on any sizes"
            )

    @property
    def key_mask(self) -> Mask:
        """The mask as a value."""
        return cast(Mask, self.mask)

    @property
    def causal(self) -> bool:
        """Whether the mask is attention()'s mask under ``causal=True``."""
        return self.mask == CAUSAL

    @property
    def caller_program(self) -> Program | None:
        """The program as a value; None for none."""
        return cast(Program, self.program) if self.program else None

    @property
    def score(self) -> Score:
        """How scores change before the softmax."""
        return capped_by(self.softcap)

    def __str__(self) -> str:
        """Joins the words, for example to 'causal+packed+uneven'; 'plain' when every field has its
        default."""
        return "+".join(self.words()) or _PLAIN

    def words(self) -> list[str]:
        """Returns one word for each field that differs from its default, in the order of the
        fields."""
        mask = [self.mask] * self.key_mask.hides
        flags = [name for name in FLAGS if getattr(self, name)]
        return mask + flags + [str(self.program)] * bool(self.program)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a dict, for files and keys, from which Semantics(**fields) restores
        the object in any process.

        If there is no program, the field ``program`` is left out, so that older libraries keep
        their keys.
        """
        fields = asdict(self)
        if self.caller_program is None:
            del fields["program"]
        else:
            fields["program"] = self.caller_program.text
        return fields

    @classmethod
    def parse(cls, text: str) -> Semantics:
        """Parses a string as str() writes it, with words in any order; packed, partial and programs
        imply uneven.

        Raises:
            ArgumentError: a word is unknown, or there are two masks or two programs.
        """
        words = [] if text.strip() == _PLAIN else [word.strip() for word in text.split("+")]
        masks = [word for word in words if word in known_masks()]
        flags = {word: True for word in words if word in FLAGS}
        programs = [word for word in words if word in known_programs()]
        n_known = len(masks) + len(flags) + len(programs)
        if len(masks) > 1 or len(programs) > 1 or n_known != len(words):
            known = (*known_masks(), *FLAGS, _PLAIN)
            hint = "".join(did_you_mean(word, known) for word in words if word not in known)
            raise ArgumentError(
                f"semantics={quoted(text)}: allowed are '{_PLAIN}', or a mask (causal or window), "
                f"softcap, packed, uneven and partial joined by '+'{hint}"
            )
        flags["uneven"] = not flags.keys().isdisjoint(("uneven", "packed", "partial")) or bool(
            programs
        )
        return cls(masks[0] if masks else NONE, **flags, program="".join(programs))

    def to_cpp_struct(self) -> str:
        """Returns a C++20 expression for these semantics, with designated initialisers."""
        values = ", ".join(f".{name} = {str(it).lower()}" for name, it in self.cpp_fields().items())
        return f"Semantics{{{values}}}"

    def cpp_fields(self) -> dict[str, bool]:
        """Returns the fields of csrc's Semantics."""
        mask, program = self.key_mask, self.caller_program
        fields = {
            "hides_earlier": mask.hides_earlier,
            "hides_later": mask.hides_later,
            "takes_limits": mask.takes_limits,
            "changes_scores": not self.score.is_plain,
            "packed": self.packed,
            "uneven": self.uneven,
            "partial": self.partial,
        }
        if program is None:
            return fields
        return fields | {
            "program_scores": program.score is not None,
            "program_masks": program.mask is not None,
            "mask_by_batch": program.mask_reads_batch,
            "mask_by_head": program.mask_reads_head,
        }
