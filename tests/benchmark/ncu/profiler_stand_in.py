"""The fake profiler put into place, on a machine that pretends to have a GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FAKE = Path(__file__).with_name("fake_ncu.py")

NOTHING_WRONG: dict[str, Any] = {
    "error": "",
    "application_says": "",
    "exit_status": 0,
    "unknown": [],
    "not_available": [],
    "wrong": [],
    "renamed": {},
    "other_kernels": [],
    "stops_after": None,
    "cut_off": 0,
    "tail": "",
    "listing_error": "",
    "hangs": False,
}


class FakeNcu:
    """`ncu` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "ncu"
        shutil.copy(FAKE, self.path)
        self.path.chmod(0o755)
        self.plan()

    def plan(self, **what: Any) -> None:
        """What goes wrong from now on."""
        assert set(what) <= set(NOTHING_WRONG)
        (self.folder / "fake.json").write_text(json.dumps(NOTHING_WRONG | what))

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of every call."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def profiles(self) -> list[list[str]]:
        """The arguments of the calls that profiled."""
        return [call for call in self.calls if "--csv" in call]
