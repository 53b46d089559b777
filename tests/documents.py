"""The documents of this repository: README, the pages of docs/ and the lab's logs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# What users read; docs/log/ holds what was measured on the way.
PAGES = sorted((ROOT / "docs").glob("*.md"))
LOGS = sorted((ROOT / "docs" / "log").glob("*.md"))
# add-a-family.md needs the package that it builds, and tests/first_row runs what it shows; the
# diary and SECURITY show no commands to run, but names as they were at the time.
NOT_RUN = {"docs/add-a-family.md", "docs/log/diary.md", "SECURITY.md"}
DOCUMENTS = [
    README,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *PAGES,
    *LOGS,
]


def name_of(path: Path) -> str:
    """A document's path from the repository's root, as tests are named."""
    return str(path.relative_to(ROOT))


# Those whose examples and commands are run.
RUNNABLE = [path for path in DOCUMENTS if name_of(path) not in NOT_RUN]
