"""Where tables are, and reading and writing their JSON so that no crash leaves half a file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from flashsmith import env
from flashsmith.errors import TableError

SHIPPED_FOLDER = Path(__file__).parents[1] / "tables"
FILE_NAME = "winners.json"


def shipped_files() -> list[Path]:
    """The tables that came with the package."""
    return sorted(SHIPPED_FOLDER.glob("*.json"))


def user_table_path() -> Path | None:
    """The user's table: FLASHSMITH_TABLE, else in the user's data folder; None without a home."""
    chosen = env.TABLE.raw()
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    try:
        folder = platformdirs.user_data_path("flashsmith", appauthor=False)
    except RuntimeError:  # newer platformdirs; older ones return a relative path
        return None
    return folder / FILE_NAME if folder.is_absolute() else None


def require_user_table_path() -> Path:
    """The user's table, to write it; raises TableError when there is no place for one."""
    path = user_table_path()
    if path is None:
        raise TableError(
            "there is no home folder to keep the table of winners in (HOME is unset); set HOME, "
            f"or {env.TABLE.name} to the path of a file that you may write"
        )
    return path


def read_json(path: Path) -> Any:
    """A file's JSON; raises TableError when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise TableError(f"{path}: no readable table of winners: {error}") from error


def write_json(path: Path, data: Any) -> None:
    """``data`` in place of the file: written beside it, flushed, renamed."""
    text = json.dumps(data, indent=1) + "\n"
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
    except OSError as error:
        raise TableError(f"{path}: cannot be written: {error}") from error


def short_digest(environment: Mapping[str, Any]) -> str:
    """A name for an environment, from its content."""
    text = json.dumps(environment, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
