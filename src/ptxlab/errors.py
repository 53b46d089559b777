"""The errors that ptxlab raises on purpose: one class per kind of mistake."""

from __future__ import annotations


class PtxlabError(Exception):
    """Base class of the errors that ptxlab raises on purpose; the message names the value and what
    is allowed."""


class ArgumentError(PtxlabError, ValueError):
    """An argument of a call is unusable; the message begins with the argument's name."""


class EmulatorError(PtxlabError, RuntimeError):
    """The PTX is not supported, or the kernel cannot continue (deadlock, bad access)."""
