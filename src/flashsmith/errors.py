"""Every error flashsmith raises on purpose: one class per kind of mistake.

Each message names the argument or file, its value, what is allowed, and what to do.
"""

from __future__ import annotations

from flashsmith.printable import printable


class FlashsmithError(Exception):
    """Base of every deliberate flashsmith error."""

    def __str__(self) -> str:
        # Messages quote files, paths and names, and callers print them to terminals.
        return printable(super().__str__(), lines=True)


class ArgumentError(FlashsmithError, ValueError):
    """An argument of a public call is unusable; the message begins with the argument's name."""


class UnservedError(ArgumentError):
    """No kernel serves a call with a score or mask function on this device."""


class TraceError(ArgumentError):
    """A score or mask function does something that kernels cannot compute; the message quotes the
    operation and its line."""


class ConfigParseError(FlashsmithError, ValueError):
    """A string is neither a config's short form nor a kernel name."""


class IllegalConfigError(FlashsmithError, ValueError):
    """A config breaks legality rules; the message lists every broken rule and the nearest legal
    configs."""


class SelectionError(FlashsmithError, ValueError):
    """A KERNELS key is unset, unknown or selects nothing."""


class PlatformError(FlashsmithError, RuntimeError):
    """This operating system or processor is not supported."""


class DependencyError(FlashsmithError, ImportError):
    """An optional package is not installed; the message names the package and the extra that
    installs it."""


class ToolchainError(FlashsmithError, RuntimeError):
    """A compiler, or a part of one, is missing or unusable."""


class CompileError(FlashsmithError, RuntimeError):
    """The compiler ran and failed; the message contains its output."""


class CacheError(FlashsmithError, RuntimeError):
    """The kernel cache cannot be read or written (permissions, space)."""


class DamagedLibraryError(CacheError):
    """A library in the kernel cache cannot be loaded because its content is damaged."""


class TableError(FlashsmithError, RuntimeError):
    """A table of winners cannot be read, understood or written."""


class KernelNotBuiltError(FlashsmithError, LookupError):
    """No library has the config, and building on demand is switched off."""


class LaunchError(FlashsmithError, RuntimeError):
    """The GPU refused or failed a launch."""


class ProfilerError(FlashsmithError, RuntimeError):
    """Nsight Compute is missing or failed; the message contains its output."""


class GroupError(FlashsmithError, RuntimeError):
    """Another process of the group has ended, or did not arrive within the group's timeout."""


class EmulatorError(FlashsmithError, RuntimeError):
    """The emulator found unsupported PTX, or a kernel that cannot continue (deadlock, bad
    access)."""


class EmulationTooLongError(FlashsmithError, RuntimeError):
    """The estimate for a run in the emulator is over the limit and emulate=True was not given."""


def install_extra(extra: str) -> str:
    """The command that installs the packages of an extra, for an error message.

    It installs from a checkout, since no package index has flashsmith.
    """
    return f"run pip install '.[{extra}]' in a checkout of flashsmith"
