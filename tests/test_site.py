"""The site of docs/: every link and anchor leads somewhere, and no page needs a network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from documents import LOGS, PAGES, ROOT

pytest.importorskip("material", reason="needs mkdocs-material: it is not installed")


class Page(HTMLParser):
    """A page's anchors, the links of its text, and what a browser fetches for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.classes: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.classes |= set(given.get("class", "").split())
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical":
            self.fetched.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def is_external(target: str) -> bool:
    return bool(urlsplit(target).scheme) or target.startswith("//")


def test_every_document_is_a_page(pages: dict[Path, Page], site: Path) -> None:
    for path in [*PAGES, *LOGS]:
        place = path.relative_to(ROOT / "docs").with_suffix("")
        assert site / place / "index.html" in pages


def broken(page: Path, found: Page, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    for link in [*found.links, *found.fetched]:
        # The page of a missing address is served at any depth, and links from the root.
        if is_external(link) or page.name == "404.html":
            continue
        parts = urlsplit(link)
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if target.is_dir():
            target /= "index.html"
        anchor = unquote(parts.fragment)
        if not target.is_file() or (
            anchor not in ("", "__skip") and target in pages and anchor not in pages[target].anchors
        ):
            yield link


def test_every_link_leads_somewhere(pages: dict[Path, Page], site: Path) -> None:
    wrong = {str(page): [*broken(page, found, pages, site)] for page, found in pages.items()}
    assert not {page: links for page, links in wrong.items() if links}


def test_a_broken_link_is_seen(pages: dict[Path, Page], site: Path) -> None:
    index = site / "index.html"
    found = Page(index)
    found.links = ["nowhere/", "attention/#nothing", "#nothing", "attention/#shapes"]
    assert [*broken(index, found, pages, site)] == found.links[:3]


def test_no_page_fetches_anything_from_another_host(pages: dict[Path, Page], site: Path) -> None:
    for path, page in pages.items():
        assert not [target for target in page.fetched if is_external(target)], path
        # The theme's script would fetch the library that draws these.
        assert "mermaid" not in page.classes, path
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style
    for picture in site.rglob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert not re.search(r"(href|src)=['\"]https?:|url\(['\"]?https?:", text), picture
