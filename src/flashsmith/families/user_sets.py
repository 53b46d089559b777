"""Reads config sets that users provide in a text file or an installed package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flashsmith.errors import ConfigParseError, SelectionError
from flashsmith.families.config import KernelConfig
from flashsmith.families.family import config_class_names
from flashsmith.families.names import parse_kernel_name_into_config
from flashsmith.printable import quoted
from flashsmith.safe_json import UnusableTextError, read_text

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "flashsmith.kernel_sets"


def read_set_file(path: str) -> list[KernelConfig]:
    """Reads the configs in a text file with one short form per line; blank lines and comments after
    '#' are skipped.

    Raises:
        ConfigParseError: a line is not a short form; the message names the file and the line.
        SelectionError: the file cannot be read as text.
    """
    try:
        lines = read_text(path).splitlines()
    except UnusableTextError as error:
        raise SelectionError(
            f"kernel set file {quoted(path)}{error.place} cannot be read: {error}"
        ) from error
    configs = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                configs.append(parse_kernel_name_into_config(text))
            except ConfigParseError as error:
                raise ConfigParseError(f"{path}, line {number}: {error}") from error
    return configs


def installed_set_names() -> list[str]:
    """The names of the sets that installed packages offer, sorted."""
    return sorted({entry.name for entry in _entry_points()})


def load_installed_set(name: str) -> list[KernelConfig]:
    """Returns the configs of a set that an installed package provides.

    The entry point of the set is a callable that returns the configs, as configs, short forms, or
    both.

    Raises:
        SelectionError: two packages offer this name, the entry point fails, or it returns something
            else than configs and short forms.
    """
    entries = [entry for entry in _entry_points() if entry.name == name]
    targets = sorted({entry.value for entry in entries})
    if len(targets) != 1:
        raise SelectionError(
            f"kernel set {name!r} is offered by {targets}; uninstall one, or name its file"
        )
    try:
        listed = list(entries[0].load()())
    except Exception as error:
        raise SelectionError(
            f"kernel set {name!r} ({targets[0]}) failed: {type(error).__name__}: {error}"
        ) from error
    return [_as_config(name, targets[0], item) for item in listed]


def _as_config(name: str, target: str, item: object) -> KernelConfig:
    if isinstance(item, KernelConfig):
        return item
    if isinstance(item, str):
        try:
            return parse_kernel_name_into_config(item)
        except ConfigParseError as error:
            raise SelectionError(f"kernel set {name!r} ({target}): {error}") from error
    raise SelectionError(
        f"kernel set {name!r} ({target}) returned {quoted(item)}: allowed are "
        f"{', '.join(config_class_names())} and short forms"
    )


def _entry_points() -> list[EntryPoint]:
    # Importing importlib.metadata takes longer than importing all families.
    metadata = import_module("importlib.metadata")
    return list(metadata.entry_points(group=ENTRY_POINT_GROUP))
