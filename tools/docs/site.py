"""Hooks for mkdocs (see mkdocs.yml), which add documents and files outside docs/ to the website."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# mkdocs removes the folder of this file from sys.path.
sys.path.insert(0, str(Path(__file__).parent))

import links

SEARCHED_LOGS = ("architectures", "lessons")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the address of the website, for its canonical links and its sitemap."""
    config.site_url = f"{site}/" if (site := links.published("site")) else None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README as the first page, other documents as pages, and the files to which pages
    link."""
    linked: set[str] = set()
    for name, place in links.PAGES.items():
        text, found = links.for_site((links.ROOT / name).read_text(encoding="utf-8"), name)
        linked |= found
        files.append(File.generated(config, place, content=text))
    for file in files.documentation_pages():
        if file.src_uri not in links.PAGES.values():
            linked |= links.for_site(file.content_string, f"{links.DOCS}/{file.src_uri}")[1]
    for path in sorted(linked):
        source = links.ROOT / path
        if source.is_file():
            place = f"{links.FILES}/{path}"
            files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Makes links to files outside docs/ point to the copies that :func:`on_files` added.

    Logs are excluded from the search, because their notes would hide the pages for users.
    """
    if page.file.src_uri.startswith("log/") and page.file.name not in SEARCHED_LOGS:
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri in links.PAGES.values():
        return markdown
    return links.for_site(markdown, f"{links.DOCS}/{page.file.src_uri}")[0]
