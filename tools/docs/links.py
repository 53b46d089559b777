"""Rewrites the links of README and docs/ for readers outside the repository.

Links in pages are relative, so that they work in a checkout. On the website of docs/ and on a
package index, paths to files of the repository do not work; they are rewritten here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs"
# Documents outside docs/ that are pages of the website.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# The folder of the website for other files to which pages link, such as examples and measured rows.
FILES = "files"

# The project's addresses are in [tool.flashsmith] of pyproject.toml.
_SETTING = r'^{name} = "([^"]*)"$'

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def published(name: str) -> str:
    """The address of the 'site' or of the 'repository', without a slash at the end; it may be ''.

    Raises LookupError if pyproject.toml has no such setting.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings = text.partition("[tool.flashsmith]\n")[2].partition("\n[")[0]
    found = re.search(_SETTING.format(name=name), settings, re.MULTILINE)
    if found is None:
        raise LookupError(f"pyproject.toml: [tool.flashsmith] has no {name}")
    return found[1].rstrip("/")


def rewrite(text: str, target_of: Callable[[str], str | None]) -> str:
    """``text``, in which every link target outside code is replaced by ``target_of(target)``.

    If that is None, a link is replaced by its text, and a picture is removed.
    """

    def replaced(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        new = target_of(target)
        if new is None:
            return "" if mark else label
        return f"{mark}[{label}]({new})"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[end:])])


def linked_path(document: str, target: str) -> tuple[str, str]:
    """The path in the repository to which a link in a document leads, and the anchor with its '#'.

    The path is empty if the link leads to the same document or to another host.
    """
    name, mark, anchor = target.partition("#")
    if not name or "://" in name or name.startswith("mailto:"):
        return "", mark + anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), name)), mark + anchor


def site_path(path: str) -> str:
    """The path that a file of the repository has among the sources of the website."""
    if path.startswith(f"{DOCS}/"):
        return path[len(DOCS) + 1 :]
    return PAGES.get(path, f"{FILES}/{path}")


def for_site(text: str, document: str) -> tuple[str, set[str]]:
    """The text of a document for the website, and the files outside docs/ to which it links."""
    here = posixpath.dirname(site_path(document)) or "."
    files = set()

    def target_of(target: str) -> str:
        path, anchor = linked_path(document, target)
        if not path:
            return target
        place = site_path(path)
        if place.startswith(f"{FILES}/"):
            files.add(path)
        return posixpath.relpath(place, here) + anchor

    return rewrite(text, target_of), files


def for_index(text: str, document: str, site: str) -> str:
    """The text of a document for a package index, with absolute links to the pages of ``site``.

    If there is no site, links are replaced by their text.
    """

    def target_of(target: str) -> str | None:
        path, anchor = linked_path(document, target)
        if not path:
            return target if "://" in target else None
        if not site:
            return None
        place = site_path(path)
        if place == "index.md":
            place = ""
        elif place.endswith(".md"):
            place = f"{place[:-3]}/"
        return f"{site.rstrip('/')}/{place}{anchor}"

    return rewrite(text, target_of)
