"""Every error ptxlab raises on purpose: one class per kind of mistake."""

from __future__ import annotations


class PtxlabError(Exception):
    """Base of every deliberate error; the message names what was given and what is allowed."""


class ArgumentError(PtxlabError, ValueError):
    """An argument of a call is unusable; the message begins with the argument's name."""


class EmulatorError(PtxlabError, RuntimeError):
    """PTX that is not supported, or a kernel that cannot continue (deadlock, bad access)."""
