"""Storage of tables: their paths, and their JSON, which is written so that a crash cannot leave
half a file."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashsmith import bundle, env, safe_json
from flashsmith.errors import TableError
from flashsmith.safe_json import UnusableTextError
from flashsmith.system_errors import is_from_system

SHIPPED_FOLDER = Path(__file__).parents[1] / "tables"
FILE_NAME = "winners.json"


def shipped_files() -> list[Path]:
    """The tables that came with the package."""
    return sorted(SHIPPED_FOLDER.glob("*.json"))


def user_table_path() -> Path | None:
    """The path of the user's table: FLASHSMITH_TABLE, else in the user's data folder; None if there
    is no home folder, or in a self-contained copy of flashsmith."""
    chosen = env.TABLE.raw()
    if chosen is not None:
        path = Path(chosen)
        # If the user is unknown or the working directory was deleted, reading the path will report
        # it.
        with contextlib.suppress(RuntimeError, OSError):
            path = path.expanduser().absolute()
        return path
    if bundle.is_copy():
        return None
    import platformdirs

    try:
        folder = platformdirs.user_data_path("flashsmith", appauthor=False)
    except RuntimeError:  # Newer platformdirs raises this; older ones return a relative path
        return None
    return folder / FILE_NAME if folder.is_absolute() else None


def require_user_table_path() -> Path:
    """The path of the user's table, to write to it.

    Raises TableError if there is no home folder.
    """
    path = user_table_path()
    if path is None:
        raise TableError(
            "there is no home folder to keep the table of winners in (HOME is unset); set HOME, "
            f"or {env.TABLE.name} to the path of a file that you may write"
        )
    return path


def is_there(path: Path) -> bool:
    """Whether a path exists.

    Also returns True if the system cannot say, since reading the path then fails with the error.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def file_version(path: Path) -> tuple[object, ...]:
    """A value that changes if the content of the file changes."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return (str(path),)
    return (str(path), facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size)


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises TableError if it cannot be read."""
    try:
        return safe_json.read_json(path)
    except UnusableTextError as error:
        raise TableError(f"{path}{error.place}: no readable table of winners: {error}") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes ``data`` to a temporary file, flushes it, and renames it, so that it replaces the
    file."""
    text = json_lines(data)
    if is_there(path) and not os.path.isfile(path):
        raise TableError(f"{path}: cannot be written: it is not a regular file; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(beside, 0o644)
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
    except (OSError, ValueError) as error:  # ValueError: the path is not valid for any file
        if not is_from_system(error):
            raise
        raise TableError(f"{path}: cannot be written: {error}") from error


def json_lines(data: Mapping[str, Any]) -> str:
    """A mapping as JSON, with each item of its values on a separate line, so that changing one
    entry changes one line."""
    members = (f"{json.dumps(name)}: {_a_line_each(value)}" for name, value in data.items())
    return "{\n" + ",\n".join(members) + "\n}\n"


def _a_line_each(value: Any) -> str:
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()]
    elif isinstance(value, list):
        lines = [json.dumps(item) for item in value]
    else:
        return json.dumps(value)
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return "\n".join([first, ",\n".join(lines), last]) if lines else first + last
