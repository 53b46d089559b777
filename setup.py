"""The metadata that depends on where the project is published: [tool.flashsmith] says where.

On a package index relative links lead nowhere. So the description is README with links to the
pages of the site, and without links where there is no site.
"""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools" / "docs"))

import links  # noqa: E402

site, repository = links.published("site"), links.published("repository")
readme = (ROOT / "README.md").read_text(encoding="utf-8")
pages = {"Documentation": site, "Changelog": f"{site}/changelog/"} if site else {}

setup(
    long_description=links.for_index(readme, "README.md", site),
    long_description_content_type="text/markdown",
    project_urls={"Repository": repository, **pages} if repository else pages,
)
