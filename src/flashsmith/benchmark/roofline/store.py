"""Where measured rooflines are kept: one JSON file a GPU in the user's data folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import platformdirs

from flashsmith.benchmark.roofline.ceilings import Roofline
from flashsmith.builder.safe_files import written_beside
from flashsmith.errors import ArgumentError
from flashsmith.runtime.driver import gpu_count, query_gpu
from flashsmith.untrusted import UnusableTextError, read_json


def roofline_path(gpu: str) -> Path:
    """The file of the GPU that calls itself `gpu`.

    Raises ArgumentError when there is no home folder to keep it in.
    """
    return _folder() / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def load_roofline(gpu: str | None = None) -> Roofline | None:
    """What was measured of the GPU of that name (None: this machine's first), if anything.

    Raises ArgumentError when its file is damaged.
    """
    if gpu is None:
        if gpu_count() == 0:
            return None
        gpu = query_gpu(0).name
    path = roofline_path(gpu)
    return read_roofline(path) if path.exists() else None


def read_roofline(path: str | Path) -> Roofline:
    """The roofline in a file. Raises ArgumentError when there is none."""
    try:
        value = read_json(path)
    except UnusableTextError as error:
        raise ArgumentError(f"roofline: {path}{error.place} cannot be read: {error}") from error
    try:
        return Roofline.from_json(value)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error


def stored_rooflines() -> list[Roofline]:
    """Every stored roofline, by GPU name. Raises ArgumentError when a file is damaged."""
    return [read_roofline(path) for path in sorted(_folder().glob("*.json"))]


def save_roofline(roofline: Roofline, path: Path | None = None) -> Path:
    """Writes the roofline to its place (or `path`), whole or not at all, and returns that place.

    Raises ArgumentError when it cannot be written.
    """
    path = path or roofline_path(roofline.gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_beside(path) as unfinished:
            unfinished.write_text(json.dumps(roofline.to_json(), indent=2) + "\n")
    except OSError as error:
        raise ArgumentError(f"roofline: {path} cannot be written: {error}") from error
    return path


def _folder() -> Path:
    try:
        folder = platformdirs.user_data_path("flashsmith", appauthor=False)
    except RuntimeError:  # newer platformdirs; older ones return a relative path
        folder = Path("~")
    if not folder.is_absolute():
        raise ArgumentError(
            "roofline: there is no home folder to keep it in (HOME is unset); set HOME or "
            "XDG_DATA_HOME"
        )
    return folder / "roofline"
